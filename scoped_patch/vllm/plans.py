"""What a parameter's own loader does with a weight, kept from one update for the next where that is nothing but copies.

Most loaders narrow the parameter, narrow the weight, and copy one to the other. Under the recorder, which sees every operator,
that takes longer than the copy itself. A call that was seen to do no more, with nothing left behind in Python, is repeated by
its copies alone as long as all that it can depend on is what it was; any other call runs the loader.
"""

from __future__ import annotations

import operator
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch

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
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
Part = tuple[tuple[int, ...], tuple[int, ...], int] | None  # shape, stride and offset of a view, in elements; None: all
Plan = list[tuple[Part, Part, Box]]  # (place in the parameter, place in the weight, what that covers)
Key = tuple[Any, ...]


@dataclass
class _Known:
    """The calls of one layer's loaders, and what the layer was like when they were seen."""

    signature: dict[str, Any]
    plans: dict[Key, Plan]


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()


class Plans:
    """The plans of one model, checked once per layer and update against what the layer is now."""

    def __init__(self) -> None:
        self._layers: dict[ShadowLayer, dict[Key, Plan]] = {}

    def get(self, layer: ShadowLayer, key: Key) -> Plan | None:
        return self._of(layer).get(key)

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
        plan = _plan_of(trace, *tensors, boxes)
        if plan is not None:
            self._of(layer)[key] = plan

    def _of(self, layer: ShadowLayer) -> dict[Key, Plan]:
        """The layer's plans; forgotten when a number or name that the layer or a parameter holds has changed."""
        plans = self._layers.get(layer)
        if plans is None:
            signature: dict[str, Any] = {"": _plain(layer.live.__dict__)}
            for name, staged in layer.params.items():
                face = staged.face(layer, name)
                signature[name] = (staged.shape, staged.stride, staged.dtype, _plain(face.__dict__))
            known = _known.get(layer.live)
            if known is None or known.signature != signature:
                known = _known[layer.live] = _Known(signature, {})
            plans = self._layers[layer] = known.plans
        return plans


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
        or not function.__module__.startswith("vllm.model_executor.")  # others may read numbers, or keep books elsewhere
        or getattr(loader, "__self__", owner.shadow) is not owner.shadow
        or not weight.is_contiguous()
    ):
        return None
    return attribute, function.__code__, args[2:], weight.shape, weight.dtype


def run(plan: Plan, real: torch.Tensor, weight: torch.Tensor) -> None:
    """Repeat the copies of a loader: from `weight`, contiguous, into `real`."""
    start = weight.storage_offset()
    with torch._C._DisableTorchDispatch():
        for to, source, _ in plan:
            place = real if to is None else real.as_strided(*to)
            place.copy_(weight if source is None else weight.as_strided(source[0], source[1], start + source[2]))


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


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v if isinstance(v, _PLAIN) else tuple(v)
        for k, v in attributes.items()
        if isinstance(v, _PLAIN) or (type(v) in (list, tuple) and all(isinstance(x, _PLAIN) for x in v))
    }
