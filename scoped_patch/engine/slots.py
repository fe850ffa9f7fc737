"""Slots: places where something can be changed, each with an exact identity, an exact read and an exact write.

A slot never says what to write. It knows where a value is really stored, so that "what was there" can be put back bit
for bit: an inherited attribute is restored by deleting, a class attribute with its descriptor, a child module in the
mapping that holds it (which keeps the order of parameters).
"""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, Final

from .errors import BadTargetError, RestoreError

Place = tuple[int, Hashable]


class _Missing:
    """The value of a place that holds nothing of its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<missing>"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()

StorageFinder = Callable[[Any, str], "MutableMapping[str, Any] | None"]
_storage_finders: list[StorageFinder] = []


def register_storage_finder(finder: StorageFinder) -> None:
    """Teach the engine about owners that keep attributes outside `__dict__`.

    `finder(owner, name)` returns the mapping that holds `name`, or None when this finder has nothing to say. The
    engine knows nothing of torch; the models room registers one for `nn.Module` children, parameters and buffers.
    """
    if finder not in _storage_finders:
        _storage_finders.append(finder)


class Slot(ABC):
    """One place that can be changed. Immutable; two slots are the same place when their `place` is equal.

    Attributes:
        owner: the object a reader would name (held strongly, so that the identity stays valid while it is live).
        key: the attribute name or mapping key.
        label: a dotted path for people; never used to find anything.
    """

    __slots__ = ("key", "label", "owner")

    owner: Any
    key: Hashable
    label: str

    def __init__(self, owner: Any, key: Hashable, label: str) -> None:
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "label", label)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a slot is frozen; cannot set {name!r} of {self!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"

    @property
    @abstractmethod
    def place(self) -> Place:
        """(id of the storage, key): equal for an attribute and an item that are the same place."""

    @abstractmethod
    def read(self) -> Any:
        """The raw value stored here (descriptors unbound), or MISSING."""

    @abstractmethod
    def write(self, raw: Any) -> None:
        """Store `raw`; MISSING deletes. Writing MISSING over MISSING does nothing."""

    def value_of(self, raw: Any) -> Any:
        """What a wrapper should build on when `raw` is stored here: `raw` itself, or what is inherited."""
        return raw

    @property
    def mapping(self) -> MutableMapping[Any, Any] | None:
        """The mapping that stores this place, where there is one."""
        return None


class ItemSlot(Slot):
    """One key of a mapping: an `nn.Module._modules` entry, a registry's own dict, `os.environ`, any dict.

    Args:
        mapping: the exact mapping that stores the item. It is changed in place, key by key, never cleared.
        key: the key.
        label: a name for people.
        owner: the object a reader would name; the mapping itself by default.
    """

    __slots__ = ("_mapping",)
    _mapping: MutableMapping[Any, Any]

    def __init__(self, mapping: MutableMapping[Any, Any], key: Hashable, label: str = "", owner: Any = None) -> None:
        if not isinstance(mapping, MutableMapping):
            raise BadTargetError(f"an item slot needs a mutable mapping, got {type(mapping).__name__} for {label or key!r}")
        super().__init__(mapping if owner is None else owner, key, label or f"{type(mapping).__name__}[{key!r}]")
        object.__setattr__(self, "_mapping", mapping)

    @property
    def place(self) -> Place:
        return (id(self._mapping), self.key)

    @property
    def mapping(self) -> MutableMapping[Any, Any]:
        return self._mapping

    def read(self) -> Any:
        # `in` first: `[]` on a defaultdict would create the key.
        return self._mapping[self.key] if self.key in self._mapping else MISSING

    def write(self, raw: Any) -> None:
        if raw is not MISSING:
            self._mapping[self.key] = raw
        elif self.key in self._mapping:
            del self._mapping[self.key]


class DictSlot(ItemSlot):
    """An attribute that lives in the owner's own `__dict__` (an instance, or a module)."""

    __slots__ = ()

    def value_of(self, raw: Any) -> Any:
        if raw is not MISSING:
            return raw
        return _inherited(self.owner, str(self.key))


class ClassSlot(Slot):
    """An attribute of a class: the raw entry of its own `__dict__`, descriptor and all."""

    __slots__ = ()

    @property
    def place(self) -> Place:
        # A class hands out a new mappingproxy at every access, so the class itself stands for its storage.
        return (id(self.owner), self.key)

    def read(self) -> Any:
        return self.owner.__dict__.get(self.key, MISSING)

    def write(self, raw: Any) -> None:
        if raw is not MISSING:
            setattr(self.owner, str(self.key), raw)
        elif self.key in self.owner.__dict__:
            delattr(self.owner, str(self.key))

    def value_of(self, raw: Any) -> Any:
        if raw is not MISSING:
            return raw
        for base in self.owner.__mro__[1:]:
            if self.key in base.__dict__:
                return base.__dict__[self.key]
        return MISSING


