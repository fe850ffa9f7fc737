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
# Rows that one step of a program that numbers rows looks at; where it also moves hidden states, how many it moves, and how much
# of each at a time.
SCAN_BLOCK = 4096
_GATHERED_ROWS, _GATHERED_COLUMNS = 16, 512
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
        and weight.stride(0) >= weight.shape[1]
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
    """One forward: where the statistics of parts go, and where their merge goes, [total] each.

    Until the device has its first product to make it waits for the host, so what is needed later is made later.
    """

    def __init__(self, head: Head, inputs: Inputs, entropy: bool, sum_sq: bool, gather: bool) -> None:
        like, (total, size) = inputs.hidden, inputs.hidden.shape
        self.head, self.total, self.entropy, self.sum_sq = head, total, entropy, sum_sq
        self.final = not head.group_name
        self._merged: tuple[Tensor, ...] | None = None
        # The rows that count come first: their numbers among all rows, and their labels among this process's.
        whole = inputs.labels.new_empty(2 * total + 2)
        self.index, self.local, self.count = whole[:total], whole[total:-2], whole[-2:]
        self._real = like.new_empty(2 * total, dtype=torch.float32)
        self.label_logit, self.scale = self._real[:total], self._real[total:]
        self.hidden = like.new_empty((total, size)) if gather else like
        host, temperature, stride = scalar(inputs.temperature)
        rows, block = (_GATHERED_ROWS, _GATHERED_ROWS) if gather else (total, SCAN_BLOCK)
        if total:
            k.scan_rows[(-(-total // rows),)](
                inputs.labels, temperature, None, None, None, None, self.index, self.count, self.local, self.scale, None,
                like, self.hidden, total, rows, head.ignore_index, head.vocab_start, scales(head)[0] / host, stride,
                0, 0, 0, 0, 0, 0, size, like.stride(0), like.stride(1),
                BLOCK=block, AHEAD=SCAN_BLOCK, COLUMNS=_GATHERED_COLUMNS, FORWARD=True, PER_ROW=temperature is not None,
                HAS_0=False, HAS_1=False, HAS_2=False, HAS_3=False, KEPT=False, GATHER=gather, num_warps=4 if gather else 8,
            )  # fmt: skip

    def allocate(self, parts: int, rows: int, tops: Tensor | None = None) -> None:
        """Room for `parts` column parts of `rows` rows; the maxima go to `tops` [parts, rows] where given."""
        store = self._real.new_empty((1 + self.entropy + self.sum_sq, parts, rows))
        top = self._real.new_empty((parts, rows)) if tops is None else tops
        self.parts = (top, store[0], store[1] if self.entropy else top, store[-1] if self.sum_sq else top)
        self.part_count, self.stride = parts, rows

    @property
    def merged(self) -> tuple[Tensor, ...]:
        """What `combine` fills, see `kernels.combine_parts`; empty where not asked for."""
        if self._merged is None:
            wanted = (True, True, self.entropy, self.sum_sq)
            last = self._real.new_empty(self.total, dtype=torch.bool if self.final else torch.float32)
            self._merged = *(self._real.new_empty(self.total if w else 0) for w in wanted), last
        return self._merged

    def combine(self, row0: int, rows: int) -> None:
        head = self.head
        *merged, last = self.merged
        k.combine_parts[(-(-rows // 32),)](
            *self.parts, self.label_logit, self.local, self.index, self.count,
            *merged, last.view(torch.int8) if self.final else last,
            row0, rows, self.part_count, self.stride, head.weight.shape[0], -head.vocab_start,
            head.vocab_size - head.vocab_start,
            BLOCK=32, PARTS=64, ENTROPY=self.entropy, SUM_SQ=self.sum_sq, FINAL=self.final, num_warps=4,
        )  # fmt: skip

    def outputs(self, inputs: Inputs, topk_logits: Tensor | None, kept: Tensor, kept_tops: Tensor) -> Outputs:
        first, second, third, fourth, last = self.merged
        if self.final and topk_logits is None:
            return Outputs(first, third, fourth, last, first.new_empty(0), second, kept, kept_tops)
        real = inputs.labels != self.head.ignore_index
        if self.final and topk_logits is not None:
            chosen = torch.where(real[:, None], topk_logits - second[:, None], 0)
            return Outputs(first, third, fourth, last, chosen, second, kept, kept_tops)
        centred, squares = third if self.entropy else None, fourth if self.sum_sq else None
        stats = merge(self.head, second, last, centred, squares, first, topk_logits)
        rows = Rows(inputs.hidden, None, inputs.labels, inputs.temperature, self.total)
        return stats.outputs(rows, real, kept, kept_tops)


def run_forward(inputs: Inputs, settings: Settings, entropy: bool, sum_sq: bool, kept: Tensor, kept_tops: Tensor) -> Outputs:
    """The outputs. A `kept` that is not empty is filled where the fused route runs."""
    head, total = settings.head(inputs), inputs.labels.shape[0]
    inputs = inputs._replace(hidden=inputs.hidden.to(head.compute_dtype), labels=inputs.labels.contiguous())
    fused = total > 0 and fused_route(head)
    state = _Forward(head, inputs, entropy, sum_sq, fused)
    if fused:
        _fused(state, kept, kept_tops)
    elif total:
        _in_blocks(state, inputs, settings.memory)
    topk = None
    if inputs.topk_ids is not None:
        ids = inputs.topk_ids
        # As with labels, nothing can be raised from here.
        topk = _chosen_logits(head, inputs).masked_fill((ids < 0) | (ids >= head.vocab_size), math.nan)
    return state.outputs(inputs, topk, kept, kept_tops)


def _fused(state: _Forward, kept: Tensor, kept_tops: Tensor) -> None:
    """Without waiting for the device: how many rows count is known only there, and the kernels read it there."""
    head, hidden = state.head, state.hidden
    total, size = hidden.shape
    vocab = head.weight.shape[0]
    rows, columns, inner, stages, warps = tile_sizes()
    keep = kept.numel() > 0
    tiles = -(-vocab // columns)
    # The maxima of kept scores are kept too, so all rows go in one launch then.
    launch = total if keep else min(total, _FORWARD_ROWS)
    state.allocate(tiles, launch, kept_tops if keep else None)
    x = descriptor(hidden, rows, inner)
    weight = descriptor(head.weight, columns, inner)
    target = descriptor(kept[:, :vocab], rows, columns) if keep else x
    simple = head.bias is None and head.softcap is None
    for row0 in range(0, total, launch):
        n = min(launch, total - row0)
        grid = min(programs(hidden), -(-n // rows) * tiles)
        k.forward_tiles[(grid,)](
            x, weight, target, state.local, state.scale, head.bias, state.count, *state.parts, state.label_logit,
            row0, n, state.stride, vocab, size, scales(head)[1],
            ROWS=rows, COLUMNS=columns, INNER=inner, GROUP=GROUP, PROGRAMS=grid, SIMPLE=simple, ENTROPY=state.entropy,
            SUM_SQ=state.sum_sq, KEEP=keep, FLATTEN=True, num_stages=stages, num_warps=warps, **options(head),
        )  # fmt: skip
        state.combine(row0, n)


def _in_blocks(state: _Forward, inputs: Inputs, memory: int) -> None:
    head = state.head
    rows = select(head, inputs, inputs.labels != head.ignore_index)
    n = rows.hidden.shape[0]
    blocks = ProductBlocks(head, rows, memory)
    splits = 1 if k.INTERPRETED else 4
    state.allocate(len(blocks) * splits, state.total)
    for number, (low, high) in enumerate(blocks if n else ()):
        product = blocks.product(low, high)
        k.block_stats[(n, splits)](
            product, state.local, state.scale, head.bias, *state.parts, state.label_logit, high - low,
            product.stride(0), -(-(high - low) // splits), number * splits, state.stride, low, scales(head)[1],
            BLOCK=256 if k.INTERPRETED else 2048, ENTROPY=state.entropy, SUM_SQ=state.sum_sq, **options(head),
        )  # fmt: skip
    state.combine(0, state.total)


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
