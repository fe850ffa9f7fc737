"""Processing that was watched before runs unwatched, as long as nothing says that it may do something else this time."""

from __future__ import annotations

import builtins
import contextlib
import cProfile
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scoped_patch.vllm import RejectedWeight, UnsupportedLayer, plans, reload_weights
from scoped_patch.vllm import familiar as familiar_module
from scoped_patch.vllm import recorder as recorder_module
from scoped_patch.vllm.recorder import Recorder

from .test_reload import restored

KERNEL = "vllm.model_executor.kernels.linear.nvfp4.emulation"
NAME = "model.layers.1.self_attn.o_proj"
HELD: list[Any] = []


@pytest.fixture
def engine(engines: Any) -> Iterator[Any]:
    plans._known.clear()
    familiar_module._known.clear()
    yield from restored(engines("dense", "w4a4"))
    HELD.clear()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose processing was watched."""
    out: list[str] = []
    watch = familiar_module.Familiar._watch

    def noting(self: Any, layer: Any, *rest: Any) -> Any:
        out.append(layer.name)
        return watch(self, layer, *rest)

    monkeypatch.setattr(familiar_module.Familiar, "_watch", noting)
    return out


def reload(engine: Any, seed: int, **options: Any) -> None:
    with reload_weights(engine.llm, **options) as update:
        update.load(engine.state[seed].items())
    assert engine.generate() == engine.fresh[seed]


def familiar(engine: Any, watched: list[str]) -> int:
    """Update until nothing new is seen; how many layers are watched from then on."""
    for seed in (1, 0, 1):
        watched.clear()
        reload(engine, seed)
    assert NAME not in watched
    return len(watched)


@pytest.mark.parametrize("atomic", ["model", "layer"])
def test_one_layer_of_a_kind_is_watched(engine: Any, watched: list[str], atomic: Any) -> None:
    familiar(engine, watched)
    watched.clear()
    reload(engine, 0, atomic=atomic)
    attention = [name for name in watched if name.endswith(".attn")]
    linear = [name for name in watched if "_proj" in name]
    processed = [n for n, m in engine.model.named_modules() if getattr(m, "quant_method", None) is not None]
    assert len(linear) == 1
    assert len(watched) - len(attention) < 4 < len(processed)


def test_what_a_function_deep_within_was_patched_to_do_is_seen(engine: Any, watched: list[str], monkeypatch: Any) -> None:
    """Even if it does so for one layer in the middle only."""
    import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as deep

    familiar(engine, watched)
    live = engine.model.model.norm.weight
    calls: list[int] = []
    parameter = torch.nn.Parameter

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 18:
            live.data.zero_()
        return parameter(*args, **kwargs)

    monkeypatch.setattr(deep, "Parameter", patched)
    with pytest.raises(UnsupportedLayer, match=r"model\.norm\.weight: .* would have written to this live tensor"):
        reload(engine, 0)
    assert len(calls) == 18
    assert live.any()
    monkeypatch.undo()
    assert engine.generate() == engine.fresh[1]


def test_a_method_of_its_own_on_one_layer_is_watched(engine: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    familiar(engine, watched)
    live = engine.model.model.norm.weight
    scheme = engine.model.get_submodule(NAME).scheme

    def own(layer: torch.nn.Module) -> None:
        type(scheme).process_weights_after_loading(scheme, layer)
        live.data.zero_()

    monkeypatch.setitem(vars(scheme), "process_weights_after_loading", own)
    with pytest.raises(UnsupportedLayer, match="would have written"):
        reload(engine, 0)
    monkeypatch.undo()
    assert engine.generate() == engine.fresh[1]


def test_a_layer_that_has_changed_is_watched(engine: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual = familiar(engine, watched)
    layer = engine.model.get_submodule(NAME)
    for holder in (layer, layer.scheme, layer.scheme.kernel):
        monkeypatch.setattr(holder, "own_mark", 1, raising=False)
        for expected in (True, False):
            watched.clear()
            reload(engine, 0)
            assert (NAME in watched) is expected
            assert len(watched) == usual + expected


def stands_in(self: Any, layer: torch.nn.Module) -> None:
    return HELD[0](self, layer)


def reads_live(self: Any, layer: torch.nn.Module) -> None:
    HELD[1].sum()
    return HELD[0](self, layer)


@pytest.mark.parametrize(
    ("function", "module", "every_time"),
    [
        (stands_in, f"{KERNEL}.own", False),
        (stands_in, "own.kernels", True),
        (stands_in, None, True),
        (reads_live, f"{KERNEL}.own", True),
    ],
)
def test_which_functions_become_familiar(
    engine: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch, function: Any, module: str | None, every_time: bool
) -> None:
    """Vllm's own that meet no live tensor; those of others may do something else next time."""
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel as Kernel

    HELD[:] = [Kernel.process_weights_after_loading, engine.model.model.norm.weight]
    own = types.FunctionType(function.__code__, {"__builtins__": builtins, "__name__": module, "HELD": HELD}, function.__name__)
    monkeypatch.setattr(Kernel, "process_weights_after_loading", own)
    for seed in (1, 0, 1):
        watched.clear()
        reload(engine, seed)
    assert (NAME in watched) is every_time


