"""Attention of one block of the matrix, forward and backward: torch's CPU kernel, or plain products in pieces.

Shapes here: queries [KV, rep, n, D] (the query heads that share a key head beside each other), keys [KV, m, D], values
[KV, m, Dv]. Both kernels return the block's own softmax and the log of its normaliser; both backwards take the output and
the normaliser of the *whole* row, which makes a block's gradient its exact share of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Block

#: scores that the plain kernel holds at once
_SCORES = 1 << 24


@dataclass(frozen=True)
class Score:
    """How a query and a key make a score: `softcap * tanh(scale * q @ k / softcap)`, within a window of positions."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class PlainKernel:
    """Matrix products in fp32 (fp64 for fp64), a piece of the queries at a time. Any device, dtype and head size."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, how: Score) -> tuple[Tensor, Tensor]:
        outs, norms = [], []
        kt, vf = _wide(k).mT, _wide(v)
        for piece, seen in _pieces(q, k, block, how):
            scores = _scores(_wide(q[:, :, piece]), kt, seen, how)[0]
            norm = scores.logsumexp(-1)
            outs.append(torch.exp(scores - norm[..., None]) @ vf[:, None])
            norms.append(norm)
        return torch.cat(outs, 2), torch.cat(norms, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, block: Block, how: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        kf, vf = _wide(k), _wide(v)
        grad_k, grad_v = torch.zeros_like(kf), torch.zeros_like(vf)
        grads_q = []
        for piece, seen in _pieces(q, k, block, how):
            qp, gp = _wide(q[:, :, piece]), _wide(grad[:, :, piece])
            scores, slope = _scores(qp, kf.mT, seen, how)
            p = torch.exp(scores - norm[:, :, piece, None])
            grad_v += (p.mT @ gp).sum(1)
            delta = (gp * _wide(out[:, :, piece])).sum(-1, keepdim=True)
            grad_s = p * (gp @ vf.mT[:, None] - delta) * how.scale
            if slope is not None:
                grad_s = grad_s * slope
            grads_q.append(grad_s @ kf[:, None])
            grad_k += (grad_s.mT @ qp).sum(1)
        return torch.cat(grads_q, 2), grad_k, grad_v


class CpuKernel:
    """torch's tiled CPU kernel. Equal head sizes of queries and values, no softcap."""

    @staticmethod
    def fits(q: Tensor, v: Tensor, how: Score) -> bool:
        return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and how.softcap is None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, how: Score) -> tuple[Tensor, Tensor]:
        causal, mask = _as_mask(q, block, how)
        out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _shared(k, q), _shared(v, q), 0.0, causal, attn_mask=mask, scale=how.scale
        )
        return out, norm

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, block: Block, how: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = _as_mask(q, block, how)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, _shared(k, q), _shared(v, q), out, norm, 0.0, causal, attn_mask=mask, scale=how.scale
        )
        return grad_q, _wide(grad_k).sum(1), _wide(grad_v).sum(1)


Kernel = PlainKernel | CpuKernel


def _shared(keys: Tensor, q: Tensor) -> Tensor:
    """Keys seen by every query head of a group, without a copy: the kernel reads them through a stride of 0."""
    return keys[:, None].expand(-1, q.shape[1], -1, -1)


def _as_mask(q: Tensor, block: Block, how: Score) -> tuple[bool, Tensor | None]:
    kind = block.kind(how.window)
    if kind != "band":
        return kind == "causal", None
    seen = block.mask(how.window, q.device)
    return False, torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))


def _pieces(q: Tensor, k: Tensor, block: Block, how: Score) -> list[tuple[slice, Tensor | None]]:
    rows, columns = q.shape[2], k.shape[1]
    step = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * columns))
    seen = None if block.kind(how.window) == "full" else block.mask(how.window, q.device)
    slices = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    return [(piece, None if seen is None else seen[piece]) for piece in slices]


def _scores(q: Tensor, kt: Tensor, seen: Tensor | None, how: Score) -> tuple[Tensor, Tensor | None]:
    """Scores [KV, rep, n, m], -inf where unseen, and the softcap's derivative."""
    scores = (q * how.scale) @ kt[:, None]
    slope = None
    if how.softcap is not None:
        t = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * t, 1 - t * t
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores, slope


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
