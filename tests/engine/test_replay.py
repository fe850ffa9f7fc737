"""Replays: an earlier moment put on again for the length of a call, over whatever is live, from any thread."""

from __future__ import annotations

import threading

import pytest

from scoped_patch.engine import LIVE, Edit, EditPatch, ItemSlot, Scope, assert_clean
from scoped_patch.engine.errors import ConflictError, OutOfOrderExit, ScopeStateError


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert_clean()
    assert not LIVE.states
    assert not LIVE._replays.frames
    assert not LIVE._replays._waiting


@pytest.fixture
def table():
    return {"x": "x", "y": "y"}


def adding(table, text, *keys, **options):
    edits = [Edit(ItemSlot(table, key), lambda prior: f"{text}({prior})", **options) for key in keys or ("x",)]
    return Scope(table, (EditPatch(text, lambda _: edits),))


def left(scope):
    with scope as session:
        pass
    return session


def in_thread(function):
    """Run in another thread; returns its result or raises its error."""
    outcome = {}

    def run():
        try:
            outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    worker = threading.Thread(target=run)
    worker.start()
    worker.join(30)
    assert not worker.is_alive(), "the thread hangs"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def reading(table, session):
    with session.replay():
        return table["x"]


def test_live_and_left_from_this_thread_and_another(table):
    with adding(table, "p") as session:
        assert reading(table, session) == in_thread(lambda: reading(table, session)) == "p(x)"
    assert table["x"] == "x"
    assert reading(table, session) == in_thread(lambda: reading(table, session)) == "p(x)"
    assert table["x"] == "x"


def test_over_another_live_scope(table):
    first = left(adding(table, "first"))
    with adding(table, "second"):
        assert reading(table, first) == in_thread(lambda: reading(table, first)) == "first(x)"
        assert table["x"] == "second(x)"
    assert table["x"] == "x"


def test_only_its_own_places_change(table):
    session = left(adding(table, "p", "x"))
    with adding(table, "q", "y"), session.replay():
        assert table == {"x": "p(x)", "y": "q(y)"}


def test_nested_in_each_other_in_every_combination(table):
    a, b = left(adding(table, "a")), left(adding(table, "b"))
    with a.replay():
        with b.replay():
            assert table["x"] == "b(x)"
            with a.replay():
                assert table["x"] == "a(x)"
            assert table["x"] == "b(x)"
        assert table["x"] == "a(x)"
        with a.replay():
            assert table["x"] == "a(x)"
        assert table["x"] == "a(x)"
    assert table["x"] == "x"


def test_a_failing_body_puts_back(table):
    session = left(adding(table, "p"))
    with pytest.raises(ZeroDivisionError), session.replay():
        raise ZeroDivisionError
    assert table["x"] == "x"


def test_nothing_to_replay(table):
    scope = adding(table, "p")
    session = scope.session_class(table, table, scope.plan(), "error")
    with pytest.raises(ScopeStateError, match="nothing to replay"), session.replay():
        raise AssertionError("not reached")


# ----------------------------------------------------------------------------------------------------- scopes inside
def test_a_scope_inside_a_replay_builds_on_what_it_shows(table):
    session = left(adding(table, "outer", rank=20))
    with session.replay():
        with adding(table, "inner", rank=10):
            assert table["x"] == "outer(inner(x))"
        assert table["x"] == "outer(x)"
    assert table["x"] == "x"


def test_the_replayed_edit_is_shared_not_doubled(table):
    scope = adding(table, "p")
    session = left(scope)
    with session.replay():
        with scope:
            assert table["x"] == "p(x)"
        assert table["x"] == "p(x)"


def test_a_scope_inside_a_replay_on_another_thread_than_the_live_one(table):
    """A checkpointed function that opens a scope of its own, recomputed while the outer scope is still live."""

    def recompute(session):
        with session.replay(), adding(table, "inner"):
            return table["x"]

    with adding(table, "outer") as session:
        assert in_thread(lambda: recompute(session)) == "inner(outer(x))"
        assert table["x"] == "outer(x)"
    assert in_thread(lambda: recompute(session)) == "inner(outer(x))"


