"""What is checked of a weight beyond its presence: that all of it was used, and that scales can be scales."""

from __future__ import annotations

import logging
import math
import re

import torch

from .coverage import Box, volume
from .errors import RejectedWeight
from .shadow import Staged, is_method

logger = logging.getLogger("scoped_patch")


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


def check_values(staged: Staged) -> None:
    """Scales must be finite, and global ones not zero: they are divisors."""
    real = staged.real
    name = staged.owners[0][1]
    if real is None or "scale" not in name or not real.is_floating_point() or not staged.sources:
        return
    divisor = name.endswith("global_scale")
    few = _few_numbers(real.data)  # read once: on a GPU every look waits for it
    if not _all_good(real.data, few, divisor):
        good = real.data.float().isfinite()
        if divisor:
            good &= real.data != 0
        for weight, boxes in staged.sources.items():
            if any(not bool(good[tuple(slice(*span) for span in box)].all()) for box in boxes):
                raise RejectedWeight(weight, "non-finite", f"{weight}: holds NaN, infinity or a zero global scale")
    if name.endswith("weight_global_scale"):
        _check_spread(staged, real.data, few)


def _few_numbers(values: torch.Tensor) -> list[float] | None:
    return values.reshape(-1).tolist() if values.numel() <= 16 else None


def _all_good(values: torch.Tensor, few: list[float] | None, divisor: bool) -> bool:
    """Done for every scale of a model, so cheap: block scales are looked at as bytes, a few numbers in Python."""
    if few is not None:
        return all(math.isfinite(v) and not (divisor and v == 0) for v in few)
    if values.dtype == torch.float8_e4m3fn:  # has no infinities, and one NaN of either sign
        low, high = torch.stack(values.view(torch.int8).aminmax()).tolist()  # in one pass, with no memory of its own
        return high != 0x7F and (low >= 0 or int((values.view(torch.uint8) & 0x7F).max()) != 0x7F)
    return bool(values.isfinite().all()) and not (divisor and bool((values == 0).any()))


def _check_spread(staged: Staged, values: torch.Tensor, few: list[float] | None) -> None:
    """Fused layers keep one global scale: tell by how much the shards' own ones differ."""
    layer, name = staged.owners[0]
    per_expert = re.match(r"w\d", name) is not None  # w13: [experts, 2]; w2: [experts], nothing fused
    if few is not None and values.dim() < 2:  # a dense layer's: done for every one, so in Python
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
