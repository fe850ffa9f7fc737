"""The live stack: what is patched in this process right now, place by place.

Each place keeps segments, and each segment a base (the raw value found there when it began) and the layers built on it,
sorted by rank. A new segment begins when the value found is not the one we wrote: somebody else's change, which is
built upon and never lost. The value of a place is always its top segment, recomputed from base upward, so scopes can
come and go in any order and the last one out leaves the first base.

All state changes are one assignment each, and the value about to be written is noted before it is written, so an
exception between any two lines (Ctrl-C included) leaves something that the next operation can settle.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .edits import Edit
from .errors import ConflictError, ForeignOverwriteError, OutOfOrderExit
from .slots import MISSING, DescriptorSlot, Place, Slot, same, write_exact

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, eq=False)
class Layer:
    """One live edit and the sessions that hold it (several share an equal edit)."""

    edit: Edit
    patch: str
    holders: tuple[Session, ...]


@dataclass(frozen=True, eq=False)
class Segment:
    base: Any
    layers: tuple[Layer, ...]
    values: tuple[Any, ...]  # values[i] is the raw value after layers[i]

    @property
    def top(self) -> Any:
        return self.values[-1] if self.values else self.base


class SlotState:
    """Everything live on one place."""

    __slots__ = ("segments", "slot", "target")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.segments: tuple[Segment, ...] = ()
        self.target: tuple[Segment, ...] | None = None

    @property
    def original(self) -> Any:
        return self.segments[0].base if self.segments else MISSING

    def move(self, segments: tuple[Segment, ...], raw: Any) -> None:
        self.target = segments
        write_exact(self.slot, raw)
        self.segments = segments
        self.target = None

    def settle(self) -> None:
        """Decide what an interrupted move came to: it happened when the value it meant to write is there."""
        if self.target is None:
            return
        target, self.target = self.target, None
        if not target:
            if self.segments and same(self.slot.read(), self.segments[0].base):
                self.segments = ()
        elif same(self.slot.read(), target[-1].top):
            self.segments = target


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The values of some places at one moment, to be put on again for the length of a call."""

    version: int
    values: tuple[tuple[Slot, Any], ...]


