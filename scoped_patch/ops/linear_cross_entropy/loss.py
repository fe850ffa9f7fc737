"""Reductions of the fused head to one number."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .api import linear_cross_entropy


def linear_cross_entropy_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | float | Tensor | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """Negative log-likelihood of the labels, a scalar: fp32, or fp64 for fp64 inputs.

    "mean" divides by `num_items` where given (the number of items of the whole step, over all micro-batches and ranks), else by the number of
    labels that are not `ignore_index`; with none of those it is 0, not NaN, and stays in the graph. "sum" divides by nothing.
    `options` and errors are those of `linear_cross_entropy`.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction: got {reduction!r}, wanted "mean" or "sum"')
    if reduction == "sum" and num_items is not None:
        raise ValueError('num_items: it goes with reduction="mean"; "sum" divides by nothing')
    out = linear_cross_entropy(
        hidden_states, weight, labels, bias, ignore_index=ignore_index, outputs=("log_probs",), **options
    )
    assert out.log_probs is not None
    total = -out.log_probs.sum()
    if reduction == "sum":
        return total
    if num_items is None:
        num_items = (labels != ignore_index).sum().clamp(min=1)
    return total / torch.as_tensor(num_items, device=total.device)
