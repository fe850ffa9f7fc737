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

    "mean" divides by `num_items` where given (the number of items of the whole step, over all micro-batches and ranks),
    else by the number of labels that are not `ignore_index`; with none of those it is 0, not NaN, and stays in the graph.
    "sum" divides by nothing. `options` and errors are those of `linear_cross_entropy`.
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


def topk_kl_divergence(teacher_log_probs: Tensor, student_log_probs: Tensor, *, rest: bool = True) -> Tensor:
    """KL(teacher || student) per token, in nats, from a teacher's log-probabilities at K chosen vocabulary rows.

    Args:
        teacher_log_probs: [..., K], at the ids that went to `linear_cross_entropy` as `topk_ids`.
        student_log_probs: [..., K], its `topk_log_probs`.
        rest: whether all other vocabulary rows count as one more, which makes it the divergence of two distributions
            over K + 1 outcomes and never negative. False leaves them out.

    Returns:
        [...], in the student's dtype. Rows of zeros in both (an ignored label, if the teacher has zeros there) give 0.
    """
    teacher = teacher_log_probs.to(student_log_probs.dtype)
    divergence = (teacher.exp() * (teacher - student_log_probs)).sum(-1)
    if not rest:
        return divergence
    left = (1 - teacher.exp().sum(-1)).clamp(min=0)
    student_left = (1 - student_log_probs.exp().sum(-1)).clamp(min=torch.finfo(student_log_probs.dtype).tiny)
    return divergence + torch.where(left > 0, left * (left.clamp(min=1e-30).log() - student_left.log()), 0)
