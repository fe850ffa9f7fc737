"""Every kind of place: what it reads, what it writes, and that it is again what it was."""

from __future__ import annotations

import os
from collections import ChainMap, OrderedDict, defaultdict

import pytest

from scoped_patch.engine import MISSING, Edit, EditPatch, ItemSlot, Scope, active, attribute_slot
from scoped_patch.engine.errors import BadTargetError, ForeignOverwriteError, RestoreError
from scoped_patch.engine.slots import ClassSlot, DescriptorSlot, DictSlot, same

from .world import make_world


def set_to(slot, value, **options):
    return Scope(None, (EditPatch("set", lambda _: [Edit(slot, lambda prior: value, "replace")]),), **options)


@pytest.mark.parametrize("label", make_world().slots)
def test_every_kind_reads_what_was_written_and_comes_back(label):
    world = make_world()
    slot, before = world.slots[label], world.picture()
    with set_to(slot, "new"):
        assert slot.read() == "new"
    assert world.picture() == before


@pytest.mark.parametrize("label", [label for label in make_world().slots if label != "child.stored"])
def test_every_kind_can_be_deleted_and_comes_back(label):
    world = make_world()
    slot, before = world.slots[label], world.picture()
    with set_to(slot, MISSING):
        assert slot.read() is MISSING
    after = world.picture()
    if isinstance(slot, ClassSlot):  # Python gives no way to say where in a class an entry comes back
        name = f"{slot.owner.__name__}{{}}"
        before[name], after[name] = sorted(before[name]), sorted(after[name])
    assert after == before


@pytest.mark.parametrize("label", make_world().slots)
def test_writing_missing_over_missing_does_nothing(label):
    world = make_world()
    slot = world.slots[label]
    if slot.read() is MISSING:
        before = world.picture()
        slot.write(MISSING)
        assert world.picture() == before


def test_kinds_are_told_apart():
    world = make_world()
    kinds = {label: type(slot) for label, slot in world.slots.items()}
    assert kinds["child.inherited"] is kinds["module.function"] is DictSlot
    assert kinds["Root.static"] is kinds["Base.computed"] is ClassSlot
    assert kinds["slotted.full"] is kinds["child.stored"] is DescriptorSlot
    assert kinds["registry[mine]"] is ItemSlot


def test_an_attribute_and_an_item_are_one_place_and_labels_do_not_matter():
    world = make_world()
    assert attribute_slot(world.child, "value").place == ItemSlot(world.child.__dict__, "value", "other").place
    assert attribute_slot(world.module, "function").place == ItemSlot(world.module.__dict__, "function").place
    assert attribute_slot(world.kind, "x").place == attribute_slot(world.kind, "x", "label").place
    assert attribute_slot(world.kind, "x").place != attribute_slot(world.base, "x").place


def test_a_slot_is_frozen():
    slot = attribute_slot(make_world().child, "value")
    with pytest.raises(AttributeError, match="frozen"):
        slot.key = "other"
    with pytest.raises(AttributeError, match="frozen"):
        del slot.key
    assert slot.label in repr(slot)


# ----------------------------------------------------------------------------------------------------- mappings
def test_reading_a_defaultdict_creates_nothing():
    table = defaultdict(list)
    assert ItemSlot(table, "x").read() is MISSING
    assert not table


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
def test_a_deleted_item_comes_back_where_it_was(kind):
    table = kind([("a", 1), ("b", 2), ("c", 3)])
    with set_to(ItemSlot(table, "b"), MISSING):
        assert list(table) == ["a", "c"]
        table["theirs"] = 4
    assert list(table) == ["a", "b", "c", "theirs"]
    with set_to(ItemSlot(table, "a"), MISSING):
        pass
    assert list(table) == ["a", "b", "c", "theirs"]


def test_an_item_that_an_inner_scope_put_back_for_a_while_comes_back_where_it_was():
    table = {"a": 1, "b": 2, "c": 3}
    slot = ItemSlot(table, "b")
    with set_to(slot, MISSING):
        inner = EditPatch("inner", lambda _: [Edit(slot, lambda prior: "inner", "wrap")])
        with Scope(None, (inner,)):
            assert table["b"] == "inner"
        assert "b" not in table
    assert list(table.items()) == [("a", 1), ("b", 2), ("c", 3)]