@contextlib.contextmanager
def tools(tracer: bool, profiler: bool) -> Iterator[cProfile.Profile | None]:
    """What sees every call of a function already, such as coverage, or a profiler."""
    before, seen = sys.gettrace(), cProfile.Profile()
    if tracer != (before is not None):
        sys.settrace((lambda *args: None) if tracer else None)
    try:
        with seen if profiler else contextlib.nullcontext():
            yield seen if profiler else None
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("tracer", [False, True])
@pytest.mark.parametrize("profiler", [False, True])
def test_under_a_tracer_and_a_profiler_all_is_watched(engine: Any, watched: list[str], tracer: bool, profiler: bool) -> None:
    """They stay, and what ran cannot be told. One of them is no hindrance."""
    familiar(engine, watched)
    watched.clear()
    with tools(tracer, profiler) as profile, reload_weights(engine.llm) as update:
        update.load(engine.state[0].items())
    assert (NAME in watched) is (tracer and profiler)
    if profile is not None:
        assert any("process_weights_after_loading" in str(entry.code) for entry in profile.getstats())


@pytest.mark.parametrize("profiled", [False, True])
def test_what_never_becomes_familiar_is_not_looked_into_for_ever(
    engine: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch, profiled: bool
) -> None:
    import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as deep

    looks: list[Any] = []
    parameter, note = torch.nn.Parameter, familiar_module.Calls.note
    monkeypatch.setattr(familiar_module.Calls, "note", lambda self, run: (looks.append(self), note(self, run))[1])
    monkeypatch.setattr(deep, "Parameter", lambda *args, **kwargs: parameter(*args, **kwargs))
    counts = []
    for seed in (1, 0, 1, 0, 1):
        looks.clear()
        watched.clear()
        with tools(profiled, profiled):
            with reload_weights(engine.llm) as update:
                update.load(engine.state[seed].items())
        counts.append(len(looks))
        assert NAME in watched
    monkeypatch.setattr(deep, "Parameter", parameter)
    if profiled:  # nothing was tried, so nothing was given up
        assert counts == [0] * 5
        familiar(engine, watched)
    else:
        assert counts[2] >= counts[3] + 8
        assert counts[3] == counts[4]


@pytest.mark.parametrize("collects", [True, False])
def test_finalizers_do_not_run_in_between(collects: bool) -> None:
    """Theirs would be functions that nobody knows, and all layers be watched for them."""
    was, threshold = gc.isenabled(), gc.get_threshold()
    (gc.enable if collects else gc.disable)()
    gc.set_threshold(1)
    try:
        circle, kept = [Circle()], []
        HELD.clear()

        def run() -> None:
            circle.clear()
            for _ in range(100):
                kept.append([0])
            kept.append(list(HELD))

        familiar_module.Calls().note(run)
        assert gc.isenabled() is collects
        assert kept[-1] == []
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if was else gc.disable)()


class Circle:
    def __init__(self) -> None:
        self.self = self

    def __del__(self) -> None:
        HELD.append("finalizer")


class Interrupting:
    """A module's functions, one of which is interrupted as soon as it is done (or before it begins)."""

    def __init__(self, of: Any, name: str, at: int, before: bool = False) -> None:
        self._of, self._name, self._at, self._before = of, name, at, before
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        return functools.partial(self.call, found) if name == self._name else found

    def call(self, function: Any, *args: Any) -> Any:
        self.calls += 1
        if self._before and self.calls == self._at:
            raise KeyboardInterrupt
        out = function(*args)
        if not self._before and self.calls == self._at:
            raise KeyboardInterrupt
        return out


def state_of_python() -> tuple[Any, ...]:
    return sys.gettrace(), sys.getprofile(), gc.isenabled(), torch._C._len_torch_dispatch_stack(), torch.is_grad_enabled()


INTERRUPTS = [("gc", "disable"), ("gc", "enable"), ("gc", "isenabled"), ("sys", "settrace"), ("sys", "gettrace")]


@pytest.mark.parametrize(("module", "name"), INTERRUPTS)
@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_leaves_no_trace_function_and_the_collector_on(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, at: int
) -> None:
    before, outer = state_of_python(), sys.gettrace()
    sys.settrace(None)
    try:
        monkeypatch.setattr(familiar_module, module, Interrupting(getattr(familiar_module, module), name, at))
        with contextlib.suppress(KeyboardInterrupt):
            familiar_module.Calls().note(lambda: None)
        found = sys.gettrace()
    finally:
        sys.settrace(outer)
    assert found is None
    assert state_of_python() == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_debugger_that_begins_in_between_stays(fails: bool) -> None:
    """From then on the calls were told to it alone."""

    def debugger(*args: Any) -> None:
        return None

    def run() -> None:
        sys.settrace(debugger)
        if fails:
            raise ValueError

    outer = sys.gettrace()
    sys.settrace(None)
    try:
        calls = familiar_module.Calls()
        with pytest.raises(ValueError) if fails else contextlib.nullcontext():
            calls.note(run)
        found = sys.gettrace()
    finally:
        sys.settrace(outer)
    assert found is debugger
    assert calls.ran is None


