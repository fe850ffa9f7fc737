"""What the leak sweep looks at: a snapshot of places that patches change, and the way back to it."""

from __future__ import annotations

import fnmatch
import gc
import sys
import types
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn

from .engine import MISSING
from .engine.slots import same

#: packages whose functions and classes are watched in the globals of their modules
PACKAGES = ("transformers", "accelerate", "peft", "trl", "vllm", "verl")
MODULES = ("torch.nn.functional", "torch.utils.checkpoint")

_REGISTRIES = (
    ("attention registry", "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("mask registry", "transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)


class Snapshot:
    """The state of everything that is watched, at one moment.

    What comes into being later (classes, instances, modules) is not compared. Values are held strongly until the snapshot is
    dropped, since they may have to be put back; the objects that hold them are not.

    Args:
        packages: more packages than `PACKAGES` whose functions and classes are watched.
        ignore: patterns (`fnmatch`) of globals, as `package.module.name`, that packages change themselves and for good.
        earlier: a snapshot since which nothing but what `restore_changes` put back was changed. Its instances are looked at
            again, without searching all of memory for others (a tenth of a second); what else did not grow is taken over.
    """

    def __init__(
        self, packages: tuple[str, ...] = (), ignore: tuple[str, ...] = (), *, earlier: Snapshot | None = None
    ) -> None:
        self.imported = frozenset(sys.modules)
        classes = list(_subclasses(nn.Module))
        self.classes = [(cls, cls.__dict__.get("forward", MISSING)) for cls in classes]
        modules = _instances(set(classes)) if earlier is None else earlier.living()
        self.instances = [
            (weakref.ref(module), module.__dict__.get("forward", MISSING), dict(module.__dict__.get("_modules") or ()))
            for module in modules
        ]
        self.registries = [(name, mapping, dict(mapping)) for name, mapping in _registries()]
        known = {} if earlier is None else {owner: (size, names) for owner, size, names in earlier.globals}
        self.globals: list[tuple[types.ModuleType, int, dict[str, Any]]] = []
        for owner in _modules((*PACKAGES, *packages)):
            size, names = known.get(owner, (-1, {}))
            if size != len(owner.__dict__):
                size, names = len(owner.__dict__), _watched(owner, ignore)
            self.globals.append((owner, size, names))

    def living(self) -> Iterator[nn.Module]:
        """The modules it knows that are still there."""
        for ref, _, _ in self.instances:
            module = ref()
            if module is not None:
                yield module

    def restore_changes(self) -> list[str]:
        """Put everything back as it was; one line for each change that was found."""
        found: list[str] = []
        paths = _Paths(self)
        for ref, forward, children in self.instances:
            module = ref()
            if module is None:
                continue
            now = module.__dict__.get("forward", MISSING)
            if not same(now, forward):
                found.append(_line(f"the forward of the instance {paths.of(module)}", forward, now, "the class's"))
                _put(module.__dict__, "forward", forward)
            found += _restore_children(module, children, paths)
        for cls, forward in self.classes:
            now = cls.__dict__.get("forward", MISSING)
            if now is not forward:
                found.append(_line(f"the forward of the class {cls.__module__}.{cls.__qualname__}", forward, now, "inherited"))
                if forward is MISSING:
                    del cls.forward
                else:
                    cls.forward = forward
        for name, mapping, items in self.registries:
            for key in [*items, *(k for k in list(mapping) if k not in items)]:
                before, now = items.get(key, MISSING), mapping.get(key, MISSING)
                # A module that was imported meanwhile may bring entries of its own.
                if now is not before and not (before is MISSING and _module_of(now) not in self.imported):
                    found.append(_line(f"the entry {key!r} of transformers' {name}", before, now, "no entry"))
                    _put(mapping, key, before)
        for owner, _, names in self.globals:
            for name, before in names.items():
                now = owner.__dict__.get(name, MISSING)
                if now is not before:
                    found.append(_line(f"the module global {owner.__name__}.{name}", before, now, "missing"))
                    _put(owner.__dict__, name, before)
        return found


class _Paths:
    """Where a module is, for people: `LlamaForCausalLM.model.layers.0.mlp`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.parents: dict[int, tuple[nn.Module, str]] | None = None

    def of(self, module: nn.Module) -> str:
        if self.parents is None:
            self.parents = {}
            for ref, _, children in self.snapshot.instances:
                parent = ref()
                if parent is not None:
                    self.parents.update((id(child), (parent, name)) for name, child in children.items() if child is not None)
        names: list[str] = []
        seen = set()
        while id(module) in self.parents and id(module) not in seen:
            seen.add(id(module))
            module, name = self.parents[id(module)]
            names.append(name)
        return ".".join([type(module).__qualname__, *reversed(names)])


def _restore_children(module: nn.Module, children: dict[str, Any], paths: _Paths) -> list[str]:
    now: dict[str, Any] = module.__dict__.get("_modules") or {}
    names = [*children, *(name for name in now if name not in children)]
    changed = [name for name in names if now.get(name, MISSING) is not children.get(name, MISSING)]
    if not changed:
        return []
    lines = [
        _line(f"the child module {paths.of(module)}.{name}", children.get(name, MISSING), now.get(name, MISSING), "missing")
        for name in changed
    ]
    # Refilled rather than set: the order of children is the order of parameters.
    now.clear()
    now.update(children)
    return lines


def _line(what: str, before: Any, now: Any, missing: str) -> str:
    return f"{what}: was {_name(before, missing)}, is {_name(now, missing)}"


def _name(value: Any, missing: str) -> str:
    if value is MISSING:
        return missing
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    name = getattr(getattr(value, "__func__", value), "__qualname__", None)
    return f"{_module_of(value)}.{name}" if name else repr(value)


def _module_of(value: Any) -> str:
    return getattr(value, "__module__", None) or type(value).__module__


def _put(mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        mapping.pop(key, None)
    else:
        mapping[key] = value


def _subclasses(root: type[nn.Module]) -> Iterator[type[nn.Module]]:
    seen, stack = {root}, [root]
    while stack:
        cls = stack.pop()
        yield cls
        for sub in type.__subclasses__(cls):
            if sub not in seen:
                seen.add(sub)
                stack.append(sub)


def _instances(classes: set[type[nn.Module]]) -> Iterator[nn.Module]:
    # type(), not isinstance(): asking a proxy what it is may do anything
    for candidate in gc.get_objects():
        if type(candidate) in classes:
            yield candidate


def _registries() -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    for name, module, attribute in _REGISTRIES:
        registry = getattr(sys.modules.get(module), attribute, None)
        for part in ("_global_mapping", "_local_mapping"):
            mapping = getattr(registry, part, None)
            if isinstance(mapping, MutableMapping):
                yield name, mapping


def _modules(packages: tuple[str, ...]) -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (name.partition(".")[0] in packages or name in MODULES):
            yield module


def _watched(module: types.ModuleType, ignore: tuple[str, ...]) -> dict[str, Any]:
    """Not the names in double underscores: they are Python's own, and those of code that a compiler puts there."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, type)
    return {
        name: value
        for name, value in list(module.__dict__.items())
        if isinstance(value, kinds)
        and not name.startswith("__")
        and not any(fnmatch.fnmatchcase(f"{module.__name__}.{name}", pattern) for pattern in ignore)
    }
