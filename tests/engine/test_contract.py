"""The engine's contract through its public names, without torch: what a user may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import sys
import threading
import types

import pytest

from scoped_patch.engine import (
    LIVE,
    MISSING,
    Edit,
    EditPatch,
    ItemSlot,
    Patch,
    Scope,
    Support,
    active,
    assert_clean,
    attribute_slot,
    replace_attribute,
    replace_item,
    wrap_call,
)
from scoped_patch.engine.errors import (
    BadOptionError,
    BadTargetError,
    ConflictError,
    ForeignOverwriteError,
    LeakError,
    OutOfOrderExit,
    PatchErrorGroup,
    ScopeStateError,
    TargetError,
    UnsupportedError,
)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert_clean()
    assert not LIVE.sessions


class Base:
    limit = 3

    def method(self, x, *, scale=1):
        """Twice."""
        return ("method", type(self).__name__, x * scale)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def klass(cls, x):
        return ("klass", cls.__name__, x)

    @property
    def prop(self):
        return ("prop", type(self).__name__)


class Child(Base):
    pass


def passing(calls):
    def wrapper(original, *args, **kwargs):
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    return wrapper


def scope(*patches, target=None, **options):
    return Scope(target, patches, **options)


def test_descriptors_get_the_same_arguments_and_come_back_identical():
    raw = {name: Base.__dict__[name] for name in ("method", "static", "klass", "prop")}
    expected = [
        Base().method(2, scale=3), Child().method(2), Base.static(1), Child().static(1), Base.klass(1), Child.klass(1),
        Child().klass(1), Base().prop, Child().prop,
    ]  # fmt: skip
    calls = []
    with scope(*(wrap_call(Base, name, passing(calls)) for name in raw)):
        found = [
            Base().method(2, scale=3), Child().method(2), Base.static(1), Child().static(1), Base.klass(1), Child.klass(1),
            Child().klass(1), Base().prop, Child().prop,
        ]  # fmt: skip
        assert type(Base.__dict__["static"]) is staticmethod
        assert type(Base.__dict__["klass"]) is classmethod
    assert found == expected
    assert calls == [((2,), {"scale": 3}), ((2,), {}), *[((1,), {})] * 5, ((), {}), ((), {})]
    assert all(Base.__dict__[name] is value for name, value in raw.items())


def test_an_inherited_attribute_is_inherited_again():
    before = dict(Child.__dict__)
    with scope(wrap_call(Child, "method", passing([])), wrap_call(Child, "static", passing([]))):
        assert Child.static(1) == ("static", 1)
        assert "method" in Child.__dict__
    assert dict(Child.__dict__) == before


def test_one_instance_changes_and_its_siblings_do_not():
    one, other = Base(), Base()
    with scope(wrap_call(one, "method", lambda original, x: "patched")):
        assert one.method(1) == "patched"
        assert other.method(1) == ("method", "Base", 1)
        assert inspect.signature(one.method) == inspect.signature(other.method)
        assert one.method.__doc__ == "Twice."
    assert one.__dict__ == {}


def test_builtins_and_odd_callables_can_be_wrapped():
    import functools

    class Odd:
        def double(self, x, y=0):
            return x * 2 + y

        partial = functools.partialmethod(double, y=1)

    calls = []
    with scope(wrap_call(Odd, "partial", passing(calls))):
        assert Odd().partial(3) == 7
    assert calls == [((3,), {})]


def test_slots_and_properties_of_instances():
    class Slotted:
        __slots__ = ("x", "y")

    class WithSetter:
        @property
        def value(self):
            return getattr(self, "_value", "default")

        @value.setter
        def value(self, new):
            self._value = new

    thing, holder = Slotted(), WithSetter()
    thing.x = 1
    with scope(replace_attribute(thing, "x", 2), replace_attribute(holder, "value", "new")):
        assert thing.x == 2
        assert holder.value == "new"
    assert thing.x == 1
    assert holder.value == "default"
    assert holder.__dict__ == {}
    with pytest.raises(BadTargetError, match="read-only property"):
        attribute_slot(Base(), "prop")


def test_items_are_restored_key_by_key():
    table = {"a": 1, "b": 2}
    with scope(replace_item(table, "b", 20), replace_item(table, "c", 30), replace_item(table, "a", MISSING)):
        assert table == {"b": 20, "c": 30}
        table["theirs"] = 4
    assert table == {"a": 1, "b": 2, "theirs": 4}
    assert list(table)[:2] == ["a", "b"]


def test_an_attribute_and_an_item_can_be_one_place():
    thing = types.SimpleNamespace(x=1)
    edits = [
        Edit(attribute_slot(thing, "x"), lambda prior: 2, "replace"),
        Edit(ItemSlot(thing.__dict__, "x"), lambda prior: 3, "replace"),
    ]
    with pytest.raises(ConflictError, match=r"'first' and 'second'"):
        scope(EditPatch("first", lambda _: edits[:1]), EditPatch("second", lambda _: edits[1:])).plan()


def test_forms_and_reuse():
    thing = Base()
    step = scope(wrap_call(thing, "method", lambda original, x: original(x + 1)))
    plan = step.plan()
    assert thing.method(1)[2] == 1
    for _ in range(3):
        with step as session:
            assert step.plan() is plan
            assert thing.method(1)[2] == 2
            assert session.location.startswith(__file__ + ":")
    assert step(lambda: thing.method(1))()[2] == 2

    @step
    async def later():
        await asyncio.sleep(0)
        return thing.method(1)[2]

    assert asyncio.run(later()) == 2
    assert thing.__dict__ == {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(step)
        stack.enter_context(step)
        assert thing.method(1)[2] == 2  # one scope entered inside itself is shared, not doubled
    session = step.apply()
    assert active() == [session]
    with pytest.raises(LeakError, match=r"test_contract\.py"):
        assert_clean()
    session.restore()
    session.restore()

    def generator():
        yield 1

    with pytest.raises(BadTargetError, match="generator"):
        step(generator)


def test_all_refusals_are_reported_together_and_nothing_is_changed():
    class Refusing(Patch):
        def __init__(self, name):
            self.name = name

        def supports(self, target):
            return Support(False, f"{self.name} looked for spam in ham 1.0")

        def plan(self, target):
            raise AssertionError("never asked")

    thing = Base()
    with pytest.raises(PatchErrorGroup) as caught:
        scope(wrap_call(thing, "method", passing([])), Refusing("one"), Refusing("two")).plan()
    assert [type(e) for e in caught.value.exceptions] == [UnsupportedError, UnsupportedError]
    assert "two looked for spam in ham 1.0" in str(caught.value.exceptions[1])
    assert thing.__dict__ == {}


@pytest.mark.parametrize("enter", [lambda scope: scope.__enter__(), lambda scope: scope.apply()], ids=["with", "apply"])
@pytest.mark.parametrize("failure", [ValueError("late"), KeyboardInterrupt()])
def test_a_failure_half_way_in_undoes_everything(failure, enter):
    one, two = Base(), Base()

    def fail(prior):
        raise failure

    late = EditPatch("late", lambda _: [Edit(attribute_slot(two, "x"), fail)])
    with pytest.raises(type(failure)):
        enter(scope(wrap_call(one, "method", passing([])), late))
    assert one.__dict__ == two.__dict__ == {}


def test_the_bodys_exception_passes_through_and_carries_what_went_wrong_on_the_way_out():
    thing = Base()
    session = scope(wrap_call(thing, "method", passing([]))).apply()
    with pytest.raises(KeyError, match="mine") as caught, session:  # noqa: PT012
        thing.method = "foreign"
        raise KeyError("mine")
    assert any("ForeignOverwriteError" in note for note in caught.value.__notes__)
    assert isinstance(session.exit_error, ForeignOverwriteError)


def test_restoring_goes_on_when_one_restore_fails():
    class Stubborn(dict):
        broken = False

        def __setitem__(self, key, value):
            if self.broken:
                raise OSError("no")
            super().__setitem__(key, value)

    stubborn, fine = Stubborn(a=1), {"a": 1}
    session = scope(replace_item(fine, "a", 2), replace_item(stubborn, "a", 2), replace_item(fine, "b", 2)).apply()
    stubborn.broken = True
    with pytest.raises(OSError, match="no"):
        session.restore()
    assert fine == {"a": 1}
    stubborn.broken = False
    session.restore()  # what is left is tried again
    assert stubborn == {"a": 1}


def test_nesting_restores_and_other_orders_end_at_the_original():
    thing = Base()
    plus, times = (wrap_call(thing, "method", f) for f in (lambda o, x: o(x + 1), lambda o, x: o(x * 10)))
    with scope(plus), scope(times):
        assert thing.method(1)[2] == 11  # the inner scope is outermost: first times, then plus
    outer, inner = scope(plus).apply(), scope(times).apply()
    with pytest.raises(OutOfOrderExit, match="in the reverse order"):
        outer.restore()
    assert thing.method(1)[2] == 10
    inner.restore()
    assert thing.__dict__ == {}


def test_disjoint_scopes_close_in_any_order():
    one, two = Base(), Base()
    first, second = scope(wrap_call(one, "method", passing([]))).apply(), scope(wrap_call(two, "method", passing([]))).apply()
    first.restore()
    second.restore()


def ranked(thing, name, rank, text):
    def make(prior):
        return lambda x: f"{text}({prior(x)})"

    return EditPatch(name, lambda _: [Edit(attribute_slot(thing, "call"), make, rank=rank, commutes=True)])


def test_ranks_not_the_order_of_entering_decide_who_wraps_whom():
    thing = types.SimpleNamespace(call=lambda x: x)
    inside, outside = ranked(thing, "fused", 10, "fused"), ranked(thing, "sp", 20, "sp")
    for scopes in ((inside, outside), (outside, inside)):
        with scope(*scopes):
            assert thing.call("x") == "sp(fused(x))"
        with scope(scopes[0]), scope(scopes[1]):
            assert thing.call("x") == "sp(fused(x))"
        first, second = scope(scopes[0]).apply(), scope(scopes[1]).apply()
        first.restore()  # commuting edits may leave in any order
        assert thing.call("x") == {10: "sp(x)", 20: "fused(x)"}[10 if scopes[0] is inside else 20]
        second.restore()
        assert thing.call("x") == "x"


def test_replaces_come_first_and_refuse_to_cover_another_scope():
    thing = types.SimpleNamespace(call=lambda x: x)
    with scope(wrap_call(thing, "call", lambda o, x: f"w({o(x)})"), replace_attribute(thing, "call", lambda x: "new")):
        assert thing.call("x") == "w(new)"
    with scope(wrap_call(thing, "call", lambda o, x: o(x))) as holder, pytest.raises(ConflictError) as caught:
        scope(replace_attribute(thing, "call", 1)).apply()
    assert holder.location in str(caught.value)


def test_equal_edits_are_shared_and_unequal_settings_refuse():
    thing = types.SimpleNamespace(call=lambda x: x)

    def patch(token):
        edit = Edit(attribute_slot(thing, "call"), lambda prior: lambda x: f"p({prior(x)})", token=token, exclusive="p")
        return EditPatch("p", lambda _: [edit])

    with scope(patch(("p", 1))):
        with scope(patch(("p", 1))):
            assert thing.call("x") == "p(x)"
        assert thing.call("x") == "p(x)"
        with pytest.raises(ConflictError, match="other options"), scope(patch(("p", 2))):
            pass
    assert thing.call("x") == "x"


@pytest.mark.parametrize("policy", ["error", "keep", "restore"])
def test_a_foreign_overwrite_is_never_clobbered_silently(policy):
    thing = types.SimpleNamespace(x=1)
    session = scope(replace_attribute(thing, "x", 2), on_foreign=policy).apply()
    thing.x = 99
    if policy == "error":
        with pytest.raises(ForeignOverwriteError, match="found 99"):
            session.restore()
    else:
        session.restore()
    assert thing.x == (1 if policy == "restore" else 99)


def test_a_value_that_somebody_moved_aside_is_mended_there():
    thing = Base()
    session = scope(wrap_call(thing, "method", lambda o, x: "patched")).apply()
    thing._old_method = thing.method  # what accelerate does: keep the bound original, put a hook in its place
    thing.method = lambda x: ("hook", thing._old_method(x))
    assert thing.method(1) == ("hook", "patched")
    session.restore()
    assert thing.method(1) == ("hook", ("method", "Base", 1))


def test_a_scope_over_a_foreign_change_keeps_it():
    thing = types.SimpleNamespace(call=lambda x: x)
    outer = scope(wrap_call(thing, "call", lambda o, x: f"outer({o(x)})")).apply()
    ours = thing.call
    thing.call = lambda x: f"foreign({ours(x)})"
    with scope(wrap_call(thing, "call", lambda o, x: f"inner({o(x)})")):
        assert thing.call("x") == "inner(foreign(outer(x)))"
    assert thing.call("x") == "foreign(outer(x))"
    with pytest.raises(ForeignOverwriteError):
        outer.restore()
    assert thing.call("x").startswith("foreign(")


def test_a_second_thread_is_told_who_holds_the_place():
    thing = Base()
    found = []

    def enter():
        try:
            with scope(wrap_call(thing, "method", passing([]))):
                found.append("entered")
        except ConflictError as error:
            found.append(error)

    with scope(wrap_call(thing, "method", passing([]))) as session:
        worker = threading.Thread(target=enter)
        worker.start()
        worker.join()
    assert isinstance(found[0], ConflictError)
    assert session.location in str(found[0])
    enter()
    assert found[1] == "entered"


def test_replay_puts_a_left_session_on_from_any_thread():
    thing = types.SimpleNamespace(call=lambda x: x)
    with scope(wrap_call(thing, "call", lambda o, x: f"first({o(x)})")) as session:
        pass
    found = []

    def again():
        with session.replay():
            found.append(thing.call("x"))

    with scope(wrap_call(thing, "call", lambda o, x: f"second({o(x)})")):
        worker = threading.Thread(target=again)
        worker.start()
        worker.join()
        assert thing.call("x") == "second(x)"
    again()
    assert found == ["first(x)", "first(x)"]
    assert thing.call("x") == "x"
    with (
        pytest.raises(ScopeStateError),
        Scope(thing, ()).session_class(thing, thing, Scope(thing, ()).plan(), "error").replay(),
    ):
        pass


def test_path_strings_and_their_errors():
    with scope(wrap_call("json:dumps", lambda original, x: "patched")):
        import json

        assert json.dumps(1) == "patched"
    assert json.dumps(1) == "1"
    with pytest.raises(TargetError, match="did you mean 'dumps'"):
        scope(wrap_call("json:dunps", passing([]))).plan()
    with pytest.raises(TargetError, match="importing 'no_such_module_x' failed"):
        scope(wrap_call("no_such_module_x:f", passing([]))).plan()
    with pytest.raises(BadTargetError, match=r"package\.module:attr\.path"):
        wrap_call("json.dumps", passing([]))
    with pytest.raises(TargetError, match="no 'nothing'"):
        scope(replace_attribute(Base(), "nothing", 1)).plan()
    with pytest.raises(BadOptionError, match="on_foreign"):
        scope(on_foreign="ignore")


@pytest.fixture
def modules(monkeypatch):
    made = []
    for name in ("sp_origin", "sp_copy"):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        made.append(module)
    origin, borrower = made
    origin.helper = lambda: "original"
    borrower.renamed = origin.helper
    return origin, borrower


def test_names_imported_by_value_are_patched_too_or_refused(modules):
    origin, borrower = modules
    with scope(wrap_call("sp_origin:helper", lambda original: "patched")) as session:
        assert origin.helper() == borrower.renamed() == "patched"
        assert "imported by value" in str(session.explain())
    assert origin.helper() == borrower.renamed() == "original"
    with pytest.raises(BadTargetError, match=r"sp_copy\.renamed"):
        scope(wrap_call("sp_origin:helper", passing([]), aliases="error")).plan()
    with scope(wrap_call("sp_origin:helper", lambda original: "patched", aliases="ignore")):
        assert borrower.renamed() == "original"


def test_a_module_that_is_imported_later_is_patched_while_the_scope_lives(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sp_late_one", "sp_late_two"):
        (tmp_path / f"{name}.py").write_text("def answer():\n    return 41\n")
    patches = [wrap_call(f"{n}:answer", lambda o: o() + 1, when="imported") for n in ("sp_late_one", "sp_late_two")]
    with scope(*patches) as session:
        assert "waits for sp_late_one" in str(session.explain())
        import sp_late_one

        assert sp_late_one.answer() == 42
    assert sp_late_one.answer() == 41
    import sp_late_two  # after the scope: the hook is inert

    assert sp_late_two.answer() == 41


def test_reports_show_what_happened_and_flag_what_was_never_called():
    thing, other = Base(), Base()
    with scope(
        wrap_call(thing, "method", passing([]), reason="to see"), wrap_call(other, "method", passing([])), target=thing
    ) as session:
        thing.method(1)
        thing.method(1)
        table = session.explain(full=True)
    text, html = str(table), table._repr_html_()
    assert "to see" in text
    assert [row.calls for row in table.rows] == [2, 0]
    assert "0 !" in text
    assert "<table>" in html
    first = session.diff()[0]
    assert (first["key"], first["before"], first["action"], first["calls"]) == ("method", MISSING, "wrap", 2)
    assert "plan for" in str(scope(wrap_call(thing, "method", passing([]))).plan())


def test_a_wrapped_call_is_not_stripped_by_unwrapping_tools():
    thing = Base()
    with scope(wrap_call(thing, "method", lambda o, x: "patched")):
        assert not hasattr(thing.method, "__wrapped__")
        assert inspect.unwrap(thing.method)(1) == "patched"


def test_sessions_are_no_copies():
    with scope() as session, pytest.raises(ScopeStateError):
        copy.copy(session)


def test_bad_patches_are_named():
    with pytest.raises(BadTargetError, match="instance is needed"):
        scope(EditPatch)
    with pytest.raises(BadOptionError, match="has no name"):
        scope(type("Nameless", (Patch,), {"plan": lambda self, target: ()})())
    with pytest.raises(BadTargetError, match="Edit objects"):
        scope(EditPatch("bad", lambda _: ["edit"])).plan()