class LiveStack:
    """The process's live edits. One lock, held only while entering, leaving and switching a replay."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self.states: dict[Place, SlotState] = {}
        self.sessions: list[Session] = []
        self.version = 0
        self._guarded: dict[int, tuple[Any, set[Place]]] = {}
        self._replays: list[_Replay] = []
        #: which owners answer copies and pickles with their unpatched state; the models room says `nn.Module`
        self.guards_owner: Callable[[Any], bool] = lambda owner: False

    # ------------------------------------------------------------------------------------------------- installing
    def install(self, edit: Edit, patch: str, session: Session) -> None:
        """Put one edit on. The session has already noted it, so any exception from here on can be undone."""
        place = edit.slot.place
        state = self.states.get(place)
        if state is None:
            state = SlotState(edit.slot)
        else:
            state.settle()
        slot = state.slot
        raw = slot.read()
        segments = state.segments
        on_top = bool(segments) and same(raw, segments[-1].top)
        for segment in segments:
            for layer in segment.layers:
                if edit.token is not None and layer.edit.token == edit.token and segment is segments[-1] and on_top:
                    if session in layer.holders:
                        return
                    shared = Layer(layer.edit, layer.patch, (*layer.holders, session))
                    layers = tuple(shared if one is layer else one for one in segment.layers)
                    state.segments = (*segments[:-1], Segment(segment.base, layers, segment.values))
                    return
                self._refuse(edit, patch, layer, session)
        top = segments[-1] if on_top else Segment(raw, (), ())
        below = segments[:-1] if on_top else segments
        at = len(top.layers)
        while at and edit.order < top.layers[at - 1].edit.order:
            at -= 1
        layers = (*top.layers[:at], Layer(edit, patch, (session,)), *top.layers[at:])
        grown = _compose(slot, top.base, layers, top.values[:at])
        if place not in self.states:
            self.states[place] = state
            self._guard(slot, place)
        state.move((*below, grown), grown.top)

    @staticmethod
    def _refuse(edit: Edit, patch: str, layer: Layer, session: Session) -> None:
        holder = next((s for s in layer.holders if s is not session), None)
        if holder is None:
            return
        where = f"{edit.slot.label} is held by {layer.patch!r}, entered at {holder.location}"
        if holder.thread != session.thread and not edit.hidden:
            raise ConflictError(
                f"{patch!r} cannot patch it from this thread: {where} in another thread ({holder.thread_name}). Patches "
                f"are facts of the whole process: leave that scope first, or enter one scope around both threads"
            )
        if edit.action == "replace" and not (edit.commutes and layer.edit.commutes) and not layer.edit.hidden:
            raise ConflictError(
                f"{patch!r} wants to replace a place that another scope has patched: {where}. Leave that scope first, "
                f"or wrap instead of replacing"
            )
        if edit.exclusive is not None and edit.exclusive == layer.edit.exclusive:
            raise ConflictError(
                f"{patch!r} is already on this model with other options: {where}. Leave that scope first, or give both "
                f"the same options"
            )

    # ------------------------------------------------------------------------------------------------- removing
    def remove(self, edit: Edit, session: Session, on_foreign: str) -> Exception | None:
        """Take one edit off; idempotent. Returns what the caller has to report, raises only if a restore failed."""
        state = self.states.get(edit.slot.place)
        if state is None:
            return None
        state.settle()
        slot, segments = state.slot, state.segments
        found = next(
            (
                (i, j)
                for i in range(len(segments) - 1, -1, -1)
                for j, layer in enumerate(segments[i].layers)
                if session in layer.holders and (layer.edit is edit or _equal_token(layer.edit, edit))
            ),
            None,
        )
        if found is None:
            self._drop_if_empty(state)
            return None
        i, j = found
        segment = segments[i]
        layer = segment.layers[j]
        if len(layer.holders) > 1:
            rest = tuple(s for s in layer.holders if s is not session)
            layers = (*segment.layers[:j], Layer(layer.edit, layer.patch, rest), *segment.layers[j + 1 :])
            state.segments = (*segments[:i], Segment(segment.base, layers, segment.values), *segments[i + 1 :])
            return None
        layers = (*segment.layers[:j], *segment.layers[j + 1 :])
        lowered = _compose(slot, segment.base, layers, segment.values[:j])
        problem: Exception | None = None
        if i < len(segments) - 1:
            problem = self._lower_covered(state, i, lowered, layer, session, on_foreign)
        else:
            covering = [above for above in segment.layers[j + 1 :] if not (edit.commutes and above.edit.commutes)]
            if covering:
                other = covering[-1]
                problem = OutOfOrderExit(
                    f"{slot.label}: {layer.patch!r} (entered at {session.location}) was left before {other.patch!r} "
                    f"(entered at {other.holders[-1].location}), which covers it. It was taken out from under; close "
                    f"scopes on one place in the reverse order of entering"
                )
            shrunk = (*segments[:i], lowered) if layers else segments[:i]
            raw = slot.read()
            if same(raw, segment.top) or same(raw, lowered.top):
                state.move(shrunk, lowered.top)
            elif _put_back_moved(slot, segment.top, lowered.top):
                state.segments = shrunk
            else:
                problem = _foreign(slot, layer, session, raw, lowered.top) if on_foreign == "error" else None
                if on_foreign == "restore":
                    state.move(shrunk, lowered.top)
                else:
                    state.segments = shrunk
        self._drop_if_empty(state)
        return problem

    @staticmethod
    def _lower_covered(
        state: SlotState, i: int, lowered: Segment, layer: Layer, session: Session, on_foreign: str
    ) -> Exception | None:
        """Our segment lies under somebody else's change, and a later scope of ours lies on top of that."""
        slot, segments = state.slot, state.segments
        above = segments[i + 1]
        keep = (*segments[:i], lowered) if lowered.layers else segments[:i]
        if on_foreign == "restore":
            rebuilt = _compose(slot, lowered.top, above.layers, ())
            if i + 1 == len(segments) - 1:
                state.move((*keep, rebuilt), rebuilt.top)
            else:
                state.segments = (*keep, rebuilt, *segments[i + 2 :])
            return None
        state.segments = (*keep, *segments[i + 1 :])
        if on_foreign == "keep":
            return None
        return _foreign(slot, layer, session, above.base, lowered.top)

    def _drop_if_empty(self, state: SlotState) -> None:
        slot = state.slot
        if not state.segments and state.target is None and self.states.get(slot.place) is state:
            if isinstance(slot, DescriptorSlot):
                slot.forget_added()
            del self.states[slot.place]
            self._unguard(slot)

    # ------------------------------------------------------------------------------------------------- copies
    # copy, deepcopy and pickle ask the *instance* for __getstate__. While an owner is patched it answers with its
    # unpatched state, so copies and files taken inside a scope never hold our edits.
    def _guard(self, slot: Slot, place: Place) -> None:
        owner = slot.owner
        if not self.guards_owner(owner):
            return
        known = self._guarded.get(id(owner))
        if known is not None:
            known[1].add(place)
        elif "__getstate__" not in owner.__dict__:
            self._guarded[id(owner)] = (owner, {place})
            owner.__dict__["__getstate__"] = types.MethodType(unpatched_state, owner)

    def _unguard(self, slot: Slot) -> None:
        known = self._guarded.get(id(slot.owner))
        if known is None:
            return
        known[1].discard(slot.place)
        if not known[1]:
            slot.owner.__dict__.pop("__getstate__", None)
            del self._guarded[id(slot.owner)]

    # ------------------------------------------------------------------------------------------------- replay
    def freeze(self, sessions: list[Session] | None = None) -> Snapshot:
        """The present values of every place that the given sessions (all, by default) have patched."""
        with self.lock:
            values = [
                (state.slot, state.segments[-1].top)
                for state in self.states.values()
                if state.segments
                and (sessions is None or any(s in layer.holders for s in sessions for layer in _layers(state)))
            ]
            return Snapshot(self.version, tuple(values))

    def freeze_without(self, session: Session) -> Snapshot:
        """The values that the places of one live session would have if it alone were left."""
        with self.lock:
            values = []
            for state in self.states.values():
                if not any(session in layer.holders for layer in _layers(state)):
                    continue
                segment = state.segments[-1]
                kept = tuple(layer for layer in segment.layers if layer.holders != (session,))
                values.append((state.slot, _compose(state.slot, segment.base, kept, ()).top))
            return Snapshot(-1, tuple(values))

    @contextmanager
    def replay(self, snapshot: Snapshot) -> Iterator[None]:
        """Put a snapshot's values on for the length of the block, over whatever is live, from any thread.

        Concurrent replays of one snapshot share it; a different one waits until the other thread is done.
        """
        me = threading.get_ident()
        with self._idle:
            if snapshot.version == self.version and not self._replays:
                frame = None
            else:
                self._idle.wait_for(lambda: all(r.snapshot is snapshot or r.thread == me for r in self._replays))
                frame = next((r for r in self._replays if r.snapshot is snapshot), None)
                if frame is None:
                    frame = _Replay(snapshot, me)
                    self._replays.append(frame)
                    frame.put_on()
                frame.users += 1
        try:
            yield
        finally:
            if frame is not None:
                with self._idle:
                    frame.users -= 1
                    if not frame.users:
                        try:
                            frame.take_off()
                        finally:
                            self._replays.remove(frame)
                            self._idle.notify_all()

    def wait_for_replays(self) -> None:
        """Called with the lock held, before entering or leaving: another thread's replay ends first."""
        if self._replays:
            me = threading.get_ident()
            self._idle.wait_for(lambda: all(r.thread == me for r in self._replays))


