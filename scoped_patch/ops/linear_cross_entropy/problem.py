"""A call in plain form: what both backends work on, and the rows of it that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import LabelOutOfRangeError

# Stands in for -inf where inf - inf or 0 * inf would make a NaN; its exponential is 0 in float32 and float64.
VERY_LOW = -1e30


class Inputs(NamedTuple):
    """The tensors of a call, flat: hidden [N, H], weight [V, H], labels [N], topk_ids [N, K]."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: Tensor  # [] or [N], fp32 or fp64; a number is [] on the CPU
    bias: Tensor | None
    extra_hidden: Tensor | None
    extra_weight: Tensor | None
    topk_ids: Tensor | None


class Settings(NamedTuple):
    """The rest of a call, in types that an operator's schema has."""

    softcap: float | None
    logit_scale: float
    ignore_index: int
    vocab_start: int
    vocab_size: int
    group_name: str
    compute_dtype: torch.dtype
    backend: str  # "torch" or "triton": "auto" is settled before
    memory: int  # bytes, or memory.LOW or memory.AUTO

    def head(self, inputs: Inputs) -> Head:
        weight, bias = inputs.weight, inputs.bias
        bias = bias if bias is None else bias.contiguous()
        # A head's last fields are the first of these, up to the dtype.
        return Head(weight.to(self.compute_dtype), bias, inputs.extra_weight, weight.dtype, *self[:7])


class Head(NamedTuple):
    """The linear head and the transforms of its logits, and this process's share of the vocabulary."""

    weight: Tensor  # [V, H] in the compute dtype
    bias: Tensor | None  # [V], contiguous: kernels count on it
    extra_weight: Tensor | None  # [V, R]
    weight_dtype: torch.dtype  # of the caller's weight: under autocast it is not the compute dtype
    softcap: float | None
    logit_scale: float
    ignore_index: int
    vocab_start: int  # of this process's rows in the whole vocabulary
    vocab_size: int  # of all processes together
    group_name: str  # "" for one process
    compute_dtype: torch.dtype

    @property
    def stat_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32


@dataclass
class Rows:
    """The N rows (tokens) that are computed, out of `total`; `index` is None where they are all of them."""

    hidden: Tensor  # [N, H] in the compute dtype
    extra_hidden: Tensor | None  # [N, R]
    labels: Tensor  # [N] int64, counted from the start of the whole vocabulary
    temperature: Tensor  # [] or [N]
    total: int
    index: Tensor | None = None

    def take(self, values: Tensor) -> Tensor:
        """Of [total, ...] values those of the rows: [N, ...]."""
        return values if self.index is None else values.index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """Put [N, ...] values at their rows of a zero tensor [total, ...]."""
        return spread(values, self.index, self.total)


def spread(values: Tensor, index: Tensor | None, total: int) -> Tensor:
    """[total, ...] with `values` [N, ...] at the rows `index`, else 0; `values` itself where `index` is None."""
    if index is None:
        return values
    full = values.new_zeros((total, *values.shape[1:]))
    full[index] = values
    return full


def check_labels(labels: Tensor, head: Head, topk_ids: Tensor | None = None) -> None:
    """Raise where a label, or a chosen id of a row that counts, is out of range. Reads the device."""
    real = labels != head.ignore_index
    for name, ids in (("labels", labels), ("topk_ids", topk_ids)):
        if ids is None:
            continue
        bad = (real if ids.ndim == 1 else real[:, None]) & ((ids < 0) | (ids >= head.vocab_size))
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            ignored = f" or be ignore_index={head.ignore_index}" if name == "labels" else ""
            raise LabelOutOfRangeError(
                f"{name}: {int(bad.sum())} of {ids.numel()} are out of range, the first is {int(ids[where])} at flat "
                f"position {where[0]}; they must lie in [0, {head.vocab_size}) (the rows of weight){ignored}"
            )


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, where reading a count from the device is not allowed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def counted(keep: Tensor) -> Tensor | None:
    """Where `keep` [total] is true, None where it is everywhere. Waits for the device; None while capturing."""
    if keep.shape[0] == 0 or capturing(keep):
        return None
    index = keep.nonzero().squeeze(1)
    return None if index.shape[0] == keep.shape[0] else index


def select(head: Head, inputs: Inputs, index: Tensor | None) -> Rows:
    """The rows `index`, all of them where it is None."""

    def take(values: Tensor) -> Tensor:
        return values if index is None else values.index_select(0, index)

    extra = inputs.extra_hidden
    return Rows(
        hidden=take(inputs.hidden).to(head.compute_dtype),
        extra_hidden=take(extra).to(head.compute_dtype) if extra is not None else None,
        labels=take(inputs.labels),
        temperature=take(inputs.temperature) if inputs.temperature.ndim else inputs.temperature,
        total=inputs.labels.shape[0],
        index=index,
    )
