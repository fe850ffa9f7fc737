"""One-line patches: what a wrapped call gets, and what it looks like."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import types

import pytest

from scoped_patch.engine import MISSING, Scope, replace_attribute, replace_item, set_tracing, wrap_call
from scoped_patch.engine import adhoc as module_of_tracing
from scoped_patch.engine.errors import BadOptionError, BadTargetError, TargetError


class Base:
    def method(self, a, *, b: int = 2) -> tuple:
        """Docs of method."""
        return (type(self).__name__, a, b)

    @staticmethod
    def static(a, b=2):
        return ("static", a, b)

    @classmethod
    def of_class(cls, a):
        return (cls.__name__, a)

    @property
    def prop(self):
        """Docs of prop."""
        return type(self).__name__

    @prop.setter
    def prop(self, value):
        self.__dict__["_prop"] = value

    partial = functools.partialmethod(method, 1)


class Child(Base):
    pass


def through(original, *args, **kwargs):
    return ("seen", original(*args, **kwargs))


CALLS = {
    "method": lambda: [Base().method(1, b=3), Child().method(1), Base.method(Base(), 1), Child.method(Child(), 1)],
    "static": lambda: [Base().static(1), Child().static(1), Base.static(1, b=3), Child.static(1)],
    "of_class": lambda: [Base().of_class(1), Child().of_class(1), Base.of_class(1), Child.of_class(1)],
    "prop": lambda: [Base().prop, Child().prop],
    "partial": lambda: [Base().partial(b=3), Child().partial()],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("owner", [Base, Child])
def test_every_descriptor_gets_the_same_arguments_by_instance_class_and_subclass(name, owner):
    expected, raw = CALLS[name](), Base.__dict__[name]
    entries = [dict(kind.__dict__) for kind in (Base, Child)]
    with Scope(owner, (wrap_call(owner, name, through),)) as session:
        found = CALLS[name]()
        if name != "partial":
            assert type(owner.__dict__[name]) is type(raw)
        seen = [one == ("seen", plain) for one, plain in zip(found, expected, strict=True)]
        assert all(a == b or a == ("seen", b) for a, b in zip(found, expected, strict=True))
        assert all(seen) if owner is Base else seen.count(True) == len(seen) // 2
        assert session.records[0].calls == seen.count(True) or name == "partial"
    assert [dict(kind.__dict__) for kind in (Base, Child)] == entries
    assert Base.__dict__[name] is raw
    assert CALLS[name]() == expected


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_one_instance_only(name):
    one, other = Child(), Child()
    plain = getattr(other, name)(1)
    with Scope(one, (wrap_call(one, name, through),)):
        assert getattr(one, name)(1) == ("seen", plain)
        assert getattr(other, name)(1) == plain
        assert getattr(Child(), name)(1) == plain
    assert one.__dict__ == {}
    assert name not in Child.__dict__


def test_a_settable_property_still_sets():
    with Scope(Base, (wrap_call(Base, "prop", through),)):
        thing = Base()
        thing.prop = 3
        assert thing.__dict__ == {"_prop": 3}
        assert Base.prop.__doc__ == "Docs of prop."
        assert thing.prop == ("seen", "Base")


@pytest.mark.parametrize("owner", [Base, Base()])
def test_signature_docs_and_name(owner):
    plain = inspect.signature(owner.method), owner.method.__doc__
    with Scope(owner, (wrap_call(owner, "method", through),)):
        patched = owner.method
        assert (inspect.signature(patched), patched.__doc__) == plain
        assert patched.__name__ == "patched_method"
        assert not hasattr(patched, "__wrapped__")
        assert inspect.unwrap(patched) is patched or inspect.ismethod(patched)


def test_a_patched_function_cannot_be_pickled_by_a_name_that_loads_the_plain_one():
    thing = Base()
    with Scope(thing, (wrap_call(thing, "method", through),)), pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(thing.method)


def test_builtins_and_c_functions():
    import builtins

    module, before = types.ModuleType("m"), builtins.len
    module.length = len
    with Scope(None, (wrap_call(module, "length", through),)):
        assert module.length("abc") == ("seen", 3)
        assert builtins.len is before  # a borrowed name is its borrower's affair
        assert len("abc") == 3
    thing = types.SimpleNamespace(length=len)
    with Scope(None, (wrap_call(thing, "length", through),)):
        assert thing.length("abc") == ("seen", 3)


def test_callable_objects_on_instances():
    class Loss:
        def __call__(self, x):
            return x

    thing = types.SimpleNamespace(loss=Loss(), partial=functools.partial(int, "7"))
    with Scope(None, (wrap_call(thing, "loss", through), wrap_call(thing, "partial", through))):
        assert thing.loss(1) == ("seen", 1)
        assert thing.partial() == ("seen", 7)
    assert isinstance(thing.loss, Loss)


def test_what_is_not_callable_is_refused():
    thing = types.SimpleNamespace(x=1)
    with pytest.raises(BadTargetError, match="is int, not a callable"):
        Scope(None, (wrap_call(thing, "x", through),)).apply()
    with pytest.raises(BadTargetError, match="is int, not a callable"):
        Scope(None, (wrap_call(type("C", (), {"x": 1}), "x", through),)).apply()
    with pytest.raises(BadTargetError, match="without a getter"):
        Scope(None, (wrap_call(type("C", (), {"x": property(None)}), "x", through),)).apply()
    with pytest.raises(BadTargetError, match="needs a callable wrapper, got int"):
        wrap_call(thing, "x", 3)
    with pytest.raises(TargetError, match="nothing would ever read it"):
        Scope(None, (wrap_call(thing, "y", through),)).apply()


def test_forms_are_checked_when_they_are_written():
    thing = types.SimpleNamespace(x=1)
    for form in (wrap_call, replace_attribute):
        with pytest.raises(BadTargetError, match="got three arguments"):
            form("json:dumps", "x", through)
        with pytest.raises(BadOptionError, match=r'needs a "package\.module:attr" string'):
            form(thing, "x", through, when="imported")
        with pytest.raises(BadOptionError, match="when must be one of 'now', 'imported'"):
            form("json:dumps", through, when="later")
        with pytest.raises(BadTargetError, match=r"package\.module:attr\.path"):
            form("json.dumps", through)


def test_replacing_with_missing_deletes():
    thing = types.SimpleNamespace(a=1, b=2, c=3)
    with Scope(None, (replace_attribute(thing, "b", MISSING),)):
        assert not hasattr(thing, "b")
    assert list(thing.__dict__) == ["a", "b", "c"]
    table = {"a": 1, "b": 2}
    with Scope(None, (replace_item(table, "a", MISSING), replace_item(table, "new", 3, reason="why", label="the table"))):
        assert table == {"b": 2, "new": 3}
    assert list(table.items()) == [("a", 1), ("b", 2)]


def test_a_wrapper_of_lower_rank_is_further_in():
    thing = types.SimpleNamespace(call=lambda: [])
    low = wrap_call(thing, "call", lambda original: [*original(), "low"], rank=5)
    high = wrap_call(thing, "call", lambda original: [*original(), "high"])
    for patches in ((low, high), (high, low)):
        with Scope(None, patches):
            assert thing.call() == ["low", "high"]


def test_calls_are_not_counted_while_code_is_traced(monkeypatch):
    monkeypatch.setattr(module_of_tracing, "tracing", bool)
    thing = types.SimpleNamespace(call=lambda: 1)
    with Scope(None, (wrap_call(thing, "call", through),)) as session:
        thing.call()
        set_tracing(lambda: True)
        thing.call()
        assert session.records[0].calls == 1


def test_describing_a_value_never_reads_all_of_it():
    class Huge:
        def __repr__(self):
            raise AssertionError("printed")

    thing = types.SimpleNamespace(x=1, y=[1])
    scope = Scope(None, (replace_attribute(thing, "x", Huge()), replace_attribute(thing, "y", [Huge()] * 3)))
    with scope as session:
        assert session.explain(full=True).rows[0].after.endswith("Huge")
        str(scope.plan()), str(session.explain())


class Server:
    async def answer(self, x):
        await asyncio.sleep(0)
        return x + 1


@pytest.mark.parametrize("on_class", [True, False])
@pytest.mark.parametrize("kind", ["async", "passing", "value"])
def test_a_wrapped_coroutine_function_stays_one(kind, on_class):
    async def awaiting(original, x):
        return 10 * await original(x)

    wrapper = {"async": awaiting, "passing": lambda original, x: original(x), "value": lambda original, x: 7}[kind]
    server = Server()
    with Scope(None, (wrap_call(Server if on_class else server, "answer", wrapper),)) as scope:
        assert inspect.iscoroutinefunction(server.answer)
        waiting = server.answer(1)
        assert scope.diff()[0]["calls"] == 0  # nothing runs before it is awaited
        assert asyncio.run(waiting) == {"async": 20, "passing": 2, "value": 7}[kind]
        assert scope.diff()[0]["calls"] == 1
    assert "answer" not in vars(server)
