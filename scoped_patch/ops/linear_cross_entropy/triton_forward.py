"""The forward of the GPU backend: statistics of tiles or of blocks of products, and their merge."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import kernels as k
from .problem import Head, Inputs, Rows, Settings, capturing, counted, select
from .remember import Remembered
from .stats import Outputs, merge
from .triton_backend import (
    GROUP,
    SCAN_BLOCK,
    Launch,
    ProductBlocks,
    descriptor,
    fused_route,
    options,
    programs,
    scalar,
    scales,
    tile_sizes,
)

# Rows that a program of the fused route brings to the front, and how much of each at a time.
_GATHERED_ROWS, _GATHERED_COLUMNS = 16, 512
# Rows per launch: bounds the statistics of its tiles to 12 * rows * vocabulary / 256 bytes.
_LAUNCHED_ROWS = 16384


class _Statistics:
    """The statistics of the parts of rows, and their merge.

    Attributes:
        places: what `kernels.find_rows` finds.
        values: the labels' logits [total], the rows' scales [total], and [parts, stride] each of what the parts have.
        tops: where the parts' maxima are kept for the backward; or `values`, which has them then.
    """

    def __init__(
        self, head: Head, inputs: Inputs, entropy: bool, sum_sq: bool, parts: int, stride: int, tops: Tensor | None
    ) -> None:
        self.head, self.total, self.entropy, self.sum_sq = head, inputs.labels.shape[0], entropy, sum_sq
        self.parts, self.stride, self.plane, self.apart = parts, stride, parts * stride, tops is not None
        size = 2 * self.total + (1 + entropy + sum_sq + (not self.apart)) * self.plane
        self.values = inputs.hidden.new_empty(size, dtype=torch.float32)
        self.places = inputs.labels.new_empty(2 * self.total + 1)
        self.tops = self.values if tops is None else tops
        self.final = not head.group_name
        self._merged: tuple[Tensor, ...] | None = None

    @property
    def merged(self) -> tuple[Tensor, ...]:
        """What `combine` fills, see `kernels.combine_parts`; empty where not asked for."""
        if self._merged is None:
            wanted = (True, True, self.entropy, self.sum_sq)
            last = self.values.new_empty(self.total, dtype=torch.bool if self.final else torch.float32)
            self._merged = *(self.values.new_empty(self.total if w else 0) for w in wanted), last
        return self._merged

    def combine(self, row0: int, rows: int) -> None:
        head = self.head
        *merged, last = self.merged
        k.combine_parts[(-(-rows // 32),)](
            self.places, self.values, self.tops, *merged, last.view(torch.int8) if self.final else last,
            row0, rows, self.total, self.plane, self.parts, self.stride, head.weight.shape[0], -head.vocab_start,
            head.vocab_size - head.vocab_start, BLOCK=32, PARTS=64, ENTROPY=self.entropy, SUM_SQ=self.sum_sq,
            APART=self.apart, FINAL=self.final, num_warps=4,
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
    head = settings.head(inputs)
    hidden, labels = inputs.hidden.to(head.compute_dtype), inputs.labels.contiguous()
    if hidden is not inputs.hidden or labels is not inputs.labels:
        inputs = inputs._replace(hidden=hidden, labels=labels)
    plan = _plan(head, inputs, settings, entropy, sum_sq, kept.shape[0] > 0)
    if plan is not None:
        found = plan.run(head, inputs, kept, kept_tops)
    else:
        found = _in_blocks(head, inputs, settings.memory, entropy, sum_sq)
    topk = None
    if inputs.topk_ids is not None:
        ids = inputs.topk_ids
        # As with labels, nothing can be raised from here.
        topk = _chosen_logits(head, inputs).masked_fill((ids < 0) | (ids >= head.vocab_size), math.nan)
    return found.outputs(inputs, topk, kept, kept_tops)


class _Plan:
    """How the fused forwards of one kind run: all that shapes, strides, types, alignment and settings decide.

    Until the device has its first product to make it waits for the host, to whom every line is new after a step of waiting for
    the device itself. So what is the same in each call of a kind is found once.

    They do not wait for the device: how many rows count is known only there, and the kernels read it there.
    """

    def __init__(self, head: Head, inputs: Inputs, entropy: bool, sum_sq: bool, keep: bool) -> None:
        self.total, self.size = inputs.hidden.shape
        self.vocab, self.entropy, self.sum_sq, self.keep = head.weight.shape[0], entropy, sum_sq, keep
        rows, columns, inner, stages, warps = tile_sizes()
        self.tile = rows, columns, inner
        self.parts = -(-self.vocab // columns)
        # The maxima of kept scores are kept too, so all rows go in one launch then.
        self.launched = self.total if keep else min(self.total, _LAUNCHED_ROWS)
        self.numerator, self.pre = scales(head)
        per_row = scalar(inputs.temperature)[1] is not None
        self.find = Launch(
            k.find_rows,
            -(-self.total // _GATHERED_ROWS),
            {
                "BLOCK": _GATHERED_ROWS,
                "AHEAD": SCAN_BLOCK,
                "COLUMNS": _GATHERED_COLUMNS,
                "PER_ROW": per_row,
                "GATHER": True,
            },
            num_warps=4,
        )
        self.tiles = []
        for row0 in range(0, self.total, self.launched):
            n = min(self.launched, self.total - row0)
            grid = min(programs(inputs.hidden), -(-n // rows) * self.parts)
            constants = {
                "ROWS": rows,
                "COLUMNS": columns,
                "INNER": inner,
                "GROUP": GROUP,
                "PROGRAMS": grid,
                "PER_ROW": per_row,
                "ENTROPY": entropy,
                "SUM_SQ": sum_sq,
                "KEEP": keep,
                "FLATTEN": True,
                **options(head),
            }
            self.tiles.append((row0, n, Launch(k.forward_tiles, grid, constants, num_stages=stages, num_warps=warps)))

    def run(self, head: Head, inputs: Inputs, kept: Tensor, kept_tops: Tensor) -> _Statistics:
        like, (rows, columns, inner), total = inputs.hidden, self.tile, self.total
        tops = kept_tops if self.keep else None
        found = _Statistics(head, inputs, self.entropy, self.sum_sq, self.parts, self.launched, tops)
        host, temperature, stride = scalar(inputs.temperature)
        hidden = like.new_empty((total, self.size))
        self.find(
            inputs.labels, temperature, found.places, found.values, like, hidden, total, _GATHERED_ROWS, head.ignore_index,
            head.vocab_start, self.numerator / host, stride, self.size, *like.stride(),
        )  # fmt: skip
        x = descriptor(hidden, rows, inner)
        weight = descriptor(head.weight, columns, inner)
        # Its rows are padded to 16 bytes.
        target = TensorDescriptor(kept, [total, self.vocab], [kept.stride(0), 1], [rows, columns]) if self.keep else x
        for row0, n, tiles in self.tiles:
            tiles(
                x, weight, target, found.places, head.bias, found.values, found.tops, row0, n, total, found.plane,
                found.stride, self.vocab, self.size, self.pre, self.numerator / host,
            )  # fmt: skip
            found.combine(row0, n)
        return found


#: None for those that do not take the fused route
_plans: Remembered[_Plan | None] = Remembered()


def _plan(head: Head, inputs: Inputs, settings: Settings, entropy: bool, sum_sq: bool, keep: bool) -> _Plan | None:
    hidden, weight, temperature, bias = inputs.hidden, head.weight, inputs.temperature, head.bias
    kind = (
        settings, entropy, sum_sq, keep, hidden.device, hidden.shape, hidden.stride(), hidden.data_ptr() % 16 == 0,
        weight.shape, weight.stride(), weight.data_ptr() % 16 == 0, inputs.labels.data_ptr() % 16 == 0,
        None if bias is None else (bias.dtype, bias.stride(), bias.data_ptr() % 16 == 0), head.extra_weight is None,
        (temperature.dtype, temperature.stride(), temperature.data_ptr() % 16 == 0, temperature.device),
    )  # fmt: skip

    def find() -> _Plan | None:
        fused = inputs.labels.shape[0] > 0 and fused_route(head)
        return _Plan(head, inputs, entropy, sum_sq, keep) if fused else None

    return _plans.get(kind, find)


def _in_blocks(head: Head, inputs: Inputs, memory: int, entropy: bool, sum_sq: bool) -> _Statistics:
    labels, total = inputs.labels, inputs.labels.shape[0]
    real = labels != head.ignore_index
    # Those that count come first, as `find_rows` numbers them; all of them where the host cannot know how many that is.
    rows = select(head, inputs, real.argsort(descending=True, stable=True) if capturing(labels) else counted(real))
    n = rows.hidden.shape[0]
    blocks = ProductBlocks(head, rows, memory)
    splits = 1 if k.INTERPRETED else 4
    found = _Statistics(head, inputs, entropy, sum_sq, len(blocks) * splits, total, None)
    if not total:
        return found
    host, temperature, stride = scalar(inputs.temperature)
    numerator, pre = scales(head)
    k.find_rows[(1,)](
        labels, temperature, found.places, found.values, None, None, total, total, head.ignore_index, head.vocab_start,
        numerator / host, stride, 0, 0, 0, BLOCK=SCAN_BLOCK, AHEAD=SCAN_BLOCK, COLUMNS=1, PER_ROW=temperature is not None,
        GATHER=False, num_warps=8,
    )  # fmt: skip
    for number, (low, high) in enumerate(blocks if n else ()):
        product = blocks.product(low, high)
        k.block_stats[(n, splits)](
            product, found.places, head.bias, found.values, high - low, product.stride(0), -(-(high - low) // splits),
            number * splits, total, found.plane, found.stride, low, pre, numerator / host,
            BLOCK=256 if k.INTERPRETED else 2048, PER_ROW=temperature is not None, ENTROPY=entropy, SUM_SQ=sum_sq,
            **options(head),
        )  # fmt: skip
    found.combine(0, total)
    return found


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
    numerator, pre = scales(head)
    host, temperature, _ = scalar(inputs.temperature)
    if temperature is None:
        scale = out.new_full(topk.shape[:1], numerator / host)
    else:
        scale = (numerator / temperature.double()).float().expand(topk.shape[0]).contiguous()
    k.chosen_logits[(topk.shape[0], -(-topk.shape[1] // 16))](
        hidden, weight, head.bias, scale, (topk - head.vocab_start).contiguous(), out, topk.shape[1], hidden.shape[1],
        weight.shape[0], hidden.stride(0), weight.stride(0), pre, CHOSEN=16, INNER=128, **options(head),
    )  # fmt: skip
    return out


def _chosen_logits_of_two_terms(head: Head, inputs: Inputs) -> Tensor:
    """The kernel knows one linear term; with a second one the chosen rows are gathered, some tokens at a time."""
    topk, extra_hidden, extra_weight = inputs.topk_ids, inputs.extra_hidden, head.extra_weight
    assert topk is not None
    assert extra_hidden is not None
    assert extra_weight is not None
    extra_hidden = extra_hidden.to(head.compute_dtype)  # as in the products: under autocast it need not be that already
    local = topk - head.vocab_start
    held = local.clamp(0, head.weight.shape[0] - 1)
    z = inputs.hidden.new_empty(topk.shape, dtype=torch.float32)
    with torch.autocast(z.device.type, enabled=False):  # these products are fp32
        for low in range(0, topk.shape[0], 256):
            at = slice(low, low + 256)
            chosen, extra_chosen = head.weight[held[at]], extra_weight[held[at]].to(head.compute_dtype)
            z[at] = torch.einsum("nh,nkh->nk", inputs.hidden[at].float(), chosen.float())
            z[at] += torch.einsum("nr,nkr->nk", extra_hidden[at].float(), extra_chosen.float())
    if head.bias is not None:
        z += head.bias[held].float()
    z *= head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    temperature = inputs.temperature
    z /= (temperature if temperature.ndim == 0 else temperature[:, None]).float()
    return torch.where(local == held, z, 0)
