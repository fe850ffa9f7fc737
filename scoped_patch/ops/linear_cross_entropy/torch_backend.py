"""The fused head in plain torch: blocks of the vocabulary, one alive at a time, on any device.

Forward and backward walk the vocabulary in blocks over all rows. The forward merges the blocks' softmax statistics; the
backward computes each block's logits again, writes that block of the weight's gradient once and adds to the hidden states'
gradient in fp32, so no error grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import VERY_LOW, Head, Rows


@dataclass
class Stats:
    """Per row, over the whole vocabulary: what the outputs and the backward are made from."""

    lse: Tensor  # [N] log of the sum of exponentials
    label_logit: Tensor  # [N]
    top_logit: Tensor  # [N]
    entropy: Tensor | None
    sum_sq_probs: Tensor | None
    topk_logits: Tensor | None  # [N, K]


@dataclass
class RowGrads:
    """Upstream gradients per row, None where nothing flows."""

    log_probs: Tensor | None  # [N]
    entropy: Tensor | None
    sum_sq_probs: Tensor | None
    topk_log_probs: Tensor | None  # [N, K]


class _Blocks:
    """Logits of one vocabulary block at a time, divided by the temperature, in the statistics' dtype."""

    def __init__(self, head: Head, rows: Rows, budget: int, buffers: int) -> None:
        self.head, self.rows = head, rows
        self.n = rows.hidden.shape[0]
        self.vocab = head.weight.shape[0]
        self.dtype = head.stat_dtype
        # The CPU has no half-precision product with an fp32 result; upcasting keeps fp32 logits there.
        self.mixed = head.compute_dtype != self.dtype and head.weight.is_cuda and _has_out_dtype()
        self.gemm_dtype = head.compute_dtype if self.mixed else self.dtype
        self.hidden = rows.hidden.to(self.gemm_dtype)
        self.extra_hidden = rows.extra_hidden.to(self.gemm_dtype) if rows.extra_hidden is not None else None
        per_column = max(1, self.n) * self.dtype.itemsize * (buffers + (head.softcap is not None))
        width = min(self.vocab, max(64, budget // per_column))
        count = -(-self.vocab // width)
        # Blocks of equal width, whole cache lines wide, leave no thin last product.
        self.width = min(self.vocab, -(-(-(-self.vocab // count)) // 64) * 64)
        self._buffers = [rows.hidden.new_empty(self.n * self.width, dtype=self.dtype) for _ in range(buffers)]
        self.slope: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for low in range(0, self.vocab, self.width):
            yield low, min(self.vocab, low + self.width)

    def buffer(self, which: int, width: int) -> Tensor:
        return self._buffers[which][: self.n * width].view(self.n, width)

    def weight(self, low: int, high: int) -> Tensor:
        return self.head.weight[low:high].to(self.gemm_dtype)

    def extra_weight(self, low: int, high: int) -> Tensor | None:
        extra = self.head.extra_weight
        return None if extra is None else extra[low:high].to(self.gemm_dtype)

    def logits(self, low: int, high: int, weight: Tensor, slope: bool = False) -> Tensor:
        """[N, high - low]; with `slope`, `self.slope` becomes the softcap's derivative there."""
        head = self.head
        z = self.buffer(0, high - low)
        matmul_into(z, self.hidden, weight.t())
        extra = self.extra_weight(low, high)
        if extra is not None and self.extra_hidden is not None:
            matmul_into(z, self.extra_hidden, extra.t(), accumulate=True)
        if head.bias is not None:
            z.add_(head.bias[low:high].to(self.dtype))
        if head.logit_scale != 1.0:
            z.mul_(head.logit_scale)
        if head.softcap is not None:
            z.div_(head.softcap).tanh_()
            self.slope = torch.addcmul(z.new_ones(()), z, z, value=-1) if slope else None
            z.mul_(head.softcap)
        temperature = self.rows.temperature.to(self.dtype)
        return z.div_(temperature if temperature.ndim == 0 else temperature[:, None])

    def local(self, labels: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Columns of the labels within the block (clamped), and which of them are in it. Same shape as `labels`."""
        column = labels - (self.head.vocab_start + low)
        return column.clamp(0, high - low - 1), (column >= 0) & (column < high - low)


def _has_out_dtype() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, accumulate: bool = False) -> None:
    """out (+)= a @ b, summed in out's precision where the device can."""
    if out.dtype == a.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif a.is_cuda and _has_out_dtype() and out.dtype == torch.float32:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        product = torch.mm(a.to(out.dtype), b.to(out.dtype))
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)


def forward(head: Head, rows: Rows, budget: int, entropy: bool, sum_sq: bool, topk: Tensor | None) -> Stats:
    """Softmax statistics of every row over this process's vocabulary rows, one block of logits at a time."""
    blocks = _Blocks(head, rows, budget, buffers=2 if entropy or sum_sq else 1)
    zeros = rows.hidden.new_zeros(blocks.n, dtype=blocks.dtype)
    top, total, label_logit = zeros + VERY_LOW, zeros, zeros
    centred, squares = zeros, zeros  # sum of e*(z - top), sum of e*e
    topk_logits = zeros.new_zeros(topk.shape) if topk is not None else None
    for low, high in blocks:
        z = blocks.logits(low, high, blocks.weight(low, high))
        column, here = blocks.local(rows.labels, low, high)
        label_logit = torch.where(here, z.gather(1, column[:, None]).squeeze(1), label_logit)
        if topk is not None and topk_logits is not None:
            column, here = blocks.local(topk, low, high)
            topk_logits = torch.where(here, z.gather(1, column), topk_logits)
        new_top = torch.maximum(top, z.amax(1))
        step = top - new_top
        decay = step.exp()
        z.sub_(new_top[:, None])
        if entropy:
            if head.bias is not None:  # only a bias can be -inf, and 0 * inf is NaN
                z.clamp_(min=VERY_LOW)
            e = torch.exp(z, out=blocks.buffer(1, high - low))
            centred = decay * (centred + total * step) + torch.linalg.vecdot(e, z)
        else:
            e = z.exp_()
        if sum_sq:
            squares = decay * decay * squares + torch.linalg.vecdot(e, e)
        total = decay * total + e.sum(1)
        top = new_top
    return merge(head, top, total, centred if entropy else None, squares if sum_sq else None, label_logit, topk_logits)


def merge(
    head: Head,
    top: Tensor,
    total: Tensor,
    centred: Tensor | None,
    squares: Tensor | None,
    label_logit: Tensor,
    topk_logits: Tensor | None,
) -> Stats:
    """Statistics from running sums, over the processes of the head's group where there is one."""
    if head.group_name:
        from .vocab_parallel import merge_over_group

        top, total, centred, squares, label_logit, topk_logits = merge_over_group(
            head.group_name, top, total, centred, squares, label_logit, topk_logits
        )
    log_total = total.log()
    return Stats(
        lse=top + log_total,
        label_logit=label_logit,
        top_logit=top,
        entropy=log_total - centred / total if centred is not None else None,
        sum_sq_probs=squares / (total * total) if squares is not None else None,
        topk_logits=topk_logits,
    )


@dataclass
class Gradients:
    """Gradients of the compacted problem; None where not asked for."""

    hidden: Tensor | None = None  # [N, H] fp32 or fp64
    weight: Tensor | None = None  # like the weight
    bias: Tensor | None = None
    extra_hidden: Tensor | None = None
    extra_weight: Tensor | None = None


def row_coefficients(
    rows: Rows, head: Head, stats: Stats, grads: RowGrads
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(constant, per log p, per p), each [N]: d logits = p * (constant + per_log_p * log p + per_p * p) + one-hot terms."""
    zero = stats.lse.new_zeros(stats.lse.shape)
    constant = zero if grads.log_probs is None else -grads.log_probs
    if grads.topk_log_probs is not None:
        constant = constant - grads.topk_log_probs.sum(1)
    per_log_p = per_p = None
    if grads.entropy is not None and stats.entropy is not None:
        constant = constant - grads.entropy * stats.entropy
        per_log_p = -grads.entropy
    if grads.sum_sq_probs is not None and stats.sum_sq_probs is not None:
        constant = constant - 2 * grads.sum_sq_probs * stats.sum_sq_probs
        per_p = 2 * grads.sum_sq_probs
    factor = head.logit_scale / rows.temperature.to(zero.dtype)
    return (
        constant * factor,
        per_log_p * factor if per_log_p is not None else None,
        per_p * factor if per_p is not None else None,
    )


def backward(
    head: Head, rows: Rows, stats: Stats, grads: RowGrads, topk: Tensor | None, budget: int, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of (hidden, weight, bias, extra_hidden, extra_weight), as `needs` says, summed in fp32 or fp64."""
    blocks = _Blocks(head, rows, budget, buffers=2)
    constant, per_log_p, per_p = row_coefficients(rows, head, stats, grads)
    factor = head.logit_scale / rows.temperature.to(constant.dtype)
    label_grad = None if grads.log_probs is None else grads.log_probs * factor
    topk_grad = None
    if grads.topk_log_probs is not None and topk is not None:
        topk_grad = grads.topk_log_probs * (factor if factor.ndim == 0 else factor[:, None])
    row = torch.arange(blocks.n, device=rows.hidden.device)
    out = Gradients()
    need_hidden, need_weight, need_bias, need_extra_hidden, need_extra_weight = needs
    if need_weight:
        out.weight = torch.empty_like(head.weight, dtype=head.weight_dtype)
    if need_bias and head.bias is not None:
        out.bias = torch.empty_like(head.bias)
    if need_extra_weight and head.extra_weight is not None:
        out.extra_weight = torch.empty_like(head.extra_weight)
    if need_hidden:
        out.hidden = rows.hidden.new_zeros(rows.hidden.shape, dtype=blocks.dtype)
    if need_extra_hidden and rows.extra_hidden is not None:
        out.extra_hidden = rows.extra_hidden.new_zeros(rows.extra_hidden.shape, dtype=blocks.dtype)
    for low, high in blocks:
        weight = blocks.weight(low, high)
        d = blocks.logits(low, high, weight, slope=True).sub_(stats.lse[:, None])
        p = torch.exp(d, out=blocks.buffer(1, high - low))
        if per_log_p is not None:
            if head.bias is not None:  # only a bias can be -inf, and 0 * inf is NaN
                d.clamp_(min=VERY_LOW)
            torch.addcmul(constant[:, None], d, per_log_p[:, None], out=d)
            if per_p is not None:
                d.addcmul_(p, per_p[:, None])
            d.mul_(p)
        elif per_p is not None:
            torch.addcmul(constant[:, None], p, per_p[:, None], out=d)
            d.mul_(p)
        else:
            torch.mul(p, constant[:, None], out=d)
        if label_grad is not None:
            column, here = blocks.local(rows.labels, low, high)
            # One entry per row: reading, adding and writing back needs no atomics and stays deterministic.
            d[row, column] = d[row, column] + torch.where(here, label_grad, 0)
        if topk_grad is not None and topk is not None:
            column, here = blocks.local(topk, low, high)
            for k in range(topk.shape[1]):
                d[row, column[:, k]] = d[row, column[:, k]] + torch.where(here[:, k], topk_grad[:, k], 0)
        if blocks.slope is not None:
            d.mul_(blocks.slope)
        _products(blocks, out, d, weight, low, high)
    if head.group_name:
        from .vocab_parallel import sum_over_group

        sum_over_group(head.group_name, [t for t in (out.hidden, out.extra_hidden) if t is not None])
    return out


def _products(blocks: _Blocks, out: Gradients, d: Tensor, weight: Tensor, low: int, high: int) -> None:
    """Bring a block of d logits into the gradients: the weight's rows are written once, the rows' are added to."""
    if out.bias is not None:
        out.bias[low:high] = d.sum(0)
    d = d.to(blocks.gemm_dtype)
    if out.weight is not None:
        _write(out.weight[low:high], d.t(), blocks.hidden)
    if out.extra_weight is not None and blocks.extra_hidden is not None:
        _write(out.extra_weight[low:high], d.t(), blocks.extra_hidden)
    if out.hidden is not None:
        matmul_into(out.hidden, d, weight, accumulate=True)
    extra = blocks.extra_weight(low, high)
    if out.extra_hidden is not None and extra is not None:
        matmul_into(out.extra_hidden, d, extra, accumulate=True)


def _write(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.is_cuda and out.dtype == torch.float32 and _has_out_dtype():
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(a, b))
