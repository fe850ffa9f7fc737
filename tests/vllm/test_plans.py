"""Loader calls that are nothing but copies are repeated by their copies in later updates; every other call runs the loader."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from scoped_patch.vllm import IncompleteReload, RejectedWeight, plans, reload_weights, staging

from .test_reload import restored

CALLS: list[Any] = []
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


def reads_a_list(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("reads_a_list")
    assert min(weight.view(-1).tolist()) >= 0
    param.data.copy_(weight)


def reads_an_array(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("reads_an_array")
    assert weight.numpy().min() >= 0
    param.data.copy_(weight)


def shows(param: Any, weight: torch.Tensor) -> None:
    CALLS.append("shows")
    assert "nan" not in f"{weight}"
    param.data.copy_(weight)


def marks(layer: Any, param: Any, weight: torch.Tensor) -> None:
    layer.own_mark = "marked"
    param.data.copy_(weight)


@functools.wraps(copies)
def wraps_without_a_closure(param: Any, weight: torch.Tensor) -> None:
    copies(param, weight)


LOADERS = [
    copies,
    copies_parts,
    reads_numbers,
    computes,
    keeps_books,
    answers,
    copies_what_it_kept,
    reads_a_list,
    reads_an_array,
    shows,
    wraps_without_a_closure,
]


@pytest.fixture
def install(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.nn.Module]]:
    """Make a function the loader of one packed weight."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layer = engine.model.get_submodule(NAME)

    def put(
        loader: Any, module: str | None = "vllm.model_executor.layers.own", of: str = "weight_packed", forget: bool = True
    ) -> torch.nn.Module:
        template = get_layerwise_info(layer).restore_metadata[0][of]
        key = next(k for k in ("_weight_loader", "weight_loader") if k in vars(template))
        monkeypatch.setattr(getattr(loader, "__func__", loader), "__module__", module)
        monkeypatch.setitem(vars(template), key, loader)
        if forget:
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


@pytest.mark.parametrize("module", ["own.loaders", None])
def test_a_loader_that_is_not_of_vllm_is_always_run(engine: Any, install: Any, module: Any) -> None:
    install(copies, module)
    for seed in (1, 0, 1):
        reload(engine, seed)
    assert len(CALLS) == 3


def test_a_strided_weight_is_given_to_a_loader_that_was_seen_to_copy_parts(engine: Any, install: Any) -> None:
    install(copies_parts)
    reload(engine, 1)
    reload(engine, 0, ((n, t.t().contiguous().t() if t.dim() == 2 else t) for n, t in engine.state[0].items()))
    assert len(CALLS) == 2


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
    layer.own_shards = Shards(0, 4)
    reload(engine, 1)
    layer.own_shards.stop = 8
    reload(engine, 0)
    assert len(CALLS) == 6
    del layer.own_shards
    reload(engine, 1)
    assert len(CALLS) == 7


@dataclasses.dataclass
class Shards:
    start: int
    stop: int


def test_all_loaders_of_a_layer_are_run_when_one_of_them_leaves_something(engine: Any, install: Any) -> None:
    install(copies)
    install(own(marks), of="weight_scale")
    for seed, order in ((1, list), (0, reversed), (1, list), (0, list)):
        reload(engine, seed, order(list(engine.state[seed].items())))
    assert len(CALLS) == 4