class _Replay:
    def __init__(self, snapshot: Snapshot, thread: int) -> None:
        self.snapshot = snapshot
        self.thread = thread
        self.users = 0
        self._saved: list[tuple[Slot, Any, Any]] = []

    def put_on(self) -> None:
        try:
            for slot, raw in self.snapshot.values:
                before = slot.read()
                if not same(before, raw):
                    self._saved.append((slot, before, raw))
                    slot.write(raw)
        except BaseException:
            self.take_off()
            LIVE._replays.remove(self)
            raise

    def take_off(self) -> None:
        for slot, before, raw in reversed(self._saved):
            if same(slot.read(), raw):
                slot.write(before)
        self._saved.clear()


def unpatched_state(owner: Any) -> Any:
    """The state that `copy`, `deepcopy` and `pickle` see of a patched object: without any live edit."""
    with LIVE.lock:
        state = type(owner).__getstate__(owner)
        own, rest = (state[0], state[1:]) if isinstance(state, tuple) else (state, ())
        if not isinstance(own, dict):
            return state
        own = dict(own)
        own.pop("__getstate__", None)
        inner: dict[int, dict[Any, Any]] = {id(owner.__dict__): own}
        for name, value in list(own.items()):
            if isinstance(value, dict) and owner.__dict__.get(name) is value:
                inner[id(value)] = value
        for (storage, key), slot_state in LIVE.states.items():
            if storage not in inner or slot_state.slot.owner is not owner or not slot_state.segments:
                continue
            mapping = inner[storage]
            if mapping is not own and mapping is slot_state.slot.mapping:
                # a child mapping (nn.Module._modules): the copy gets one of its own, the live one stays
                mapping = inner[storage] = type(mapping)(mapping)
                name = next(n for n, v in owner.__dict__.items() if v is slot_state.slot.mapping)
                own[name] = mapping
            if slot_state.original is MISSING:
                mapping.pop(key, None)
            else:
                mapping[key] = slot_state.original
        return (own, *rest) if rest else own


