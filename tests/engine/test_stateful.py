"""Random programs over every kind of place, held against a second account of what each place should read.

When everything is closed, every owner is what it was: entries by identity, key order, MRO; except for what somebody else
wrote meanwhile, which is where the second account says it is.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scoped_patch.engine import LIVE, MISSING, Edit, EditPatch, Scope, Session, assert_clean
from scoped_patch.engine.errors import ConflictError, ForeignOverwriteError, OutOfOrderExit, PatchErrorGroup

from .oracle import Hold, Made, Place
from .world import make_world

LABELS = tuple(make_world().slots)


class Boom(Exception):
    pass


class Spec:
    """One edit as the program sees it."""

    def __init__(self, name: str, label: str, edit: Edit) -> None:
        self.name, self.label, self.edit = name, label, edit


class Program(RuleBasedStateMachine):
    @initialize(mode=st.sampled_from(["error", "keep", "restore"]))
    def start(self, mode: Any) -> None:
        for left in (LIVE.states, LIVE.sessions, LIVE._guarded, LIVE._replays.frames):
            left.clear()  # of a program that failed: each starts with a world of its own
        self.mode = mode
        self.world = make_world()
        self.before = self.world.picture()
        self.strangers = self.world.make_slots()  # somebody else does not use our slots
        self.places = {label: Place(raw) for label, raw in self.world.values().items()}
        self.origin = self.world.values()
        self.scopes: list[tuple[Scope[Session], list[Spec]]] = []
        self.live: list[tuple[Session, list[Spec]]] = []
        self.closed: list[tuple[Session, dict[str, Any]]] = []
        self.replays: list[tuple[Any, Any, dict[str, Any], bool]] = []
        self.touched: set[str] = set()  # mappings that somebody else wrote to: their key order is his affair
        self.deleting: set[str] = set()
        self.count = 0

    # ------------------------------------------------------------------------------------------------- what to enter
    def _scope(self, draw: list[tuple[str, str, int, bool]], boom: bool = False) -> tuple[Scope[Session], list[Spec]]:
        specs, replaced = [], set()
        for label, kind, rank, commutes in draw:
            if kind != "wrap" and label in replaced:
                continue
            if kind == "delete" and label == "child.stored":
                kind = "replace"  # a property without a deleter
            replaced.add(label) if kind != "wrap" else None
            self.count += 1
            name = f"e{self.count}"

            def make(prior: Any, name: str = name, kind: str = kind, label: str = label) -> Any:
                if kind == "delete":
                    return MISSING
                return Made(name, label, prior if kind == "wrap" else MISSING)

            action: Any = "wrap" if kind == "wrap" else "replace"
            if kind == "delete":
                name = ""
                if not self.world.storage_of(label):
                    self.deleting.add(label.partition(".")[0])  # what a class lost comes back at its end
            edit = Edit(self.world.slots[label], make, action, rank=rank, commutes=commutes)
            specs.append(Spec(name or f"delete{self.count}", label, edit))
        edits = [spec.edit for spec in specs]
        if boom:

            def explode(prior: Any) -> Any:
                raise Boom

            edits.append(Edit(self.world.slots[draw[-1][0]], explode, rank=99))
        scope: Scope[Session] = Scope(None, (EditPatch("program", lambda target: edits),), on_foreign=self.mode)
        return scope, sorted(specs, key=lambda spec: spec.edit.order)

    edits = st.lists(
        st.tuples(
            st.sampled_from(LABELS),
            st.sampled_from(["wrap", "wrap", "wrap", "replace", "delete"]),
            st.sampled_from([10, 20, 50]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )

    def _conflicts(self, specs: list[Spec]) -> bool:
        for spec in specs:
            place = self.places[spec.label]
            on_top = place.foreign is Place.NOTHING
            top = place.parts[-1].holds if place.parts and on_top else []
            for hold in place.visible():
                if hold.name == spec.name:
                    if hold not in top:
                        return True
                    break
                if spec.edit.action == "replace" and not (spec.edit.commutes and hold.commutes):
                    return True
        return False

    def _enter(self, scope: Scope[Session], specs: list[Spec]) -> None:
        self._materialise()
        if self._conflicts(specs):
            with pytest.raises(ConflictError):
                scope.apply()
            return
        session = scope.apply()
        for spec in specs:
            self.places[spec.label].enter(spec.name, spec.edit.order, spec.edit.commutes, session)
        self.live.append((session, specs))

    @rule(draw=edits)
    def enter(self, draw: Any) -> None:
        scope, specs = self._scope(draw)
        self.scopes.append((scope, specs))
        self._enter(scope, specs)

    @precondition(lambda self: self.scopes)
    @rule(data=st.data())
    def enter_again(self, data: Any) -> None:
        self._enter(*data.draw(st.sampled_from(self.scopes)))

    @rule(draw=edits)
    def fail_half_way(self, draw: Any) -> None:
        scope, specs = self._scope(draw, boom=True)
        self._materialise()
        expected = ConflictError if self._conflicts(specs) else Boom
        with pytest.raises((expected, ConflictError)):
            scope.apply()

    @rule(draw=edits, fail=st.booleans())
    def decorated_call(self, draw: Any, fail: bool) -> None:
        scope, specs = self._scope(draw)
        self._materialise()
        conflict = self._conflicts(specs)

        @scope
        def body() -> str:
            self._enter_account(specs, "body")
            self.values_are_as_accounted_for()
            self._leave_account(specs, "body", self.mode)
            if fail:
                raise Boom
            return "ran"

        if conflict or fail:
            with pytest.raises(ConflictError if conflict else Boom):
                body()
        else:
            assert body() == "ran"

    def _enter_account(self, specs: list[Spec], session: Any) -> None:
        for spec in specs:
            self.places[spec.label].enter(spec.name, spec.edit.order, spec.edit.commutes, session)

    def _leave_account(self, specs: list[Spec], session: Any, mode: str) -> set[str]:
        serial = session.serial if isinstance(session, Session) else 10**9

        def later(hold: Hold) -> bool:
            return min(getattr(holder, "serial", -1) for holder in hold.holders) > serial

        due: set[str] = set()
        for spec in reversed(specs):
            due |= self.places[spec.label].leave(spec.name, session, mode, later)
        return due

    # ------------------------------------------------------------------------------------------------- leaving
    def _leave(self, at: int, raising: bool) -> None:
        self._materialise()
        session, specs = self.live.pop(at)
        frozen = {spec.label: self.places[spec.label].frozen(session) for spec in specs}
        due = self._leave_account(specs, session, self.mode)
        body = Boom() if raising else None
        allowed = {"foreign": ForeignOverwriteError, "order": OutOfOrderExit}
        if due and not raising:
            with pytest.raises((*(allowed[one] for one in due), PatchErrorGroup)):
                session.restore()
        else:
            session.leave(body)  # the body's own exception passes: nothing is raised here
            assert (session.exit_error is not None) == (raising and bool(due))
        assert session.state == "closed"
        session.restore()
        self.closed.append((session, {label: part for label, part in frozen.items() if part is not None}))

    @precondition(lambda self: self.live)
    @rule(raising=st.booleans())
    def leave_last(self, raising: bool) -> None:
        self._leave(-1, raising)

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data(), raising=st.booleans())
    def leave_any(self, data: Any, raising: bool) -> None:
        self._leave(data.draw(st.integers(0, len(self.live) - 1)), raising)

    # ------------------------------------------------------------------------------------------------- somebody else
    @rule(label=st.sampled_from(LABELS), what=st.sampled_from(["new", "origin", "delete"]))
    def foreign_write(self, label: str, what: str) -> None:
        slot = self.strangers[label]
        if label == "child.stored" and what != "new":
            return  # a property without a deleter, and whose value has an entry of its own once it is set
        value = {"new": object(), "origin": self.origin[label], "delete": MISSING}[what]
        self.touched.add(self.world.storage_of(label) or label.partition(".")[0])
        slot.write(value)
        self.places[label].write(value)

    # ------------------------------------------------------------------------------------------------- replay
    def _materialise(self) -> None:
        """Entering and leaving inside a replay makes it independent of what is live."""
        for i, (context, replay, frozen, on) in enumerate(self.replays):
            if not on:
                for label, part in frozen.items():
                    self.places[label].start_replay(part, replay)
                self.replays[i] = (context, replay, frozen, True)

    def _replay(self, session: Session, frozen: dict[str, Any]) -> None:
        if len(self.replays) >= 3:
            return
        frames = len(LIVE._replays.frames)
        context = session.replay()
        context.__enter__()
        if len(LIVE._replays.frames) == frames:  # the same snapshot shows already
            self.replays.append((context, object(), {}, True))
            return
        self.replays.append((context, object(), frozen, False))
        if LIVE._replays.frames[-1].on:
            self._materialise()

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def replay_closed(self, data: Any) -> None:
        session, frozen = data.draw(st.sampled_from(self.closed))
        self._replay(session, frozen)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def replay_live(self, data: Any) -> None:
        session, specs = data.draw(st.sampled_from(self.live))
        parts = {spec.label: self.places[spec.label].frozen(session) for spec in specs}
        self._replay(session, {label: part for label, part in parts.items() if part is not None})

    @precondition(lambda self: self.replays)
    @rule()
    def end_replay(self) -> None:
        context, replay, frozen, on = self.replays.pop()
        context.__exit__(None, None, None)
        if on:
            for label in frozen:
                self.places[label].end_replay(replay)

    # ------------------------------------------------------------------------------------------------- the proof
    @invariant()
    def values_are_as_accounted_for(self) -> None:
        for label, place in self.places.items():
            found, (base, edits) = self.world.slots[label].read(), place.value()
            if not edits:
                assert found is base, f"{label}: {found!r} is not {base!r}"
                continue
            assert isinstance(found, Made), f"{label}: {found!r} should be {edits}"
            bottom, chain = found.chain()
            assert chain == edits, f"{label}: {chain} should be {edits}"
            if base is not MISSING:
                assert bottom is base, f"{label}: built on {bottom!r}, not on {base!r}"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        while self.replays:
            self.end_replay()
        while self.live:
            self._leave(-1, raising=False)
        self.values_are_as_accounted_for()
        assert_clean()
        assert not LIVE.states
        assert not LIVE.sessions
        assert not LIVE._replays.frames
        self._compare()

    def _compare(self) -> None:
        changed = {label for label, place in self.places.items() if place.raw is not self.origin[label]}
        after = self.world.picture()
        for what, then in self.before.items():
            now = after[what]
            name = what.removesuffix("{}")
            if name in changed or any(
                label.startswith(f"{name}.") or self.world.storage_of(label) == name for label in changed
            ):
                continue  # somebody else changed it last; the values were compared above
            if name in self.touched or name in self.deleting:
                now, then = sorted(now, key=repr), sorted(then, key=repr)
            assert now == then, f"{what} is not what it was"


Program.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
test_random_programs = Program.TestCase
