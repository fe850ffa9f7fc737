"""A second, slow and simple account of what every place should read, to hold the engine against.

It keeps no values, only names: a place is a list of segments, each a base and the edits above it. What the engine makes
of an edit is a `Made`, which knows its edit and what it was made from, so the two can be compared without sharing code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scoped_patch.engine import MISSING


class Made:
    """The value that a test edit makes."""

    def __init__(self, edit: str, place: str, prior: Any) -> None:
        self.edit = edit
        self.place = place
        self.prior = prior

    def chain(self) -> tuple[Any, tuple[str, ...]]:
        """What is at the bottom, and the edits above it from the inside out."""
        bottom, edits = self.prior, (self.edit,)
        if isinstance(bottom, Made) and bottom.place == self.place:  # else: inherited from a class that is patched too
            bottom, below = bottom.chain()
            edits = (*below, *edits)
        return bottom, edits

    def __repr__(self) -> str:
        return f"<Made {self.edit}>"


class Hold:
    """An edit on one place with everybody who holds it; `"replay"` among them stands for a replay."""

    def __init__(self, name: str, order: tuple[bool, int], commutes: bool, holders: list[Any]) -> None:
        self.name, self.order, self.commutes, self.holders = name, order, commutes, holders

    def copy(self, holders: list[Any]) -> Hold:
        return Hold(self.name, self.order, self.commutes, holders)


class Part:
    def __init__(self, base: Any, holds: list[Hold], replay: Any = None) -> None:
        self.base, self.holds, self.replay = base, holds, replay

    def put(self, hold: Hold) -> None:
        at = len(self.holds)
        while at and hold.order < self.holds[at - 1].order:
            at -= 1
        self.holds.insert(at, hold)

    def value(self) -> tuple[Any, tuple[str, ...]]:
        """The base (MISSING where a replace made it irrelevant, or nothing is left) and the edits that show."""
        names = [hold.name for hold in self.holds]
        base, below = self.base if isinstance(self.base, tuple) else (self.base, ())
        first = max((i for i, hold in enumerate(self.holds) if not hold.order[0]), default=-1)
        if first >= 0:
            base, below, names = MISSING, (), names[first:]
        if names and names[0].startswith("delete"):
            names = names[1:]
        return base, (*below, *names)


class Place:
    """One place. `raw` is what it holds while no part is on it; `foreign` what somebody wrote over the top part."""

    NOTHING = object()

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.parts: list[Part] = []
        self.foreign: Any = Place.NOTHING

    def value(self) -> tuple[Any, tuple[str, ...]]:
        if self.foreign is not Place.NOTHING:
            return self.foreign, ()
        return self.parts[-1].value() if self.parts else (self.raw, ())

    def write(self, value: Any) -> None:
        if not self.parts:
            self.raw = value
        else:
            self.foreign = value if self.parts[-1].value() != (value, ()) else Place.NOTHING

    def _absorb(self) -> None:
        if self.foreign is not Place.NOTHING:
            self.parts.append(Part(self.foreign, []))
            self.foreign = Place.NOTHING
        elif not self.parts:
            self.parts.append(Part(self.raw, []))

    def visible(self) -> list[Hold]:
        """The edits a newcomer meets: those from the last replay upward."""
        first = max((i for i, part in enumerate(self.parts) if part.replay is not None), default=0)
        return [hold for part in self.parts[first:] for hold in part.holds]

    def enter(self, name: str, order: tuple[bool, int], commutes: bool, session: Any) -> None:
        on_top = self.foreign is Place.NOTHING
        for hold in self.parts[-1].holds if self.parts and on_top else ():
            if hold.name == name:
                if session not in hold.holders:
                    hold.holders.append(session)
                return
        self._absorb()
        self.parts[-1].put(Hold(name, order, commutes, [session]))

    def leave(self, name: str, session: Any, mode: str, later: Callable[[Hold], bool]) -> set[str]:
        """Take the edit off. Returns which errors are due."""
        for i in range(len(self.parts) - 1, -1, -1):
            part = self.parts[i]
            hold = next((one for one in part.holds if one.name == name and session in one.holders), None)
            if hold is None:
                continue
            hold.holders.remove(session)
            if hold.holders:
                return set()
            part.holds.remove(hold)
            due = {"order"} if any(later(one) and not (hold.commutes and one.commutes) for one in part.holds) else set()
            above = self.parts[i + 1] if i + 1 < len(self.parts) else None
            if above is None:
                due |= self._leave_top(part, mode)
            elif above.replay is None:
                if mode == "restore":
                    above.base = _as_base(part.value())
                    due = set()
                else:
                    due = {"foreign"} if mode == "error" else set()
                if not part.holds and part.replay is None:
                    self.parts.remove(part)
            return due
        return set()

    def _leave_top(self, part: Part, mode: str) -> set[str]:
        due: set[str] = set()
        if self.foreign is not Place.NOTHING:
            if part.value() == (self.foreign, ()) or mode == "restore":
                self.foreign = Place.NOTHING
            elif mode == "error":
                due = {"foreign"}
        if not part.holds and part.replay is None:
            self._drop_top(part)
        return due

    def _drop_top(self, part: Part) -> None:
        """The top part is empty: what shows now is its base, or what somebody wrote over it."""
        self.parts.pop()
        shows = part.base if self.foreign is Place.NOTHING else self.foreign
        self.foreign = Place.NOTHING
        if not self.parts:
            self.raw = shows
        elif self.parts[-1].value() != _flat(shows):
            self.foreign = shows

    # ------------------------------------------------------------------------------------------------- replay
    def frozen(self, session: Any) -> Part | None:
        for part in reversed(self.parts):
            if any(session in hold.holders for hold in part.holds):
                return Part(part.base, [hold.copy(["replay"]) for hold in part.holds])
        return None

    def start_replay(self, frozen: Part, replay: Any) -> None:
        self._absorb()
        self.parts.append(Part(frozen.base, [hold.copy([replay]) for hold in frozen.holds], replay))

    def end_replay(self, replay: Any) -> None:
        k = max((k for k, part in enumerate(self.parts) if part.replay is replay), default=-1)
        if k < 0:
            return
        part, below = self.parts[k], self.parts[k - 1]
        for hold in part.holds:
            rest = [holder for holder in hold.holders if holder is not replay]
            if rest:
                twin = next((one for one in below.holds if one.name == hold.name), None)
                if twin is not None:
                    twin.holders += rest
                else:
                    below.put(hold.copy(rest))
        top = k == len(self.parts) - 1
        del self.parts[k]
        if not below.holds and below.replay is None:
            if top:
                self._drop_top(below)
            else:
                self.parts.remove(below)


def _as_base(value: tuple[Any, tuple[str, ...]]) -> Any:
    """A part rebuilt on another's top has that as its base: with its edits, or the bare value."""
    return value[0] if not value[1] else value


def _flat(base: Any) -> tuple[Any, tuple[str, ...]]:
    return base if isinstance(base, tuple) else (base, ())
