"""The live stack: what is patched in this process right now, place by place."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .conflicts import (
    foreign,
    moved_to,
    out_of_order,
    refuse_covered,
    refuse_moved,
    refuse_other_thread,
    refuse_unstackable,
)
from .copies import Guarded, guard, guard_by_class, unguard
from .edits import Edit
from .errors import finish
from .replay import Replays, Snapshot
from .segments import Layer, Segment, SlotState, compose, insert
from .slots import MISSING, ClassSlot, Place, Slot, same

if TYPE_CHECKING:
    from .session import Session


class LiveStack:
    """The process's live edits. One lock, held only while entering, leaving and switching a replay.

    Attributes:
        version: names the state of the stack; the same number again means that nothing has been entered or left.
        sessions: the live sessions, oldest first.
        guards_owner: which owners answer copies and pickles with their unpatched state; the models room says `nn.Module`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.states: dict[Place, SlotState] = {}
        self.sessions: list[Session] = []
        self.version = 0
        self.guards_owner: Callable[[Any], bool] = lambda owner: False
        self._versions = itertools.count(1)
        self._guarded: Guarded = {}
        self._replays = Replays(self)

    def changed(self) -> int:
        """Something was entered or left: a new version."""
        self.version = next(self._versions)
        return self.version

    def state_for(self, slot: Slot) -> SlotState:
        """The state of the slot's place, made if there is none. `drop_if_empty` takes it away again."""
        state = self.states.get(slot.place)
        if state is None:
            state = self.states[slot.place] = SlotState(slot)
            (guard if self.guards_owner(slot.owner) else guard_by_class)(self._guarded, slot)
        return state

    def drop_if_empty(self, state: SlotState) -> None:
        if not state.busy:
            unguard(self._guarded, state.slot)
            self.states.pop(state.slot.place, None)

    # ------------------------------------------------------------------------------------------------- installing
    def install(self, edit: Edit, patch: str, session: Session, raw: Any) -> Any:
        """Put one edit on. The session has already noted it, so any exception from here on can be undone.

        Args:
            raw: what the place reads now.

        Returns:
            What the place reads afterwards.
        """
        slot = edit.slot
        state = self.states.get(slot.place)
        if state is not None:
            state.settle()
        if state is None or not state.segments:
            if raw is not MISSING and (edit.token is not None or edit.exclusive is not None):
                refuse_moved(edit, patch, raw, self._states_of(slot.owner))
            made = edit.build(slot.value_of(raw))
            state = self.state_for(slot)
            return state.move((Segment(raw, (Layer(edit, patch, (session,)),), (made,)),), made, raw)
        segments = state.segments
        on_top = state.is_ours(raw)
        # What lies below a replay is not asked: the replay stands for the moment that it shows.
        first = max((i for i, segment in enumerate(segments) if segment.replay is not None), default=0)
        for segment in segments[first:]:
            for layer in segment.layers:
                if not edit.hidden:
                    refuse_other_thread(edit, patch, layer, session)
                if not layer.is_same_edit(edit):
                    refuse_unstackable(edit, patch, layer, session)
                elif session in layer.holders:
                    return raw
                elif segment is segments[-1] and on_top:
                    shared = layer.held_by((*layer.holders, session))
                    layers = tuple(shared if one is layer else one for one in segment.layers)
                    state.segments = (*segments[:-1], Segment(segment.base, layers, segment.values, segment.replay))
                    return raw
                else:
                    refuse_covered(edit, patch, layer)
        top = segments[-1] if on_top else Segment(raw)
        below = segments[:-1] if on_top else segments
        grown = insert(top, Layer(edit, patch, (session,)))
        return state.move((*below, grown), grown.top, raw)

    def _states_of(self, owner: Any) -> Iterator[SlotState]:
        """The live states of a guarded owner."""
        _, places = self._guarded.get(id(owner), (owner, ()))
        return (self.states[place] for place in places if place in self.states)

    # ------------------------------------------------------------------------------------------------- removing
    def remove(self, edit: Edit, session: Session, on_foreign: str) -> Exception | None:
        """Take one edit off; idempotent. Returns what the caller has to report, raises only if a restore failed."""
        state = self.states.get(edit.slot.place)
        problem = None
        if state is not None:
            state.settle()
            if state.segments and not self._remove_only(state, edit, session):
                problem = self._remove(state, edit, session, on_foreign)
            self.drop_if_empty(state)
        if isinstance(edit.slot, ClassSlot):
            self.rebuild_heirs(edit.slot)
        return problem

    def rebuild_heirs(self, slot: ClassSlot) -> None:
        """A class attribute has changed: what was built on it as inherited, in instances and subclasses, is built anew."""
        heirs = []
        for state in self.states.values():
            heir = state.slot
            if heir.key == slot.key and state.segments and state.segments[0].base is MISSING and heir.place != slot.place:
                kind = heir.owner if isinstance(heir, ClassSlot) else type(heir.owner)
                if issubclass(kind, slot.owner):
                    heirs.append((not isinstance(heir, ClassSlot), len(kind.__mro__), state))
        # a subclass before its own subclasses, and instances last: each builds on what the one above has become
        for _, _, state in sorted(heirs, key=lambda one: one[:2]):
            state.settle()
            heir, segments = state.slot, state.segments
            first = compose(MISSING, segments[0].layers, (), segments[0].replay)
            raw = heir.read()
            if len(segments) == 1 and state.is_ours(raw):
                if not same(first.top, raw):
                    state.move((first,), first.top, raw)
            else:
                state.segments = (first, *segments[1:])

    @staticmethod
    def _remove_only(state: SlotState, edit: Edit, session: Session) -> bool:
        """The common case, in short: nothing else is live here, and nobody else was here."""
        segment = state.segments[0]
        if len(state.segments) == 1 and len(segment.layers) == 1 and segment.replay is None:
            layer = segment.layers[0]
            if layer.edit is edit and layer.holders == (session,):
                raw = state.slot.read()
                if raw is segment.top:
                    state.move((), segment.base, raw)
                    return True
        return False

    def _remove(self, state: SlotState, edit: Edit, session: Session, on_foreign: str) -> Exception | None:
        slot, segments = state.slot, state.segments
        i, j = _find(segments, edit, session)
        if i < 0:
            return None
        segment = segments[i]
        layer = segment.layers[j]
        if len(layer.holders) > 1:
            rest = layer.held_by(tuple(holder for holder in layer.holders if holder is not session))
            layers = (*segment.layers[:j], rest, *segment.layers[j + 1 :])
            lowered = Segment(segment.base, layers, segment.values, segment.replay)
            state.segments = (*segments[:i], lowered, *segments[i + 1 :])
            return None
        layers = (*segment.layers[:j], *segment.layers[j + 1 :])
        lowered = compose(segment.base, layers, segment.values[:j], segment.replay)
        problem = out_of_order(slot, session, layer, layers)
        kept = (*segments[:i], lowered) if layers or lowered.replay is not None else segments[:i]
        above = segments[i + 1 :]
        if above and above[0].replay is not None:
            state.segments = (*segments[:i], lowered, *above)  # the replay ends on what is below it by then
            return problem
        if above:
            return self._lower_covered(state, kept, lowered, above, layer, session, on_foreign)
        raw = slot.read()
        if state.is_ours(raw) or slot.agrees(raw, lowered.top):
            state.move(kept, lowered.top, raw)
        elif moved := moved_to(slot, segment.top):
            state.mend(kept, tuple((key, slot.value_of(lowered.top)) for key in moved))
        elif self._rebase_others(slot, segment.top, lowered.top):
            state.segments = kept
        elif on_foreign == "restore":
            state.move(kept, lowered.top, raw)
        else:
            state.segments = kept
            if on_foreign == "error":
                return foreign(slot, layer, session, raw, lowered.top)
        return problem

    @staticmethod
    def _lower_covered(
        state: SlotState,
        kept: tuple[Segment, ...],
        lowered: Segment,
        above: tuple[Segment, ...],
        layer: Layer,
        session: Session,
        on_foreign: str,
    ) -> Exception | None:
        """Our segment lies under somebody else's change, and a later scope of ours lies on top of that."""
        cover, rest = above[0], above[1:]
        if on_foreign == "restore":
            rebuilt = compose(lowered.top, cover.layers, (), cover.replay)
            if rest:
                state.segments = (*kept, rebuilt, *rest)
            else:
                state.move((*kept, rebuilt), rebuilt.top, state.slot.read())
            return None
        state.segments = (*kept, *above)
        return None if on_foreign == "keep" else foreign(state.slot, layer, session, cover.base, lowered.top)

    def _rebase_others(self, slot: Slot, ours: Any, restored: Any) -> bool:
        """Our value was moved to another place of the same owner, and a later scope has patched it there."""
        mapping = slot.mapping
        for state in list(self.states.values()):
            segments = state.segments
            if state.slot.mapping is not mapping or mapping is None or not segments or state.slot.place == slot.place:
                continue
            if segments[0].base is MISSING or not same(segments[0].base, ours):
                continue
            first = compose(slot.value_of(restored), segments[0].layers, (), segments[0].replay)
            raw = state.slot.read()
            if len(segments) == 1 and state.is_ours(raw):
                state.move((first,), first.top, raw)
            else:
                state.segments = (first, *segments[1:])
            return True
        return False

    # ------------------------------------------------------------------------------------------------- replay
    def freeze(self, sessions: Iterable[Session] | None = None, root: object | None = None) -> Snapshot:
        """The present values of every place that the given sessions (all, by default) have patched.

        Inside a replay, the places that it shows are among them: what runs now is what a later replay has to show.

        Args:
            root: a replay also hides what sessions of this root have patched since, in places that are not among them.
        """
        with self.lock:
            wanted = None if sessions is None else frozenset(map(id, sessions))
            places = [
                (state.slot, state.segments[-1])
                for state in self.states.values()
                if state.segments and (wanted is None or _shows(state.segments[-1], wanted))
            ]
            return Snapshot(self.version, tuple(places), f"a replay of {len(places)} places", root)

    def freeze_session(self, session: Session, slots: Iterable[Slot]) -> Snapshot:
        """The segments that hold a session's edits, one per place."""
        places: dict[Place, tuple[Slot, Segment]] = {}
        version = self.version
        for slot in slots:
            state = self.states.get(slot.place)
            segments = state.segments if state is not None else ()
            if len(segments) == 1:
                places[slot.place] = (slot, segments[0])
                continue
            for segment in reversed(segments):
                if any(session in layer.holders for layer in segment.layers):
                    places[slot.place] = (slot, segment)
                    break
                version = -1  # something lies over it: replaying it is not what shows now
        return Snapshot(version, tuple(places.values()), f"a replay of the scope entered at {session.location}")

    def freeze_without(self, session: Session) -> Snapshot:
        """The values that the places of one live session would have if it alone were left."""
        with self.lock:
            places = []
            for state in self.states.values():
                if not any(session in layer.holders for segment in state.segments for layer in segment.layers):
                    continue
                segment = state.segments[-1]
                kept = tuple(layer for layer in segment.layers if layer.holders != (session,))
                places.append((state.slot, compose(segment.base, kept, ())))
            return Snapshot(-1, tuple(places), f"a replay without the scope entered at {session.location}")

    def freeze_original(self, root: object) -> Snapshot:
        """The values that the places of all live sessions of one root would have without them."""
        with self.lock:
            places = [
                (state.slot, Segment(state.segments[-1].base))
                for state in self.states.values()
                if any(getattr(h, "root", None) is root for s in state.segments for layer in s.layers for h in layer.holders)
            ]
            return Snapshot(-1, tuple(places), "a replay of the unpatched state")

    @contextmanager
    def replay(self, snapshot: Snapshot) -> Iterator[None]:
        """Put a snapshot's values on for the length of the block, over whatever is live, from any thread.

        Concurrent replays of one snapshot share it; a different one waits until the other thread is done, and so do
        entering and leaving. Scopes may be entered and left inside the block.

        Raises:
            ConflictError: two threads would wait for each other for ever.
        """
        block = object()
        try:
            try:
                self._replays.begin(snapshot, block)
                yield
            finally:
                finish(lambda: self._replays.end(snapshot, block))
        except BaseException:
            finish(lambda: self._replays.end(snapshot, block))  # an interrupt may have come before the first one
            raise

    def before_change(self) -> None:
        """Called with the lock held, before entering or leaving: another thread's replay ends first."""
        self._replays.before_change()

    # ------------------------------------------------------------------------------------------------- fork
    def forked(self) -> None:
        """In a child process: whatever is live belongs to the one thread that has gone on."""
        self._replays.forget_other_threads()
        for session in self.sessions:
            session.thread = threading.get_ident()
            session.thread_name = threading.current_thread().name


def _find(segments: tuple[Segment, ...], edit: Edit, session: Session) -> tuple[int, int]:
    """The topmost (segment, layer) that this session holds of this edit; (-1, -1) for none."""
    for i in range(len(segments) - 1, -1, -1):
        for j, layer in enumerate(segments[i].layers):
            if session in layer.holders and layer.is_same_edit(edit):
                return i, j
    return -1, -1


def _shows(segment: Segment, sessions: frozenset[int]) -> bool:
    return segment.replay is not None or any(id(h) in sessions for layer in segment.layers for h in layer.holders)


LIVE = LiveStack()
os.register_at_fork(before=LIVE.lock.acquire, after_in_parent=LIVE.lock.release, after_in_child=LIVE.lock.release)
os.register_at_fork(after_in_child=LIVE.forked)
