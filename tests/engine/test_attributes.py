"""From an owner and a name to the place that Python reads: and refusals where it would never look."""

from __future__ import annotations

import enum
import types
import weakref
from collections import ChainMap

import pytest
import wrapt

from scoped_patch.engine import (
    MISSING,
    ItemSlot,
    Scope,
    attribute_slot,
    attributes,
    item_slot,
    register_storage_finder,
    replace_attribute,
    replace_item,
    wrap_call,
)
from scoped_patch.engine.errors import BadTargetError


class Thing:
    def method(self):
        return "method"

    def __call__(self):
        return "called"


@pytest.mark.parametrize("name", ["__call__", "__len__", "__getitem__", "__enter__", "__eq__", "__radd__", "__iter__"])
def test_what_python_looks_up_on_the_class_is_refused_on_an_instance(name):
    with pytest.raises(BadTargetError, match=f"looks {name} up on the class"):
        attribute_slot(Thing(), name)
    assert attribute_slot(Thing, name).owner is Thing


def test_what_python_looks_up_on_the_instance_is_not_refused():
    module = types.ModuleType("m")
    for owner, name in ((Thing(), "__deepcopy__"), (Thing(), "__doc__"), (module, "__getattr__"), (module, "__all__")):
        assert attribute_slot(owner, name).owner is owner


@pytest.mark.parametrize("name", ["", "a.b", "1", None, 3])
def test_a_name_is_an_identifier(name):
    with pytest.raises(BadTargetError, match="must be an identifier"):
        attribute_slot(Thing(), name)


@pytest.mark.parametrize("owner", [1, "text", (), None, object()])
def test_an_owner_without_a_place_is_refused(owner):
    with pytest.raises(BadTargetError, match="have no __dict__"):
        attribute_slot(owner, "anything")


def test_immutable_types_are_refused():
    with pytest.raises(BadTargetError, match="immutable type"):
        attribute_slot(int, "bit_length")


def test_an_owner_whose_dict_is_made_anew_is_refused():
    class Odd:
        @property
        def __dict__(self):
            return {}

    with pytest.raises(BadTargetError, match="no __dict__ that keeps values"):
        attribute_slot(Odd(), "x")


def test_new_of_a_class_that_has_none_cannot_be_put_back_so_it_is_refused():
    class Plain:
        def __init__(self, x):
            self.x = x

    class Own(Plain):
        def __new__(cls, x):
            return object.__new__(cls)

    with pytest.raises(BadTargetError, match="Patch __init__ instead"):
        attribute_slot(Plain, "__new__")
    with Scope(Own, (wrap_call(Own, "__new__", lambda original, *args: original(*args)),)):
        assert Own(3).x == 3
    assert Own(4).x == 4


# ----------------------------------------------------------------------------------------------------- classes
def test_a_metaclass_with_a_property_of_that_name_is_where_the_value_is():
    class Meta(type):
        @property
        def setting(cls):
            return cls.__dict__.get("_setting", "default")

        @setting.setter
        def setting(cls, value):
            type.__setattr__(cls, "_setting", value)

        @setting.deleter
        def setting(cls):
            type.__delattr__(cls, "_setting")

    class Configured(metaclass=Meta):
        _setting = "own"

    with Scope(Configured, (replace_attribute(Configured, "setting", "patched"),)):
        assert Configured.setting == "patched"
    assert Configured.setting == "own"


def test_name_and_doc_of_a_class():
    class Named:
        """Docs."""

    before = dict(Named.__dict__)
    with Scope(Named, (replace_attribute(Named, "__name__", "Other"), replace_attribute(Named, "__doc__", "New."))):
        assert (Named.__name__, Named.__doc__) == ("Other", "New.")
    assert (Named.__name__, Named.__doc__) == ("Named", "Docs.")
    assert dict(Named.__dict__) == before


