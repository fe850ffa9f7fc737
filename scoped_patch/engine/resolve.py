"""From what a user names ("package.module:Class.method") to the slot that holds it."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import wrapt

from .errors import BadTargetError, TargetError
from .slots import Slot, attribute_slot


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
    except ImportError as error:
        raise TargetError(f"cannot patch {path!r}: importing {module_name!r} failed: {error}") from error
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
    found = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(module, types.ModuleType) or names is None:
            continue
        for name, other in list(names.items()):
            if other is value and (id(names), name) != slot.place:
                found.append((module, name))
    return found