def test_a_mapping_of_its_own_kind_decides_on_its_order_itself():
    class Sorted(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            self.log.append(key)

        log: list = []

    table = Sorted(a=1, b=2)
    with set_to(ItemSlot(table, "a"), MISSING):
        pass
    assert dict(table) == {"a": 1, "b": 2}
    assert table.log == ["a"]  # one write, no rearranging through its back


def test_os_environ_makes_its_strings_anew_and_is_patched_all_the_same():
    slot = ItemSlot(os.environ, "SCOPED_PATCH_TEST_VALUE")
    with set_to(slot, "one"):
        assert os.environ["SCOPED_PATCH_TEST_VALUE"] == "one"
    assert "SCOPED_PATCH_TEST_VALUE" not in os.environ


def test_what_is_no_mutable_mapping_or_no_key_is_refused():
    with pytest.raises(BadTargetError, match="mutable mapping, got mappingproxy"):
        ItemSlot(int.__dict__, "x")
    with pytest.raises(BadTargetError, match="cannot be a key"):
        ItemSlot({}, [])


def test_a_layered_mapping_says_so_when_an_item_shines_through():
    """The layer below still shows the key that was deleted above: that is no deletion."""
    table = ChainMap({}, {"x": 1})
    slot = ItemSlot(table.maps[0], "x")
    with set_to(slot, 2):
        assert table["x"] == 2
    assert table.maps == [{}, {"x": 1}]


def test_a_mapping_that_stores_something_else_is_an_error_and_stays_known_until_it_can_be_left():
    class Upper(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, [value])

    table = Upper()
    dict.__setitem__(table, "x", "before")
    with pytest.raises(RestoreError, match=r"set to 'new' but reads \['new'\]"):
        set_to(ItemSlot(table, "x"), "new").apply()
    (left,) = active()  # it could not be put back either, so it stays known until it can
    del Upper.__setitem__
    left.restore()
    assert active() == []


# ----------------------------------------------------------------------------------------------------- properties
class Converting:
    """A property that stores under another name, in another form, and hands out copies."""

    def __init__(self):
        self._numbers = (1, 2)

    @property
    def numbers(self):
        return list(self._numbers)

    @numbers.setter
    def numbers(self, values):
        self._numbers = tuple(values)


def test_a_property_that_hands_out_copies():
    thing = Converting()
    with set_to(attribute_slot(thing, "numbers"), (3, 4)) as session:
        assert thing.numbers == [3, 4]
        assert session.records[0].value == [3, 4]  # as it reads, not as it was given
    assert thing._numbers == (1, 2)


def test_what_a_setter_stored_goes_again_unless_somebody_else_stored_it():
    class Lazy:
        @property
        def size(self):
            return self.__dict__.get("_size", 7)

        @size.setter
        def size(self, value):
            self._size = value

    thing = Lazy()
    with set_to(attribute_slot(thing, "size"), 9):
        assert thing.size == 9
    assert thing.__dict__ == {}
    session = set_to(attribute_slot(thing, "size"), 9, on_foreign="keep").apply()
    thing.size = 5
    session.restore()
    assert thing.size == 5
    session = set_to(attribute_slot(thing, "size"), 9).apply()
    thing.size = 6
    with pytest.raises(ForeignOverwriteError):
        session.restore()
    assert thing.size == 6


def test_a_property_that_cannot_be_compared():
    class Elementwise:
        def __eq__(self, other):
            raise ValueError("ambiguous")

        __hash__ = None

    class Holder:
        def __init__(self):
            self._x = Elementwise()

        x = property(lambda self: self._x, lambda self, value: setattr(self, "_x", value))

    thing = Holder()
    before, new = thing._x, Elementwise()
    with set_to(attribute_slot(thing, "x"), new):
        assert thing._x is new
    assert thing._x is before


def test_a_frozen_dataclass_with_slots():
    from dataclasses import dataclass

    @dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int

    point = Point(1, 2)
    with set_to(attribute_slot(point, "x"), 10):
        assert point == Point(10, 2)
    assert point == Point(1, 2)


# ----------------------------------------------------------------------------------------------------- inherited values
def test_a_cached_property_is_not_cached_by_looking():
    import functools

    class Thing:
        made = 0

        @functools.cached_property
        def value(self):
            Thing.made += 1
            return ["computed"]

    thing = Thing()
    slot = attribute_slot(thing, "value")
    assert slot.value_of(slot.read()) == ["computed"]
    assert thing.__dict__ == {}
    with set_to(slot, "patched"):
        assert thing.value == "patched"
    assert thing.__dict__ == {}


def test_values_from_getattr_are_built_upon_even_while_an_edit_is_live():
    class Forwarding:
        def __getattr__(self, name):
            if name.startswith("f"):
                return f"made {name}"
            raise AttributeError(name)

    thing = Forwarding()
    seen = []

    def wrap(rank):
        def make(prior):
            seen.append((rank, prior))
            return (rank, prior)

        return Scope(None, (EditPatch("w", lambda _: [Edit(attribute_slot(thing, "fast"), make, rank=rank)]),))

    with wrap(50), wrap(10):
        assert thing.fast == (50, (10, "made fast"))
    assert thing.__dict__ == {}
    assert thing.fast == "made fast"


def test_a_module_with_lazy_attributes():
    import types

    module = types.ModuleType("lazy_one")
    module.__dict__["__getattr__"] = lambda name: f"lazy {name}"
    slot = attribute_slot(module, "thing")
    with set_to(slot, "patched"):
        assert module.thing == "patched"
        assert slot.value_of(MISSING) == "lazy thing"
    assert module.thing == "lazy thing"
    assert "thing" not in module.__dict__


# ----------------------------------------------------------------------------------------------------- same
def test_same():
    class Thing:
        def method(self):
            pass

    one, two = Thing(), Thing()
    assert same(one.method, one.method)
    assert not same(one.method, two.method)
    assert same("ab" + str(1), "ab1")
    assert not same(1, True)
    assert not same(1, 1.0)
    assert not same([], [])
    assert same(MISSING, MISSING)
    assert repr(MISSING) == "<missing>"


def test_missing_survives_copies_and_pickles():
    import copy
    import pickle

    assert copy.deepcopy(MISSING) is MISSING
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING
