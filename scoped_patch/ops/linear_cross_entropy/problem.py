"""What both backends work on: the rows that count, in the dtype they are computed in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import LabelOutOfRangeError

# Stands in for -inf where inf - inf or 0 * inf would make a NaN; its exponential is 0 in float32 and float64.
VERY_LOW = -1e30


@dataclass(frozen=True)
class Head:
    """The linear head and the transforms of its logits, and this process's share of the vocabulary."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    extra_weight: Tensor | None  # [V, R]
    softcap: float | None
    logit_scale: float
    ignore_index: int
    vocab_start: int  # of this process's rows in the whole vocabulary
    vocab_size: int  # of all processes together
    group_name: str  # "" for one process
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype  # of the caller's weight: under autocast it is not the compute dtype

    @property
    def stat_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Rows:
    """The N rows (tokens) that are computed, out of `total`; `index` is None where they are all of them."""

    hidden: Tensor  # [N, H] in the compute dtype
    extra_hidden: Tensor | None  # [N, R]
    labels: Tensor  # [N] int64, counted from the start of the whole vocabulary
    temperature: Tensor  # [] or [N], fp32 or fp64
    total: int
    index: Tensor | None = field(default=None)

    def spread(self, values: Tensor) -> Tensor:
        """Put [N, ...] values at their rows of a zero tensor [total, ...]."""
        if self.index is None:
            return values
        full = values.new_zeros((self.total, *values.shape[1:]))
        full[self.index] = values
        return full


def check_labels(labels: Tensor, head: Head) -> None:
    """Raise where a label is out of range. Reads the device: call it where a read is paid for anyway."""
    valid = labels != head.ignore_index
    bad = valid & ((labels < 0) | (labels >= head.vocab_size))
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        raise LabelOutOfRangeError(
            f"labels: {int(bad.sum())} of {labels.numel()} are out of range, the first is {int(labels[where])} at flat position "
            f"{where}; they must lie in [0, {head.vocab_size}) (the rows of weight) or be ignore_index={head.ignore_index}"
        )


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, where reading a count from the device is not allowed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def select(head: Head, hidden: Tensor, extra_hidden: Tensor | None, labels: Tensor, temperature: Tensor, keep: Tensor) -> Rows:
    """The rows where `keep` [total] is true. Costs one read of a count from the device, none while capturing."""
    total = labels.shape[0]
    index = None
    if total and not capturing(labels):
        index = keep.nonzero().squeeze(1)
        if index.shape[0] == total:
            index = None
    if index is not None:
        hidden, labels = hidden.index_select(0, index), labels.index_select(0, index)
        extra_hidden = extra_hidden.index_select(0, index) if extra_hidden is not None else None
        temperature = temperature.index_select(0, index) if temperature.ndim else temperature
    extra_hidden = extra_hidden.to(head.compute_dtype) if extra_hidden is not None else None
    return Rows(hidden.to(head.compute_dtype), extra_hidden, labels, temperature, total, index)
