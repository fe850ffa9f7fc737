"""Softmax statistics per row, their merge over blocks and processes, and what flows back into the logits from each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Head, Rows

# (log_probs, entropy, sum_sq_probs, is_top1, topk_log_probs, lse, kept scores, their tiles' maxima); empty where not
# asked for.
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass
class Stats:
    """Per row, over the whole vocabulary: what the outputs and the backward are made from."""

    lse: Tensor  # [N] log of the sum of exponentials
    label_logit: Tensor  # [N]
    top_logit: Tensor  # [N]
    entropy: Tensor | None
    sum_sq_probs: Tensor | None
    topk_logits: Tensor | None  # [N, K]

    def outputs(self, rows: Rows, real: Tensor, kept: Tensor, kept_tops: Tensor) -> Outputs:
        """The operator's outputs: each value at its row, 0 where the label is ignored. `real` [N]: labels that count."""

        def place(values: Tensor | None) -> Tensor:
            if values is None:
                return self.lse.new_empty(0)
            return rows.spread(torch.where(real if values.ndim == 1 else real[:, None], values, 0))

        topk = self.topk_logits - self.lse[:, None] if self.topk_logits is not None else None
        return (
            place(self.label_logit - self.lse),
            place(self.entropy),
            place(self.sum_sq_probs),
            rows.spread((self.label_logit >= self.top_logit) & real),
            place(topk),
            place(self.lse),
            kept,
            kept_tops,
        )


def merge(
    head: Head,
    top: Tensor,
    total: Tensor,
    centred: Tensor | None,
    squares: Tensor | None,
    label_logit: Tensor,
    topk_logits: Tensor | None,
) -> Stats:
    """Statistics from running sums of e = exp(z - top): of e, of e * (z - top), of e * e; merged over the head's group."""
    if head.group_name:
        from .vocab_parallel import merge_over_group

        top, total, centred, squares, label_logit, topk_logits = merge_over_group(
            head.group_name, top, total, centred, squares, label_logit, topk_logits
        )
    log_total = total.log()
    return Stats(
        lse=top + log_total,
        label_logit=label_logit,
        top_logit=top,
        entropy=log_total - centred / total if centred is not None else None,
        sum_sq_probs=squares / (total * total) if squares is not None else None,
        topk_logits=topk_logits,
    )


@dataclass
class RowGrads:
    """Upstream gradients per row, None where nothing flows."""

    log_probs: Tensor | None  # [N]
    entropy: Tensor | None
    sum_sq_probs: Tensor | None
    topk_log_probs: Tensor | None  # [N, K]


@dataclass
class Backward:
    """What a backend's backward gets: the rows with a gradient, what the forward found for them, and what flows in."""

    head: Head
    rows: Rows
    log_probs: Tensor  # [N]
    lse: Tensor  # [N]
    entropy: Tensor | None
    sum_sq_probs: Tensor | None
    grads: RowGrads
    topk_ids: Tensor | None  # [N, K]
    topk_log_probs: Tensor | None
    kept: Tensor | None  # scores that the forward kept, for its rows
    kept_tops: Tensor
    kept_rows: Tensor | None  # where `rows` are among those; None where they are the same
    memory: int
    needs: tuple[bool, ...]  # hidden, weight, bias, extra_hidden, extra_weight

    def coefficients(self) -> Coefficients:
        """What a gradient of the logits is made from; the logits' own scale and the temperature are in it."""
        head, grads = self.head, self.grads
        dtype = self.lse.dtype
        factor = (head.logit_scale / self.rows.temperature.double()).to(dtype)
        constant: Tensor | None = None if grads.log_probs is None else -grads.log_probs
        if grads.topk_log_probs is not None:
            chosen = grads.topk_log_probs.sum(1)
            constant = -chosen if constant is None else constant - chosen
        per_log_p = per_p = None
        if grads.entropy is not None and self.entropy is not None:
            term = grads.entropy * self.entropy
            constant = -term if constant is None else constant - term
            per_log_p = -grads.entropy * factor
        if grads.sum_sq_probs is not None and self.sum_sq_probs is not None:
            term = 2 * grads.sum_sq_probs * self.sum_sq_probs
            constant = -term if constant is None else constant - term
            per_p = 2 * grads.sum_sq_probs * factor
        assert constant is not None
        return Coefficients(
            constant * factor,
            per_log_p,
            per_p,
            None if grads.log_probs is None else grads.log_probs * factor,
            None if grads.topk_log_probs is None else grads.topk_log_probs * (factor if factor.ndim == 0 else factor[:, None]),
        )


@dataclass
class Coefficients:
    """d logits = p * (constant + per_log_p * log p + per_p * p), plus `label` at the label and `topk` at the chosen ids."""

    constant: Tensor  # [N]
    per_log_p: Tensor | None
    per_p: Tensor | None
    label: Tensor | None
    topk: Tensor | None  # [N, K]


@dataclass
class Gradients:
    """Gradients of the rows that were handed in; None where not asked for."""

    hidden: Tensor | None = None  # [N, H] fp32 or fp64
    weight: Tensor | None = None  # like the weight
    bias: Tensor | None = None
    extra_hidden: Tensor | None = None
    extra_weight: Tensor | None = None

    @classmethod
    def empty(cls, problem: Backward, dtype: torch.dtype) -> Gradients:
        """Room for what is needed; sums over the vocabulary start at 0, in `dtype`."""
        head, rows = problem.head, problem.rows
        hidden, weight, bias, extra_hidden, extra_weight = problem.needs
        out = cls()
        if hidden:
            out.hidden = rows.hidden.new_zeros(rows.hidden.shape, dtype=dtype)
        if weight:
            out.weight = torch.empty_like(head.weight, dtype=head.weight_dtype)
        if bias and head.bias is not None:
            out.bias = torch.empty_like(head.bias)
        if extra_hidden and rows.extra_hidden is not None:
            out.extra_hidden = rows.extra_hidden.new_zeros(rows.extra_hidden.shape, dtype=dtype)
        if extra_weight and head.extra_weight is not None:
            out.extra_weight = torch.empty_like(head.extra_weight)
        return out

    def sum_over_group(self, group_name: str) -> None:
        """Each process has its vocabulary rows' part of the rows' gradients: add them up."""
        if group_name:
            from .vocab_parallel import sum_over_group

            sum_over_group(group_name, [t for t in (self.hidden, self.extra_hidden) if t is not None])
