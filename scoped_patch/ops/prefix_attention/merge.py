"""Merging two partial softmaxes of the same rows, in place: one Triton kernel on CUDA, torch elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def merge_(out: Tensor, norm: Tensor, part: Tensor | None, part_norm: Tensor | None, start: int, sinks: Tensor | None) -> None:
    """Fold a second partial result, and then the sinks, into the first.

    Args:
        out: [N, H, D], changed in place.
        norm: [H, N] fp32 log normalisers, changed in place.
        part, part_norm: [n, H, D] and [H, n], for the rows that begin at `start`; or None.
        sinks: [H] or None: a score that takes its share of every row's softmax and gives nothing.
    """
    if part is not None and part_norm is not None:
        rows = slice(start, start + part.shape[0])
        kernel = _kernel() if out.device.type == "cuda" else None
        if kernel is not None and part.is_contiguous() and out.is_contiguous() and part_norm.is_contiguous():
            kernel(out[rows], norm, part, part_norm, start)
        else:
            before = norm[:, rows]
            total = torch.logaddexp(before, part_norm)
            kept, added = torch.exp(before - total).mT[..., None], torch.exp(part_norm - total).mT[..., None]
            out[rows] = (out[rows] * kept + part * added).to(out.dtype)
            norm[:, rows] = total
    if sinks is not None:
        total = torch.logaddexp(norm, sinks.to(norm.dtype)[:, None])
        out.mul_(torch.exp(norm - total).mT[..., None])
        norm.copy_(total)


@functools.cache
def _kernel() -> Any:  # GPU only
    """The launcher, or None without triton."""
    try:
        import triton
    except ImportError:
        return None
    from .merge_triton import merge_kernel

    def launch(out: Tensor, norm: Tensor, part: Tensor, part_norm: Tensor, start: int) -> None:
        rows, heads, size = part.shape
        block = 64
        # Triton launches on the current device, whatever it is given.
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            merge_kernel[(triton.cdiv(rows, block), heads)](
                out,
                norm,
                part,
                part_norm,
                start,
                rows,
                norm.stride(0),
                part_norm.stride(0),
                heads,
                size,
                triton.next_power_of_2(size),
                block,
            )

    return launch
