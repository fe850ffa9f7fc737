"""The attention of a packed row, block by block: each kernel call sees one segment, or all responses and their prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Kernel, Score
from .layout import PrefixLayout


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: PrefixLayout, how: Score, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """q [H, N, D], k [KV, N, D], v [KV, N, Dv], sinks [H] or None -> out [H, N, Dv], log normaliser [H, N] (fp32 or fp64)."""
    heads, tokens = q.shape[:2]
    grouped = _grouped(q, k)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*grouped.shape[:3], v.shape[-1], dtype=wide)
    norm = q.new_empty(grouped.shape[:3], dtype=wide)
    begun = 0
    for block in layout.blocks(how.window):
        rows, columns = slice(*block.queries), slice(*block.keys)
        part, part_norm = kernel.forward(grouped[:, :, rows], k[:, columns], v[:, columns], block, how)
        if block.queries[0] >= begun:
            out[:, :, rows], norm[:, :, rows] = part, part_norm
            begun = block.queries[1]
            continue
        total = torch.logaddexp(norm[:, :, rows], part_norm)
        out[:, :, rows] *= torch.exp(norm[:, :, rows] - total)[..., None]
        out[:, :, rows] += part * torch.exp(part_norm - total)[..., None]
        norm[:, :, rows] = total
    out, norm = out.view(heads, tokens, -1), norm.view(heads, tokens)
    if sinks is not None:
        # A sink takes its share of the softmax and gives nothing.
        total = torch.logaddexp(norm, sinks.to(wide)[:, None])
        out, norm = out * torch.exp(norm - total)[..., None], total
    return out.to(q.dtype), norm


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, layout: PrefixLayout, how: Score, kernel: Kernel
) -> tuple[Tensor, Tensor, Tensor]:
    grouped, grad, out = _grouped(q, k), _grouped(grad, k), _grouped(out, k)
    norm = norm.view(grouped.shape[:3])
    wide = norm.dtype
    grad_q = torch.zeros(grouped.shape, dtype=wide, device=q.device)
    grad_k, grad_v = torch.zeros(k.shape, dtype=wide, device=k.device), torch.zeros(v.shape, dtype=wide, device=v.device)
    for block in layout.blocks(how.window):
        rows, columns = slice(*block.queries), slice(*block.keys)
        found = kernel.backward(
            grad[:, :, rows],
            grouped[:, :, rows],
            k[:, columns],
            v[:, columns],
            out[:, :, rows],
            norm[:, :, rows],
            block,
            how,
        )
        grad_q[:, :, rows] += found[0]
        grad_k[:, columns] += found[1]
        grad_v[:, columns] += found[2]
    return grad_q.view(q.shape).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """[H, N, D] -> [KV, H / KV, N, D]: a view."""
    return q.view(k.shape[0], -1, *q.shape[1:])
