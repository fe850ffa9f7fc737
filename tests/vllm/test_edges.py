"""What the parts of a weight update do at their edges and when they are misused; needs no vLLM."""

from __future__ import annotations

import copy
import functools
import json
import logging
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from scoped_patch import patched
from scoped_patch.engine.errors import BadOptionError, BadTargetError, ScopeStateError, TargetError, UnsupportedError
from scoped_patch.vllm import (
    IncompleteReload,
    ParamMeta,
    RejectedWeight,
    RemoteReloadError,
    UnsupportedLayer,
    quantize_state_dict,
    reload_engine,
    reload_weights,
    targets,
    weights_digest,
)
from scoped_patch.vllm import exchange as exchange_module
from scoped_patch.vllm.coverage import Coverage, box_of_view
from scoped_patch.vllm.exchange import Exchange
from scoped_patch.vllm.graph import reach
from scoped_patch.vllm.pages import LARGE, advise
from scoped_patch.vllm.plugin import register
from scoped_patch.vllm.repeatable import process_again
from scoped_patch.vllm.source import Source
from scoped_patch.vllm.targets import NVFP4DenseW4A4, NVFP4DenseW4A16, targets_by_name
from tests.vllm.probe_versions import VERSIONS


@pytest.mark.parametrize(
    "error",
    [
        RejectedWeight("model.norm.weight", "shape", "model.norm.weight: did not load"),
        IncompleteReload("nothing came", {"model.norm": ["weight"]}, ["lm_head"]),
        RemoteReloadError("load failed", {1: "ValueError: no"}),
    ],
)
def test_errors_cross_processes_whole(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert vars(copy.copy(error)) == vars(error)


# ------------------------------------------------------------------------------------------------- exchange
def test_tensors_that_overlap_or_have_gaps_are_refused_by_name() -> None:
    live = torch.zeros(12)
    with pytest.raises(UnsupportedLayer, match="a overlaps another live tensor"):
        Exchange([("a", live[:8], torch.ones(8)), ("b", live[4:], torch.ones(8))])
    with pytest.raises(UnsupportedLayer, match=r"odd: a strided view \(2,\)"):
        Exchange([("odd", live[::2], torch.ones(13)[1::2])])


def test_equal_views_with_equal_content_move_once_and_empty_ones_not_at_all() -> None:
    live = torch.zeros(12)
    exchange = Exchange([("a", live[:4], torch.ones(4)), ("b", live[:4], torch.ones(4)), ("none", live[:0], torch.ones(0))])
    assert exchange.nbytes == 16
    exchange.swap()
    assert live.tolist() == [1.0] * 4 + [0.0] * 8


def test_a_second_interrupt_while_old_weights_go_back_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "CHUNK", 16)
    live, staged = torch.zeros(12), torch.ones(12)
    exchange = Exchange([("a", live, staged)])
    exchange.swap()
    move, calls = exchange._move, []

    def interrupted(new: bool) -> None:
        calls.append(new)
        if len(calls) < 3:
            raise KeyboardInterrupt(len(calls))
        move(new)

    monkeypatch.setattr(exchange, "_move", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        exchange.unswap()
    assert raised.value.args == (2,)
    assert calls == [False] * 3
    assert not live.any()
    assert bool(staged.all())


def test_an_error_while_old_weights_go_back_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange([("a", torch.zeros(2), torch.ones(2))])
    exchange.swap()
    monkeypatch.setattr(exchange, "_synchronize", lambda: (_ for _ in ()).throw(RuntimeError("the device is gone")))
    with pytest.raises(RuntimeError, match="the device is gone"):
        exchange.unswap()


# ------------------------------------------------------------------------------------------------- bookkeeping
def test_boxes_of_empty_and_of_reshaped_views() -> None:
    assert box_of_view((0, 4), (4, 1), (0, 4), (4, 1), 0) == ((0, 0), (0, 0))
    assert Coverage((0, 4)).missing() == []
    assert Coverage((0, 4)).complete()
    whole = torch.zeros(4, 6)

    def box(view: torch.Tensor) -> Any:
        return box_of_view((4, 6), (6, 1), tuple(view.shape), view.stride(), int(view.storage_offset()))

    assert box(whole.view(24)[6:18]) == ((1, 3), (0, 6))
    assert box(whole.view(24)[7:10]) == ((1, 2), (1, 4))
    assert box(whole.view(24)[4:9]) is None  # the end of one row and the beginning of the next


def test_a_digest_of_bytes_that_begin_anywhere() -> None:
    data = torch.arange(23, dtype=torch.uint8)
    assert weights_digest([("a", data[1:22])]) == weights_digest([("a", data[1:22].clone())])
    assert weights_digest([("a", data[1:22])]) != weights_digest([("a", data[2:23])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_of_bytes_that_lie_apart(dtype: torch.dtype) -> None:
    """A column of one row is contiguous whatever its stride; a negative view keeps the other sign's bytes."""
    data = torch.arange(1, 25, dtype=dtype).view(4, 6)
    for view in (data[:1, 2], data[1:3, ::2], data.t(), torch._neg_view(data), data[:0], data[2, 3]):
        assert weights_digest([("a", view)]) == weights_digest(
            [("a", view.resolve_neg().clone(memory_format=torch.contiguous_format))]
        )
    assert weights_digest([("a", data)]) != weights_digest([("a", torch._neg_view(data))])


@pytest.mark.parametrize(
    ("pairs", "kind", "text"),
    [
        (["model.norm.weight"], TypeError, r"got str; pass `state_dict.items\(\)`"),
        ([("a", torch.ones(1), 2)], TypeError, r"got \(str, Tensor, int\)"),
        ([("a", torch.ones(2, 2).to_sparse())], RejectedWeight, "a: a tensor of layout torch.sparse_coo has no memory"),
        ([("a", TwoTensor(torch.ones(2), torch.ones(2)))], RejectedWeight, r"a: a TwoTensor has no memory .*full_tensor\(\)"),
        ([("a", 1.0)], TypeError, r"got \(str, float\); pass `state_dict.items\(\)`"),
        ([("a", torch.empty(2, device="meta"))], RejectedWeight, "a: a meta tensor carries no weights"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], RejectedWeight, "a: arrived twice"),
        ([("b", torch.ones(1))], RejectedWeight, "b: arrived, but is not among the names"),
    ],
)
def test_a_stream_of_anything_else_is_refused(pairs: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        list(Source(frozenset({"a"})).stream(pairs))


def test_a_weight_whose_memory_is_unknown_goes_by_the_name_that_was_asked_for_last() -> None:
    source = Source(None)
    assert source.name_of(torch.ones(1)) == "?"
    for name, tensor in source.stream([("a", torch.ones(2))]):
        assert source.name_of(tensor) == name
        assert source.name_of(torch.ones(3)) == "a"
        assert source.name_of(None) == "a"


def test_the_walk_through_a_layer_follows_callables_and_skips_empty_cells() -> None:
    weights = {name: torch.ones(2) for name in ("closed", "bound", "partial", "keyword")}

    class Kernel:
        def __init__(self) -> None:
            self.scale = weights["bound"]

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def make() -> Any:
        def closure() -> Any:
            return closed, later

        closed = weights["closed"]
        if not weights:
            later = None
        return closure

    layer = torch.nn.Module()
    layer.closure, layer.method = make(), Kernel().run
    layer.part = functools.partial(torch.add, weights["partial"], other=weights["keyword"])
    found = reach(layer, ()).tensors
    for name, wanted in weights.items():
        assert any(tensor is wanted for tensor in found.values()), name


def test_large_pages_are_asked_for_and_content_stays() -> None:
    big = torch.arange(3 * LARGE, dtype=torch.uint8)
    before = big.clone()
    advise(big)
    advise(big[:10])  # nothing to gain
    assert torch.equal(big, before)


# ------------------------------------------------------------------------------------------------- QAT targets
def process_with(result: Any) -> Any:
    """`process_weights_after_loading` of a scheme that leaves what `result(layer)` gives as the layer's only parameter."""

    def process(self: Any, layer: torch.nn.Module) -> None:
        made = result(layer)
        layer._parameters.clear()
        layer._parameters.update(made)

    return process


def parameter(*shape: int, value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, value), requires_grad=False)


def test_processing_again_with_another_layout_or_a_missing_tensor_keeps_the_old_layer() -> None:
    pytest.importorskip("vllm", reason="vLLM makes the templates of parameters")
    layer = torch.nn.Module()
    layer.weight = parameter(4)
    first = {"packed": parameter(4), "scale": parameter(2), "empty": parameter(0)}
    process_again(process_with(lambda _: dict(first)), None, layer)
    meta = ParamMeta(layer)
    assert len(meta) == 1
    with pytest.raises(KeyError):
        meta["packed_or_so"]
    for made, text in (
        ({"packed": parameter(5), "scale": parameter(2)}, "packed is .* in the live layer"),
        ({"packed": parameter(4)}, "scale was not made anew"),
    ):
        meta["weight"].data.fill_(2.0)
        with pytest.raises(UnsupportedLayer, match=text):
            process_again(process_with(lambda _, made=made: dict(made)), None, layer)
        assert dict(layer._parameters) == first
        assert first["packed"].tolist() == [1.0] * 4
    meta["weight"].data.fill_(2.0)
    made = {"packed": parameter(4, value=3.0), "scale": parameter(2, value=5.0), "empty": parameter(0)}
    process_again(process_with(lambda _: dict(made)), None, layer)
    assert dict(layer._parameters) == first
    assert (first["packed"].tolist(), first["scale"].tolist()) == ([3.0] * 4, [5.0] * 2)


def test_names_of_layers_that_were_not_processed_lead_to_the_model() -> None:
    pytest.importorskip("vllm", reason="vLLM makes the templates of parameters")
    model = torch.nn.Module()
    model.layer, model.norm = torch.nn.Module(), torch.nn.LayerNorm(2)
    model.layer.weight = parameter(4)
    process_again(process_with(lambda _: {"packed": parameter(4)}), None, model.layer)
    meta = ParamMeta(model)
    assert set(meta) == {"norm.weight", "norm.bias", "layer.weight"}
    assert meta["norm.weight"] is model.norm.weight
    with pytest.raises(ScopeStateError, match="none of its layers was processed"):
        ParamMeta(torch.nn.Linear(2, 2))


def vllm_stub(monkeypatch: pytest.MonkeyPatch, version: str, **classes: type) -> None:
    """A vLLM that has these scheme classes and nothing else."""
    names = ["vllm"]
    for part in NVFP4DenseW4A16.candidates[0].partition(":")[0].split(".")[1:]:
        names.append(f"{names[-1]}.{part}")
    names.append(NVFP4DenseW4A4.candidates[0].partition(":")[0])
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    for name, value in classes.items():
        for module_name in names:
            setattr(sys.modules[module_name], name, value)


class Good:
    def __init__(self, use_a16: bool = False) -> None: ...

    def process_weights_after_loading(self, layer: Any) -> None: ...


class NoMode:
    def process_weights_after_loading(self, layer: Any) -> None: ...


class NoMethod:
    pass


class OtherArguments:
    def process_weights_after_loading(self) -> None: ...


@pytest.mark.parametrize(
    ("version", "classes", "text"),
    [
        ("0.17.2", {"CompressedTensorsW4A16Fp4": Good}, "vLLM 0.17.2 is outside 0.18 to 0.32, on which"),
        ("0.33.0", {"CompressedTensorsW4A16Fp4": Good}, "vLLM 0.33.0 is outside 0.18 to 0.32, on which"),
        ("0.30.0", {}, "vLLM 0.30.0 has none of"),
        ("0.30.0", {"CompressedTensorsW4A16Fp4": NoMethod}, r"does not take \(self, layer\)"),
        ("0.30.0", {"CompressedTensorsW4A16Fp4": OtherArguments}, r"does not take \(self, layer\)"),
        ("0.30.0", {"CompressedTensorsW4A4Fp4": NoMode}, "has no use_a16 mode"),
    ],
)
def test_a_target_that_is_not_as_known_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, classes: dict[str, type], text: str
) -> None:
    vllm_stub(monkeypatch, version, **classes)
    found = NVFP4DenseW4A16()._find()
    assert isinstance(found, str)
    assert re.search(text, found), found
    assert not NVFP4DenseW4A16().supports(None)
    assert NVFP4DenseW4A16().supports(None).reason == found


@pytest.mark.parametrize("version", ["0.30.0", "0.0.0+checkout", "dev", "unknown"])
def test_a_target_is_found_by_what_is_there(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    vllm_stub(monkeypatch, version, CompressedTensorsW4A4Fp4=Good)
    found = NVFP4DenseW4A16()._find()
    assert not isinstance(found, str)
    assert (found.owner, found.mode) == (Good, "use_a16")
    assert found.applies(types.SimpleNamespace(use_a16=True))
    assert not found.applies(Good())


@pytest.mark.parametrize("version", ["0.18.0", "0.30.1", "0.31.0", "0.0.0+checkout"])
def test_a_version_that_nobody_measured_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    vllm_stub(monkeypatch, version, CompressedTensorsW4A4Fp4=Good)
    targets._warn.cache_clear()
    plan = patched(None, NVFP4DenseW4A16(), NVFP4DenseW4A4()).plan()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if version in ("0.18.0", "0.30.1"):
        assert not said
        assert "not measured" not in str(plan)
    else:
        assert said == [f"qat: vLLM {version} was not measured; 0.18, 0.20, 0.24, 0.26, 0.30, 0.32 were"]
        assert str(plan).count(f"vLLM {version} was not measured") == 2


def test_the_measured_versions_are_those_of_the_probe_and_of_the_docs() -> None:
    measured = [".".join(map(str, minor)) for minor in targets.MEASURED]
    assert [version.rpartition(".")[0] for version in VERSIONS] == measured
    root = Path(__file__).parents[2]
    table = re.findall(r"^\| (0\.\d+\.\d+) \|", (root / "docs/vllm.md").read_text(), re.MULTILINE)
    assert table == list(VERSIONS)
    assert f"| vLLM | {' | '.join(VERSIONS)} |" in (root / "README.md").read_text()


def test_targets_by_name() -> None:
    assert [patch.name for patch in targets_by_name("nvfp4")] == ["nvfp4_dense_w4a16", "nvfp4_dense_w4a4", "nvfp4_moe"]
    assert [patch.name for patch in targets_by_name(["nvfp4_moe"])] == ["nvfp4_moe"]
    for bad in ([], ["nvfp5"], 3, [3]):
        with pytest.raises(BadOptionError, match='must be "nvfp4" or some of nvfp4_dense_w4a16, '):
            targets_by_name(bad)


@pytest.mark.parametrize("spec", ["{", "[1, 2]", "3"])
def test_a_spec_that_is_none_is_refused_by_the_plugin(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setenv("SCOPED_PATCH_SPEC", spec)
    monkeypatch.delenv("SCOPED_PATCH_VLLM_QAT", raising=False)
    with pytest.raises(BadOptionError, match="SCOPED_PATCH_SPEC holds no spec"):
        register()


# ------------------------------------------------------------------------------------------------- an engine elsewhere
class Remote:
    """An engine of two ranks. `answers`: what they say of each step, by its name, where it is not that all is well."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.resets = 0

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[str]:
        step = method.removeprefix("scoped_patch_")
        self.calls.append(step)
        answer = self.answers.get(step, {})
        if isinstance(answer, BaseException):
            raise answer
        digest = weights_digest([("a", torch.ones(2))])
        fine = {"ok": True, "error": None, "digest": digest, "scales": "0"}
        return [json.dumps(fine | {"rank": rank} | answer.get(rank, {})) for rank in (0, 1)]

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def update(engine: Remote, **options: Any) -> Any:
    with reload_engine(engine, **options) as session:
        session.load([("a", torch.ones(2))])
    return session


def test_every_rank_goes_through_the_steps() -> None:
    engine = Remote()
    session = update(engine, reset_prefix_cache=True)
    assert engine.calls == ["begin", "load", "prepare", "commit", "release"]
    assert engine.resets == 1
    assert [one["rank"] for one in session.ranks] == [0, 1]
    session.__exit__(None, None, None)  # closed: nothing more is sent
    assert len(engine.calls) == 5


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({"prepare": {1: {"digest": "12"}}}, "the ranks do not hold the same update.*\n  rank 1: digest 12, sent "),
        ({"prepare": {1: {"scales": "7"}}}, "the ranks do not hold the same update.*\n  rank 0: global scales 0\n.*7"),
        ({"load": {0: {"ok": False, "error": "ValueError: no"}}}, "load failed on 1 of 2 ranks.*\n  rank 0: ValueError: no"),
        ({"commit": {1: {"ok": False, "error": "full"}}}, "commit failed on 1 of 2 ranks.*\n  rank 1: full"),
    ],
)
def test_ranks_that_disagree_or_fail_are_named_and_all_go_back(answers: Any, text: str) -> None:
    engine = Remote(**answers)
    with pytest.raises(RemoteReloadError, match=text) as raised:
        update(engine)
    assert engine.calls[-1] == "rollback"
    assert engine.calls.count("rollback") == 1
    assert raised.value.ranks


def test_an_exception_in_the_block_or_in_a_call_takes_all_ranks_back(caplog: pytest.LogCaptureFixture) -> None:
    engine = Remote()
    with pytest.raises(KeyError), reload_engine(engine):
        raise KeyError("mine")
    assert engine.calls == ["begin", "rollback"]
    engine = Remote(load=ConnectionError("gone"), rollback=ConnectionError("gone too"))
    with caplog.at_level(logging.ERROR), pytest.raises(ConnectionError, match=r"gone$"):
        update(engine)
    assert engine.calls == ["begin", "load", "rollback"]
    assert "the roll-back did not reach every rank" in caplog.text


def test_workers_without_the_extension_are_told_about_it() -> None:
    with pytest.raises(BadTargetError, match="worker_extension_cls="):
        update(Remote(begin=AttributeError("no scoped_patch_begin")))


# ------------------------------------------------------------------------------------------------- misuse
def test_targets_that_are_none() -> None:
    with pytest.raises(BadTargetError, match="an empty list of models"), reload_weights([]):
        pass
    with pytest.raises(TargetError, match="Linear has no `load_weights`"), reload_weights(torch.nn.Linear(2, 2)):
        pass


def test_experts_that_do_not_fit_together_are_refused() -> None:
    state = {"mlp.experts.gate_up_proj": torch.ones(2, 32, 16), "mlp.experts.down_proj": torch.ones(2, 16, 48)}
    with pytest.raises(BadOptionError, match=r"mlp.experts: gate_up_proj \(.*\) and down_proj \(.*\) do not fit together"):
        list(quantize_state_dict(state, "w4a16"))
    for absent in list(state):
        with pytest.raises(BadOptionError, match=f"{absent} is not in the state dict"):
            list(quantize_state_dict({name: weight for name, weight in state.items() if name != absent}, "w4a16"))


def test_quantising_without_compressed_tensors_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors.nvfp4.base", None)
    with pytest.raises(UnsupportedError, match=r'pip install "scoped-patch\[qat\]"'):
        list(quantize_state_dict({"a.weight": torch.ones(4, 32)}))