def _compose(slot: Slot, base: Any, layers: tuple[Layer, ...], values: tuple[Any, ...]) -> Segment:
    """Recompute a segment's values; those given are kept, the rest is built."""
    made = list(values)
    raw = made[-1] if made else base
    for layer in layers[len(made) :]:
        raw = layer.edit.build(slot.value_of(raw))
        made.append(raw)
    return Segment(base, layers, tuple(made))


def _layers(state: SlotState) -> Iterator[Layer]:
    for segment in state.segments:
        yield from segment.layers


def _equal_token(left: Edit, right: Edit) -> bool:
    return left.token is not None and left.token == right.token


def _put_back_moved(slot: Slot, ours: Any, restored: Any) -> bool:
    """Somebody stored our value under another name of the same owner (accelerate's `_old_forward`): mend it there."""
    mapping = slot.mapping
    if mapping is None or mapping is not getattr(slot.owner, "__dict__", None):
        return False
    for key, value in list(mapping.items()):
        if key != slot.key and same(value, ours):
            mapping[key] = slot.value_of(restored)
            return True
    return False


def _foreign(slot: Slot, layer: Layer, session: Session, found: Any, wanted: Any) -> ForeignOverwriteError:
    return ForeignOverwriteError(
        f"{slot.label} was changed by somebody else while {layer.patch!r} (entered at {session.location}) was live: "
        f"found {found!r}, and it was left as it is instead of being put back to {wanted!r}. Pass on_foreign='restore' to "
        f"put the original back, or on_foreign='keep' to accept such changes silently"
    )


LIVE = LiveStack()
