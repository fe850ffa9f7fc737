"""One owner of every kind, fresh for each test, and a picture of all of it to compare by identity."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from typing import Any

from scoped_patch.engine import MISSING, ItemSlot, Slot, attribute_slot


class Registry:
    """Like transformers' tables: a part of the class that all share, and one of the instance that wins."""

    shared: dict[str, Any]

    def __init__(self) -> None:
        self.own: dict[str, Any] = {"mine": object()}


def make_world() -> World:
    return World()


class World:
    """Owners of every kind with some values in them.

    Attributes:
        slots: label -> slot; some hold a value of their own, some inherit, some hold nothing.
        mappings: label -> every mapping whose items and order must come back.
        classes: every class whose entries and MRO must come back.
    """

    def __init__(self) -> None:
        class Root:
            def inherited(self) -> str:
                return "inherited"

            @staticmethod
            def static(x: int) -> int:
                return x

            @classmethod
            def of_class(cls) -> type:
                return cls

        class Base(Root):
            def own(self) -> str:
                return "own"

            @property
            def computed(self) -> str:
                return "computed"

            @property
            def stored(self) -> Any:
                return self.__dict__.get("_stored", "default")

            @stored.setter
            def stored(self, value: Any) -> None:
                self.__dict__["_stored"] = value

        class Child(Base):
            pass

        class Slotted:
            __slots__ = ("empty", "full")

        self.child = Child()
        self.child.first, self.child.value, self.child.last = object(), object(), object()
        self.slotted = Slotted()
        self.slotted.full = object()
        self.module = types.ModuleType("a_module_of_the_tests")
        self.module.function, self.module.after = lambda: "function", object()
        self.plain: dict[str, Any] = {"a": object(), "b": object(), "c": object()}
        self.ordered = OrderedDict((key, object()) for key in "abc")
        self.default: defaultdict[str, list[int]] = defaultdict(list, a=[1])
        self.registry = Registry()
        Registry.shared = {"theirs": object()}
        self.classes = [Root, Base, Child, Slotted, Registry]
        self.mappings = {
            "child": self.child.__dict__,
            "module": self.module.__dict__,
            "plain": self.plain,
            "ordered": self.ordered,
            "default": self.default,
            "registry": self.registry.own,
            "shared": Registry.shared,
        }
        self.root, self.base, self.kind = Root, Base, Child
        self.slots: dict[str, Slot] = self.make_slots()

    def make_slots(self) -> dict[str, Slot]:
        Root, Base, Child = self.root, self.base, self.kind
        slots = [
            attribute_slot(self.child, "own", "child.own"),
            attribute_slot(self.child, "inherited", "child.inherited"),
            attribute_slot(self.child, "value", "child.value"),
            attribute_slot(self.child, "absent", "child.absent"),
            attribute_slot(self.child, "stored", "child.stored"),
            attribute_slot(Base, "own", "Base.own"),
            attribute_slot(Base, "computed", "Base.computed"),
            attribute_slot(Root, "static", "Root.static"),
            attribute_slot(Root, "of_class", "Root.of_class"),
            attribute_slot(Child, "of_class", "Child.of_class"),
            attribute_slot(Child, "inherited", "Child.inherited"),
            attribute_slot(self.slotted, "full", "slotted.full"),
            attribute_slot(self.slotted, "empty", "slotted.empty"),
            attribute_slot(self.module, "function", "module.function"),
            attribute_slot(self.module, "absent", "module.absent"),
            ItemSlot(self.plain, "b", "plain[b]"),
            ItemSlot(self.plain, "absent", "plain[absent]"),
            ItemSlot(self.ordered, "b", "ordered[b]"),
            ItemSlot(self.default, "absent", "default[absent]"),
            ItemSlot(self.registry.own, "mine", "registry[mine]", self.registry),
            ItemSlot(self.registry.own, "theirs", "registry[theirs]", self.registry),
        ]
        return {slot.label: slot for slot in slots}

    def storage_of(self, label: str) -> str:
        """The mapping that a place is in, as named in `mappings`; "" for classes and `__slots__`."""
        mapping = self.slots[label].mapping
        return next((name for name, other in self.mappings.items() if other is mapping), "")

    def values(self) -> dict[str, Any]:
        return {label: slot.read() for label, slot in self.slots.items()}

    def picture(self) -> dict[str, Any]:
        """Everything by identity: entries and key order of every mapping, entries, order and MRO of every class."""
        seen: dict[str, Any] = {f"{name}{{}}": _entries(mapping) for name, mapping in self.mappings.items()}
        for kind in self.classes:
            seen[f"{kind.__name__}{{}}"] = _entries(kind.__dict__)
            seen[f"{kind.__name__} mro"] = [*map(id, kind.__mro__)]
        for name in ("empty", "full"):
            seen[f"slotted.{name}"] = id(getattr(self.slotted, name, MISSING))
        return seen


def _entries(mapping: Any) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in mapping.items()]
