"""The fused head on a GPU: products by cuBLAS or by our own tiles, everything else in one pass of a Triton kernel.

Two routes. The fused one (half precision, Hopper or newer, aligned rows) makes the softmax statistics and the logits'
gradients in the epilogue of a matrix product, so fp32 logits never reach memory. The other, for everything else, lets
the library's product write a block in fp32 and passes over it once. In both the backward hands blocks of the logits'
gradient to cuBLAS.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import kernels as k
from . import memory as budgets
from .problem import Head, Rows, select
from .products import multiply
from .stats import Outputs, merge

LOG2E = 1 / math.log(2)
# Rows, columns, inner, stages, warps: on an H200 the fastest of 14 variants forward and of 10 backward, both with one
# program per multiprocessor and a flattened loop.
_TILE = (128, budgets.TILE_COLUMNS, 64, 3, 8)
_INTERPRETED_TILE = (16, budgets.TILE_COLUMNS, 32, 2, 4)
GROUP = 16
# Shared memory that the widest variant (the product's stages and an output tile) needs.
_SHARED_BYTES = 214_000
# Rows per launch of the forward: bounds the statistics of its tiles to 12 * rows * vocabulary / 256 bytes.
_FORWARD_ROWS = 16384


@cache
def _device(index: int) -> tuple[int, bool]:
    """(multiprocessors, whether tiles fit and tensor descriptors are in hardware)."""
    if index < 0:
        return 3, True
    properties = torch.cuda.get_device_properties(index)
    fits = getattr(properties, "shared_memory_per_block_optin", 0) >= _SHARED_BYTES
    return properties.multi_processor_count, torch.version.hip is None and properties.major >= 9 and fits


def programs(tensor: Tensor) -> int:
    """One program per multiprocessor."""
    return _device(tensor.device.index if tensor.is_cuda else -1)[0]


def tile_sizes() -> tuple[int, int, int, int, int]:
    """(rows, columns, inner, stages, warps) of a product tile."""
    return _INTERPRETED_TILE if k.INTERPRETED else _TILE


def fused_route(head: Head) -> bool:
    """Whether the tiles can run: half precision, rows of 16-byte multiples, one linear term, a chip that holds a tile."""
    weight, itemsize = head.weight, head.weight.element_size()
    half = weight.dtype in (torch.float16, torch.bfloat16) or (k.INTERPRETED and weight.dtype == torch.float32)
    aligned = (
        weight.stride(1) == 1
        and weight.stride(0) * itemsize % 16 == 0
        and weight.shape[1] * itemsize % 16 == 0
        and weight.data_ptr() % 16 == 0
    )
    return half and aligned and head.extra_weight is None and _device(weight.device.index if weight.is_cuda else -1)[1]


def descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """A tensor descriptor with blocks of [rows, columns]; reads past the edge give 0, writes there are dropped."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def scales(head: Head) -> tuple[float, float]:
    """(what a row's scale is divided by its temperature from, `pre`): see the kernels' module."""
    if head.softcap is None:
        return head.logit_scale * LOG2E, 1.0
    return head.softcap * LOG2E, head.logit_scale / head.softcap


def row_scale(head: Head, temperature: Tensor, rows: int) -> Tensor:
    """[rows] fp32."""
    scale = (scales(head)[0] / temperature.double()).float()
    return scale if scale.ndim else scale.expand(rows).contiguous()


def options(head: Head) -> dict[str, Any]:
    """Which terms the kernels compile in."""
    return {"HAS_BIAS": head.bias is not None, "SOFTCAP": head.softcap is not None}