def own(function: Any) -> Any:
    """A method of the layer, as vLLM records it."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    return types.MethodType(function, layer_ref_sentinel)


def test_a_loader_that_loads_another_parameter_too_is_always_run(engine: Any, install: Any) -> None:
    install(own(loads_two))
    for seed in (1, 0, 1):
        KEPT[:] = [engine.state[seed][f"{NAME}.input_global_scale"]]
        reload(engine, seed, ((n, t) for n, t in engine.state[seed].items() if n != f"{NAME}.input_global_scale"))
    assert CALLS == ["loads_two"] * 3


def loads_two(layer: Any, param: Any, weight: torch.Tensor) -> None:
    CALLS.append("loads_two")
    param.data.copy_(weight)
    layer.input_global_scale.weight_loader(layer.input_global_scale, KEPT[0])


def test_scales_start_from_one_for_loaders_that_look_first(engine: Any, install: Any) -> None:
    install(looks_first, of="weight_global_scale")
    for seed in (1, 0):
        reload(engine, seed)
    assert CALLS == [[1.0]] * 2


def looks_first(param: Any, weight: torch.Tensor) -> None:
    CALLS.append(param.data.tolist())
    param.data.copy_(weight)


def test_a_loader_that_calls_another_is_always_run(engine: Any, install: Any) -> None:
    install(calls_another)
    for seed in (1, 0, 1):
        reload(engine, seed)
    assert CALLS == ["whole", "half", "whole", "whole"]  # what it calls is a call of its own


def calls_another(param: Any, weight: torch.Tensor) -> None:
    """Copies one half itself, and leaves the other to the parameter's loader (itself)."""
    half = param.shape[0] // 2
    CALLS.append("whole" if weight.shape[0] > half else "half")
    if weight.shape[0] > half:
        param.data[:half].copy_(weight[:half])
        param.weight_loader(param, weight[half:])
    else:
        param.data[half:].copy_(weight)


def test_functions_of_the_same_code_with_other_defaults_are_told_apart(engine: Any, install: Any) -> None:
    def made(half: int) -> Any:
        return types.FunctionType(copies_halves.__code__, globals(), "copies_halves", (half,))

    install(made(32))
    reload(engine, 1)
    install(made(64), forget=False)
    reload(engine, 0)
    assert CALLS == ["copies_halves"] * 2


def copies_halves(param: Any, weight: torch.Tensor, half: int) -> None:
    CALLS.append("copies_halves")
    param.data[:half].copy_(weight[:half])
    param.data[half:].copy_(weight[half:])


def test_a_loader_may_decide_by_what_a_weight_carries(engine: Any, install: Any) -> None:
    install(takes_the_mark)
    reload(engine, 1)
    for mark in (1, 1, 2, torch.ones(1), torch.ones(1)):
        state = {n: t.clone() for n, t in engine.state[0].items()}
        state[f"{NAME}.weight_packed"].own_mark = mark
        reload(engine, 0, state.items())
    assert [None, 1, 2, torch.ones(1), torch.ones(1)] == CALLS


def takes_the_mark(param: Any, weight: torch.Tensor) -> None:
    CALLS.append(getattr(weight, "own_mark", None))
    param.data.copy_(weight)


def test_a_method_that_a_loader_calls_may_be_patched_between_updates(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.parameter import RowvLLMParameter

    reload(engine, 1)
    reload(engine, 0)
    load = RowvLLMParameter.load_row_parallel_weight
    seen: list[int] = []

    def patched(self: Any, loaded_weight: torch.Tensor) -> None:
        seen.append(loaded_weight.numel())
        load(self, loaded_weight=loaded_weight)

    monkeypatch.setattr(RowvLLMParameter, "load_row_parallel_weight", patched)
    reload(engine, 1)
    assert engine.state[1][f"{NAME}.weight_packed"].numel() in seen


@pytest.mark.parametrize("at", [0, 1])
def test_only_what_is_overwritten_as_a_whole_has_no_initial_value(
    engine: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A fused scale's shards are copied one by one, and their loaders may be run in between."""
    blank: dict[str, bool] = {}
    allocate = staging.StagedModel._allocate

    def noting(self: Any, staged: Any, is_blank: bool) -> torch.Tensor:
        blank[staged.label] = is_blank
        return allocate(self, staged, is_blank)

    reload(engine, 1)
    monkeypatch.setattr(staging.StagedModel, "_allocate", noting)
    items = list(engine.state[0].items())
    reload(engine, 0, items if at == 0 else reversed(items))
    assert blank[f"{NAME}.weight_scale"]
    assert blank["model.norm.weight"]
    assert not blank["model.layers.0.self_attn.qkv_proj.weight_global_scale"]
    assert not blank["model.layers.0.self_attn.qkv_proj.weight_packed"]
