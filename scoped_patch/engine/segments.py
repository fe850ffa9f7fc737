"""What is live on one place: segments of layers, and the one way in which they change.

A segment has a base (the raw value found when it began) and the layers built on it, sorted by rank. A new segment begins
when the value found is not the one we wrote: somebody else's change, which is built upon and never lost. A replay is a
segment of its own on top of all, which always has a segment below it to go back to. The value of a place is always the
top of its last segment, recomputed from the base upward, so scopes can come and go in any order and the last one out
leaves the first base.

Every change is noted before it is made and is one assignment afterwards, so an exception between any two lines (Ctrl-C
included) leaves something that `settle()` can finish.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final, Protocol

from .edits import Edit
from .errors import RestoreError
from .slots import MISSING, DescriptorSlot, ItemSlot, Slot, same

if TYPE_CHECKING:
    from .replay import Snapshot


_AS_GIVEN: Final = object()


class Holder(Protocol):
    """Who holds a layer: a session, or the snapshot of one that is being replayed."""

    location: str
    serial: int
    thread: int
    thread_name: str


class Layer:
    """One live edit and who holds it (several sessions share an equal edit). Never changed once made."""

    __slots__ = ("edit", "holders", "patch")

    def __init__(self, edit: Edit, patch: str, holders: tuple[Holder, ...]) -> None:
        self.edit = edit
        self.patch = patch
        self.holders = holders

    def held_by(self, holders: tuple[Holder, ...]) -> Layer:
        return Layer(self.edit, self.patch, holders)

    def is_same_edit(self, edit: Edit) -> bool:
        mine = self.edit
        return mine is edit or (edit.token is not None and mine.token == edit.token)


class Segment:
    """A base and the layers built on it. Never changed once made.

    Attributes:
        values: `values[i]` is the raw value after `layers[i]`.
        top: the last of them, or the base.
        replay: the snapshot that this segment puts on, or None.
    """

    __slots__ = ("base", "layers", "replay", "top", "values")

    def __init__(
        self, base: Any, layers: tuple[Layer, ...] = (), values: tuple[Any, ...] = (), replay: Snapshot | None = None
    ) -> None:
        self.base = base
        self.layers = layers
        self.values = values
        self.replay = replay
        self.top = values[-1] if values else base


def compose(base: Any, layers: tuple[Layer, ...], values: tuple[Any, ...], replay: Snapshot | None = None) -> Segment:
    """A segment of these layers; the values given are those of the first ones, the rest is built."""
    made = list(values)
    raw = made[-1] if made else base
    for layer in layers[len(made) :]:
        edit = layer.edit
        raw = edit.build(edit.slot.value_of(raw))
        made.append(raw)
    return Segment(base, layers, tuple(made), replay)


def insert(segment: Segment, layer: Layer) -> Segment:
    """The segment with one more layer, at the height that its rank says."""
    order = layer.edit.order
    at = len(segment.layers)
    while at and order < segment.layers[at - 1].edit.order:
        at -= 1
    layers = (*segment.layers[:at], layer, *segment.layers[at:])
    return compose(segment.base, layers, segment.values[:at], segment.replay)


class SlotState:
    """Everything live on one place."""

    __slots__ = ("_goal", "_mend", "_order", "_seen", "segments", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.segments: tuple[Segment, ...] = ()
        #: what a move under way will come to: the segments, the raw value it writes, the one it found
        self._goal: tuple[tuple[Segment, ...], Any, Any] | None = None
        #: other keys that hold our value and what to put there, then the segments
        self._mend: tuple[tuple[tuple[Hashable, Any], ...], tuple[Segment, ...]] | None = None
        #: the keys in front of this one when an edit deleted it
        self._order: frozenset[Hashable] | None = None
        #: how the place hands out what was last written, where that is not what was given
        self._seen: Any = _AS_GIVEN

    @property
    def unpatched(self) -> Any:
        """What the place would read without any of our edits: somebody else's change, where there is one."""
        return next((segment.base for segment in reversed(self.segments) if segment.replay is None), MISSING)

    def base_of(self, raw: Any) -> Any:
        """What lies under the live edits that made this value; the value itself where none of them did."""
        made = (segment.base for segment in self.segments for value in segment.values if same(raw, value))
        return next((self.slot.value_of(base) for base in made), raw)

    @property
    def busy(self) -> bool:
        """Is anything live here, or half way?"""
        return bool(self.segments) or self._goal is not None or self._mend is not None

    def is_ours(self, raw: Any) -> bool:
        """Is `raw`, as read just now, what the last segment put there?"""
        top = self.segments[-1].top
        if raw is top or self.slot.agrees(raw, top):
            return True
        return self._seen is not _AS_GIVEN and self.slot.agrees(raw, self._seen)

    def move(self, segments: tuple[Segment, ...], raw: Any, found: Any) -> Any:
        """Write `raw` over `found`, and with it make `segments` true.

        Returns:
            What the place reads now.

        Raises:
            RestoreError: the place does not read what was written.
        """
        slot = self.slot
        self._goal = (segments, raw, found)
        self._seen = _AS_GIVEN
        if raw is MISSING and segments and found is not MISSING and self._order is None and isinstance(slot, ItemSlot):
            self._order = slot.keys_before()
        slot.write(raw)
        seen = slot.read()
        if seen is not raw and not slot.agrees(seen, raw):
            self._seen = seen
            if not isinstance(slot, DescriptorSlot) or seen is MISSING or raw is MISSING:
                raise RestoreError(f"{slot.label} was set to {raw!r} but reads {seen!r}")
        if self._order is not None or not segments:
            self._tidy(segments, raw)
        self.segments = segments
        self._goal = None
        return seen

    def _tidy(self, segments: tuple[Segment, ...], raw: Any) -> None:
        if self._order is not None and raw is not MISSING and isinstance(self.slot, ItemSlot):
            self.slot.move_behind(self._order)
        if not segments:
            self.slot.forget()

    def mend(self, segments: tuple[Segment, ...], entries: tuple[tuple[Hashable, Any], ...]) -> None:
        """Put values under other keys of the same mapping, and with it make `segments` true."""
        self._mend = (entries, segments)
        self.settle()

    def settle(self) -> None:
        """Finish what an interrupt cut short. A move happened when the place no longer reads what it found."""
        if self._mend is not None:
            entries, segments = self._mend
            mapping = self.slot.mapping
            for key, value in entries:
                mapping[key] = value  # type: ignore[index]
            self.segments = segments
            self._mend = None
        if self._goal is not None:
            segments, raw, found = self._goal
            now = self.slot.read()
            written = self.slot.agrees(now, raw)
            if written or not self.slot.agrees(now, found):
                # Neither the one nor the other: the place made something else of what we wrote. It is ours all the same.
                self._seen = _AS_GIVEN if written else now
                self._tidy(segments, raw)
                self.segments = segments
            self._goal = None
