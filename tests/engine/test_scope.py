"""Scopes and sessions: every form of entering, and what happens when blocks do not end as they should."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import pickle
import types
import weakref

import pytest

from scoped_patch.engine import LIVE, Edit, EditPatch, ItemSlot, Patch, Scope, active, assert_clean, wrap_call
from scoped_patch.engine.errors import (
    BadTargetError,
    LeakError,
    NotEnteredError,
    OutOfOrderExit,
    PatchErrorGroup,
    ScopeStateError,
)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert_clean()
    assert not LIVE.states


@pytest.fixture
def table():
    return {"x": "x"}


@pytest.fixture
def step(table):
    return adding(table, "p")


def adding(table, text, **options):
    edit = Edit(ItemSlot(table, "x"), lambda prior: f"{text}({prior})", **options)
    return Scope(table, (EditPatch(text, lambda _: [edit]),))


def line(offset):
    frame = inspect.currentframe().f_back
    return f"{__file__}:{frame.f_lineno + offset}"


# ----------------------------------------------------------------------------------------------------- forms
def test_every_form_says_where_it_was_entered(step):
    with step as session:
        assert session.location == line(-1)
    session = step.apply()
    assert session.location == line(-1)
    session.restore()
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(step)
        assert session.location == line(-1)
    seen = []
    function = step(lambda: seen.append(active()[0].location))
    function()
    assert seen == [line(-1)]

    @step
    async def later():
        seen.append(active()[0].location)

    async def caller():
        await later()
        assert seen[-1] == line(-1)
        task = asyncio.create_task(later())
        await task
        assert "asyncio" not in seen[-1]

    asyncio.run(caller())


def test_a_decorated_function_keeps_its_face_and_its_errors(step, table):
    @step
    def function(a, *, b=1):
        """Docs."""
        raise ZeroDivisionError(table["x"])

    assert function.__name__ == "function"
    assert inspect.signature(function) == inspect.signature(lambda a, *, b=1: None)
    with pytest.raises(ZeroDivisionError, match=r"p\(x\)"):
        function(1)
    with pytest.raises(TypeError, match="missing"):
        function()
    assert table["x"] == "x"


def test_async_functions_run_inside_to_their_end(step, table):
    @step
    async def function(a):
        await asyncio.sleep(0)
        return a + table["x"]

    @step
    async def fails():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    @step
    async def waits():
        await asyncio.sleep(60)

    async def cancelled():
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        assert table["x"] == "p(x)"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    class Callable:
        async def __call__(self):
            await asyncio.sleep(0)
            return table["x"]

    assert inspect.iscoroutinefunction(function)
    assert asyncio.run(function("a")) == "ap(x)"
    assert asyncio.run(step(Callable().__call__)()) == "p(x)"
    assert asyncio.run(step(functools.partial(function, "b"))()) == "bp(x)"
    with pytest.raises(TypeError, match="missing"):
        asyncio.run(function())  # a call that does not fit leaves nothing behind
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fails())
    asyncio.run(cancelled())
    assert table["x"] == "x"


def test_what_runs_after_the_call_has_returned_cannot_be_decorated(step):
    def generator():
        yield

    async def agenerator():
        yield

    class Generates:
        def __call__(self):
            yield

    for function in (generator, agenerator, Generates()):
        with pytest.raises(BadTargetError, match="is a generator"):
            step(function)
    for thing in (Generates, 3, classmethod(generator)):
        with pytest.raises(BadTargetError, match="decorates functions"):
            step(thing)


def test_a_scope_entered_by_hand_out_of_turn(step, table):
    with pytest.raises(ScopeStateError, match="not entered"):
        step.__exit__(None, None, None)
    session = step.apply()
    with pytest.raises(ScopeStateError, match="already live"):
        session.enter()
    with session:
        assert table["x"] == "p(x)"
    assert session.state == "closed"
    with pytest.raises(ScopeStateError, match="the block would run unpatched"), session:
        raise AssertionError("not reached")


def test_a_session_applied_for_good_outlives_its_handle(step, table):
    step.apply()
    gc.collect()
    assert table["x"] == "p(x)"
    with pytest.raises(LeakError, match=r"test_scope\.py"):
        assert_clean()
    (session,) = active()
    session.restore()


def test_a_closed_scope_keeps_nothing_alive():
    class Owner:
        def method(self):
            return 1

    owner = Owner()
    scope = Scope(owner, (wrap_call(owner, "method", lambda original: original()),))
    with scope:
        owner.method()
    gone = weakref.ref(owner)
    del owner, scope
    gc.collect()
    assert gone() is None


def test_an_owner_that_everybody_else_forgot_lives_until_the_scope_is_left():
    """So that its identity stays its own."""

    class Owner:
        def method(self):
            return 1

    owner = Owner()
    gone = weakref.ref(owner)
    session = Scope(None, (wrap_call(owner, "method", lambda original: original()),)).apply()
    del owner
    gc.collect()
    assert gone() is not None
    session.restore()


# ----------------------------------------------------------------------------------------------------- tasks, generators
def test_two_tasks_that_hold_one_scope_leave_their_own_session(step, table):
    async def hold(entered, leave):
        with step as session:
            entered.set()
            await leave.wait()
            assert table["x"] == "p(x)"
        assert session.state == "closed"

    async def main():
        events = [asyncio.Event() for _ in range(4)]
        one = asyncio.create_task(hold(events[0], events[1]))
        await events[0].wait()
        two = asyncio.create_task(hold(events[2], events[3]))
        await events[2].wait()
        events[1].set()  # the first one leaves first
        await one
        assert [session.state for session in active()] == ["live"]
        events[3].set()
        await two

    asyncio.run(main())
    assert table["x"] == "x"


def test_two_tasks_with_scopes_of_their_own_see_each_others_edits_and_are_told_when_they_cross(table):
    """Patches are facts of the process: documented in `scoped_patch.engine.scope`."""
    seen = {}

    async def hold(name, entered, leave):
        with adding(table, name):
            entered.set()
            await leave.wait()
            seen[name] = table["x"]

    async def main():
        events = [asyncio.Event() for _ in range(4)]
        one = asyncio.create_task(hold("a", events[0], events[1]))
        await events[0].wait()
        two = asyncio.create_task(hold("b", events[2], events[3]))
        await events[2].wait()
        events[1].set()
        with pytest.raises(OutOfOrderExit, match="entered later"):
            await one
        events[3].set()
        await two

    asyncio.run(main())
    assert seen == {"a": "b(a(x))", "b": "b(x)"}
    assert table["x"] == "x"


def test_a_block_that_moves_to_another_thread_is_left_there(step, table):
    import threading

    step.__enter__()
    worker = threading.Thread(target=step.__exit__, args=(None, None, None))
    worker.start()
    worker.join()
    assert table["x"] == "x"


def test_a_generator_holds_its_scope_until_it_goes_on_or_is_closed(step, table):
    def body():
        with step:
            yield table["x"]

    generator = body()
    assert next(generator) == "p(x)"
    assert table["x"] == "p(x)"
    generator.close()
    assert table["x"] == "x"
    generator = body()
    next(generator)
    del generator
    gc.collect()
    assert table["x"] == "x"


# ----------------------------------------------------------------------------------------------------- failures
class Auditing(Patch):
    name = "auditing"

    def __init__(self, table, error):
        self.table, self.error = table, error

    def plan(self, target):
        yield Edit(ItemSlot(self.table, "x"), lambda prior: "audited")

    def audit(self, session):
        assert self.table["x"] == "audited"  # before anything is put back
        if self.error is not None:
            raise self.error


def test_an_audit_speaks_when_the_block_ended_well_only(table):
    scope = Scope(None, (Auditing(table, ValueError("one")), Auditing(table, ValueError("two"))))
    with pytest.raises(PatchErrorGroup) as caught, scope:
        pass
    assert [str(error) for error in caught.value.exceptions] == ["one", "two"]
    assert table["x"] == "x"
    with pytest.raises(ZeroDivisionError), scope:
        raise ZeroDivisionError
    assert table["x"] == "x"


def test_an_interrupt_in_an_audit_still_leaves(table):
    with pytest.raises(KeyboardInterrupt), Scope(None, (Auditing(table, KeyboardInterrupt()),)):
        pass
    assert table["x"] == "x"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_bodys_exception_passes_whatever_the_exit_found(kind):
    class Stubborn(dict):
        broken = False

        def __setitem__(self, key, value):
            if self.broken:
                raise OSError("not ours")  # no error of this library
            super().__setitem__(key, value)

    table = Stubborn(x="x")
    scope = adding(table, "p")
    with pytest.raises(kind, match="the body's own") as caught, scope as session:  # noqa: PT012
        table.broken = True
        raise kind("the body's own")
    assert isinstance(session.exit_error, OSError)
    assert session.exit_error.__cause__ is caught.value
    assert "OSError: not ours" in caught.value.__notes__[0]
    table.broken = False
    session.restore()


def test_the_cause_of_a_failed_enter_carries_what_undoing_found():
    class Fragile(dict):
        writes = 0

        def __setitem__(self, key, value):
            self.writes += 1
            if self.writes == 2:
                raise OSError("cannot go back")
            super().__setitem__(key, value)

    table = Fragile(x="x")

    def fail(prior):
        raise ZeroDivisionError

    edits = [Edit(ItemSlot(table, "x"), lambda prior: "p"), Edit(ItemSlot(table, "y"), fail)]
    scope = Scope(None, (EditPatch("p", lambda _: edits),))
    with pytest.raises(ZeroDivisionError) as caught:
        scope.apply()
    assert caught.value.__notes__ == ["while undoing: OSError: cannot go back"]
    (session,) = active()
    session.restore()
    assert table == {"x": "x"}


def test_a_scope_may_be_kept_but_not_copied(step):
    with step as session, pytest.raises(ScopeStateError, match="cannot be pickled"):
        pickle.dumps(session)
    assert "p" in repr(step)
    assert "closed" in repr(session)


def test_a_subclass_checks_before_entering(table):
    class Checked(Scope):
        def check_enter(self, plan):
            raise ScopeStateError(f"{len(plan)} edits are too many")

    scope = Checked(table, adding(table, "p").patches)
    with pytest.raises(ScopeStateError, match="1 edits are too many"), scope:
        raise AssertionError("not reached")
    assert table["x"] == "x"


def test_an_interrupt_while_a_subclass_enters_leaves_nothing(table):
    class Interrupted(Scope):
        def apply(self):
            super().apply()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Interrupted(table, adding(table, "p").patches):
        raise AssertionError("not reached")
    assert table["x"] == "x"


def test_options_are_checked_at_once():
    from scoped_patch.engine.errors import BadOptionError

    with pytest.raises(BadOptionError, match="'error', 'keep' or 'restore', got 'ignore'"):
        Scope(None, (), on_foreign="ignore")
    with pytest.raises(BadTargetError, match=r"every patch must be a scoped_patch\.Patch, got 3"):
        Scope(None, (3,))


def test_records_say_what_was_done(table):
    thing = types.SimpleNamespace(call=lambda: 1)
    scope = Scope(thing, (wrap_call(thing, "call", lambda original: original(), reason="why"),))
    before = thing.call
    with scope as session:
        (record,) = session.records
        assert record.prior is before
        assert record.value is thing.call
        assert record.patch == scope.patches[0].name
        assert record.location == session.location
        thing.call()
        assert record.calls == 1
    with scope as session:
        assert session.records[0].calls == 0  # a session counts its own


def test_what_belongs_to_the_session_is_found_from_the_scope_while_it_is_entered(step, table):
    with pytest.raises(NotEnteredError, match=r"with patched\(\.\.\.\) as scope: scope\.explain"):
        step.explain()
    assert not hasattr(step, "diff")
    with step as session:
        assert step.diff() == session.diff()
        with step as inner:
            assert step.restore == inner.restore
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        step.explian()
