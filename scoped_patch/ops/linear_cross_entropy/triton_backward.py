"""The backward of the GPU backend: blocks of the logits' gradient from tiles, from kept logits or from products."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels as k
from . import memory as budgets
from .problem import Head
from .products import multiply
from .stats import Backward, Coefficients, Gradients
from .triton_backend import (
    GROUP,
    LOG2E,
    ProductBlocks,
    descriptor,
    fused_route,
    options,
    programs,
    row_scale,
    scales,
    tile_sizes,
)


class _RowTerms:
    """Per-row inputs of the gradient kernels, in units of log 2 where they meet scores."""

    def __init__(self, problem: Backward) -> None:
        self.problem = problem
        self.coefficients: Coefficients = problem.coefficients()
        c = self.coefficients
        self.scale = row_scale(problem.head, problem.rows.temperature, problem.rows.hidden.shape[0])
        self.lse = problem.lse * LOG2E
        self.log_probs = problem.log_probs * LOG2E
        self.constant = c.constant.contiguous()
        self.per_log_p = c.per_log_p / LOG2E if c.per_log_p is not None else self.lse
        self.per_p = c.per_p.contiguous() if c.per_p is not None else self.lse
        self.flags = {"PER_LOG_P": c.per_log_p is not None, "PER_P": c.per_p is not None}
        self.local = problem.rows.labels - problem.head.vocab_start
        self.topk = (problem.topk_ids - problem.head.vocab_start).contiguous() if problem.topk_ids is not None else None

    @property
    def terms(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.lse, self.constant, self.per_log_p, self.per_p

    def add_own_terms(self, d: Tensor, low: int, high: int) -> None:
        """The label's and the chosen ids' own terms of a block [N, high - low] of gradients that lacks them."""
        n, c = d.shape[0], self.coefficients
        block = 256
        softcap = self.problem.head.softcap is not None
        grid = (-(-n // block),)
        if c.label is not None:
            k.place_labels[grid](
                d, self.local, self.log_probs, self.scale, *self.terms, c.label.contiguous(), n, low, high, d.stride(0),
                BLOCK=block, SOFTCAP=softcap, **self.flags,
            )  # fmt: skip
        if c.topk is not None and self.topk is not None and self.problem.topk_log_probs is not None:
            log_probs = self.problem.topk_log_probs * LOG2E
            k.add_chosen[grid](
                d, self.topk, c.topk.contiguous(), log_probs.contiguous(), self.scale, self.lse, n, self.topk.shape[1],
                low, high, d.stride(0), BLOCK=block, SOFTCAP=softcap,
            )  # fmt: skip


def run_backward(problem: Backward) -> Gradients:
    """Gradients of the rows that something flows into; each block of the weight's is written once."""
    head, rows = problem.head, problem.rows
    out = Gradients.empty(problem, torch.float32)
    n, vocab = rows.hidden.shape[0], head.weight.shape[0]
    if n == 0:
        for grad in (out.weight, out.bias, out.extra_weight):
            if grad is not None:
                grad.zero_()
        return out
    terms = _RowTerms(problem)
    hidden = rows.hidden if rows.hidden.stride(1) == 1 else rows.hidden.contiguous()
    if fused_route(head):
        if hidden.data_ptr() % 16 or hidden.stride(0) * hidden.element_size() % 16:
            hidden = hidden.clone(memory_format=torch.contiguous_format)
        kept = problem.kept
        columns = tile_sizes()[1]
        room = budgets.block_bytes(problem.memory, hidden, kept.nbytes if kept is not None else 0)
        width = budgets.block_width(vocab, room // (n * hidden.element_size()), columns)
        buffer = hidden.new_empty((n, -(-width // columns) * columns))
        for low in range(0, vocab, width):
            high = min(vocab, low + width)
            d = buffer[:, : high - low]
            if kept is None:
                _tiles(head, hidden, buffer, terms, low, high)
            else:
                _pass(kept[:, low:], d, head, terms, low, high, problem.kept_rows, problem.kept_tops)
            terms.add_own_terms(d, low, high)
            _multiply_out(out, d, hidden, None, head, low, high, single=width == vocab and not head.group_name)
        del buffer
    else:
        blocks = ProductBlocks(head, rows, problem.memory)
        for low, high in blocks:
            product = blocks.product(low, high)
            d = product if hidden.dtype == torch.float32 else torch.empty_like(product, dtype=hidden.dtype)
            _pass(product, d, head, terms, low, high)
            terms.add_own_terms(d, low, high)
            _multiply_out(out, d, hidden, rows.extra_hidden, head, low, high, single=False)
    out.sum_over_group(head.group_name)
    return out


def _tiles(head: Head, hidden: Tensor, out: Tensor, terms: _RowTerms, low: int, high: int) -> None:
    rows, columns, inner, stages, warps = tile_sizes()
    n, size = hidden.shape
    grid = min(programs(hidden), -(-n // rows) * -(-(high - low) // columns))
    k.backward_tiles[(grid,)](
        descriptor(hidden, rows, inner), descriptor(head.weight, columns, inner), descriptor(out, rows, columns),
        terms.scale, head.bias, *terms.terms, n, high - low, size, low, head.weight.shape[0], scales(head)[1],
        ROWS=rows, COLUMNS=columns, INNER=inner, GROUP=GROUP, PROGRAMS=grid, FLATTEN=True, num_stages=stages,
        num_warps=warps, **options(head), **terms.flags,
    )  # fmt: skip


def _pass(
    source: Tensor,
    d: Tensor,
    head: Head,
    terms: _RowTerms,
    low: int,
    high: int,
    source_row: Tensor | None = None,
    tops: Tensor | None = None,
) -> None:
    """From products, or, with the maxima of their tiles in `tops`, from kept scores."""
    block = 256 if k.INTERPRETED else 2048
    k.backward_block[(d.shape[0], -(-(high - low) // block))](
        source, d, source_row, tops, terms.scale, head.bias, *terms.terms, high - low, source.stride(0), d.stride(0),
        tops.stride(0) if tops is not None else 0, low, scales(head)[1], BLOCK=block, COLUMNS=budgets.TILE_COLUMNS,
        KEPT=tops is not None, GATHER=source_row is not None, **options(head), **terms.flags,
    )  # fmt: skip


def _multiply_out(
    out: Gradients, d: Tensor, hidden: Tensor, extra_hidden: Tensor | None, head: Head, low: int, high: int, single: bool
) -> None:
    """Bring a block of gradients into the results. A single block needs no fp32 sum over blocks for the hidden states."""
    if out.bias is not None:
        out.bias[low:high] = d.sum(0, dtype=torch.float32)
    if out.weight is not None:
        multiply(out.weight[low:high], d.t(), hidden)
    if out.hidden is not None:
        if single:
            out.hidden = torch.mm(d, head.weight)
        else:
            multiply(out.hidden, d, head.weight[low:high], accumulate=low > 0)
    if extra_hidden is not None and head.extra_weight is not None:
        if out.extra_weight is not None:
            multiply(out.extra_weight[low:high], d.t(), extra_hidden)
        if out.extra_hidden is not None:
            multiply(out.extra_hidden, d, head.extra_weight[low:high].to(d.dtype), accumulate=True)
