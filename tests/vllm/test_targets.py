"""The QAT target patches: reload code of the older protocol (prepare, load, process) works, any number of times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scoped_patch import patched
from scoped_patch.vllm import ParamMeta, UnsupportedLayer, reload_weights

from .support.addresses import addresses
from .support.protocol import moved, process, without_router

KINDS = [("moe", "w4a16"), ("dense", "w4a16"), ("dense", "w4a4")]


@pytest.fixture(scope="module", params=KINDS, ids=["-".join(kind) for kind in KINDS])
def engine(request: pytest.FixtureRequest, engines: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from .conftest import Engine

    engines("moe", "w4a16")
    with patched(qat="nvfp4"):
        yield Engine(tmp_path_factory.mktemp("targets"), *request.param, same="mlp.gate.weight")


def test_prepare_load_process_five_times(engine: Any) -> None:
    model = engine.model
    live = {n: (id(p), type(p), p.data_ptr()) for n, p in model.named_parameters()}
    before = addresses(model)
    loaders: dict[str, Any] = {}
    for seed in (1, 0, 1, 0, 1):
        meta = ParamMeta(model)
        meta.prepare()
        seen = {
            name: (type(p), getattr(p, "weight_loader", None), tuple(p.shape), p.dtype)
            for name, p in meta.items()
            if name.endswith(("weight_packed", "weight_scale", "global_scale"))
        }
        assert all(loader is not None for _, loader, _, _ in seen.values())
        assert not loaders or loaders.keys() == seen.keys()
        assert not loaders or all(loaders[n][0] is seen[n][0] for n in seen)
        loaders = seen
        assert set(meta) <= set(dict(model.named_parameters()))
        model.load_weights(without_router(engine.state[seed]))
        process(model)
        process(model)  # a second pass finds nothing to do
        assert engine.generate() == engine.fresh[seed]
        assert {n: (id(p), type(p), p.data_ptr()) for n, p in model.named_parameters()} == live
        assert not moved(before, addresses(model))


def test_both_ways_of_reloading_agree(engine: Any) -> None:
    with reload_weights(engine.llm) as update:
        update.load(engine.state[1].items())
    assert engine.generate() == engine.fresh[1]
    ParamMeta(engine.model).prepare()
    engine.model.load_weights(without_router(engine.state[0]))
    process(engine.model)
    assert engine.generate() == engine.fresh[0]


def test_a_failure_while_processing_keeps_the_old_layer(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = ParamMeta(engine.model)
    name = next(n for n in meta if n.endswith("weight_packed"))
    layer = engine.model.get_submodule(name.rpartition(".")[0])
    before = addresses(layer)
    meta.prepare()
    engine.model.load_weights(without_router(engine.state[1]))
    real = torch.Tensor.max
    monkeypatch.setattr(torch, "where", lambda *a, **k: 1 / 0)
    monkeypatch.setattr(torch.Tensor, "max", lambda *a, **k: 1 / 0)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer.quant_method.process_weights_after_loading(layer)
    monkeypatch.undo()
    assert torch.Tensor.max is real
    assert addresses(layer) == before


def test_another_layout_is_refused_and_the_old_layer_serves(engine: Any) -> None:
    meta = ParamMeta(engine.model)
    name = next(n for n in meta if n.endswith("weight_packed"))
    layer = engine.model.get_submodule(name.rpartition(".")[0])
    before = addresses(layer)
    meta.prepare()
    engine.model.load_weights(without_router(engine.state[1]))
    key = next(k for k in layer._parameters if k.endswith("weight_global_scale"))
    layer._parameters[key] = torch.nn.Parameter(layer._parameters[key].double(), requires_grad=False)
    packed = next(k for k in layer._parameters if k.endswith("weight_packed"))
    layer._parameters[packed] = torch.nn.Parameter(layer._parameters[packed][..., :0], requires_grad=False)
    with pytest.raises((UnsupportedLayer, RuntimeError, AssertionError, ValueError)):
        layer.quant_method.process_weights_after_loading(layer)
    assert addresses(layer) == before
