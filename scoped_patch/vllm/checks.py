"""What is checked of a weight beyond its presence: that all of it was used, and that scales can be scales."""

from __future__ import annotations

import itertools
import logging
import math
import re

import torch

from .coverage import Box, volume
from .errors import RejectedWeight
from .kinds import is_method
from .shadow import ShadowLayer, Staged

logger = logging.getLogger("scoped_patch")
FEW = 16  # scales that are looked at one by one


def check_use(staged: Staged, name: str, weight: torch.Tensor | None, copied: list[Box], tp_size: int) -> None:
    """A weight with more rows than its place is silently cut by some loaders.

    Args:
        copied: the parts of `staged` that the loader copied the weight to.
    """
    layer = staged.owners[0][0]
    if weight is None or not is_method(layer.method) or not copied or weight.dim() > 2:
        return
    used = sum(map(volume, copied))
    parts = max(int(getattr(layer.live, "tp_size", 1) or 1), tp_size)
    if used * parts < weight.numel():
        raise RejectedWeight(
            name,
            "shape",
            f"{name}: has {weight.numel()} elements {tuple(weight.shape)}, but only {used} of them fit {staged.label}",
        )


def check_values(layer: ShadowLayer) -> None:
    """Scales must be finite, and global ones not zero: they are divisors."""
    looks: list[tuple[Staged, torch.Tensor, int]] = []  # and how many numbers of those read it takes
    read: list[torch.Tensor] = []
    for name, staged in layer.params.items():
        if "scale" in name and staged.real is not None and staged.is_floating_point and staged.sources:
            found = _look(staged.real.data, _is_divisor(staged))
            looks.append((staged, staged.real.data, sum(one.numel() for one in found)))
            read += found
    if not looks:
        return
    numbers = iter(torch.cat(read).tolist())  # at once: on a GPU every read waits for all that was asked of it before
    for staged, values, count in looks:
        few = list(itertools.islice(numbers, count))
        if not _all_good(values, few, _is_divisor(staged)):
            good = values.float().isfinite()
            if _is_divisor(staged):
                good &= values != 0
            for weight, boxes in staged.sources.items():
                if any(not bool(good[tuple(slice(*span) for span in box)].all()) for box in boxes):
                    raise RejectedWeight(weight, "non-finite", f"{weight}: holds NaN, infinity or a zero global scale")
        if staged.owners[0][1].endswith("weight_global_scale"):
            _check_spread(staged, values, few)


def _is_divisor(staged: Staged) -> bool:
    return staged.owners[0][1].endswith("global_scale")


def _look(values: torch.Tensor, divisor: bool) -> list[torch.Tensor]:
    """The numbers to judge scales by, as 1-d tensors: themselves, if few, else the ends of block scales' bytes.

    Done for every scale of a model, so cheap: in one pass, with no memory of its own.
    """
    if values.numel() <= FEW:
        return [values.reshape(-1).float()]
    if values.dtype == torch.float8_e4m3fn:  # has no infinities, and one NaN of either sign
        return [end.reshape(1) for end in values.view(torch.int8).aminmax()]
    bad = ~values.isfinite()
    return [((bad | (values == 0)) if divisor else bad).any().reshape(1)]


def _all_good(values: torch.Tensor, numbers: list[float], divisor: bool) -> bool:
    if values.numel() <= FEW:
        return all(math.isfinite(v) and not (divisor and v == 0) for v in numbers)
    if values.dtype == torch.float8_e4m3fn:
        low, high = numbers
        return high != 0x7F and (low >= 0 or int((values.view(torch.uint8) & 0x7F).max()) != 0x7F)
    return not numbers[0]


def _check_spread(staged: Staged, values: torch.Tensor, few: list[float]) -> None:
    """Fused layers keep one global scale: tell by how much the shards' own ones differ. `few`: the values, if few."""
    layer, name = staged.owners[0]
    per_expert = re.match(r"w\d", name) is not None  # w13: [experts, 2]; w2: [experts], nothing fused
    if values.numel() <= FEW and values.dim() < 2:  # a dense layer's: done for every one, so in Python
        spread = max(few) / min(few) if few and not per_expert else 1.0
    else:
        values = values.float()
        shards = values if values.dim() == 2 else values[None] if not per_expert else values[:, None]
        spread = float((shards.amax(1) / shards.amin(1)).max()) if shards.numel() else 1.0
    if spread != 1.0:
        logger.warning(
            "%s: the shards of this fused layer have different global scales (factor %.4g); vLLM takes %s for all, "
            "which distorts the others by up to that factor. Quantise fused layers with one scale.",
            layer.name,
            spread,
            "the first" if per_expert else "the largest",
        )