def test_a_scope_that_outlives_the_replay_it_was_entered_in_moves_to_what_is_real(table):
    first = left(adding(table, "first"))
    with adding(table, "live"):
        with first.replay():
            late = adding(table, "late").apply()
            assert table["x"] == "late(first(x))"
        assert table["x"] == "late(live(x))"
        late.restore()
        assert table["x"] == "live(x)"
    with first.replay():
        late = adding(table, "late").apply()
    assert table["x"] == "late(x)"
    late.restore()


def test_a_shared_scope_that_outlives_its_replay(table):
    scope = adding(table, "p")
    session = left(scope)
    with session.replay():
        late = scope.apply()
    assert table["x"] == "p(x)"
    late.restore()
    assert table["x"] == "x"
    with scope:
        with session.replay():
            late = scope.apply()
        late.restore()
        assert table["x"] == "p(x)"


@pytest.mark.parametrize("after_exit", [True, False])
def test_the_replay_goes_on_when_a_scope_below_it_is_left(table, after_exit):
    first = left(adding(table, "first"))
    live = adding(table, "live").apply()
    with (first if after_exit else live).replay():
        shown = table["x"]
        live.restore()
        assert table["x"] == shown
    assert table["x"] == "x"


def test_leaving_out_of_order_below_a_replay_is_reported_there(table):
    first = left(adding(table, "first"))
    outer, inner = adding(table, "outer").apply(), adding(table, "inner").apply()
    with first.replay():
        with pytest.raises(OutOfOrderExit):
            outer.restore()
        assert table["x"] == "first(x)"
    assert table["x"] == "inner(x)"
    inner.restore()


# ----------------------------------------------------------------------------------------------------- others' changes
def test_a_foreign_change_inside_a_replay_is_left(table, caplog):
    session = left(adding(table, "p"))
    with session.replay():
        table["x"] = "theirs"
    assert table["x"] == "theirs"
    assert "changed by somebody else during a replay" in caplog.text


def test_a_foreign_change_below_a_replay_is_kept(table):
    session = left(adding(table, "p"))
    live = adding(table, "live")
    with pytest.raises(RuntimeError, match="changed by somebody else"), live:  # noqa: PT012
        table["x"] = "theirs"
        with session.replay():
            assert table["x"] == "p(x)"
        assert table["x"] == "theirs"
    assert table["x"] == "theirs"


# ----------------------------------------------------------------------------------------------------- freeze
def test_freeze_is_the_moment_not_the_session(table):
    with adding(table, "a") as a, adding(table, "b"):
        everything, of_a = LIVE.freeze(), LIVE.freeze([a])
        assert len(everything) == len(of_a) == 1
        none = LIVE.freeze([])
    with LIVE.replay(everything):
        assert table["x"] == "b(a(x))"
    with LIVE.replay(none):
        assert table["x"] == "x"
    assert "1 places" in repr(everything)


def test_freeze_inside_a_replay_holds_what_the_replay_shows(table):
    """A checkpoint inside a checkpoint: the inner one is recorded while the outer one is recomputed."""
    session = left(adding(table, "p"))
    with session.replay():
        inner = LIVE.freeze([])
    assert len(inner) == 1
    with LIVE.replay(inner):
        assert table["x"] == "p(x)"
    assert table["x"] == "x"


def test_a_frozen_moment_of_a_root_hides_what_the_root_has_patched_since(table):
    """A forward that ran under one scope is recomputed while another one, with edits elsewhere, is live."""
    other = {"y": "y"}
    with adding(table, "a", "x") as a:
        moment, loose = LIVE.freeze([a], root=table), LIVE.freeze([a])
    stranger = Scope(other, (EditPatch("s", lambda _: [Edit(ItemSlot(table, "y"), lambda prior: f"s({prior})")]),))
    with stranger, adding(table, "b", "x", "y"):
        assert table == {"x": "b(x)", "y": "b(s(y))"}
        with LIVE.replay(loose):
            assert table == {"x": "a(x)", "y": "b(s(y))"}
        with LIVE.replay(moment):
            assert table == {"x": "a(x)", "y": "s(y)"}
            with adding(table, "c", "y"):
                assert table["y"] == "c(s(y))"
        assert table == {"x": "b(x)", "y": "b(s(y))"}
    assert table == {"x": "x", "y": "y"}
    with LIVE.replay(moment):
        assert table == {"x": "a(x)", "y": "y"}