def test_an_enum_class_has_methods_to_patch_and_members_that_refuse():
    class Colour(enum.Enum):
        RED = 1

        def shout(self):
            return self.name

    with Scope(Colour, (wrap_call(Colour, "shout", lambda original: original() + "!"),)):
        assert Colour.RED.shout() == "RED!"
    assert Colour.RED.shout() == "RED"
    with pytest.raises(AttributeError, match="reassign"):
        Scope(Colour, (replace_attribute(Colour, "RED", 2),)).apply()
    assert Colour(1) is Colour.RED


def test_the_class_of_an_instance_can_be_swapped():
    class Other(Thing):
        def method(self):
            return "other"

    thing = Thing()
    with Scope(thing, (replace_attribute(thing, "__class__", Other),)):
        assert thing.method() == "other"
    assert type(thing) is Thing


# ----------------------------------------------------------------------------------------------------- proxies
def test_a_wrapt_proxy_stands_for_what_it_wraps():
    class WithProperty:
        _x = 1
        x = property(lambda self: self._x, lambda self, value: setattr(self, "_x", value))

    thing, holder = Thing(), WithProperty()
    assert attribute_slot(wrapt.ObjectProxy(thing), "method").place == attribute_slot(thing, "method").place
    assert attribute_slot(wrapt.ObjectProxy(Thing), "method").place == attribute_slot(Thing, "method").place
    with Scope(None, (replace_attribute(wrapt.ObjectProxy(holder), "x", 5),)):
        assert holder.x == 5
    assert holder.__dict__ == {}
    with pytest.raises(BadTargetError, match="wrapt proxy"):
        attribute_slot(wrapt.FunctionWrapper(len, lambda *args: None), "_self_wrapper")


def test_a_weak_proxy_is_refused():
    thing = Thing()
    with pytest.raises(BadTargetError, match="pass the object itself"):
        attribute_slot(weakref.proxy(thing), "method")


def test_an_object_that_lies_about_its_class_is_taken_for_what_it_is():
    class Liar:
        __class__ = type

    liar = Liar()
    liar.x = 1
    with Scope(liar, (replace_attribute(liar, "x", 2),)):
        assert liar.x == 2
    assert liar.x == 1


# ----------------------------------------------------------------------------------------------------- other storage
class Holder:
    """Keeps children apart from its attributes, as nn.Module does."""

    def __init__(self):
        self.__dict__["children"] = {"a": 1, "b": 2, "c": 3}

    def __getattr__(self, name):
        try:
            return self.__dict__["children"][name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.fixture
def finder(monkeypatch):
    monkeypatch.setattr(attributes, "_storage_finders", list(attributes._storage_finders))

    def find(owner, name):
        if isinstance(owner, Holder) and name in owner.children:
            return owner.children
        return None

    register_storage_finder(find)
    register_storage_finder(find)
    assert attributes._storage_finders.count(find) == 1


def test_a_registered_storage_is_found_and_keeps_its_order(finder):
    holder = Holder()
    slot = attribute_slot(holder, "b")
    assert isinstance(slot, ItemSlot)
    assert slot.mapping is holder.children
    with Scope(holder, (replace_attribute(holder, "b", 20),)):
        assert holder.b == 20
        assert list(holder.children) == ["a", "b", "c"]
    with Scope(holder, (replace_attribute(holder, "b", MISSING),)):
        assert not hasattr(holder, "b")
    assert holder.children == {"a": 1, "b": 2, "c": 3}
    assert list(holder.children) == ["a", "b", "c"]
    assert attribute_slot(holder, "other").mapping is holder.__dict__


def test_items_of_layered_mappings_are_set_in_the_layer_that_is_written_to():
    table = ChainMap({}, {"x": 1})
    slot = item_slot(table, "x")
    assert slot.mapping is table.maps[0]
    assert slot.owner is table
    with Scope(None, (replace_item(table, "x", 2),)):
        assert table["x"] == 2
    assert table.maps == [{}, {"x": 1}]  # no shadow is left
    assert item_slot({"a": 1}, "a").read() == 1
    with pytest.raises(BadTargetError, match="mutable mapping"):
        item_slot((), "a")
