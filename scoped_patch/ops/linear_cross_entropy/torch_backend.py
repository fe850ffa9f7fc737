"""The fused head in plain torch: blocks of the vocabulary, one alive at a time, on any device.

Forward and backward walk the vocabulary in blocks over all rows. The forward merges the blocks' softmax statistics; the
backward computes each block's logits again, writes that block of the weight's gradient once and adds to the hidden
states' gradient in fp32, so no error grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import memory as budgets
from .problem import VERY_LOW, Head, Inputs, Rows, Settings, capturing, check_labels, counted, select
from .products import has_out_dtype, multiply
from .stats import Gradients, Outputs, Stats, Upstream, merge


class _Blocks:
    """Logits of one vocabulary block at a time, divided by the temperature, in the statistics' dtype."""

    def __init__(self, head: Head, rows: Rows, memory: int, buffers: int) -> None:
        self.head, self.rows = head, rows
        self.n = rows.hidden.shape[0]
        self.vocab = head.weight.shape[0]
        self.dtype = head.stat_dtype
        # The CPU has no half-precision product with an fp32 result; upcasting keeps fp32 logits there.
        mixed = head.compute_dtype != self.dtype and head.weight.is_cuda and has_out_dtype()
        self.gemm_dtype = head.compute_dtype if mixed else self.dtype
        self.hidden = rows.hidden.to(self.gemm_dtype)
        self.extra_hidden = rows.extra_hidden.to(self.gemm_dtype) if rows.extra_hidden is not None else None
        per_column = max(1, self.n) * self.dtype.itemsize * (buffers + (head.softcap is not None))
        budget = budgets.block_bytes(memory, rows.hidden)
        self.width = budgets.block_width(self.vocab, budget // per_column, 64)
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
        multiply(z, self.hidden, weight.t())
        extra = self.extra_weight(low, high)
        if extra is not None and self.extra_hidden is not None:
            multiply(z, self.extra_hidden, extra.t(), accumulate=True)
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


def run_forward(inputs: Inputs, settings: Settings, entropy: bool, sum_sq: bool, kept: Tensor, kept_tops: Tensor) -> Outputs:
    """The outputs. This backend keeps no logits: `kept` and `kept_tops` are handed on as they are."""
    head = settings.head(inputs)
    if not capturing(inputs.labels):
        check_labels(inputs.labels, head, inputs.topk_ids)
    rows = select(head, inputs, counted(inputs.labels != head.ignore_index))
    topk = rows.take(inputs.topk_ids) if inputs.topk_ids is not None else None
    stats = _statistics(head, rows, settings.memory, entropy, sum_sq, topk)
    # Ignored labels are only still among the rows when nothing could be counted (graph capture).
    return stats.outputs(rows, rows.labels != head.ignore_index, kept, kept_tops)


def _statistics(head: Head, rows: Rows, memory: int, entropy: bool, sum_sq: bool, topk: Tensor | None) -> Stats:
    blocks = _Blocks(head, rows, memory, buffers=2 if entropy or sum_sq else 1)
    zeros = rows.hidden.new_zeros(blocks.n, dtype=blocks.dtype)
    top, total, label_logit = zeros + VERY_LOW, zeros, zeros
    centred, squares = zeros, zeros  # sum of e * (z - top), sum of e * e
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


@dataclass
class _Coefficients:
    """d logits = p * (constant + per_log_p * log p + per_p * p), plus `label` at the label and `topk` at the chosen ids.

    The logits' own scale and the temperature are in them.
    """

    constant: Tensor  # [N]
    per_log_p: Tensor | None
    per_p: Tensor | None
    label: Tensor | None
    topk: Tensor | None  # [N, K]


def _coefficients(head: Head, rows: Rows, forward: Outputs, upstream: Upstream, dtype: torch.dtype) -> _Coefficients:
    # Rows with an ignored label are only here while nothing can be counted: nothing flows into them.
    real = rows.labels != head.ignore_index
    factor = torch.where(real, head.logit_scale / rows.temperature.to(dtype), 0)

    def scaled(grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        return rows.take(grad.to(dtype)) * (factor if grad.ndim == 1 else factor[:, None])

    label, entropy, squares, topk = map(scaled, upstream)
    constant = torch.zeros_like(factor)
    if label is not None:
        constant = constant - label
    if topk is not None:
        constant = constant - topk.sum(1)
    if entropy is not None:
        constant = constant - entropy * rows.take(forward.entropy)
    if squares is not None:
        squares = 2 * squares
        constant = constant - squares * rows.take(forward.sum_sq_probs)
    return _Coefficients(constant, None if entropy is None else -entropy, squares, label, topk)


def run_backward(
    inputs: Inputs, settings: Settings, forward: Outputs, upstream: Upstream, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of the inputs, from the rows that something flows into, summed in fp32 or fp64."""
    head = settings.head(inputs)
    flows = inputs.labels != head.ignore_index
    some = torch.zeros_like(flows)
    for grad in upstream:
        if grad is not None:
            some = some | ((grad != 0) if grad.ndim == 1 else (grad != 0).any(1))
    rows = select(head, inputs, counted(flows & some))
    blocks = _Blocks(head, rows, settings.memory, buffers=2)
    out = Gradients.of_head(head, needs).with_rows(rows, blocks.dtype, needs)
    if blocks.n == 0:
        out.zero()
        return out.finish(head, rows, inputs)
    c = _coefficients(head, rows, forward, upstream, blocks.dtype)
    topk = rows.take(inputs.topk_ids) if inputs.topk_ids is not None else None
    # An ignored row's log-sum-exp is not known: with this one its probabilities are 0.
    lse = torch.where(rows.labels != head.ignore_index, rows.take(forward.lse), -VERY_LOW)
    row = torch.arange(blocks.n, device=rows.hidden.device)
    for low, high in blocks:
        weight = blocks.weight(low, high)
        d = blocks.logits(low, high, weight, slope=True).sub_(lse[:, None])
        p = torch.exp(d, out=blocks.buffer(1, high - low))
        if c.per_log_p is not None:
            if head.bias is not None:  # only a bias can be -inf, and 0 * inf is NaN
                d.clamp_(min=VERY_LOW)
            torch.addcmul(c.constant[:, None], d, c.per_log_p[:, None], out=d)
            if c.per_p is not None:
                d.addcmul_(p, c.per_p[:, None])
            d.mul_(p)
        elif c.per_p is not None:
            torch.addcmul(c.constant[:, None], p, c.per_p[:, None], out=d)
            d.mul_(p)
        else:
            torch.mul(p, c.constant[:, None], out=d)
        if c.label is not None:
            column, here = blocks.local(rows.labels, low, high)
            # One entry per row: reading, adding and writing back needs no atomics and stays deterministic.
            d[row, column] = d[row, column] + torch.where(here, c.label, 0)
        if c.topk is not None and topk is not None:
            column, here = blocks.local(topk, low, high)
            for i in range(topk.shape[1]):
                d[row, column[:, i]] = d[row, column[:, i]] + torch.where(here[:, i], c.topk[:, i], 0)
        if blocks.slope is not None:
            d.mul_(blocks.slope)
        _multiply_out(blocks, out, d, weight, low, high)
    return out.finish(head, rows, inputs)


def _multiply_out(blocks: _Blocks, out: Gradients, d: Tensor, weight: Tensor, low: int, high: int) -> None:
    """Bring a block of d logits into the gradients: the weight's rows are written once, the rows' are added to."""
    if out.bias is not None:
        out.bias[low:high] = d.sum(0)
    d = d.to(blocks.gemm_dtype)
    if out.weight is not None:
        multiply(out.weight[low:high], d.t(), blocks.hidden)
    if out.extra_weight is not None and blocks.extra_hidden is not None:
        multiply(out.extra_weight[low:high], d.t(), blocks.extra_hidden)
    if out.hidden is not None:
        multiply(out.hidden, d, weight, accumulate=low > 0)
    extra = blocks.extra_weight(low, high)
    if out.extra_hidden is not None and extra is not None:
        multiply(out.extra_hidden, d, extra, accumulate=low > 0)