@pytest.mark.parametrize("before", [False, True])
def test_an_interrupt_leaves_the_recorder_where_it_was(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    recorder = Recorder({}, lambda *args: None, lambda *args: None)
    pop = Interrupting(recorder_module, "_pop_mode", 1, before)
    with recorder:
        depth = torch._C._len_torch_dispatch_stack()
        monkeypatch.setattr(recorder_module, "_pop_mode", pop._pop_mode)
        with pytest.raises(KeyboardInterrupt):
            recorder.away(lambda: None)
        assert recorder.watching
        assert torch._C._len_torch_dispatch_stack() == depth
        monkeypatch.undo()
    assert torch._C._len_torch_dispatch_stack() == depth - 1


def writes_live(self: Any, layer: torch.nn.Module) -> None:
    if HELD[2] and HELD[2][0] == 0:
        HELD[1].zero_()
    for left in HELD[2]:
        HELD[2][0] = left - 1
    return HELD[0](self, layer)


def test_a_layer_whose_watched_processing_failed_is_watched_next_time(
    engine: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made it write to a live tensor, its functions are known, and in the next update it need not be the first."""
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel as Kernel

    live = engine.model.model.norm.weight
    HELD[:] = [Kernel.process_weights_after_loading, live.data, []]
    own = types.FunctionType(writes_live.__code__, {"__builtins__": builtins, "__name__": f"{KERNEL}.own", "HELD": HELD})
    monkeypatch.setattr(Kernel, "process_weights_after_loading", own)
    familiar(engine, watched)
    last = list(engine.state[0].items())
    first = [pair for pair in last if pair[0].startswith(NAME)]
    HELD[2][:] = [0]
    watched.clear()
    with pytest.raises(UnsupportedLayer, match="would have written"), reload_weights(engine.llm) as update:
        update.load(first)
    assert watched == [NAME]
    HELD[2][:] = []
    watched.clear()
    with reload_weights(engine.llm) as update:
        update.load([pair for pair in last if not pair[0].startswith(NAME)] + first)
    assert NAME in watched


def test_an_interrupt_on_the_way_out_leaves_no_recorder(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, leaving, calls = state_of_python(), Recorder.__exit__, []

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return leaving(self, *args)

    monkeypatch.setattr(Recorder, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt), reload_weights(engine.llm) as update:
        update.load(engine.state[1].items())
    assert state_of_python() == before
    assert engine.generate() == engine.fresh[0]


def makes_parameter(*args: Any, **kwargs: Any) -> Any:
    return HELD[0](*args, **kwargs)


def test_a_new_function_of_vllms_has_all_layers_watched_once(engine: Any, watched: list[str], monkeypatch: Any) -> None:
    import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as deep

    usual = familiar(engine, watched)
    HELD[:] = [torch.nn.Parameter]
    own = types.FunctionType(makes_parameter.__code__, {"__builtins__": builtins, "__name__": f"{KERNEL}.own", "HELD": HELD})
    monkeypatch.setattr(deep, "Parameter", own)
    for expected in (True, False):
        watched.clear()
        reload(engine, 0)
        assert (NAME in watched) is expected
        assert (len(watched) > usual) is expected


def test_a_tensor_that_a_method_was_given_is_noticed(engine: Any, watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual = familiar(engine, watched)
    layer = engine.model.get_submodule(NAME)
    for holder in (layer.scheme, layer.scheme.kernel):
        monkeypatch.setattr(holder, "own_memory", engine.model.model.norm.weight.data, raising=False)
        watched.clear()
        with contextlib.suppress(UnsupportedLayer), reload_weights(engine.llm) as update:
            update.load(engine.state[0].items())
        assert NAME in watched
        assert len(watched) <= usual + 1


def test_a_function_that_was_patched_in_is_not_kept(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel as Kernel

    original = Kernel.process_weights_after_loading

    def patched(self: Any, layer: torch.nn.Module) -> None:
        original(self, layer)

    monkeypatch.setattr(Kernel, "process_weights_after_loading", patched)
    for seed in (1, 0):
        reload(engine, seed)
    left = weakref.ref(patched)
    monkeypatch.undo()
    del patched
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("failing", [False, True])
def test_an_update_leaves_python_as_it_was(engine: Any, watched: list[str], failing: bool) -> None:
    familiar(engine, watched)
    items = list(engine.state[0].items())
    if failing:
        items = [(name, tensor[:1] if name == "model.norm.weight" else tensor) for name, tensor in items]
    before = state_of_python()
    with pytest.raises(RejectedWeight, match=r"model\.norm\.weight") if failing else contextlib.nullcontext():
        with reload_weights(engine.llm) as update:
            update.load(items)
    assert state_of_python() == before


def test_operators_reach_the_recorder_without_a_wrapper() -> None:
    assert not hasattr(Recorder.__torch_dispatch__, "__wrapped__")
    assert Recorder.__torch_dispatch__.__code__.co_filename.endswith("recorder.py")