class DescriptorSlot(Slot):
    """An instance attribute behind a data descriptor of its class: `__slots__`, or a property with a setter."""

    __slots__ = ("_added", "_descriptor")
    _descriptor: Any
    _added: set[str]

    def __init__(self, owner: Any, key: str, label: str, descriptor: Any) -> None:
        super().__init__(owner, key, label)
        if isinstance(descriptor, property) and descriptor.fset is None:
            raise BadTargetError(
                f"{label} is a read-only property of {type(owner).__name__}: patch the attribute it reads, "
                f"or the property on the class"
            )
        object.__setattr__(self, "_descriptor", descriptor)
        object.__setattr__(self, "_added", set())

    @property
    def place(self) -> Place:
        return (id(self.owner), self.key)

    def read(self) -> Any:
        try:
            return self._descriptor.__get__(self.owner, type(self.owner))
        except AttributeError:
            return MISSING

    def write(self, raw: Any) -> None:
        own = getattr(self.owner, "__dict__", {})
        before = set(own)
        if raw is not MISSING:
            self._descriptor.__set__(self.owner, raw)
        elif self.read() is not MISSING:
            self._descriptor.__delete__(self.owner)
        # A property's setter may store its value under another name: what our write added goes with our restore.
        added = set(own) - before
        if added:
            self._added.update(added)

    def forget_added(self) -> None:
        """Drop the instance entries that earlier writes through this slot created."""
        own = getattr(self.owner, "__dict__", {})
        for name in self._added:
            own.pop(name, None)
        self._added.clear()


def attribute_slot(owner: Any, name: str, label: str = "") -> Slot:
    """The slot of `owner.name`, wherever that attribute is really stored.

    Args:
        owner: an instance, a class or a module.
        name: the attribute's name (no dots).
        label: a name for people; made from the owner's type by default.

    Raises:
        BadTargetError: the owner has no place where such an attribute could be stored.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise BadTargetError(f"an attribute name must be an identifier, got {name!r} for {_describe_owner(owner)}")
    label = label or f"{_describe_owner(owner)}.{name}"
    if isinstance(owner, type):
        return ClassSlot(owner, name, label)
    for finder in _storage_finders:
        mapping = finder(owner, name)
        if mapping is not None:
            return ItemSlot(mapping, name, label, owner)
    descriptor = inspect.getattr_static(type(owner), name, MISSING)
    if descriptor is not MISSING and hasattr(type(descriptor), "__set__"):
        return DescriptorSlot(owner, name, label, descriptor)
    storage = getattr(owner, "__dict__", None)
    if not isinstance(storage, dict):
        raise BadTargetError(
            f"{label} cannot be patched on this instance: {type(owner).__name__} objects have no __dict__ and no slot "
            f"named {name!r}. Patch the class instead"
        )
    return DictSlot(storage, name, label, owner)


def write_exact(slot: Slot, raw: Any) -> None:
    """Write `raw` and prove by reading that it is there."""
    slot.write(raw)
    found = slot.read()
    # A property may normalise what it is given, so only a missing value counts there.
    if not same(found, raw) and not (isinstance(slot, DescriptorSlot) and found is not MISSING and raw is not MISSING):
        raise RestoreError(f"{slot.label} was set to {raw!r} but reads {found!r}")


def same(left: Any, right: Any) -> bool:
    """Are these the same raw value? Bound methods are re-created at each access, so they compare by their parts."""
    if left is right:
        return True
    if isinstance(left, types.MethodType) and isinstance(right, types.MethodType):
        return left.__func__ is right.__func__ and left.__self__ is right.__self__
    return False


def _inherited(owner: Any, name: str) -> Any:
    """`owner.name` as it would read without an own entry: class attributes bound, `__getattr__` honoured."""
    if name in owner.__dict__:
        # Only while one of our edits is live: look past it, at what the class gives.
        raw = inspect.getattr_static(type(owner), name, MISSING)
        if raw is MISSING:
            return MISSING
        getter = getattr(type(raw), "__get__", None)
        return raw if getter is None else getter(raw, owner, type(owner))
    return getattr(owner, name, MISSING)


def _describe_owner(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    return f"{type(owner).__qualname__}@{id(owner):#x}"
