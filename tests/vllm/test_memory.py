"""What an update holds: one copy of what changes, one layer of it, nothing once it is over. Counted by torch's allocator."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scoped_patch.vllm import IncompleteReload, reload_weights


class Counted:
    """Bytes of tensors made inside the block and alive: the most at any one time, and those left at its end."""

    peak = left = 0


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    out = Counted()
    gc.collect()
    gc.disable()  # what only a collector would free counts as held
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield out
    finally:
        gc.enable()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    alive = list(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    out.peak, out.left = max(alive), alive[-1]


def size(state: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in state.values())


def buffers(model: torch.nn.Module) -> int:
    """The shadow has small buffers of its own, such as tables of positions."""
    return sum(b.nbytes for b in model.buffers())


def largest_layer(state: dict[str, torch.Tensor]) -> int:
    layers: dict[str, int] = {}
    for name, tensor in state.items():
        layer = name.rpartition(".")[0]
        for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            layer = layer.replace(part, "qkv" if part[0] in "qkv" else "gate_up")
        layers[layer] = layers.get(layer, 0) + tensor.nbytes
    return max(layers.values())


@pytest.mark.parametrize("scheme", ["w4a4", "w4a16"])
def test_one_copy_is_held_until_the_commit(engines: Any, scheme: str) -> None:
    engine = engines("dense", scheme)
    for seed in (1, 0):
        state = engine.state[seed]
        with counted() as held:
            update = reload_weights(engine.llm)
            update.__enter__()
            update.load(state.items())
        # Marlin lays weights out anew: the checkpoint's form of a layer must be gone once the kernel's is there.
        assert 0.9 * size(state) < held.left < 1.05 * size(state) + buffers(engine.model)
        with counted() as after:
            update.__exit__(None, None, None)
        assert after.peak < 0.1 * size(state)
        assert engine.generate() == engine.fresh[seed]


@pytest.mark.parametrize("atomic", ["model", "layer"])
def test_nothing_is_held_afterwards(engines: Any, atomic: Any) -> None:
    engine = engines("dense", "w4a4")
    for seed in (1, 0):
        with counted() as held:
            with reload_weights(engine.llm, atomic=atomic) as update:
                update.load(engine.state[seed].items())
        assert abs(held.left) < 0.02 * size(engine.state[seed])
        assert engine.generate() == engine.fresh[seed]


def test_nothing_is_held_after_an_update_that_was_dropped(engines: Any) -> None:
    engine = engines("dense", "w4a4")
    with counted() as held:
        with pytest.raises(IncompleteReload):
            with reload_weights(engine.llm) as update:
                update.load((n, t) for n, t in engine.state[1].items() if not n.endswith("1.self_attn.k_proj.weight_packed"))
        del update
    assert abs(held.left) < 0.02 * size(engine.state[1])
    assert engine.generate() == engine.fresh[0]


def test_layer_by_layer_holds_one_layer(engines: Any) -> None:
    engine = engines("dense", "w4a4")
    for seed in (1, 0):
        state = engine.state[seed]
        with counted() as held:
            with reload_weights(engine.llm, atomic="layer") as update:
                update.load(state.items())
        assert largest_layer(state) <= held.peak < 1.1 * largest_layer(state) + buffers(engine.model)
        assert engine.generate() == engine.fresh[seed]
