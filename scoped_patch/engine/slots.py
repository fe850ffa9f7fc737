"""Slots: places where something can be changed, each with an exact identity, an exact read and an exact write.

A slot never says what to write. It knows where a value is really stored, so that "what was there" can be put back bit
for bit: an inherited attribute is restored by deleting, a class attribute with its descriptor, a child module in the
mapping that holds it (which keeps the order of parameters).
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, MutableMapping
from typing import Any, Final

from .errors import BadTargetError

Place = tuple[int, Hashable]


class _Missing:
    """The value of a place that holds nothing of its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<missing>"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


class Slot(ABC):
    """One place that can be changed. Immutable; two slots are the same place when their `place` is equal.

    Attributes:
        owner: the object a reader would name (held strongly, so that the identity stays valid while it is live).
        key: the attribute name or mapping key.
        label: a dotted path for people; never used to find anything.
        place: (id of the storage, key): equal for an attribute and an item that are the same place.
    """

    __slots__ = ("key", "label", "owner", "place")

    owner: Any
    key: Hashable
    label: str
    place: Place

    def __init__(self, owner: Any, key: Hashable, label: str, storage: object) -> None:
        put = object.__setattr__
        put(self, "owner", owner)
        put(self, "key", key)
        put(self, "label", label)
        put(self, "place", (id(storage), key))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a slot is frozen; cannot set {name!r} of {self!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a slot is frozen; cannot delete {name!r} of {self!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"

    @abstractmethod
    def read(self) -> Any:
        """The raw value stored here (descriptors unbound), or MISSING."""

    @abstractmethod
    def write(self, raw: Any) -> None:
        """Store `raw`; MISSING deletes. Writing MISSING over MISSING does nothing."""

    def value_of(self, raw: Any) -> Any:
        """What a wrapper should build on when `raw` is stored here: `raw` itself, or what is inherited."""
        return raw

    def agrees(self, left: Any, right: Any) -> bool:
        """Are these the same value of this place? Identity, except where the place itself makes values anew."""
        return same(left, right)

    def current(self) -> bool:
        """Does this slot still lead to where its owner keeps the value? False once the owner has a new `__dict__`."""
        return True

    @property
    def mapping(self) -> MutableMapping[Any, Any] | None:
        """The mapping that stores this place, where there is one."""
        return None

    def forget(self) -> None:  # noqa: B027  (only properties leave something behind)
        """Called once the original is back: drop what the writes in between left behind elsewhere."""


class ItemSlot(Slot):
    """One key of a mapping: an `nn.Module._modules` entry, a registry's own dict, `os.environ`, any dict.

    Args:
        mapping: the exact mapping that stores the item. It is changed in place, key by key, never cleared. A layered
            mapping (a `ChainMap`, a registry with a local and a global part) reads through to layers that it does not
            write to: pass the layer that is written to.
        key: the key.
        label: a name for people.
        owner: the object a reader would name; the mapping itself by default.

    Raises:
        BadTargetError: not a mutable mapping, or a key that no mapping could hold.
    """

    __slots__ = ("_mapping",)
    _mapping: MutableMapping[Any, Any]

    def __init__(self, mapping: MutableMapping[Any, Any], key: Hashable, label: str = "", owner: Any = None) -> None:
        if not isinstance(mapping, MutableMapping):
            raise BadTargetError(f"an item slot needs a mutable mapping, got {type(mapping).__name__} for {label or repr(key)}")
        try:
            hash(key)
        except TypeError as error:
            raise BadTargetError(f"{key!r} cannot be a key of {type(mapping).__name__}: {error}") from error
        label = label or f"{type(mapping).__name__}[{key!r}]"
        super().__init__(mapping if owner is None else owner, key, label, mapping)
        object.__setattr__(self, "_mapping", mapping)

    @property
    def mapping(self) -> MutableMapping[Any, Any]:
        return self._mapping

    def read(self) -> Any:
        # `in` first: `[]` on a defaultdict, and `get` on mappings built over one, would create the key.
        mapping, key = self._mapping, self.key
        return mapping[key] if key in mapping else MISSING  # noqa: SIM401

    def write(self, raw: Any) -> None:
        if raw is not MISSING:
            self._mapping[self.key] = raw
        elif self.key in self._mapping:
            del self._mapping[self.key]

    def keys_before(self) -> frozenset[Hashable]:
        """The keys in front of this one, to find the position again after a deletion."""
        before: list[Hashable] = []
        for key in self._mapping:
            if key == self.key:
                break
            before.append(key)
        return frozenset(before)

    def move_behind(self, before: Collection[Hashable]) -> None:
        """Undo what delete and set did to the order: this key comes after those, and before all others.

        Only in dicts and OrderedDicts that store as such; other mappings decide on their order themselves.
        """
        mapping = self._mapping
        behind = [key for key in mapping if key not in before and key != self.key]
        if isinstance(mapping, OrderedDict):
            for key in behind:
                mapping.move_to_end(key)
        elif type(mapping).__setitem__ is dict.__setitem__ and type(mapping).__delitem__ is dict.__delitem__:
            # One call into C for each pair of pop and set: no interrupt comes between the two and loses an item.
            deque(map(mapping.__setitem__, behind, map(mapping.pop, behind)), maxlen=0)


class DictSlot(ItemSlot):
    """An attribute that lives in the owner's own `__dict__` (an instance, or a module)."""

    __slots__ = ()

    def read(self) -> Any:
        return self._mapping.get(self.key, MISSING)

    def value_of(self, raw: Any) -> Any:
        if raw is not MISSING:
            return raw
        return _inherited(self.owner, str(self.key))

    def current(self) -> bool:
        return self.owner.__dict__ is self._mapping


class ClassSlot(Slot):
    """An attribute of a class: the raw entry of its own `__dict__`, descriptor and all.

    An entry that an edit deletes comes back at the end of the class `__dict__`: Python gives no way to say where.
    """

    __slots__ = ()

    def __init__(self, owner: type, key: str, label: str) -> None:
        # A class hands out a new mappingproxy at every access, so the class itself stands for its storage.
        super().__init__(owner, key, label, owner)

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
    """An attribute behind a data descriptor of its owner's class: `__slots__`, or a property with a setter.

    A property may hand out what it was given in another form (a converted number, a copy of a list), so its values
    count as the same when they are equal.
    """

    __slots__ = ("_added", "_before", "_descriptor")
    _descriptor: Any
    _added: set[str]
    _before: frozenset[str] | None

    def __init__(self, owner: Any, key: str, label: str, descriptor: Any) -> None:
        super().__init__(owner, key, label, owner)
        if isinstance(descriptor, property) and descriptor.fset is None:
            raise BadTargetError(
                f"{label} is a read-only property of {type(owner).__name__}: patch the attribute it reads, "
                f"or the property on the class"
            )
        object.__setattr__(self, "_descriptor", descriptor)
        object.__setattr__(self, "_added", set())
        object.__setattr__(self, "_before", None)

    def read(self) -> Any:
        try:
            return self._descriptor.__get__(self.owner, type(self.owner))
        except AttributeError:
            return MISSING

    def write(self, raw: Any) -> None:
        if raw is MISSING:
            self.forget()  # a property has no deleter as a rule: without what its setter stored, it reads as before
            if self.read() is not MISSING:
                self._descriptor.__delete__(self.owner)
            return
        # A property's setter may store its value under another name: what our write adds goes with our restore.
        self._note_added()
        object.__setattr__(self, "_before", frozenset(self._own()))
        self._descriptor.__set__(self.owner, raw)
        self._note_added()

    def _note_added(self) -> None:
        if self._before is not None:
            self._added.update(set(self._own()) - self._before)
            object.__setattr__(self, "_before", None)

    def agrees(self, left: Any, right: Any) -> bool:
        if same(left, right):
            return True
        if left is MISSING or right is MISSING:
            return False
        try:
            return bool(left == right)
        except Exception:  # tensors and arrays compare element by element: not the same object, not the same value
            return False

    def forget(self) -> None:
        self._note_added()  # of a write that was interrupted
        own = self._own()
        for name in list(self._added):
            own.pop(name, None)
            self._added.discard(name)

    def _own(self) -> dict[str, Any]:
        own = getattr(self.owner, "__dict__", None)
        return own if isinstance(own, dict) else {}


# int, str and the like may be made anew at each read (`os.environ` does); their identity means nothing.
_VALUES: Final = frozenset({str, bytes, int, float, complex})


def same(left: Any, right: Any) -> bool:
    """Are these the same raw value? Bound methods are re-created at each access, so they compare by their parts."""
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is types.MethodType:
        return left.__func__ is right.__func__ and left.__self__ is right.__self__
    return kind in _VALUES and bool(left == right)


def class_entry(kind: type, name: str) -> Any:
    """The raw entry that instances of `kind` see under `name`, or MISSING; nothing is bound and nothing is called."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def _inherited(owner: Any, name: str) -> Any:
    """`owner.name` as it would read without an own entry: class attributes bound, `__getattr__` honoured."""
    raw = class_entry(type(owner), name)
    if isinstance(raw, functools.cached_property):
        return raw.func(owner)  # reading the attribute would store it in the owner
    if name not in owner.__dict__:
        return getattr(owner, name, MISSING)
    # Only while one of our edits is live: look past it, at what the class gives.
    if raw is not MISSING:
        getter = getattr(type(raw), "__get__", None)
        return raw if getter is None else getter(raw, owner, type(owner))
    try:
        if isinstance(owner, types.ModuleType):
            return owner.__dict__["__getattr__"](name)
        return type(owner).__getattr__(owner, name)
    except (AttributeError, KeyError):
        return MISSING
