"""cuDNN's attention on CUDA, a call per run of equal segments and one per run of equal groups, merged by log-sum-exp.

On Hopper it is faster than torch's variable-length flash kernel. It builds a plan for every new shape, so it pays where
lengths repeat. Nothing is copied: runs of equal segments are views of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .layout import PrefixLayout
from .merge import merge_

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Run:
    """`count` blocks of one shape that lie behind each other: queries from `rows` on, keys from `columns` on."""

    count: int
    rows: int
    row_length: int
    columns: int
    column_length: int
    causal: bool

    @property
    def row_slice(self) -> slice:
        return slice(self.rows, self.rows + self.count * self.row_length)

    @property
    def column_slice(self) -> slice:
        return slice(self.columns, self.columns + self.count * self.column_length)


#: shorter segments are refused: cuDNN has no plan for one token, and crashed at some lengths below a tile
SHORTEST = 64


def cudnn_problem(q: Tensor, v: Tensor, layout: PrefixLayout, softcap: float | None, window: int | None) -> str | None:
    """Why cuDNN's attention cannot do this, or None."""
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}, it needs cuda"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the tensors are {q.dtype}, it needs bfloat16 or float16"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"the head sizes are {q.shape[-1]} and {v.shape[-1]}, it needs equal ones, a multiple of 8 up to 128"
    if softcap is not None or window is not None:
        return "it has no softcap, and no window over a shared prefix"
    shortest = min((min(run.row_length, run.column_length) for run in runs(layout)), default=SHORTEST)
    if shortest < SHORTEST:
        return f"a segment has {shortest} tokens, it needs {SHORTEST}"
    return None


def pays(q: Tensor, layout: PrefixLayout) -> bool:
    """Is this faster than torch's flash kernel? On Hopper and later, where there is much to do in few shapes.

    A new shape costs about 0.1 s of planning, once per process; what a call saves was measured on an H200.
    """
    found = runs(layout)
    shapes = {(run.count, run.row_length, run.column_length, run.causal) for run in found}
    pairs = sum(run.count * run.row_length * run.column_length // (2 if run.causal else 1) for run in found)
    return len(shapes) <= 3 and pairs * q.shape[1] >= 5e8 and torch.cuda.get_device_capability(q.device)[0] >= 9


def runs(layout: PrefixLayout) -> tuple[Run, ...]:
    """Every segment with itself, then all responses of each group with their prefix; neighbours of one shape together."""
    return layout.remember("runs", torch.device("cpu"), lambda: _runs(layout))


def _runs(layout: PrefixLayout) -> tuple[Run, ...]:
    own = [*layout.prefix_bounds, *(r for group in layout.response_bounds for r in group)]
    found = [
        Run(len(same), same[0][0], length, same[0][0], length, True)
        for length, same in _neighbours([one for one in own if one[1] > one[0]], lambda one: one[1] - one[0])
    ]
    groups = [
        (group[0][0], group[-1][1] - group[0][0], prefix[0], prefix[1] - prefix[0]) if group else (0, 0, 0, 0)
        for prefix, group in zip(layout.prefix_bounds, layout.response_bounds, strict=True)
    ]
    # A group with nothing to ask or nothing to see has no call, and keeps its neighbours apart: their keys do not adjoin.
    for (rows, columns), same in _neighbours(groups, lambda one: (one[1], one[3])):
        if rows and columns:
            found.append(Run(len(same), same[0][0], rows, same[0][2], columns, False))
    return tuple(found)


def _neighbours(items: Sequence[Any], shape: Any) -> list[tuple[Any, list[Any]]]:
    return [(key, list(same)) for key, same in groupby(items, shape)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: PrefixLayout, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [N, H, D], k and v [N, KV, D] -> out [N, H, D], log normaliser [H, N] fp32, and cuDNN's two random states."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    norm = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    seed = offset = q.new_zeros((), dtype=torch.int64)
    for run in runs(layout):
        part, part_norm, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            _batched(q, run.row_slice, run.count),
            _batched(k, run.column_slice, run.count),
            _batched(v, run.column_slice, run.count),
            None,
            True,
            0.0,
            run.causal,
            False,
            scale=scale,
        )
        part = part.transpose(1, 2).reshape(-1, *q.shape[1:])
        part_norm = part_norm.reshape(run.count, q.shape[1], run.row_length).transpose(0, 1).reshape(q.shape[1], -1)
        if run.causal:
            out[run.row_slice], norm[:, run.row_slice] = part, part_norm
        else:
            merge_(out, norm, part.contiguous(), part_norm.contiguous(), run.rows, None)
    merge_(out, norm, None, None, 0, sinks)
    return out, norm, seed, offset


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norm: Tensor,
    states: tuple[Tensor, Tensor],
    layout: PrefixLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v: each call is given the merged output and normaliser of its rows."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    grad = grad.contiguous()
    for run in runs(layout):
        rows, columns = run.row_slice, run.column_slice
        batched_norm = norm[:, rows].reshape(q.shape[1], run.count, run.row_length).transpose(0, 1)
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            _batched(grad, rows, run.count),
            _batched(q, rows, run.count),
            _batched(k, columns, run.count),
            _batched(v, columns, run.count),
            _batched(out, rows, run.count),
            batched_norm[..., None].contiguous(),
            *states,
            None,
            None,
            None,
            run.row_length,
            run.column_length,
            0.0,
            run.causal,
            scale=scale,
        )
        for whole, part, where in zip(grads, found, (rows, columns, columns), strict=True):
            part = part.transpose(1, 2).reshape(-1, *whole.shape[1:])
            if run.causal:
                whole[where] = part
            else:
                whole[where] += part
    return grads[0], grads[1], grads[2]


def _batched(x: Tensor, rows: slice, count: int) -> Tensor:
    """[N, H, D] -> [count, H, n, D]: a view."""
    return x[rows].unflatten(0, (count, -1)).transpose(1, 2)  # type: ignore[no-untyped-call,no-any-return]
