"""Every tensor that can be reached from a layer through Python: parameters, attributes, kernels, configs, closures.

vLLM's kernels keep references of their own (a MoE kernel holds the scales it was built with, a CPU linear layer holds a
packed weight in a lambda, CUDA graphs hold addresses). A weight update that looks at parameters alone leaves them stale.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Container, Iterable, Iterator
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
        scalars: every bool, int and float by the path of its holder: (holder, {key: value}). Processing may derive some from
            weights.
        opaque: objects of compiled code that may hide tensors.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, tuple[Any, dict[Any, bool | int | float]]] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)


def reach(layer: torch.nn.Module, tree: Container[int], numbers: bool = True) -> Reached:
    """Walk from `layer`, not into other modules of the model (`tree` holds the ids of all of them).

    Args:
        numbers: fill in `scalars`, most of what there is.
    """
    out = Reached()
    tensors, scalars, roles = out.tensors, out.scalars, _roles
    seen: set[int] = {id(layer)}
    stack: list[tuple[str, str, Any, int]] = []
    groups, depth = _members_of_module(layer, ""), 1
    while True:
        for holder, before, after, items, skipped in groups:
            own: dict[Any, bool | int | float] | None = None
            for key, value in items:
                role = roles.get(type(value)) or _role(type(value))
                if role == "leaf" or key in skipped:
                    continue
                if role == "scalar":
                    if numbers:
                        if own is None:
                            own = scalars.setdefault(before, (holder, {}))[1]
                        own[key] = value
                    continue
                if role == "tensor":
                    tensors[f"{before}{key!r}]" if after == "]" else f"{before}{key}{after}"] = value
                elif id(value) in seen or id(value) in tree or depth > MAX_DEPTH:
                    continue
                else:
                    seen.add(id(value))
                    path = f"{before}{key!r}]" if after == "]" else f"{before}{key}{after}"
                    if role == "opaque":
                        out.opaque.append(path)
                    else:
                        stack.append((role, path, value, depth))
        if not stack:
            return out
        role, path, value, depth = stack.pop()
        groups, depth = _members(role, value, path), depth + 1


_roles: dict[Any, str] = {}
# Members that are reached alike: who holds them, what their paths begin and end with, (key, member), keys to leave out.
_Group = tuple[Any, str, str, Iterable[tuple[Any, Any]], Container[Any]]


def _role(kind: Any) -> str:
    """What a walk does with values of this type; asked for thousands of values of few types."""
    for role, of in (
        ("tensor", torch.Tensor),
        ("leaf", enum.Enum),
        ("scalar", _SCALARS),
        ("leaf", _LEAVES),
        ("opaque", torch.ScriptObject),
        ("module", torch.nn.Module),
        ("dict", dict),
        ("items", (list, tuple, set, frozenset)),
        ("function", types.FunctionType),
        ("bound", types.MethodType),
        ("partial", functools.partial),
    ):
        if issubclass(kind, of):
            _roles[kind] = role
            return role
    _roles[kind] = "leaf" if is_closed_kind(kind) else "object"
    return _roles[kind]


def _members(role: str, value: Any, path: str) -> list[_Group]:
    if role == "module":
        return _members_of_module(value, path)
    if role == "dict":
        return [(value, f"{path}[", "]", value.items(), ())]
    if role == "items":
        return [(value if isinstance(value, list) else None, f"{path}[", "]", enumerate(value), ())]
    if role == "function":
        return [(None, f"{path}<", ">", _captured(value), ())]
    if role == "bound":
        return [(None, f"{path}.", "", (("__self__", value.__self__),), ())]
    if role == "partial":
        return [(None, f"{path}(", ")", enumerate((value.func, *value.args, *value.keywords.values())), ())]
    slots = [(k, getattr(value, k)) for k in _slots(type(value)) if hasattr(value, k)]  # type: ignore[arg-type]
    return [(value, f"{path}.", "", getattr(value, "__dict__", {}).items(), ()), (value, f"{path}.", "", slots, ())]


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that was never filled
            continue


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    found = [(s,) if isinstance(s, str) else tuple(s) for s in (k.__dict__.get("__slots__", ()) for k in kind.__mro__)]
    return tuple(k for slots in found for k in slots if k not in ("__dict__", "__weakref__"))


def _members_of_module(module: torch.nn.Module, path: str) -> list[_Group]:
    dot = f"{path}." if path else ""
    groups: list[_Group] = [
        (None, dot, "", module._parameters.items(), ()),
        (None, dot, "", module._buffers.items(), ()),
        (module, dot, "", vars(module).items(), _MODULE_INTERNALS),
    ]
    if path:  # a module that is no part of the model's tree: a kernel object, say
        groups.append((None, dot, "", module._modules.items(), ()))
    return groups


@functools.lru_cache(maxsize=1024)
def is_closed_kind(kind: Any) -> bool:
    """Configurations, process groups and the like: shared by all layers, never part of a layer's weights."""
    return kind.__module__.startswith(_CLOSED) or any(of.__name__ == "QuantizationConfig" for of in kind.__mro__)


def holds_tensors(function: Any) -> bool:
    """Does a function capture tensors, itself or through an object in its closure?"""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return False
    captured = [value for _, value in _captured(function)]
    inner = [v for c in captured if hasattr(c, "__dict__") and not isinstance(c, type) for v in vars(c).values()]
    return any(isinstance(value, torch.Tensor) for value in (*captured, *inner))


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage while it lives, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...], torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.device == b.device


def address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The content as uint8 [bytes], in order; a copy where the tensor does not lie in memory like that."""
    out = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return out.as_strided((out.numel(),), (1,)).view(torch.uint8)  # one element is contiguous with any stride
