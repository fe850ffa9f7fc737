"""Compare a processed shadow layer with its live layer, tensor by tensor, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from .errors import UnsupportedLayer
from .graph import reach, same_layout, storage_key
from .kinds import is_attention, is_method
from .shadow import ShadowLayer


@dataclass
class Processed:
    """What a layer's commit will exchange.

    Attributes:
        pairs: (path, live tensor, new tensor).
        scalars: (holder, key, live value, new value) of the Python numbers that processing derived from the weights.
    """

    layer: str
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]]
    scalars: list[tuple[Any, Any, Any, Any]]


def processed_state(layer: ShadowLayer, tree: Container[int]) -> Processed:
    """Pair every tensor reachable from the live layer with the new one at the same place.

    Raises:
        UnsupportedLayer: a live tensor was not made anew, or with another shape, dtype or stride, or either side hides
            state in compiled objects. The live layer is untouched.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return _processed_state(layer, tree)


def _processed_state(layer: ShadowLayer, tree: Container[int]) -> Processed:
    live, new = reach(layer.live, tree), reach(layer.shadow, tree)
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    absent: list[str] = []
    kept: list[str] = []
    problems = [f"{path} is a compiled object that may hide weights" for path in {*live.opaque, *new.opaque}]
    moving: set[int] = set()
    for path, tensor in live.tensors.items():
        other = new.tensors.get(path)
        if other is None:
            absent.append(path)
        elif other is tensor or storage_key(other) == (key := storage_key(tensor)):
            kept.append(path)
        elif tensor.numel() == 0 == other.numel():
            continue  # a weight that moved into a packed copy
        elif other.is_meta or not same_layout(other, tensor):
            problems.append(f"{path} is {_show(tensor)} in the live layer, but came out as {_show(other)}")
        else:
            pairs.append((f"{layer.name}.{path}", tensor, other))
            moving.add(key)

    def _may_be_stale(path: str) -> bool:
        # What a method or kernel object held before and holds now may have been derived from the old weights.
        tensor = live.tensors[path]
        own = re.split(r"[.\[<]", path, maxsplit=1)[0] in (layer.live._parameters | layer.live._buffers)
        return not own and not tensor.is_meta and tensor.is_floating_point() and storage_key(tensor) not in moving

    for path in absent:
        tensor = live.tensors[path]
        # A view of a tensor that is exchanged shows the new content by itself; scratch space is zero between calls.
        if storage_key(tensor) not in moving and not _is_scratch(tensor):
            problems.append(f"{path} ({_show(tensor)}) was not made anew by processing")
    if kept and is_method(layer.method) and not is_attention(layer.live):
        problems += [f"{p} ({_show(live.tensors[p])}) was kept as it was by processing" for p in kept if _may_be_stale(p)]
    scalars = []
    for path, (holder, values) in live.scalars.items():
        others = new.scalars.get(path, (None, values))[1]
        if others != values:
            changed = [k for k, v in values.items() if k in others and others[k] != v and v == v and k is not None]
            scalars += [(holder, k, values[k], others[k]) for k in changed]
            if holder is None:  # a tuple, a closure, the arguments of a partial
                problems += [
                    f"{path}{k} is {others[k]!r} now, and nothing can put that in place of {values[k]!r}" for k in changed
                ]
    if problems:
        raise UnsupportedLayer(
            f"{layer.name} ({type(layer.live).__name__}, {type(layer.method).__name__}): the new weights cannot take the "
            f"place of the live ones: {'; '.join(sorted(problems))}. Nothing was changed."
        )
    return Processed(layer.name, pairs, scalars)


def _is_scratch(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or (not tensor.is_floating_point() and not bool(tensor.any()))


def _show(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" + (
        "" if tensor.is_contiguous() else f" stride {list(tensor.stride())}"
    )
