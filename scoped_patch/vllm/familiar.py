"""Which layers' processing need not be watched again.

Watching takes Python code for every operator, and processing a layer is some fifty of them: together about as long as all else
that an update does to it. It is left out for a layer whose own processing was watched in an earlier update and met no live
tensor, as long as the layer is what it was then, and after another one of its kind has been watched in this update and ran no
function that was not known from earlier ones: so whatever has been patched since, deep within vLLM too, has all layers watched.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .kinds import KINDS, is_attention, kind_of
from .plans import Plans, plain
from .recorder import Recorder
from .shadow import ShadowLayer

PATIENCE = 3  # updates
_METHOD = "process_weights_after_loading"
#: what may run within processing and is not looked at; other packages but vLLM may do something else next time
_GROUND = frozenset(sys.stdlib_module_names) | {"torch"}
_WATCHERS = frozenset(
    f"{__package__}.{name}" for name in ("familiar", "graph", "kinds", "recorder", "shadow", "staging", "target")
)

_Kind = tuple[Any, ...]  # types, and functions of theirs, in the order in which a layer holds them
Look = tuple[_Kind, list[dict[str, Any]]]  # (kind, what the objects that process hold in numbers and names)
#: by kind, the functions of vLLM's that processing was seen to run
_known: dict[_Kind, set[types.CodeType]] = {}


class Familiar:
    """What was watched in one update of one model."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._same: set[_Kind] = set()
        self._strange: set[_Kind] = set()

    def watch(self, layer: ShadowLayer, recorder: Recorder) -> contextlib.AbstractContextManager[None]:
        """What to process the layer under: the recorder's guard, or nothing."""
        look = self._look(layer)
        if recorder.watching and look is not None and look[0] in self._same and self._plans.of(layer).watched == look:
            return recorder.away()
        return self._watch(layer, look, recorder)

    @contextlib.contextmanager
    def _watch(self, layer: ShadowLayer, look: Look | None, recorder: Recorder) -> Iterator[None]:
        known, calls = self._plans.of(layer), Calls()
        worth = look is not None and known.misses < PATIENCE and calls.possible  # it may take longer than watching
        with recorder.guard(), calls.noted() if worth else contextlib.nullcontext():
            yield
        ran = None if recorder.met_live else calls.ran
        if worth:
            known.misses = known.misses + 1 if ran is None else 0
        known.watched = None if ran is None or known.distrusted else look
        if look is None:
            return
        kind, before = look[0], _known.setdefault(look[0], set())
        if ran is None or not ran <= before:
            self._strange.add(kind)
            self._same.discard(kind)
            before |= ran or set()
        elif kind not in self._strange:
            self._same.add(kind)

    def _look(self, layer: ShadowLayer) -> Look | None:
        """What is about to process this layer; None: something that must be watched every time."""
        kind: list[Any] = []
        about: list[dict[str, Any]] = []
        stack, seen = [layer.shadow.__dict__], set()
        while stack:
            for value in stack.pop().values():
                of = type(value)
                if (KINDS.get(of) or kind_of(of)) != "copied" or id(value) in seen or isinstance(value, torch.nn.Module):
                    continue
                if _METHOD in value.__dict__:
                    return None
                seen.add(id(value))
                kind += (of, getattr(of, _METHOD, None))
                about.append(plain(value.__dict__))
                stack.append(value.__dict__)
        return None if is_attention(layer.live) else (tuple(kind), about)  # attention reads other layers


class Calls:
    """Which functions of vLLM's run meanwhile; `ran` is None if others do."""

    def __init__(self) -> None:
        self.ran: set[types.CodeType] | None = None
        # A profiler's function is told of C functions too, thousands of them; but a debugger or coverage may be in the way.
        places = ((sys.gettrace, sys.settrace), (sys.getprofile, sys.setprofile))
        self._set: Callable[[Any], None] | None = next((put for get, put in places if get() is None), None)

    @property
    def possible(self) -> bool:
        return self._set is not None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        found: dict[types.CodeType, str] = {}

        def note(frame: types.FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code not in found:
                found[frame.f_code] = frame.f_globals.get("__name__") or ""

        assert self._set is not None
        collects = gc.isenabled()
        gc.disable()  # or finalizers of anything at all would run in between
        self._set(note)
        try:
            yield
        finally:
            self._set(None)
            if collects:
                gc.enable()
        own = {code for code, module in found.items() if module.startswith("vllm.")}
        others = {module for module in found.values() if not module.startswith("vllm.")} - _WATCHERS
        self.ran = own if {module.partition(".")[0] for module in others} <= _GROUND else None