class _Forward:
    """One forward: where the statistics of parts go, and where their merge goes, [total] each, 0 at ignored rows."""

    def __init__(self, head: Head, like: Tensor, total: int, entropy: bool, sum_sq: bool) -> None:
        self.head, self.total, self.entropy, self.sum_sq = head, total, entropy, sum_sq
        self.final = not head.group_name
        self.label_logit = like.new_zeros(total, dtype=torch.float32)
        self.first, self.second = (torch.zeros_like(self.label_logit) for _ in range(2))
        none = like.new_empty(0, dtype=torch.float32)
        self.third = torch.zeros_like(self.first) if entropy else none
        self.fourth = torch.zeros_like(self.first) if sum_sq else none.clone()
        self.last = torch.zeros_like(self.first, dtype=torch.bool) if self.final else torch.ones_like(self.first)

    def allocate(self, parts: int, rows: int, tops: Tensor | None = None) -> None:
        """Room for `parts` column parts of `rows` rows; the maxima go to `tops` [parts, rows] where given."""
        store = iter(self.first.new_empty((1 + self.entropy + self.sum_sq, parts, rows)).unbind(0))
        top = self.first.new_empty((parts, rows)) if tops is None else tops
        total = next(store)
        self.parts = (top, total, next(store) if self.entropy else top, next(store) if self.sum_sq else top)
        self.count, self.stride = parts, rows

    def combine(self, labels: Tensor, index: Tensor, count: Tensor, row0: int, rows: int) -> None:
        head = self.head
        k.combine_parts[(-(-rows // 32),)](
            *self.parts, self.label_logit, labels, index, count,
            self.first, self.second, self.third, self.fourth, self.last.view(torch.int8) if self.final else self.last,
            row0, rows, self.count, self.stride, -head.vocab_start, head.vocab_size - head.vocab_start,
            BLOCK=32, PARTS=16, ENTROPY=self.entropy, SUM_SQ=self.sum_sq, FINAL=self.final, num_warps=4,
        )  # fmt: skip

    def outputs(self, rows: Rows, real: Tensor, topk_logits: Tensor | None, kept: Tensor, kept_tops: Tensor) -> Outputs:
        if self.final:
            chosen = self.first.new_empty(0)
            if topk_logits is not None:
                chosen = torch.where(real[:, None], topk_logits - self.second[:, None], 0)
            return self.first, self.third, self.fourth, self.last, chosen, self.second, kept, kept_tops
        stats = merge(
            self.head,
            self.second,
            self.last,
            self.third if self.entropy else None,
            self.fourth if self.sum_sq else None,
            self.first,
            topk_logits,
        )
        return stats.outputs(rows, real, kept, kept_tops)


def run_forward(
    head: Head,
    hidden: Tensor,
    extra_hidden: Tensor | None,
    labels: Tensor,
    temperature: Tensor,
    topk: Tensor | None,
    memory: int,
    entropy: bool,
    sum_sq: bool,
    kept: Tensor,
    kept_tops: Tensor,
) -> Outputs:
    """The operator's outputs, see `stats.Outputs`. A `kept` that is not empty is filled where the fused route runs."""
    total = labels.shape[0]
    state = _Forward(head, hidden, total, entropy, sum_sq)
    real = labels != head.ignore_index
    hidden = hidden.to(head.compute_dtype)
    everything = Rows(hidden, None, labels, temperature, total)
    if total and fused_route(head):
        _fused(state, hidden, labels, real, temperature, kept, kept_tops)
    elif total:
        _in_blocks(state, hidden, extra_hidden, labels, real, temperature, memory)
    chosen = _chosen_logits(head, hidden, extra_hidden, temperature, topk) if topk is not None else None
    return state.outputs(everything, real, chosen, kept, kept_tops)


def _fused(
    state: _Forward, hidden: Tensor, labels: Tensor, real: Tensor, temperature: Tensor, kept: Tensor, kept_tops: Tensor
) -> None:
    """Without waiting for the device: how many rows count is known only there, and the kernels read it there."""
    head = state.head
    total, size = hidden.shape
    vocab = head.weight.shape[0]
    position = real.cumsum(0)
    count = position[-1:].to(torch.int32)
    index, local = torch.zeros_like(labels), torch.zeros_like(labels)
    scale = torch.zeros_like(state.first)
    numerator, pre = scales(head)
    k.compact_rows[(-(-total // 1024),)](
        labels, position, temperature, index, local, scale, total, head.vocab_start, numerator, head.ignore_index,
        temperature.stride(0) if temperature.ndim else 0, BLOCK=1024,
    )  # fmt: skip
    rows, columns, inner, stages, warps = tile_sizes()
    x = descriptor(hidden.index_select(0, index), rows, inner)
    weight = descriptor(head.weight, columns, inner)
    keep = kept.numel() > 0
    target = descriptor(kept[:, :vocab], rows, columns) if keep else x
    tiles = -(-vocab // columns)
    # The maxima of kept scores are kept too, so all rows go in one launch then.
    launch = total if keep else min(total, _FORWARD_ROWS)
    state.allocate(tiles, launch, kept_tops if keep else None)
    simple = head.bias is None and head.softcap is None
    for row0 in range(0, total, launch):
        n = min(launch, total - row0)
        grid = min(programs(hidden), -(-n // rows) * tiles)
        k.forward_tiles[(grid,)](
            x, weight, target, local, scale, head.bias, count, *state.parts, state.label_logit,
            row0, n, state.stride, vocab, size, pre,
            ROWS=rows, COLUMNS=columns, INNER=inner, GROUP=GROUP, PROGRAMS=grid, SIMPLE=simple, ENTROPY=state.entropy,
            SUM_SQ=state.sum_sq, KEEP=keep, FLATTEN=True, num_stages=stages, num_warps=warps, **options(head),
        )  # fmt: skip
        state.combine(local, index, count, row0, n)


def _in_blocks(
    state: _Forward,
    hidden: Tensor,
    extra_hidden: Tensor | None,
    labels: Tensor,
    real: Tensor,
    temperature: Tensor,
    memory: int,
) -> None:
    head = state.head
    rows = select(head, hidden, extra_hidden, labels, temperature, real)
    n = rows.hidden.shape[0]
    if n == 0:
        return
    blocks = ProductBlocks(head, rows, memory)
    scale = row_scale(head, rows.temperature, n)
    local = rows.labels - head.vocab_start
    index = rows.index if rows.index is not None else torch.arange(n, device=hidden.device)
    count = torch.full((1,), n, dtype=torch.int32, device=hidden.device)
    splits = 1 if k.INTERPRETED else 4
    state.allocate(len(blocks) * splits, n)
    for number, (low, high) in enumerate(blocks):
        product = blocks.product(low, high)
        k.block_stats[(n, splits)](
            product, local, scale, head.bias, *state.parts, state.label_logit,
            high - low, product.stride(0), -(-(high - low) // splits), number * splits, state.stride, low, scales(head)[1],
            BLOCK=256 if k.INTERPRETED else 2048, ENTROPY=state.entropy, SUM_SQ=state.sum_sq, **options(head),
        )  # fmt: skip
    state.combine(local, index, count, 0, n)


class ProductBlocks:
    """Blocks of hidden @ weight.T (and the extra term) in fp32, one alive at a time; for the route that is not fused."""

    def __init__(self, head: Head, rows: Rows, memory: int) -> None:
        self.head, self.rows = head, rows
        self.n, self.vocab = rows.hidden.shape[0], head.weight.shape[0]
        budget = budgets.block_bytes(memory, rows.hidden)
        self.width = budgets.block_width(self.vocab, budget // (4 * max(1, self.n)), 64)
        self._buffer = rows.hidden.new_empty((self.n, -(-self.width // 4) * 4), dtype=torch.float32)

    def __len__(self) -> int:
        return -(-self.vocab // self.width)

    def __iter__(self) -> Any:
        for low in range(0, self.vocab, self.width):
            yield low, min(self.vocab, low + self.width)

    def product(self, low: int, high: int) -> Tensor:
        out = self._buffer[:, : high - low]
        multiply(out, self.rows.hidden, self.head.weight[low:high].t())
        if self.head.extra_weight is not None and self.rows.extra_hidden is not None:
            extra = self.head.extra_weight[low:high].to(self.rows.extra_hidden.dtype)
            multiply(out, self.rows.extra_hidden, extra.t(), accumulate=True)
        return out


def _chosen_logits(head: Head, hidden: Tensor, extra_hidden: Tensor | None, temperature: Tensor, topk: Tensor) -> Tensor:
    """[total, K] logits at `topk`, 0 at ids of other processes."""
    total, ids_per_row = topk.shape
    out = hidden.new_zeros(topk.shape, dtype=torch.float32)
    if not topk.numel():
        return out
    if head.extra_weight is not None and extra_hidden is not None:
        # The kernel knows one linear term: put the two side by side, for the chosen rows only.
        local = (topk - head.vocab_start).clamp(0, head.weight.shape[0] - 1)
        rows = hidden.shape[0]
        u = torch.empty_like(out)
        for row in range(0, rows, 1024):
            at = slice(row, row + 1024)
            u[at] = torch.einsum("nh,nkh->nk", hidden[at].float(), head.weight[local[at]].float())
            extra = head.extra_weight[local[at]].float()
            u[at] += torch.einsum("nr,nkr->nk", extra_hidden[at].float(), extra)
        if head.bias is not None:
            u += head.bias[local].float()
        u *= head.logit_scale
        if head.softcap is not None:
            u = head.softcap * torch.tanh(u / head.softcap)
        u /= (temperature if temperature.ndim == 0 else temperature[:, None]).float()
        return torch.where(local == topk - head.vocab_start, u, 0)
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    weight = head.weight if head.weight.stride(1) == 1 else head.weight.contiguous()
    k.chosen_logits[(total, -(-ids_per_row // 16))](
        hidden, weight, head.bias, row_scale(head, temperature, total), (topk - head.vocab_start).contiguous(), out,
        ids_per_row, hidden.shape[1], weight.shape[0], hidden.stride(0), weight.stride(0), scales(head)[1],
        CHOSEN=16, INNER=128, **options(head),
    )  # fmt: skip
    return out
