"""Are the modules that a patch acts on still those that the model runs? Asked at every call of the model.

A module that is replaced while a scope is open takes the patch with it, out of the model, and the new one would run without:
right by itself, and not what was asked for. So that is an error at the next call. A module that is put inside another one (an
adapter, a checkpoint or FSDP wrapper) is still there, and so is one that was only moved, or taken out and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..engine import Edit
from ..engine.errors import SeamNotReachedError
from .modules import forward_edit, module_paths, walk
from .spec import describe

RANK = 90  # outermost: before anything of the call has run

#: modules whose children are all called alike, so that one more of them would be patched like the others
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


Children = dict[str, nn.Module | None]
#: the children of a module, a name, and which one that is
Step = tuple[Children, str, nn.Module]


class Placement:
    """Where the modules that one plan acts on are in the model.

    Args:
        patch: the name of the patch.
        model: the unwrapped model.
        modules: those of it that the patch acts on; what is not in the model is left out.
        adapters: a module may come to lie inside an adapter (PEFT's `base_layer`).
    """

    def __init__(self, patch: str, model: nn.Module, modules: Iterable[nn.Module], *, adapters: bool = True) -> None:
        self.patch = patch
        self.model = model
        self.adapters = adapters
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        paths = module_paths(model)
        for module in modules:
            if id(module) in paths and module is not model:
                self.modules[id(module)] = (paths[id(module)], module)
        self._note({key: path for key, (path, _) in self.modules.items()})

    def _note(self, paths: dict[int, str]) -> None:
        """Take down each step of the way from the model to these modules."""
        self.ways = {key: self._way(path) for key, path in paths.items()}
        steps: dict[tuple[int, str], Step] = {}
        lists: dict[int, Any] = {}
        for way in self.ways.values():
            holder = self.model
            for name, child in way:
                if isinstance(holder, _LISTS):
                    lists[id(holder)] = holder._modules
                steps[id(holder), name] = (holder._modules, name, child)
                holder = child
        self.steps = tuple(steps.values())
        self.lengths = tuple((children, len(children)) for children in lists.values())

    def _way(self, path: str) -> list[tuple[str, nn.Module]]:
        way, holder = list[tuple[str, nn.Module]](), self.model
        for name in path.split("."):
            child = holder._modules[name]
            assert child is not None
            way.append((name, child))
            holder = child
        return way

    def check(self) -> None:
        """Cheap where nothing has changed: one look at each step. Nothing is looked at in code that is being compiled.

        Raises:
            SeamNotReachedError: a module was replaced by another one, or one more was put beside those of a list.
        """
        if torch.compiler.is_dynamo_compiling():
            return None
        for children, name, module in self.steps:
            if children.get(name) is not module:
                return self._changed()
        for children, length in self.lengths:
            if len(children) != length:
                return self._changed()
        return None

    def _changed(self) -> None:
        """Something was moved, wrapped, taken out, put in or replaced; the latter two are errors."""
        paths = module_paths(self.model)
        known = {id(module) for _, _, module in self.steps}
        for key, (was, module) in self.modules.items():
            now = paths.get(key)
            if now is None:
                self._refuse_replaced(key, known)
            elif now.endswith(".base_layer") and not was.endswith(".base_layer") and not self.adapters:
                raise self._error(was, module, f"was put inside an adapter ({now})")
        for children, _ in self.lengths:
            for child in children.values():
                if child is not None and not any(id(module) in known for module in walk(child)) and id(child) in paths:
                    raise self._error(paths[id(child)], child, "was put into the model")
        self._note({key: paths[key] for key in self.modules if key in paths})

    def _refuse_replaced(self, key: int, known: set[int]) -> None:
        """Raise for the outermost module on the way that has another one in its place. (Or none: it was taken out.)"""
        holder, names = self.model, list[str]()
        for name, child in self.ways.get(key, ()):
            names.append(name)
            now = holder._modules.get(name)
            if now is not child:
                if now is not None and id(now) not in known:
                    other = "another" if type(now) is type(child) else "a"
                    raise self._error(".".join(names), child, f"was replaced by {other} {type(now).__name__}")
                return
            holder = child

    def _error(self, path: str, module: nn.Module, what: str) -> SeamNotReachedError:
        return SeamNotReachedError(
            f"{self.patch}: {path} ({type(module).__name__}) of {describe(self.model)} {what} while the scope was live, and "
            f"what runs there now is not patched. Change the model first, then enter the scope (leave it and enter it again)"
        )

    def forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """For `forward_edit`: the call as it was, after a look."""
        self.check()
        return prior(*args, **kwargs)

    def edit(self) -> Edit:
        """A hidden edit that looks at every call of the model, for patches that have no edit there themselves."""
        made = forward_edit(
            self.model,
            type(self.model).__name__,
            self.forward,
            name=f"{self.patch}_model_forward",
            rank=RANK,
            reason="see whether the patched modules are still there",
            to="as before",
        )
        return replace(made, hidden=True, counter=None)
