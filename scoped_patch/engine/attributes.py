"""From an owner and a name to the slot that holds it: where Python really stores what `owner.name` reads."""

from __future__ import annotations

import re
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, Final, TypeGuard

import wrapt

from .errors import BadTargetError
from .slots import MISSING, ClassSlot, DescriptorSlot, DictSlot, ItemSlot, Slot, class_entry

StorageFinder = Callable[[Any, str], "MutableMapping[str, Any] | None"]
_storage_finders: list[StorageFinder] = []

# Python stores these entries of a class in its __dict__ although `type` has a data descriptor for them.
_KEPT_IN_CLASS_DICT: Final = frozenset({"__doc__", "__module__", "__annotations__", "__abstractmethods__"})

# What the language looks up on the class and never on the instance: an edit of the instance would have no effect.
_BINARY: Final = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_LOOKED_UP_ON_CLASS: Final = frozenset(
    f"__{name}__"
    for name in [
        *re.findall(r"\w+", "call getitem setitem delitem missing len iter next reversed contains enter exit aenter aexit"),
        *re.findall(r"\w+", "await aiter anext hash eq ne lt le gt ge bool repr str bytes format getattr getattribute"),
        *re.findall(r"\w+", "setattr delattr get set delete del neg pos abs invert int float complex index round"),
        *re.findall(r"\w+", "trunc floor ceil"),
        *(prefix + name for name in re.findall(r"\w+", _BINARY) for prefix in ("", "r", "i")),
    ]
)
_IMMUTABLE_TYPE: Final = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def register_storage_finder(finder: StorageFinder) -> None:
    """Teach the engine about owners that keep attributes or items elsewhere than `__dict__`.

    `finder(owner, name)` returns the mapping that holds `name`, or None when this finder has nothing to say. The
    engine knows nothing of torch; the models room registers one for `nn.Module` children, parameters and buffers.
    """
    if finder not in _storage_finders:
        _storage_finders.append(finder)


def attribute_slot(owner: Any, name: str, label: str = "") -> Slot:
    """The slot of `owner.name`, wherever that attribute is really stored.

    Args:
        owner: an instance, a class or a module. A wrapt proxy stands for the object it wraps.
        name: the attribute's name (no dots).
        label: a name for people; made from the owner's type by default.

    Raises:
        BadTargetError: the owner has no place where such an attribute could be stored, or Python would never look there.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise BadTargetError(f"an attribute name must be an identifier, got {name!r} for {describe_owner(owner)}")
    owner = _behind_proxy(owner, name)
    label = label or f"{describe_owner(owner)}.{name}"
    if is_class(owner):
        return _class_slot(owner, name, label)
    for finder in _storage_finders:
        mapping = finder(owner, name)
        if mapping is not None:
            return ItemSlot(mapping, name, label, owner)
    descriptor = class_entry(type(owner), name)
    if descriptor is not MISSING and hasattr(type(descriptor), "__set__"):
        return DescriptorSlot(owner, name, label, descriptor)
    storage = getattr(owner, "__dict__", None)
    if not isinstance(storage, dict) or owner.__dict__ is not storage:
        raise BadTargetError(
            f"{label} cannot be patched on this instance: {type(owner).__name__} objects have no __dict__ that keeps "
            f"values, and no slot named {name!r}. Patch the class instead"
        )
    if name in _LOOKED_UP_ON_CLASS and not (isinstance(owner, types.ModuleType) and name == "__getattr__"):
        raise BadTargetError(
            f"{label} would have no effect on an instance: Python looks {name} up on the class. Patch the class "
            f"{type(owner).__qualname__}, or a method that {name} calls"
        )
    return DictSlot(storage, name, label, owner)


def item_slot(mapping: MutableMapping[Any, Any], key: Hashable, label: str = "") -> ItemSlot:
    """The slot of `mapping[key]`, in the layer of the mapping that is written to.

    Raises:
        BadTargetError: not a mutable mapping.
    """
    exact: MutableMapping[Any, Any] | None = None
    if isinstance(mapping, ChainMap):
        exact = mapping.maps[0]
    elif isinstance(mapping, MutableMapping) and isinstance(key, str):
        exact = next((found for finder in _storage_finders if (found := finder(mapping, key)) is not None), None)
    if exact is None:
        return ItemSlot(mapping, key, label)
    return ItemSlot(exact, key, label or f"{type(mapping).__name__}[{key!r}]", mapping)


def is_class(thing: Any) -> TypeGuard[type]:
    """Is it really a class, whatever its `__class__` says?"""
    return issubclass(type(thing), type)


def describe_owner(owner: Any) -> str:
    if is_class(owner):
        return f"{owner.__module__}.{owner.__qualname__}"
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    return f"{type(owner).__qualname__}@{id(owner):#x}"


def _class_slot(owner: type, name: str, label: str) -> Slot:
    if owner.__flags__ & _IMMUTABLE_TYPE:
        raise BadTargetError(f"{label} cannot be patched: {owner.__qualname__} is an immutable type")
    descriptor = class_entry(type(owner), name)
    if name not in _KEPT_IN_CLASS_DICT and descriptor is not MISSING and hasattr(type(descriptor), "__set__"):
        return DescriptorSlot(owner, name, label, descriptor)
    if name == "__new__" and "__new__" not in owner.__dict__ and owner.__new__ is object.__new__:  # type: ignore[comparison-overlap]
        raise BadTargetError(
            f"{label} cannot be patched and put back: once a class had a __new__, CPython refuses arguments for the "
            f"inherited one. Patch __init__ instead"
        )
    return ClassSlot(owner, name, label)


def _behind_proxy(owner: Any, name: str) -> Any:
    while isinstance(owner, wrapt.BaseObjectProxy):
        own = name.startswith("_self_") or class_entry(type(owner), name) is not MISSING
        if own and not hasattr(object, name):
            raise BadTargetError(
                f"{name!r} is the {type(owner).__qualname__}'s own, a wrapt proxy: patch its class, or what it wraps "
                f"(its __wrapped__)"
            )
        owner = owner.__wrapped__
    if type(owner) in weakref.ProxyTypes:
        raise BadTargetError(f"cannot patch {name!r} through a weak reference proxy: pass the object itself")
    return owner
