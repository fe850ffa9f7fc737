"""What a parameter's own loader does with a weight, kept from one update for the next where that is nothing but copies.

Most loaders narrow the parameter, narrow the weight, and copy one to the other. Under the recorder, which sees every operator,
that takes longer than the copy itself. A call that was seen to do no more, with nothing left behind in Python, is repeated by
its copies alone as long as all that it can depend on is what it was; any other call runs the loader.
"""

from __future__ import annotations

import enum
import fractions
import operator
import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .coverage import Box
from .shadow import ShadowLayer, Staged

_aten = torch.ops.aten
#: operators that read no element
VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)
_CONTAINERS = frozenset({list, dict, set})
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, fractions.Fraction)
#: what hands numbers to Python, or memory to others, with no operator to be seen
_HIDDEN = frozenset(
    {"tolist", "numpy", "data_ptr", "storage", "untyped_storage", "_typed_storage"}
    | {f"__{name}__" for name in ("array", "dlpack", "repr", "format", "reduce_ex", "deepcopy", "cuda_array_interface")}
)
Part = tuple[tuple[int, ...], tuple[int, ...], int] | None  # shape, stride and offset of a view, in elements; None: all
Plan = list[tuple[Part, Part, Box]]  # (place in the parameter, place in the weight, what that covers)
Key = tuple[Any, ...]


@dataclass
class _Known:
    """The calls of one layer's loaders, and what the layer was like when they were seen."""

    signature: dict[str, Any]
    plans: dict[Key, Plan]
    distrusted: bool = False
    watched: Any = None  # how it was processed when that was watched; see `familiar`
    misses: int = 0  # how often in a row nothing could be learned from it


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()


