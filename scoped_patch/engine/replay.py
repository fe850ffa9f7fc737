"""Replays: values of an earlier moment, put on again for the length of a call.

A replay is one more segment on top of each of its places. Scopes may be entered inside it and build on what it shows;
scopes below it may be left meanwhile; ending it goes back to whatever is below by then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import ConflictError, join_errors
from .segments import Holder, Layer, Segment, SlotState, compose, insert
from .slots import Slot

if TYPE_CHECKING:
    from .live import LiveStack

logger = logging.getLogger("scoped_patch")


class Snapshot:
    """The values of some places at one moment, to be put on again for the length of a call.

    Attributes:
        version: the live stack's version at that moment.
        places: each slot with the segment that was its top.
        location, thread, thread_name: of the moment, for messages.
        root: whose moment it is. What sessions of this root have patched elsewhere since is hidden by a replay.
    """

    __slots__ = ("__weakref__", "_prepared", "location", "places", "root", "thread", "thread_name", "version")

    serial = -1  # holds its layers from before every session that is entered inside its replay

    def __init__(
        self, version: int, places: tuple[tuple[Slot, Segment], ...], location: str, root: object | None = None
    ) -> None:
        self.version = version
        self.places = places
        self.location = location
        self.root = root
        self.thread = threading.get_ident()
        self.thread_name = threading.current_thread().name
        self._prepared: tuple[tuple[Slot, Segment], ...] | None = None

    def prepared(self) -> tuple[tuple[Slot, Segment], ...]:
        """The segments to put on: the same layers, held by this snapshot and by no session. Made once."""
        if self._prepared is None:
            held = (self,)
            self._prepared = tuple(
                (slot, Segment(seg.base, tuple(layer.held_by(held) for layer in seg.layers), seg.values, self))
                for slot, seg in self.places
            )
        return self._prepared

    def hidden(self, live: LiveStack) -> list[tuple[Slot, Segment]]:
        """What sessions of the root have patched where they had not at the moment, as it reads without them."""
        if self.root is None:
            return []
        shown = {slot.place for slot, _ in self.places}
        hidden = []
        for place, state in live.states.items():
            if place in shown or not state.segments:
                continue
            top = state.segments[-1]
            kept = tuple(layer for layer in top.layers if any(_root_of(holder) is not self.root for holder in layer.holders))
            if len(kept) < len(top.layers):
                hidden.append((state.slot, Segment(compose(top.base, kept, ()).top, replay=self)))
        return hidden

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"<Snapshot of {len(self.places)} places, {self.location}>"


class Frame:
    """One snapshot that is being replayed, by one or more threads at once."""

    __slots__ = ("on", "snapshot", "users", "values", "version_before", "version_on")

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.values: list[tuple[Slot, Segment]] = []
        self.users: dict[object, int] = {}  # one entry per block, with its thread
        self.on = False
        self.version_before = self.version_on = -1

    def is_intact(self, live: LiveStack) -> bool:
        """Has nothing been entered, left or replayed since?"""
        return live.version == (self.version_on if self.on else self.snapshot.version)

    def put_on(self, live: LiveStack) -> None:
        """Put the values on, unless that was done. Undone by `take_off`, however far it came."""
        if self.on:
            return
        self.values = [*self.snapshot.prepared(), *self.snapshot.hidden(live)]
        self.version_before = live.version
        self.on = True
        for slot, segment in self.values:
            state = live.state_for(slot)
            state.settle()
            raw = state.slot.read()
            below = state.segments
            if not below or not state.is_ours(raw):
                below = (*below, Segment(raw))
            state.move((*below, segment), segment.top, raw)
        self.version_on = live.changed()

    def take_off(self, live: LiveStack) -> Exception | None:
        """Go back to what is below, as it is now. May be called again. Returns what could not be put back, and why."""
        if not self.on:
            return None
        errors: list[Exception] = []
        for slot, _ in reversed(self.values):
            state = live.states.get(slot.place)
            if state is not None:
                try:
                    state.settle()
                    self._take_off_place(state)
                    live.drop_if_empty(state)
                except Exception as error:
                    errors.append(error)
        if live.version == self.version_on:
            live.version = self.version_before  # all is as it was, so snapshots of then are of now
        else:
            live.changed()
        self.on = False
        return join_errors(f"ending {self.snapshot.location}", errors)

    def _take_off_place(self, state: SlotState) -> None:
        segments = state.segments
        k = len(segments) - 1  # from the top: a replay inside another one ends before it
        while k >= 0 and segments[k].replay is not self.snapshot:
            k -= 1
        if k < 0:
            return
        below = segments[k - 1]
        for layer in segments[k].layers:
            # A scope entered inside the replay and still live: it moves down to what is real again.
            rest = tuple(holder for holder in layer.holders if holder is not self.snapshot)
            if rest:
                below = _join(below, layer.held_by(rest))
        real = (*segments[: k - 1], below) if below.layers or below.replay is not None else segments[: k - 1]
        if k < len(segments) - 1:
            state.segments = (*real, *segments[k + 1 :])
            return
        raw = state.slot.read()
        if state.is_ours(raw):
            state.move(real, below.top, raw)
        else:
            logger.warning("%s was changed by somebody else during a replay, and was left as it is", state.slot.label)
            state.segments = real


def _root_of(holder: Holder) -> object:
    return getattr(holder, "root", None)


def _join(segment: Segment, layer: Layer) -> Segment:
    for i, other in enumerate(segment.layers):
        if other.is_same_edit(layer.edit):
            joined = other.held_by((*other.holders, *layer.holders))
            layers = (*segment.layers[:i], joined, *segment.layers[i + 1 :])
            return Segment(segment.base, layers, segment.values, segment.replay)
    return insert(segment, layer)


class Replays:
    """The frames of all threads, and the rule of who waits for whom."""

    def __init__(self, live: LiveStack) -> None:
        self._live = live
        self._idle = threading.Condition(live.lock)
        self._waiting: set[int] = set()
        self.frames: list[Frame] = []

    def begin(self, snapshot: Snapshot, block: object) -> None:
        """Start a block: joins the frame of the same snapshot, waits for other threads' other ones.

        Nothing is written while the live stack is what the snapshot was taken of.
        """
        me = threading.get_ident()
        frames = self.frames

        def shows_it(frame: Frame) -> bool:
            return frame is frames[-1] and frame.snapshot is snapshot and frame.is_intact(self._live)

        with self._live.lock:
            self._wait(lambda frame: _used_by_others(frame, me) and not shows_it(frame))
            if not frames or not shows_it(frames[-1]):
                frames.append(Frame(snapshot))
            frame = frames[-1]
            frame.users[block] = me
            if snapshot.version != self._live.version:
                self._put_all_on()

    def end(self, snapshot: Snapshot, block: object) -> None:
        """End a block; may be called again. The last block of a frame takes it off."""
        with self._live.lock:
            for frame in reversed(self.frames):
                known = frame.users.pop(block, None) is not None
                if frame.snapshot is snapshot and not frame.users:
                    problem = frame.take_off(self._live)  # an interrupt here leaves the frame for another try
                    self.frames.remove(frame)
                    self._wake()
                    if problem is not None:
                        raise problem
                if known:
                    self._wake()
                    return

    def before_change(self) -> None:
        """Called with the lock held, before a scope is entered or left: waits until no other thread is in a replay.

        A replay of this thread goes on, from now on independent of what is live below it.
        """
        if not self.frames:
            return
        me = threading.get_ident()
        self._wait(lambda frame: _used_by_others(frame, me))
        self._put_all_on()

    def _put_all_on(self) -> None:
        for frame in self.frames:  # outermost first, since later ones lie on top
            frame.put_on(self._live)

    def _wait(self, blocks: Callable[[Frame], bool]) -> None:
        me = threading.get_ident()
        while blocking := [frame for frame in self.frames if blocks(frame)]:
            others = {thread for frame in blocking for thread in frame.users.values()} - {me}
            if others <= self._waiting:
                raise ConflictError(
                    "threads that replay scopes wait for each other: each is inside a replay and wants to enter, leave or "
                    "replay another scope. Patches are facts of the whole process: run one of them after the other"
                )
            self._waiting.add(me)
            try:
                self._idle.wait()
            finally:
                self._waiting.discard(me)

    def _wake(self) -> None:
        self._waiting.clear()  # each looks again, and says so again if it has to wait on
        self._idle.notify_all()

    def forget_other_threads(self) -> None:
        """In a forked child: only the thread that forked has gone on."""
        me = threading.get_ident()
        self._waiting.clear()
        for frame in list(self.frames):
            for block, thread in list(frame.users.items()):
                if thread != me:
                    self.end(frame.snapshot, block)


def _used_by_others(frame: Frame, me: int) -> bool:
    return any(thread != me for thread in frame.users.values())