def test_the_version_names_the_state(table):
    session = left(adding(table, "p"))
    before = LIVE.version
    with session.replay():
        assert LIVE.version != before
        with session.replay():
            pass
    assert LIVE.version == before  # all is as it was
    with adding(table, "q"):
        assert LIVE.version != before
    assert LIVE.version != before


def test_freeze_without_one_session(table):
    with adding(table, "a", rank=10) as a, adding(table, "b", rank=20):
        with LIVE.replay(LIVE.freeze_without(a)):
            assert table["x"] == "b(x)"
        assert table["x"] == "b(a(x))"


# ----------------------------------------------------------------------------------------------------- threads
class Meeting:
    """Two threads that wait for each other, each saying what it saw."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=20)

    def run(self, *functions):
        results = [None] * len(functions)

        def call(i, function):
            try:
                results[i] = function(self.barrier)
            except Exception as error:
                results[i] = error

        threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a thread hangs"
        return results


def test_two_threads_share_one_snapshot(table):
    session = left(adding(table, "p"))

    def body(barrier):
        with session.replay():
            barrier.wait()  # both are inside at once
            seen = table["x"]
            barrier.wait()
        return seen

    assert Meeting().run(body, body) == ["p(x)", "p(x)"]
    assert table["x"] == "x"


def test_the_first_to_leave_does_not_take_it_from_the_other(table):
    session = left(adding(table, "p"))

    def short(barrier):
        with session.replay():
            barrier.wait()
        barrier.wait()

    def long(barrier):
        with session.replay():
            barrier.wait()
            barrier.wait()
            return table["x"]

    assert Meeting().run(short, long)[1] == "p(x)"


def test_a_different_snapshot_waits_and_so_do_entering_and_leaving(table):
    a, b = left(adding(table, "a")), left(adding(table, "b"))
    log = []

    def holds(barrier):
        with a.replay():
            barrier.wait()
            for _ in range(100):
                log.append(table["x"])
                threading.Event().wait(0.001)

    def waits(enter):
        def run(barrier):
            barrier.wait()
            with enter():
                log.append(table["x"])

        return run

    for enter, shown in ((b.replay, "b(x)"), (lambda: adding(table, "c"), "c(x)")):
        log.clear()
        Meeting().run(holds, waits(enter))
        assert log == ["a(x)"] * 100 + [shown]


def test_many_threads_replay_different_sessions_over_a_live_one(table):
    sessions = [left(adding(table, str(i))) for i in range(4)]
    wrong = []

    def body(i):
        for _ in range(50):
            with sessions[i].replay():
                if table["x"] != f"{i}(x)":
                    wrong.append((i, table["x"]))

    with adding(table, "live"):
        threads = [threading.Thread(target=body, args=(i % 4,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert table["x"] == "live(x)"
    assert wrong == []


def test_two_threads_that_would_wait_for_ever_are_told(table):
    a, b = left(adding(table, "a")), left(adding(table, "b"))

    def body(barrier):
        with a.replay():
            barrier.wait()
            with b.replay():
                return table["x"]

    results = Meeting().run(body, body)
    assert sorted(map(type, results), key=str) == [ConflictError, str]
    assert "b(x)" in results
    assert "wait for each other" in str(next(r for r in results if isinstance(r, ConflictError)))


def test_leaving_waits_for_a_replay_of_the_same_session_on_another_thread(table):
    """The recomputation of one backward, while the main thread leaves the block."""
    session = adding(table, "p").apply()
    seen = []

    def recompute(barrier):
        with session.replay():
            barrier.wait()
            for _ in range(50):
                seen.append(table["x"])
                threading.Event().wait(0.001)

    def leave(barrier):
        barrier.wait()
        session.restore()
        seen.append(table["x"])

    Meeting().run(recompute, leave)
    assert seen == ["p(x)"] * 50 + ["x"]


def test_a_fork_in_the_middle_of_another_threads_replay(table):
    import os

    session = left(adding(table, "p"))
    inside, done = threading.Event(), threading.Event()

    def hold():
        with session.replay():
            inside.set()
            done.wait(30)

    worker = threading.Thread(target=hold)
    worker.start()
    inside.wait(30)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if table["x"] == "x":  # that thread is not here: what it had put on is off
                with adding(table, "child"):
                    code = 0 if table["x"] == "child(x)" else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    done.set()
    worker.join()
    assert os.waitstatus_to_exitcode(status) == 0
