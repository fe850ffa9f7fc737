"""Which layers' processing need not be watched again.

Watching takes Python code for every operator, and processing a layer is some fifty of them: together about as long as all else
that an update does to it. It is left out for a layer whose own processing was watched in an earlier update and met no live
tensor, as long as the layer is what it was then, and after another one that the very same functions process has been watched in
this update: whatever has been patched since, deep within vLLM too, meets a watcher first.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from .plans import Plans, plain
from .shadow import ShadowLayer, is_attention, is_copied

_METHOD = "process_weights_after_loading"
_Kind = tuple[Any, ...]  # types, and functions of theirs, in the order in which a layer holds them


class Familiar:
    """What was watched in one update of one model."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._kinds: set[_Kind] = set()

    def look(self, layer: ShadowLayer) -> Look | None:
        """What is about to process this layer; None: something that must be watched every time."""
        kind: list[Any] = [type(layer.live)]
        about: list[dict[str, Any]] = []
        stack, seen = [layer.shadow.__dict__], set()
        while stack:
            for value in stack.pop().values():
                of: Any = type(value)
                if not is_copied(of) or id(value) in seen or isinstance(value, torch.nn.Module):
                    continue
                seen.add(id(value))
                function = getattr(of, _METHOD, None)
                if _METHOD in value.__dict__ or not _is_own(function):
                    return None
                kind += (of, function)
                about.append(plain(value.__dict__))
                stack.append(value.__dict__)
        return None if is_attention(layer.live) else (tuple(kind), about)  # attention reads other layers

    def knows(self, layer: ShadowLayer, look: Look | None) -> bool:
        return look is not None and look[0] in self._kinds and self._plans.of(layer).watched == look

    def learn(self, layer: ShadowLayer, look: Look | None) -> None:
        """The layer's processing was watched, and met no live tensor."""
        known = self._plans.of(layer)
        if look is not None and not known.distrusted:
            self._kinds.add(look[0])
            known.watched = look


Look = tuple[_Kind, list[dict[str, Any]]]  # (kind, what the objects that process hold in numbers and names)


def _is_own(function: Any) -> bool:
    """A plain function of vLLM's. Those of others may do something else next time, by what they hold or where they look."""
    if function is None:
        return True
    return (
        type(function) is types.FunctionType
        and function.__closure__ is None
        and (function.__module__ or "").startswith("vllm.")
        and not hasattr(function, "__wrapped__")
    )
