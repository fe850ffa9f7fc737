"""Every tensor that can be reached from a layer through Python: parameters, attributes, kernels, configs, closures.

vLLM's kernels keep references of their own (a MoE kernel holds the scales it was built with, a CPU linear layer holds a
packed weight in a lambda, CUDA graphs hold addresses). A weight update that looks at parameters alone leaves them stale.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_DEPTH = 8
_LEAVES = (str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, enum.Enum)
_SCALARS = (bool, int, float)
# Objects that describe and never hold weights; walking them reaches the whole engine.
_CLOSED = ("torch", "transformers", "vllm.config", "vllm.distributed", "vllm.platforms", "vllm.logger", "vllm.v1.kv_cache")
_MODULE_INTERNALS = frozenset(
    {"_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training", "_is_full_backward_hook"}
    | {k for k in torch.nn.Module().__dict__ if "hook" in k}
)


@dataclass
class Reached:
    """What a walk found, by path from the layer.

    Attributes:
        tensors: every tensor.
        scalars: every bool, int and float, with its holder and key: processing may derive some from weights.
        opaque: objects of compiled code that may hide tensors.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, tuple[Any, Any, bool | int | float]] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)


def reach(layer: torch.nn.Module, tree: Container[int]) -> Reached:
    """Walk from `layer`, not into other modules of the model (`tree` holds the ids of all of them)."""
    out = Reached()
    seen: set[int] = {id(layer)}
    stack: list[tuple[str, Any, Any, Any, int]] = [
        (name, holder, key, value, 1) for name, holder, key, value in _members_of_module(layer, "")
    ]
    while stack:
        path, holder, key, value, depth = stack.pop()
        of: Any = type(value)
        kind = _role(of)
        if kind == "leaf":
            continue
        if kind == "tensor":
            out.tensors[path] = value
            continue
        if kind == "scalar":
            out.scalars[path] = (holder, key, value)
            continue
        if id(value) in seen or id(value) in tree or depth > MAX_DEPTH:
            continue
        seen.add(id(value))
        if kind == "opaque":
            out.opaque.append(path)
            continue
        stack += [(*member, depth + 1) for member in _members(value, path)]
    return out


@functools.cache
def _role(kind: Any) -> str:
    """What a walk does with values of this type; asked for thousands of values of few types."""
    for role, of in (("tensor", torch.Tensor), ("leaf", enum.Enum), ("scalar", _SCALARS), ("leaf", _LEAVES)):
        if issubclass(kind, of):
            return role
    return "opaque" if issubclass(kind, torch.ScriptObject) else "inner"


def _members(value: Any, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from _members_of_module(value, path)
    elif isinstance(value, dict):
        for k, v in value.items():
            yield f"{path}[{k!r}]", value, k, v
    elif isinstance(value, (list, tuple, set, frozenset)):
        for i, v in enumerate(value):
            yield f"{path}[{i}]", value if isinstance(value, list) else None, i, v
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"{path}<{name}>", None, None, cell.cell_contents
            except ValueError:  # a cell that was never filled
                continue
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", None, None, value.__self__
    elif isinstance(value, functools.partial):
        for i, v in enumerate((value.func, *value.args, *value.keywords.values())):
            yield f"{path}({i})", None, None, v
    elif not is_closed(value):
        for k, v in vars(value).items() if hasattr(value, "__dict__") else ():
            yield f"{path}.{k}", value, k, v
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for k in (slots,) if isinstance(slots, str) else slots:
                if k not in ("__dict__", "__weakref__") and hasattr(value, k):
                    yield f"{path}.{k}", value, k, getattr(value, k)


def _members_of_module(module: torch.nn.Module, path: str) -> Iterator[tuple[str, Any, Any, Any]]:
    dot = f"{path}." if path else ""
    for table in (module._parameters, module._buffers):
        for k, v in table.items():
            yield f"{dot}{k}", None, None, v
    for k, v in vars(module).items():
        if k not in _MODULE_INTERNALS:
            yield f"{dot}{k}", module, k, v
    if path:  # a module that is no part of the model's tree: a kernel object, say
        for k, child in module._modules.items():
            yield f"{dot}{k}", None, None, child


def is_closed(value: Any) -> bool:
    """Configurations, process groups and the like: shared by all layers, never part of a layer's weights."""
    module = type(value).__module__
    if module.startswith(_CLOSED):
        return True
    return any(kind.__name__ == "QuantizationConfig" for kind in type(value).__mro__)


def holds_tensors(function: Any) -> bool:
    """Does a function capture tensors, itself or through an object in its closure?"""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return False
    captured = [value for _, _, _, value in _members(function, "")]
    inner = [v for c in captured if hasattr(c, "__dict__") and not isinstance(c, type) for v in vars(c).values()]
    return any(isinstance(value, torch.Tensor) for value in (*captured, *inner))


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage while it lives, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...], torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device