class Plans:
    """The plans of one model, checked once per layer and update against what the layer is now."""

    def __init__(self) -> None:
        self._layers: dict[ShadowLayer, _Known] = {}
        self._classes: dict[type, tuple[Any, ...]] = {}

    def get(self, layer: ShadowLayer, key: Key) -> Plan | None:
        return self.of(layer).plans.get(key)

    def distrust(self, layer: ShadowLayer) -> None:
        """One of the layer's loaders keeps books, which any other may read: from now on all of them run."""
        known = self.of(layer)
        known.distrusted = True
        known.plans.clear()
        known.watched = None

    def learn(
        self,
        layer: ShadowLayer,
        key: Key,
        trace: list[tuple[Any, Any, Any]],
        tensors: tuple[torch.Tensor, torch.Tensor],
        boxes: list[Box],
    ) -> None:
        """Note what a loader did, if it was only copies.

        Args:
            trace: its operators with their arguments, without `VIEWS`.
            tensors: the parameter and the weight.
            boxes: what each copy covered in the parameter, in order.
        """
        known = self.of(layer)
        plan = None if known.distrusted else _plan_of(trace, *tensors, boxes)
        if plan is not None:
            known.plans[key] = plan

    def of(self, layer: ShadowLayer) -> _Known:
        """What is known of the layer; forgotten when a number or name that the layer or a parameter holds has changed, or a
        method of their classes."""
        known = self._layers.get(layer)
        if known is None:
            signature: dict[str, Any] = {"": (self._methods(type(layer.live)), plain(layer.live.__dict__))}
            for name, staged in layer.params.items():
                face = staged.face(layer, name)
                about = staged.shape, staged.stride, staged.dtype
                signature[name] = (*about, self._methods(type(face)), plain(face.__dict__))
            known = _known.get(layer.live)
            if known is None or known.signature != signature:
                known = _known[layer.live] = _Known(signature, {})
            self._layers[layer] = known
        return known

    def _methods(self, kind: type) -> tuple[Any, ...]:
        """Weak references to the functions of a class of vLLM's: someone may patch what a loader calls."""
        found = self._classes.get(kind)
        if found is None:
            members = [
                (name, getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
                for of in kind.__mro__
                if not of.__module__.startswith("torch.") and of is not object
                for name, value in vars(of).items()
            ]
            found = tuple((name, weakref.ref(f)) for name, f in members if type(f) is types.FunctionType)
            self._classes[kind] = found
        return found


def key_of(staged: Staged, loader: Any, args: tuple[Any, ...]) -> Key | None:
    """What identifies the call `loader(parameter, weight[, shard])` among those of its layer, or None: run the loader."""
    if len(args) not in (2, 3) or staged.tied:
        return None
    owner, attribute = staged.owners[0]
    weight, function = args[1], getattr(loader, "__func__", loader)
    if (
        type(weight) not in (torch.Tensor, torch.nn.Parameter)
        or not (len(args) == 2 or type(args[2]) in (int, str))
        or type(function) is not types.FunctionType
        or function.__closure__ is not None
        or not _is_plain(function.__defaults__ or ())
        or function.__kwdefaults__
        # Functions of others may read numbers, or keep books elsewhere; a wrapper takes its function's names over.
        or not (function.__module__ or "").startswith("vllm.model_executor.")
        or hasattr(function, "__wrapped__")
        or getattr(loader, "__self__", owner.shadow) is not owner.shadow
        or not weight.is_contiguous()
        or not _is_plain(weight.__dict__.values())  # what the model, or the sender, has noted on it
    ):
        return None
    about = type(weight), weight.shape, weight.dtype, tuple(weight.__dict__.items())
    return attribute, function.__code__, function.__defaults__, args[2:], about


def run(plan: Plan, real: torch.Tensor, weight: torch.Tensor) -> None:
    """Repeat the copies of a loader: from `weight`, contiguous, into `real`."""
    start = weight.storage_offset()
    with torch._C._DisableTorchDispatch():
        for to, source, _ in plan:
            place = real if to is None else real.as_strided(*to)
            place.copy_(weight if source is None else weight.as_strided(source[0], source[1], start + source[2]))


class Watch(TorchFunctionMode):
    """Notes calls that read a tensor where the recorder sees none: it sees operators, and `tolist()` is none."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _HIDDEN:
            self.hidden = True
        return func(*args, **(kwargs or {}))


class Books:
    """Attributes, and the sizes of the containers among them: a loader that keeps books changes one of these."""

    def __init__(self, *holders: Any) -> None:
        self._holders = holders
        self._names, self._values, self._sizes = self._now()

    def _now(self) -> tuple[list[str], list[Any], list[int]]:
        names = [name for holder in self._holders for name in vars(holder)]
        values = [value for holder in self._holders for value in vars(holder).values()]
        return names, values, [len(v) for v in values if type(v) in _CONTAINERS]

    def same(self) -> bool:
        names, values, sizes = self._now()
        return names == self._names and sizes == self._sizes and all(map(operator.is_, values, self._values))


def _plan_of(trace: list[tuple[Any, Any, Any]], real: torch.Tensor, weight: torch.Tensor, boxes: list[Box]) -> Plan | None:
    if len(trace) != len(boxes) or not boxes:
        return None
    out: Plan = []
    for (func, args, kwargs), box in zip(trace, boxes, strict=True):
        if func is not _aten.copy_.default or kwargs or len(args) != 2:
            return None
        to, source = args
        if not _same_storage(to, real) or not _same_storage(source, weight) or source.dtype != weight.dtype:
            return None
        offset = source.storage_offset() - weight.storage_offset()
        last = offset + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
        if to.dtype != real.dtype or not source.numel() or offset < 0 or last >= weight.numel():
            return None  # another weight of the same bucket, say
        place = tuple(to.shape), to.stride(), int(to.storage_offset())
        part = tuple(source.shape), source.stride(), int(offset)
        everything = tuple(real.shape), real.stride(), 0
        whole = tuple(weight.shape), weight.stride(), 0
        out.append((None if place == everything else place, None if part == whole else part, box))
    return out


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """What a loader may decide by: numbers, names, containers of them, and those within small objects (shard indices)."""
    out: dict[str, Any] = {}
    for key, value in attributes.items():
        kind = _kinds.get(type(value)) or _kind(type(value))
        if kind == "plain":
            out[key] = value
        elif kind == "list":
            if _is_plain(value):
                out[key] = tuple(value)
        elif kind == "set":
            if _is_plain(value):
                out[key] = frozenset(value)
        elif kind == "dict":
            if _is_plain(value.values()):
                out[key] = tuple(value.items())
        elif kind == "data":
            out[key] = {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, _PLAIN)}
    return out


_kinds: dict[Any, str] = {}


def _kind(of: Any) -> str:
    """How `plain` takes values of this type; asked for thousands of values of few types."""
    kinds = {list: "list", tuple: "list", torch.Size: "list", set: "set", dict: "dict"}
    _kinds[of] = "plain" if issubclass(of, _PLAIN) else kinds.get(of, "data" if is_dataclass(of) else "other")
    return _kinds[of]


def _is_plain(values: Iterable[Any]) -> bool:
    return all((_kinds.get(type(value)) or _kind(type(value))) == "plain" for value in values)
