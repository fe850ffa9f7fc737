"""Which layers' processing need not be watched again.

Watching takes Python code for every operator, and processing a layer is some fifty of them: together about as long as all else
that an update does to it. It is left out for a layer whose own processing was watched in an earlier update and met no live
tensor, as long as the layer is what it was then, and after another one of its kind has been watched in this update and ran no
function that was not known from earlier ones: so whatever has been patched since, deep within vLLM too, has all layers watched.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
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

_Place = tuple[Callable[[], Any], Callable[[Any], None]]  # (getter, setter)
_Kind = tuple[Any, ...]  # types, and functions of theirs, in the order in which a layer holds them
Look = tuple[_Kind, list[Any]]  # (kind, numbers and names that the objects that process hold, and types of all they hold)
#: by kind, the functions of vLLM's that processing was seen to run
_known: dict[_Kind, set[types.CodeType]] = {}


class Familiar:
    """What was watched in one update of one model."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._same: set[_Kind] = set()
        self._strange: set[_Kind] = set()

    def process(self, layer: ShadowLayer, recorder: Recorder, run: Callable[[], None]) -> None:
        """Call `run`, which processes the layer, under the recorder's guard or unwatched."""
        look = self._look(layer)
        if recorder.watching and look is not None and look[0] in self._same and self._plans.of(layer).watched == look:
            recorder.away(run)
        else:
            self._watch(layer, look, recorder, run)

    def _watch(self, layer: ShadowLayer, look: Look | None, recorder: Recorder, run: Callable[[], None]) -> None:
        known, calls = self._plans.of(layer), Calls()
        worth = look is not None and known.misses < PATIENCE and calls.possible  # it may take longer than watching
        known.watched = None  # if this fails, it says nothing good of the layer
        with recorder.guard():
            if worth:
                calls.note(run)
            else:
                run()
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
        about: list[Any] = [[(name, type(held)) for name, held in layer.shadow.__dict__.items()]]
        stack, seen = [layer.shadow.__dict__], set()
        while stack:
            for value in stack.pop().values():
                of = type(value)
                if (KINDS.get(of) or kind_of(of)) != "copied" or id(value) in seen or isinstance(value, torch.nn.Module):
                    continue
                if _METHOD in value.__dict__:
                    return None
                seen.add(id(value))
                kind += (of, _reference(getattr(of, _METHOD, None)))
                about.append((plain(value.__dict__), *((name, type(held)) for name, held in value.__dict__.items())))
                stack.append(value.__dict__)
        return None if is_attention(layer.live) else (tuple(kind), about)  # attention reads other layers


def _reference(function: Any) -> Any:
    """Weak: what is known of a function that was patched in must not keep it, nor what it captured."""
    return weakref.ref(function) if type(function) is types.FunctionType else function


class Calls:
    """Which functions of vLLM's run meanwhile; `ran` is None if others do, or if someone else wants to be told of calls."""

    def __init__(self) -> None:
        self.ran: set[types.CodeType] | None = None
        # A profiler's function is told of C functions too, thousands of them; but a debugger or coverage may be in the way.
        places = ((sys.gettrace, sys.settrace), (sys.getprofile, sys.setprofile))
        self._place: _Place | None = next((place for place in places if place[0]() is None), None)

    @property
    def possible(self) -> bool:
        return self._place is not None

    def note(self, run: Callable[[], None]) -> None:
        """Call `run`. No context manager: an interrupt between its own steps would leave the function in place."""
        found: dict[types.CodeType, str] = {}

        def told(frame: types.FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code not in found:
                found[frame.f_code] = frame.f_globals.get("__name__") or ""

        assert self._place is not None
        get, put = self._place
        collects, after = gc.isenabled(), told
        try:
            gc.disable()  # or finalizers of anything at all would run in between
            put(told)
            run()
        finally:
            try:
                after = get()  # a debugger's, if a breakpoint was met: it stays
            finally:
                try:
                    if after is told:
                        put(None)
                finally:
                    if collects:
                        gc.enable()
        own = {code for code, module in found.items() if module.startswith("vllm.")}
        others = {module for module in found.values() if not module.startswith("vllm.")} - _WATCHERS
        seen_all = after is told and {module.partition(".")[0] for module in others} <= _GROUND
        self.ran = own if seen_all else None
