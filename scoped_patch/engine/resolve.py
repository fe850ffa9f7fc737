"""From what a user names ("package.module:Class.method") to the slot that holds it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Collection
from typing import Any

import wrapt

from .attributes import attribute_slot
from .errors import BadTargetError, TargetError
from .slots import Slot


def split_path(path: str) -> tuple[str, str]:
    """Split `"package.module:attr.path"` into its module and attribute parts.

    Raises:
        BadTargetError: the string is not of that form.
    """
    module, colon, attributes = path.partition(":")
    if not colon or not module or not attributes or not all(p.isidentifier() for p in attributes.split(".")):
        raise BadTargetError(f'a target string must look like "package.module:attr.path", got {path!r}')
    return module, attributes


def slot_from_path(path: str) -> Slot:
    """The slot that `"package.module:attr.path"` names; imports the module.

    Raises:
        BadTargetError: the string is not of that form.
        TargetError: the module cannot be imported or has no such attribute; names the module, its version and the
            nearest names that do exist.
    """
    module_name, attributes = split_path(path)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may fail in any way while it is imported
        raise TargetError(
            f"cannot patch {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        parent, name, _ = wrapt.resolve_path(module, attributes)
    except AttributeError as error:
        raise TargetError(f"cannot patch {path!r}: {missing_symbol(module, attributes)}") from error
    return attribute_slot(parent, name, f"{module_name}:{attributes}")


def missing_symbol(module: types.ModuleType, attributes: str) -> str:
    """One sentence about a symbol that is not there: where it was looked for, in which version, what is close."""
    import difflib

    where: Any = module
    for part in attributes.split("."):
        if not hasattr(where, part):
            near = difflib.get_close_matches(part, dir(where), n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            name = getattr(where, "__qualname__", getattr(where, "__name__", repr(where)))
            return f"{name} has no {part!r} in {version_of(module.__name__)}{hint}"
        where = getattr(where, part)
    return f"{attributes!r} is there but could not be resolved"


def version_of(module_name: str) -> str:
    """`"torch 2.13.0"` for any module name inside an installed package; the bare name where there is no version."""
    root = module_name.partition(".")[0]
    version = getattr(sys.modules.get(root), "__version__", None)
    return f"{root} {version}" if version else root


def aliases_of(slot: Slot, value: Any) -> list[tuple[types.ModuleType, str]]:
    """Every other module global that is this very object: `from m import f` copies that a patch of `m.f` would miss."""
    return [(m, name) for m, name in copies_by_value(value) if (id(m.__dict__), name) != slot.place]


def home_of(value: Any) -> types.ModuleType | None:
    """The module that defines `value` and holds it under its own name, or None."""
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    name = getattr(value, "__name__", None)
    if module is None or not isinstance(name, str) or module.__dict__.get(name) is not value:
        return None
    return module


def copies_by_value(value: Any, not_in: Collection[str] = ()) -> list[tuple[types.ModuleType, str]]:
    """Every module global that is this very object, but for modules of the names given."""
    found = []
    for key, module in list(sys.modules.items()):
        if key in not_in or not isinstance(module, types.ModuleType):
            continue
        found += [(module, name) for name, other in list(module.__dict__.items()) if other is value]
    return found
