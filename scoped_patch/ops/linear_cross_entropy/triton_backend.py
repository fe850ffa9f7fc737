"""The fused head on a GPU: products by cuBLAS or by our own tiles, everything else in one pass of a Triton kernel.

Two routes. The fused one (half precision, Hopper or newer, aligned rows) makes the softmax statistics and the logits'
gradients in the epilogue of a matrix product, so fp32 logits never reach memory. The other, for everything else, lets
the library's product write a block in fp32 and passes over it once. In both the backward hands blocks of the logits'
gradient to cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import kernels as k
from . import memory as budgets
from .problem import Head, Inputs, Rows, Settings, select
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


def scalar(temperature: Tensor) -> tuple[float, Tensor | None, int]:
    """(what to divide by on the host, a tensor to divide by per row, its stride)."""
    if temperature.ndim == 0 and temperature.device.type == "cpu" and not k.INTERPRETED:
        return float(temperature), None, 0
    return 1.0, temperature, temperature.stride(0) if temperature.ndim else 0


def options(head: Head) -> dict[str, Any]:
    """Which terms the kernels compile in."""
    return {"HAS_BIAS": head.bias is not None, "SOFTCAP": head.softcap is not None}


class _Forward:
    """One forward: where the statistics of parts go, and where their merge goes, [total] each."""

    def __init__(self, head: Head, like: Tensor, total: int, entropy: bool, sum_sq: bool) -> None:
        self.head, self.total, self.entropy, self.sum_sq = head, total, entropy, sum_sq
        self.final = not head.group_name
        none = like.new_empty(0, dtype=torch.float32)
        self.label_logit, self.first, self.second = (like.new_empty(total, dtype=torch.float32) for _ in range(3))
        self.third = torch.empty_like(self.first) if entropy else none
        self.fourth = torch.empty_like(self.first) if sum_sq else none.clone()
        self.last = torch.empty_like(self.first, dtype=torch.bool if self.final else torch.float32)
        self.scale = torch.empty_like(self.first)
        # The rows that count come first: their numbers among all rows, and their labels among this process's.
        self.index, self.local = (like.new_empty(total, dtype=torch.int64) for _ in range(2))

    @property
    def results(self) -> tuple[Tensor, ...]:
        last = self.last.view(torch.int8) if self.final else self.last
        return self.first, self.second, self.third, self.fourth, last

    def compact(self, inputs: Inputs, position: Tensor) -> None:
        head = self.head
        host, temperature, stride = scalar(inputs.temperature)
        k.compact_rows[(-(-self.total // 1024),)](
            inputs.labels, position, temperature, self.index, self.local, self.scale, *self.results, self.label_logit,
            self.total, head.vocab_start, scales(head)[0] / host, head.ignore_index, stride,
            BLOCK=1024, PER_ROW=temperature is not None, ENTROPY=self.entropy, SUM_SQ=self.sum_sq, FINAL=self.final,
        )  # fmt: skip

    def allocate(self, parts: int, rows: int, tops: Tensor | None = None) -> None:
        """Room for `parts` column parts of `rows` rows; the maxima go to `tops` [parts, rows] where given."""
        store = self.first.new_empty((1 + self.entropy + self.sum_sq, parts, rows))
        top = self.first.new_empty((parts, rows)) if tops is None else tops
        self.parts = (top, store[0], store[1] if self.entropy else top, store[-1] if self.sum_sq else top)
        self.count, self.stride = parts, rows

    def combine(self, count: Tensor, row0: int, rows: int) -> None:
        head = self.head
        k.combine_parts[(-(-rows // 32),)](
            *self.parts, self.label_logit, self.local, self.index, count, *self.results,
            row0, rows, self.count, self.stride, -head.vocab_start, head.vocab_size - head.vocab_start,
            BLOCK=32, PARTS=16, ENTROPY=self.entropy, SUM_SQ=self.sum_sq, FINAL=self.final, num_warps=4,
        )  # fmt: skip

    def outputs(self, rows: Rows, real: Tensor, topk_logits: Tensor | None, kept: Tensor, kept_tops: Tensor) -> Outputs:
        if self.final:
            chosen = self.first.new_empty(0)
            if topk_logits is not None:
                chosen = torch.where(real[:, None], topk_logits - self.second[:, None], 0)
            return Outputs(self.first, self.third, self.fourth, self.last, chosen, self.second, kept, kept_tops)
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


def run_forward(inputs: Inputs, settings: Settings, entropy: bool, sum_sq: bool, kept: Tensor, kept_tops: Tensor) -> Outputs:
    """The outputs. A `kept` that is not empty is filled where the fused route runs."""
    head, total = settings.head(inputs), inputs.labels.shape[0]
    inputs = inputs._replace(hidden=inputs.hidden.to(head.compute_dtype))
    state = _Forward(head, inputs.hidden, total, entropy, sum_sq)
    real = inputs.labels != head.ignore_index
    if total:
        position = real.cumsum(0)
        state.compact(inputs, position)
        if fused_route(head):
            _fused(state, inputs.hidden, position[-1:], kept, kept_tops)
        else:
            _in_blocks(state, inputs, real, settings.memory)
    topk = _chosen_logits(head, inputs) if inputs.topk_ids is not None else None
    rows = Rows(inputs.hidden, None, inputs.labels, inputs.temperature, total)
    return state.outputs(rows, real, topk, kept, kept_tops)


def _fused(state: _Forward, hidden: Tensor, count: Tensor, kept: Tensor, kept_tops: Tensor) -> None:
    """Without waiting for the device: how many rows count is known only there, and the kernels read it there."""
    head = state.head
    total, size = hidden.shape
    vocab = head.weight.shape[0]
    rows, columns, inner, stages, warps = tile_sizes()
    keep = kept.numel() > 0
    tiles = -(-vocab // columns)
    # The maxima of kept scores are kept too, so all rows go in one launch then.
    launch = total if keep else min(total, _FORWARD_ROWS)
    state.allocate(tiles, launch, kept_tops if keep else None)
    x = descriptor(hidden.index_select(0, state.index), rows, inner)
    weight = descriptor(head.weight, columns, inner)
    target = descriptor(kept[:, :vocab], rows, columns) if keep else x
    simple = head.bias is None and head.softcap is None
    for row0 in range(0, total, launch):
        n = min(launch, total - row0)
        grid = min(programs(hidden), -(-n // rows) * tiles)
        k.forward_tiles[(grid,)](
            x, weight, target, state.local, state.scale, head.bias, count, *state.parts, state.label_logit,
            row0, n, state.stride, vocab, size, scales(head)[1],
            ROWS=rows, COLUMNS=columns, INNER=inner, GROUP=GROUP, PROGRAMS=grid, SIMPLE=simple, ENTROPY=state.entropy,
            SUM_SQ=state.sum_sq, KEEP=keep, FLATTEN=True, num_stages=stages, num_warps=warps, **options(head),
        )  # fmt: skip
        state.combine(count, row0, n)


def _in_blocks(state: _Forward, inputs: Inputs, real: Tensor, memory: int) -> None:
    head = state.head
    rows = select(head, inputs, real)
    n = rows.hidden.shape[0]
    if n == 0:
        return
    blocks = ProductBlocks(head, rows, memory)
    splits = 1 if k.INTERPRETED else 4
    state.allocate(len(blocks) * splits, n)
    for number, (low, high) in enumerate(blocks):
        product = blocks.product(low, high)
        k.block_stats[(n, splits)](
            product, state.local, state.scale, head.bias, *state.parts, state.label_logit, high - low,
            product.stride(0), -(-(high - low) // splits), number * splits, state.stride, low, scales(head)[1],
            BLOCK=256 if k.INTERPRETED else 2048, ENTROPY=state.entropy, SUM_SQ=state.sum_sq, **options(head),
        )  # fmt: skip
    state.combine(torch.full((1,), n, dtype=torch.int64, device=real.device), 0, n)


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

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for low in range(0, self.vocab, self.width):
            yield low, min(self.vocab, low + self.width)

    def product(self, low: int, high: int) -> Tensor:
        out = self._buffer[:, : high - low]
        multiply(out, self.rows.hidden, self.head.weight[low:high].t())
        if self.head.extra_weight is not None and self.rows.extra_hidden is not None:
            extra = self.head.extra_weight[low:high].to(self.rows.extra_hidden.dtype)
            multiply(out, self.rows.extra_hidden, extra.t(), accumulate=True)
        return out


def _chosen_logits(head: Head, inputs: Inputs) -> Tensor:
    """[total, K] logits at `topk_ids`, 0 at ids of other processes."""
    hidden, topk = inputs.hidden, inputs.topk_ids
    assert topk is not None
    out = hidden.new_zeros(topk.shape, dtype=torch.float32)
    if not topk.numel():
        return out
    if inputs.extra_hidden is not None:
        return _chosen_logits_of_two_terms(head, inputs)
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    weight = head.weight if head.weight.stride(1) == 1 else head.weight.contiguous()
    scale = (scales(head)[0] / inputs.temperature.double()).float().to(out.device).expand(topk.shape[0]).contiguous()
    k.chosen_logits[(topk.shape[0], -(-topk.shape[1] // 16))](
        hidden, weight, head.bias, scale, (topk - head.vocab_start).contiguous(), out, topk.shape[1], hidden.shape[1],
        weight.shape[0], hidden.stride(0), weight.stride(0), scales(head)[1], CHOSEN=16, INNER=128, **options(head),
    )  # fmt: skip
    return out


def _chosen_logits_of_two_terms(head: Head, inputs: Inputs) -> Tensor:
    """The kernel knows one linear term; with a second one the chosen rows are gathered, some tokens at a time."""
    topk, extra_hidden, extra_weight = inputs.topk_ids, inputs.extra_hidden, head.extra_weight
    assert topk is not None
    assert extra_hidden is not None
    assert extra_weight is not None
    local = topk - head.vocab_start
    held = local.clamp(0, head.weight.shape[0] - 1)
    z = inputs.hidden.new_empty(topk.shape, dtype=torch.float32)
    for low in range(0, topk.shape[0], 256):
        at = slice(low, low + 256)
        z[at] = torch.einsum("nh,nkh->nk", inputs.hidden[at].float(), head.weight[held[at]].float())
        z[at] += torch.einsum("nr,nkr->nk", extra_hidden[at].float(), extra_weight[held[at]].float())
    if head.bias is not None:
        z += head.bias[held].float()
    z *= head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    temperature = inputs.temperature
    z /= (temperature if temperature.ndim == 0 else temperature[:, None]).float()
    return torch.where(local == held, z, 0)
