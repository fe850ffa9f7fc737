"""Loader calls that are nothing but copies are repeated by their copies in later updates; every other call runs the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from scoped_patch.vllm import IncompleteReload, RejectedWeight, plans, reload_weights, staging

from .test_reload import restored

CALLS: list[str] = []
KEPT: list[torch.Tensor] = []
NAME = "model.layers.0.self_attn.o_proj"


@pytest.fixture
def engine(engines: Any) -> Iterator[Any]:
    yield from restored(engines("dense", "w4a4"))


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    out: list[Any] = []
    run = staging.run
    monkeypatch.setattr(staging, "run", lambda plan, *tensors: (out.append(plan), run(plan, *tensors)))
    return out


def reload(engine: Any, seed: int, items: Any = None, **options: Any) -> None:
    with reload_weights(engine.llm, **options) as update:
        update.load(engine.state[seed].items() if items is None else items)
    assert engine.generate() == engine.fresh[seed]


def in_one_buffer(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into one buffer, each with whatever comes before and after it, as a bucket has them."""
    places, size = {}, 64
    for name, tensor in state.items():
        places[name] = size
        size += -(-tensor.nbytes // 64) * 64 + 64
    buffer = torch.full((size,), 0x7F, dtype=torch.uint8)
    for name, tensor in state.items():
        view = buffer[places[name] : places[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        yield name, view


@pytest.mark.parametrize("atomic", ["model", "layer"])
def test_most_of_a_later_update_is_copies(engine: Any, repeated: list[Any], atomic: Any) -> None:
    reload(engine, 1, atomic=atomic)
    repeated.clear()
    reload(engine, 0, atomic=atomic)
    assert len(repeated) > 0.8 * len(engine.state[0])


def test_weights_elsewhere_in_a_buffer_and_strided_ones(engine: Any, repeated: list[Any]) -> None:
    reload(engine, 1)
    repeated.clear()
    reload(engine, 0, in_one_buffer(engine.state[0]))
    assert len(repeated) > 0.8 * len(engine.state[0])
    strided = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in engine.state[1].items()}
    assert any(not t.is_contiguous() for t in strided.values())
    reload(engine, 1, strided.items())


def test_faults_are_seen_in_a_later_update_too(engine: Any, repeated: list[Any]) -> None:
    reload(engine, 1)
    reload(engine, 0)
    cut = {n: t[:-1] if n == f"{NAME}.weight_packed" else t for n, t in engine.state[1].items()}
    with pytest.raises(RejectedWeight, match=rf"{NAME}\.weight_packed"):
        reload(engine, 1, cut.items())
    assert engine.generate() == engine.fresh[0]
    repeated.clear()
    with pytest.raises(IncompleteReload, match=rf"{NAME}\.weight_scale"):
        reload(engine, 1, ((n, t) for n, t in engine.state[1].items() if n != f"{NAME}.weight_scale"))
    assert repeated
    assert engine.generate() == engine.fresh[0]


def copies(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("copies")
    param.data.copy_(weight)


def copies_parts(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("copies_parts")
    half = weight.shape[0] // 2
    param.data[:half].copy_(weight[:half])
    param.data[half:].copy_(weight.narrow(0, half, weight.shape[0] - half))


def reads_numbers(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("reads_numbers")
    assert int(weight.sum()) >= 0
    param.data.copy_(weight)


def computes(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("computes")
    param.data.copy_(weight + 0)


def keeps_books(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("keeps_books")
    param.times_loaded = getattr(param, "times_loaded", 0) + 1
    param.data.copy_(weight)


def answers(param: Any, weight: torch.Tensor) -> bool:
    CALLS.append("answers")
    param.data.copy_(weight)
    return True


def copies_what_it_kept(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("copies_what_it_kept")
    KEPT.append(weight.clone())
    param.data.copy_(KEPT[-1])


LOADERS = [copies, copies_parts, reads_numbers, computes, keeps_books, answers, copies_what_it_kept]


@pytest.fixture
def install(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.nn.Module]]:
    """Make a function the loader of one packed weight."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layer = engine.model.get_submodule(NAME)
    template = get_layerwise_info(layer).restore_metadata[0]["weight_packed"]
    key = next(k for k in ("_weight_loader", "weight_loader") if k in vars(template))

    def put(loader: Any, module: str = "vllm.model_executor.layers.own") -> torch.nn.Module:
        monkeypatch.setattr(loader, "__module__", module)
        monkeypatch.setitem(vars(template), key, loader)
        plans._known.pop(layer, None)
        CALLS.clear()
        return layer

    yield put
    KEPT.clear()


@pytest.mark.parametrize("loader", LOADERS, ids=lambda f: f.__name__)
def test_a_loader_is_left_out_only_when_it_does_no_more_than_copy(engine: Any, install: Any, loader: Any) -> None:
    install(loader)
    for seed in (1, 0, 1):
        reload(engine, seed)
    assert len(CALLS) == (1 if loader in (copies, copies_parts) else 3)


def test_a_loader_that_is_not_of_vllm_is_always_run(engine: Any, install: Any) -> None:
    install(copies, "own.loaders")
    for seed in (1, 0, 1):
        reload(engine, seed)
    assert len(CALLS) == 3


def test_a_loader_is_run_again_when_its_layer_has_changed(engine: Any, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = install(copies)
    for seed in (1, 0):
        reload(engine, seed)
    assert len(CALLS) == 1
    monkeypatch.setattr(layer, "own_rank", 1, raising=False)
    reload(engine, 1)
    reload(engine, 0)
    assert len(CALLS) == 2
    monkeypatch.setattr(layer, "own_sizes", [1, 2], raising=False)
    reload(engine, 1)
    layer.own_sizes[0] = 3
    reload(engine, 0)
    assert len(CALLS) == 4
