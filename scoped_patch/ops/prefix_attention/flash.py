"""Two calls of torch's variable-length flash kernel on CUDA: every segment with itself, and responses with their prefix.

All prefixes lie before all responses, so both calls read slices of the packed row: nothing is copied, whatever the number
of groups. The second call's result is merged by log-sum-exp; the backward hands each call the merged output and
normaliser, which makes its gradients the exact share of that call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import PrefixLayout
from .merge import merge_

_aten: Any = torch.ops.aten


def flash_problem(q: Tensor, v: Tensor, softcap: float | None, window: int | None) -> str | None:
    """Why the flash kernel cannot do this, or None."""
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}, it needs cuda"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the tensors are {q.dtype}, it needs bfloat16 or float16"
    if q.shape[-1] != v.shape[-1]:
        return f"queries and values have different head sizes ({q.shape[-1]} and {v.shape[-1]})"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"the head size is {q.shape[-1]}, it needs a multiple of 8 up to 256"
    if softcap is not None:
        return "it has no softcap"
    if window is not None:
        return "a sliding window cuts the shared prefix differently for every row"
    return None


def forward(  # GPU only
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: PrefixLayout, scale: float
) -> tuple[Tensor, Tensor]:
    """q [N, H, D], k and v [N, KV, D], sinks [H] or None -> out [N, H, D], log normaliser [H, N] fp32."""
    of_segments = layout.cumulative("segments", q.device)
    longest = layout.longest_of("segments")
    out, norm, *_ = _aten._flash_attention_forward(
        q, k, v, of_segments, of_segments, longest, longest, 0.0, True, False, scale=scale
    )
    if norm.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(
            f"prefix_attention: torch {torch.__version__} gave log normalisers {list(norm.shape)} for {q.shape[0]} rows of "
            f"{q.shape[1]} heads, wanted [heads, rows]; use backend='flex'"
        )
    norm = norm.contiguous()
    prefix, rows = _cross(layout)
    part = part_norm = None
    if rows.stop > rows.start:
        part, part_norm, *_ = _aten._flash_attention_forward(
            q[rows], k[prefix], v[prefix], *_cross_lengths(layout, q.device), 0.0, False, False, scale=scale
        )
    merge_(out, norm, part, part_norm, rows.start, sinks)
    return out, norm


def backward(  # GPU only
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, layout: PrefixLayout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_segments = layout.cumulative("segments", q.device)
    longest = layout.longest_of("segments")
    grad = grad.contiguous()
    # The kernel's dropout state, which no dropout reads.
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    grad_q, grad_k, grad_v = _aten._flash_attention_backward(
        grad, q, k, v, out, norm, of_segments, of_segments, longest, longest, 0.0, True, seed, unused, scale=scale
    )
    prefix, rows = _cross(layout)
    if rows.stop > rows.start:
        more_q, more_k, more_v = _aten._flash_attention_backward(
            grad[rows],
            q[rows],
            k[prefix],
            v[prefix],
            out[rows],
            norm[:, rows].contiguous(),
            *_cross_lengths(layout, q.device),
            0.0,
            False,
            seed,
            unused,
            scale=scale,
        )
        grad_q[rows] += more_q
        grad_k[prefix] += more_k
        grad_v[prefix] += more_v
    return grad_q, grad_k, grad_v


def _cross(layout: PrefixLayout) -> tuple[slice, slice]:  # GPU only
    return slice(0, layout.prefix_tokens), slice(layout.prefix_tokens, layout.shared_stop)


def _cross_lengths(layout: PrefixLayout, device: torch.device) -> tuple[Tensor, Tensor, int, int]:  # GPU only
    return (
        layout.cumulative("responses", device),
        layout.cumulative("prefixes", device),
        layout.longest_of("responses"),
        layout.longest_of("prefixes"),
    )
