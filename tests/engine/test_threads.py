"""Patches are facts of the process: one lock, and a second thread is told who holds a place."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from scoped_patch.engine import LIVE, Edit, EditPatch, ItemSlot, Scope, active, assert_clean
from scoped_patch.engine.errors import ConflictError

from .test_replay import Meeting, adding, in_thread


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert_clean()


@pytest.mark.parametrize("action", ["wrap", "replace"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_second_thread_is_told_file_and_line_of_the_holder(action, shared):
    table = {"x": "x"}

    def scope():
        edit = Edit(ItemSlot(table, "x", "the place"), lambda prior: "p", action, token="t" if shared else None)
        return Scope(None, (EditPatch("mine", lambda _: [edit]),))

    with scope() as holder:
        with pytest.raises(ConflictError) as caught:
            in_thread(lambda: scope().apply())
        assert table["x"] == "p"
    text = str(caught.value)
    assert holder.location in text
    assert "the place" in text
    assert threading.current_thread().name in text
    in_thread(lambda: scope().apply().restore())
    assert table["x"] == "x"


def test_a_hidden_edit_is_exempt():
    table = {"x": "x"}
    scope = adding(table, "p", hidden=True)
    with scope:
        in_thread(lambda: scope.apply().restore())
        assert table["x"] == "p(x)"


def test_an_edit_that_is_the_same_for_everybody_is_shared_by_threads():
    """An entry in a registry of the process: two models in two threads need it at once, and may leave in any order."""
    table = {"x": "x"}

    def scope(token="t"):
        edit = Edit(ItemSlot(table, "x", "the place"), lambda prior: f"p({prior})", token=token, commutes=True, any_thread=True)
        return Scope(None, (EditPatch("mine", lambda _: [edit]),))

    first = scope().apply()
    second = []
    in_thread(lambda: second.append(scope().apply()))
    assert table["x"] == "p(x)"
    first.restore()
    assert table["x"] == "p(x)", "the other thread's scope still holds it"
    with pytest.raises(ConflictError):
        scope("another").apply()
    second[0].restore()
    assert table["x"] == "x"


def test_other_places_are_free():
    tables = [{"x": "x"}, {"x": "x"}]

    def body(i):
        def run(barrier):
            with adding(tables[i], "p"):
                barrier.wait()
                assert len(active()) == 2
                barrier.wait()
                return tables[i]["x"]

        return run

    assert Meeting().run(body(0), body(1)) == ["p(x)", "p(x)"]


def test_a_session_can_be_left_by_another_thread():
    table = {"x": "x"}
    session = adding(table, "p").apply()
    in_thread(session.restore)
    assert table["x"] == "x"


def test_threads_that_enter_and_leave_all_the_time():
    """Each has places of its own in one mapping; all of them are back at the end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    table = {f"k{i}": i for i in range(8)}
    expected = dict(table)
    try:

        def body(i):
            for _ in range(100):
                with adding(table, "p", f"k{i}"):
                    assert table[f"k{i}"] == f"p({i})"

        threads = [threading.Thread(target=body, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert table == expected
    assert not LIVE.states


def test_the_lock_is_free_inside_a_block():
    with adding({"x": "x"}, "p"):
        assert in_thread(lambda: LIVE.lock.acquire(blocking=False) and (LIVE.lock.release() or True))


def test_a_child_process_inherits_what_is_live_and_may_go_on_with_it():
    table = {"x": "x"}
    session = adding(table, "p").apply()

    def forks_from_a_worker():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with adding(table, "inner"):  # the holder's thread is not there: it is ours now
                    code = 0 if table["x"] == "inner(p(x))" else 2
                session.restore()
                code = code if table["x"] == "x" else 3
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert in_thread(forks_from_a_worker) == 0
    session.restore()
