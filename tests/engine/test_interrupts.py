"""Ctrl-C at any line of the engine while a scope is entered or left: afterwards, nothing is left behind.

A tracer raises KeyboardInterrupt at the n-th line that runs in `scoped_patch/engine`, for every n.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import scoped_patch.engine as engine
from scoped_patch.engine import LIVE, MISSING, Edit, EditPatch, ItemSlot, Scope, active, assert_clean

from .world import World, make_world

ENGINE = str(Path(engine.__file__).parent)


class Interrupter:
    """Counts the lines that run in the engine, and raises KeyboardInterrupt before those named."""

    def __init__(self, *at: int) -> None:
        self.at = at
        self.lines = 0
        self.where: list[str] = []
        self.active = False

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        self.active = True
        self.arm()
        return self

    def arm(self) -> None:
        """Python takes a tracer off once it has raised: on again, in all frames that run."""
        if not self.active or 0 < len(self.at) == len(self.where):
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(ENGINE):
                frame.f_trace = self._line
            frame = frame.f_back
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        self.active = False
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(ENGINE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines in self.at:
                self.where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
                raise KeyboardInterrupt
        return self._line


class Arming(dict[str, Any]):
    """A mapping whose every use arms the interrupter again, for the interrupts after the first."""

    interrupter: Interrupter | None = None

    def __contains__(self, key: object) -> bool:
        if self.interrupter is not None:
            self.interrupter.arm()
        return super().__contains__(key)


class Made:
    def __init__(self, prior: Any) -> None:
        self.prior = prior


LABELS = ("child.inherited", "child.value", "child.stored", "ordered[b]")


def make_scope(world: World) -> Scope[Any]:
    edits = [Edit(world.slots[label], Made) for label in LABELS]
    for i, key in enumerate("ab"):
        edits.insert(4 * i, Edit(ItemSlot(world.arming, key), Made))
    edits.append(Edit(world.slots["plain[b]"], lambda prior: MISSING, "replace"))
    return Scope(world, (EditPatch("made", lambda target: edits),))


def check(world: World, before: dict[str, Any], where: list[str]) -> None:
    world.arming.interrupter = None
    # A tracer also raises just before a with-statement releases its lock, where Python never lets a signal in.
    while LIVE.lock._is_owned():  # type: ignore[attr-defined]
        LIVE.lock.release()
    for session in reversed(active()):
        session.restore()
    assert world.picture() == before, f"interrupted at {where}"
    assert_clean()
    assert not LIVE.states, f"interrupted at {where}"
    assert not LIVE.sessions
    assert not LIVE._guarded, f"interrupted at {where}"
    assert not LIVE._replays.frames, f"interrupted at {where}"


@pytest.fixture(autouse=True)
def _guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIVE, "guards_owner", lambda owner: type(owner).__name__ == "Child")


def enter_only(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    with interrupter:
        scope.__enter__()
    scope.__exit__(None, None, None)


def exit_only(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    scope.__enter__()
    with interrupter:
        scope.__exit__(None, None, None)


def with_block(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    with interrupter, scope:
        pass


def body_raises(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    with interrupter:
        try:
            with scope:
                raise ValueError("the body's own")
        except ValueError:
            pass


def nested(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    other = make_scope(world)
    other.patches = (EditPatch("wraps", lambda t: [Edit(world.slots[label], Made, rank=30) for label in LABELS]),)
    with scope, interrupter, other:
        pass


def out_of_order(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    other = make_scope(world)
    other.patches = (
        EditPatch("wraps", lambda t: [Edit(world.slots[label], Made, rank=60, commutes=True) for label in LABELS]),
    )
    outer, inner = scope.apply(), other.apply()
    with interrupter:
        with contextlib.suppress(Exception):
            outer.restore()
        inner.restore()


def foreign(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    """Somebody stored our value under another name (accelerate's hooks do), and put his own in its place."""
    before = world.child.value
    session = scope.apply()
    world.child._old_value, world.child.value = world.child.value, object()
    try:
        with interrupter:
            session.restore()
    finally:
        for left in active():
            left.restore()
        assert world.child._old_value is before
        world.child.value = before
        del world.child._old_value


def replay_live(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    with scope as session, interrupter, session.replay():
        pass


def replay_after(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    with scope as session:
        pass
    with interrupter, session.replay():
        pass


def replay_with_scope_inside(world: World, scope: Scope[Any], interrupter: Interrupter) -> None:
    other = make_scope(world)
    other.patches = (EditPatch("wraps", lambda t: [Edit(world.slots[label], Made, rank=30) for label in LABELS]),)
    with scope as session:
        pass
    with session.replay(), interrupter, other:
        pass


EVERY_LINE = [enter_only, exit_only, out_of_order, foreign, replay_after]
SITUATIONS = [*EVERY_LINE, with_block, body_raises, nested, replay_live, replay_with_scope_inside]


def run(situation: Callable[..., None], *at: int) -> Interrupter:
    world = make_world()
    world.arming = Arming(a=object(), b=object(), c=object())
    world.mappings["arming"] = world.arming
    before = world.picture()
    scope = make_scope(world)
    interrupter = Interrupter(*at)
    world.arming.interrupter = interrupter if len(at) > 1 else None
    try:
        situation(world, scope, interrupter)
    except KeyboardInterrupt:
        assert interrupter.where
    check(world, before, interrupter.where)
    return interrupter


@pytest.mark.parametrize("situation", SITUATIONS)
def test_an_interrupt_at_any_line(situation: Callable[..., None]) -> None:
    lines = run(situation).lines
    assert lines > 50
    step = 1 if situation in EVERY_LINE else 5  # the others run the same lines in another setting
    for n in range(1, lines + 1, step):
        assert run(situation, n).where


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_second_interrupt_while_the_first_is_undone(situation: Callable[..., None]) -> None:
    lines = run(situation).lines
    for first in range(1, lines + 1, 17):
        for second in range(first + 1, first + 200, 37):
            run(situation, first, second)
