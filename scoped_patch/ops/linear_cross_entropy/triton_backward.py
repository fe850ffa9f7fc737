"""The backward of the GPU backend: blocks of the logits' gradient from tiles, from kept scores or from products."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels_backward as k
from . import memory as budgets
from .kernels import INTERPRETED
from .problem import Head, Inputs, Rows, Settings, capturing
from .products import multiply
from .stats import Gradients, Outputs, Upstream
from .triton_backend import (
    GROUP,
    SCAN_BLOCK,
    ProductBlocks,
    descriptor,
    fused_route,
    options,
    programs,
    scalar,
    scales,
    tile_sizes,
)

_ROW_BLOCK = 256
# The part of a block that is begun for the case that kept scores cannot be used up in place.
_SHORT = 16


class _Terms:
    """Per-row inputs of the gradient kernels, in the order of `index`; see `kernels_backward.prepare_rows`.

    All of it is left to the device. The host learns `count` when it has to, and may hand the device more work before.
    """

    def __init__(self, head: Head, inputs: Inputs, forward: Outputs, upstream: Upstream) -> None:
        total, kept = inputs.labels.shape[0], forward.kept.shape[0] > 0
        self.head = head
        flags = {f"HAS_{i}": g is not None for i, g in enumerate(upstream)}
        strides = [g.stride(0) if g is not None else 0 for g in upstream]
        topk = upstream.topk_log_probs
        self.ids_per_row = topk.shape[1] if topk is not None else 0
        strides += [topk.stride(1) if topk is not None else 0, self.ids_per_row]
        whole = inputs.labels.new_empty((2 + kept + self.ids_per_row) * total + 2)
        self.index, self.local, self.count = whole[:total], whole[total : 2 * total], whole[-2:]
        # The forward brought the rows that count to the front of what it kept: where each is there.
        self.kept_row = whole[2 * total : 3 * total] if kept else None
        self.ids = whole[(2 + kept) * total : -2].view(total, self.ids_per_row)
        terms = inputs.hidden.new_empty((7, total), dtype=torch.float32)
        self.scale, self.lse, self.constant, self.on_log_p, self.on_p, self.label, self.log_prob = terms.unbind(0)
        self.topk = terms.new_empty((2, total, self.ids_per_row)) if topk is not None else terms
        self.has_label, self.has_topk = flags["HAS_0"], flags["HAS_3"]
        self.flags = {"PER_LOG_P": flags["HAS_1"], "PER_P": flags["HAS_2"]}
        host, temperature, stride = scalar(inputs.temperature)
        k.scan_rows[(1,)](
            inputs.labels, *upstream, self.index, self.count, self.kept_row, total, head.ignore_index, *strides,
            BLOCK=SCAN_BLOCK, KEPT=kept, **flags, num_warps=8,
        )  # fmt: skip
        self.capturing = capturing(self.count)
        self._told, self._ready = self.count, None
        if self.count.is_cuda and not self.capturing:  # GPU only
            self._told, self._ready = self.count.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(self.count.device))
        topk_ids = inputs.topk_ids.contiguous() if inputs.topk_ids is not None and self.has_topk else None
        k.prepare_rows[(-(-total // _ROW_BLOCK),)](
            self.index, inputs.labels, temperature, forward.log_probs, forward.lse, forward.entropy,
            forward.sum_sq_probs, forward.topk_log_probs, topk_ids, *upstream, self.local, terms, self.topk, self.ids,
            self.count, total, head.vocab_start, scales(head)[0] / host, head.logit_scale / host, stride, *strides,
            total * self.ids_per_row, BLOCK=_ROW_BLOCK, PER_ROW=temperature is not None, **flags,
        )  # fmt: skip
        self.n, self.all_labelled = total, False

    def read_count(self) -> Tensor | None:
        """Wait for the device to have counted: where the rows are that something flows into, None where that is all of them.

        While a CUDA graph is captured nothing can be read: then it is all rows, those that count first.
        """
        if self.capturing:
            return self.index
        if self._ready is not None:  # GPU only
            self._ready.synchronize()
        self.n, labelled = self._told.tolist()
        self.all_labelled = self.n == labelled
        return self.index[: self.n] if self.n < self.index.shape[0] else None

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        return self.lse, self.constant, self.on_log_p, self.on_p

    def add_labels(self, d: Tensor, low: int, high: int) -> None:
        """The label's own term of a block [N, high - low] of gradients that lacks it."""
        if self.has_label:
            k.place_labels[(-(-self.n // _ROW_BLOCK),)](
                d, self.local, self.log_prob, self.label, self.scale, *self.pointers, self.n, low, high, d.stride(0),
                BLOCK=_ROW_BLOCK, SOFTCAP=self.head.softcap is not None, **self.flags,
            )  # fmt: skip

    def add_chosen(self, d: Tensor, low: int, high: int) -> None:
        """The chosen ids' own terms of a block that has all others."""
        if self.has_topk:
            k.add_chosen[(-(-self.n // _ROW_BLOCK),)](
                d, self.ids, self.topk, self.scale, self.lse, self.n, self.ids_per_row, self.topk.shape[1] * self.ids_per_row,
                low, high, d.stride(0),
                BLOCK=_ROW_BLOCK, SOFTCAP=self.head.softcap is not None,
            )  # fmt: skip


def run_backward(
    inputs: Inputs, settings: Settings, forward: Outputs, upstream: Upstream, needs: tuple[bool, ...], once: bool
) -> Gradients:
    """Gradients of the inputs, from the rows that something flows into; each block of the weight's is written once."""
    head, total = settings.head(inputs), inputs.labels.shape[0]
    inputs = inputs._replace(labels=inputs.labels.contiguous())
    index, n, extra = None, total, inputs.extra_hidden
    fused = None
    if total:
        terms = _Terms(head, inputs, forward, upstream)
        if fused_route(head):
            room = budgets.block_bytes(settings.memory, inputs.hidden, forward.kept.nbytes)
            fused = _FusedBlocks(head, terms, forward, room, once)
    out = Gradients.of_head(head, needs)
    if total:
        index = terms.read_count()
        n = terms.n
    hidden = inputs.hidden if index is None else inputs.hidden.index_select(0, index)
    if extra is not None:
        extra = (extra if index is None else extra.index_select(0, index)).to(head.compute_dtype)
    rows = Rows(hidden.to(head.compute_dtype), extra, inputs.labels, inputs.temperature, total, index)
    out.with_rows(rows, torch.float32, needs)
    if n == 0:
        out.zero()
    elif fused is not None:
        fused.multiply_out(rows.hidden, out)
    else:
        _in_blocks(head, rows, terms, settings.memory, out)
    return out.finish(head, rows, inputs)


class _FusedBlocks:
    """The logits' gradient on the fused route, from tiles or from kept scores.

    It is made in blocks, one alive at a time. Kept scores that nobody will read again (`once`) become it where they are, if all
    rows that were kept count. Either is begun here, over all rows: the device finds out which it is and what rows count, and
    is busy while the host learns it too.

    Args:
        room: bytes that a block may take.
        once: whether this is the last backward over `forward`.
    """

    def __init__(self, head: Head, terms: _Terms, forward: Outputs, room: int, once: bool) -> None:
        self._head, self._terms, self._kept, self._tops = head, terms, forward.kept, forward.kept_tops
        self._vocab, self._columns = head.weight.shape[0], tile_sizes()[1]
        self._fitting = room // head.weight.element_size()
        self._block: Tensor | None = None
        self._high = 0
        rows = self._kept.shape[0]
        self._once = once and rows > 0 and not terms.capturing and self._kept.is_contiguous()
        if self._once:
            self._scores = self._kept.view(head.weight.dtype)[:, : self._vocab]
            self._begun = min(self._vocab, max(1, self._fitting // rows // self._columns) * self._columns)
            self._from_kept(self._scores[:, : self._begun], 0, self._begun, 1)
        if rows:
            self._begin(0, rows, None, 2 if self._once else 0)

    def _from_kept(self, d: Tensor, low: int, high: int, when: int = 0) -> None:
        _kept_pass(self._kept[:, low:], d, self._tops, self._head, self._terms, low, high, when)

    def _begin(self, low: int, rows: int, hidden: Tensor | None, when: int = 0) -> None:
        """Hand the device the block [rows, from column `low`]."""
        self._block = None  # its memory serves again
        # One that is likely not to be wanted is only to have begun.
        fitting = self._fitting // _SHORT if when else self._fitting
        width = budgets.block_width(self._vocab - low, fitting // rows, self._columns)
        self._block = self._head.weight.new_empty((rows, -(-width // self._columns) * self._columns))
        self._high = low + width
        if hidden is None:
            self._from_kept(self._block[:, :width], low, self._high, when)
        else:
            _tiles(self._head, hidden, self._block, self._terms, low, self._high)
            self._terms.add_labels(self._block[:, :width], low, self._high)

    def multiply_out(self, hidden: Tensor, out: Gradients) -> None:
        """Bring all of it into the results; `hidden` [n, H] are the rows that count."""
        stride, size = hidden.stride(0), hidden.element_size()
        if hidden.stride(1) != 1 or stride < hidden.shape[1] or hidden.data_ptr() % 16 or stride * size % 16:
            hidden = hidden.clone(memory_format=torch.contiguous_format)
        n, low = self._terms.n, 0
        if self._once and self._terms.all_labelled:
            self._block = None
            d = self._scores[:n]
            if self._begun < self._vocab:
                self._from_kept(d[:, self._begun :], self._begun, self._vocab)
            self._terms.add_chosen(d, 0, self._vocab)
            _multiply_out(out, d, hidden, None, self._head, 0, self._vocab)
            return
        while low < self._vocab:
            if low or self._block is None:
                self._begin(low, n, None if self._kept.shape[0] else hidden)
            assert self._block is not None
            d = self._block[:n, : self._high - low]
            self._terms.add_chosen(d, low, self._high)
            _multiply_out(out, d, hidden, None, self._head, low, self._high)
            del d
            low = self._high
        self._block = None  # its memory serves the results' last copy


def _in_blocks(head: Head, rows: Rows, terms: _Terms, memory: int, out: Gradients) -> None:
    blocks = ProductBlocks(head, rows, memory)
    for low, high in blocks:
        product = blocks.product(low, high)
        d = product if rows.hidden.dtype == torch.float32 else torch.empty_like(product, dtype=rows.hidden.dtype)
        _pass(product, d, head, terms, low, high)
        terms.add_labels(d, low, high)
        terms.add_chosen(d, low, high)
        _multiply_out(out, d, rows.hidden, rows.extra_hidden, head, low, high)


def _tiles(head: Head, hidden: Tensor, out: Tensor, terms: _Terms, low: int, high: int) -> None:
    rows, columns, inner, stages, warps = tile_sizes()
    n, size = hidden.shape
    grid = min(programs(hidden), -(-n // rows) * -(-(high - low) // columns))
    k.backward_tiles[(grid,)](
        descriptor(hidden, rows, inner), descriptor(head.weight, columns, inner), descriptor(out, rows, columns),
        terms.scale, head.bias, *terms.pointers, n, high - low, size, low, head.weight.shape[0], scales(head)[1],
        ROWS=rows, COLUMNS=columns, INNER=inner, GROUP=GROUP, PROGRAMS=grid, FLATTEN=True, num_stages=stages,
        num_warps=warps, **options(head), **terms.flags,
    )  # fmt: skip


def _pass(products: Tensor, d: Tensor, head: Head, terms: _Terms, low: int, high: int) -> None:
    block = 256 if INTERPRETED else 2048
    k.backward_block[(d.shape[0], -(-(high - low) // block))](
        products, d, head.bias, terms.scale, *terms.pointers, high - low, products.stride(0), d.stride(0), low,
        scales(head)[1], BLOCK=block, **options(head), **terms.flags,
    )  # fmt: skip


def _kept_pass(kept: Tensor, d: Tensor, tops: Tensor, head: Head, terms: _Terms, low: int, high: int, when: int) -> None:
    tiles = 1 if INTERPRETED else 8
    k.kept_block[(d.shape[0], -(-(high - low) // (tiles * budgets.TILE_COLUMNS)))](
        kept, d, terms.kept_row, tops, terms.count, terms.local, terms.log_prob, terms.label, terms.scale, *terms.pointers,
        high - low, kept.stride(0), d.stride(0), tops.stride(0), low, TILES=tiles, COLUMNS=budgets.TILE_COLUMNS,
        ZEROS=terms.capturing, WHEN=when, HAS_LABEL=terms.has_label, SOFTCAP=head.softcap is not None, **terms.flags,
        num_warps=2,  # on an H200 a few percent faster than 4 or 8, at any number of tiles
    )  # fmt: skip


def _multiply_out(
    out: Gradients, d: Tensor, hidden: Tensor, extra_hidden: Tensor | None, head: Head, low: int, high: int
) -> None:
    """Bring a block of gradients into the results: the weight's rows are written once, the rows' are added to in fp32."""
    if out.bias is not None:
        out.bias[low:high] = d.sum(0, dtype=torch.float32)
    if out.weight is not None:
        multiply(out.weight[low:high], d.t(), hidden)
    if out.hidden is not None:
        multiply(out.hidden, d, head.weight[low:high], accumulate=low > 0)
    if extra_hidden is not None and head.extra_weight is not None:
        if out.extra_weight is not None:
            multiply(out.extra_weight[low:high], d.t(), extra_hidden)
        if out.extra_hidden is not None:
            multiply(out.extra_hidden, d, head.extra_weight[low:high].to(d.dtype), accumulate=low > 0)
