"""Softmax statistics per row, their merge over blocks and processes, and the outputs made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Head, Inputs, Rows


class Outputs(NamedTuple):
    """What the forward gives, [total] each ([total, K] for the chosen ids); empty where not asked for."""

    log_probs: Tensor
    entropy: Tensor
    sum_sq_probs: Tensor
    is_top1: Tensor
    topk_log_probs: Tensor
    lse: Tensor  # log of the sum of exponentials
    kept: Tensor  # fp16 scores for the backward, relative to their tile's maximum, those of ignored rows at the end
    kept_tops: Tensor  # fp32 maxima [tiles, total]


class Upstream(NamedTuple):
    """Gradients of the outputs, None where nothing flows."""

    log_probs: Tensor | None  # [total]
    entropy: Tensor | None
    sum_sq_probs: Tensor | None
    topk_log_probs: Tensor | None  # [total, K]


@dataclass
class Stats:
    """Per row, over the whole vocabulary."""

    lse: Tensor  # [N]
    label_logit: Tensor  # [N]
    top_logit: Tensor  # [N]
    entropy: Tensor | None
    sum_sq_probs: Tensor | None
    topk_logits: Tensor | None  # [N, K]

    def outputs(self, rows: Rows, real: Tensor, kept: Tensor, kept_tops: Tensor) -> Outputs:
        """Each value at its row, 0 where the label is ignored. `real` [N]: labels that count."""

        def place(values: Tensor | None) -> Tensor:
            if values is None:
                return self.lse.new_empty(0)
            return rows.spread(torch.where(real if values.ndim == 1 else real[:, None], values, 0))

        topk = self.topk_logits - self.lse[:, None] if self.topk_logits is not None else None
        return Outputs(
            log_probs=place(self.label_logit - self.lse),
            entropy=place(self.entropy),
            sum_sq_probs=place(self.sum_sq_probs),
            is_top1=rows.spread((self.label_logit >= self.top_logit) & real),
            topk_log_probs=place(topk),
            lse=place(self.lse),
            kept=kept,
            kept_tops=kept_tops,
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
class Gradients:
    """Of (hidden, weight, bias, extra_hidden, extra_weight); None where not asked for."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    extra_hidden: Tensor | None = None
    extra_weight: Tensor | None = None

    @classmethod
    def of_head(cls, head: Head, needs: tuple[bool, ...]) -> Gradients:
        """Room for what is needed of the head's."""
        _, weight, bias, _, extra_weight = needs
        out = cls()
        if weight:
            out.weight = torch.empty_like(head.weight, dtype=head.weight_dtype)
        if bias and head.bias is not None:
            out.bias = torch.empty_like(head.bias)
        if extra_weight and head.extra_weight is not None:
            out.extra_weight = torch.empty_like(head.extra_weight)
        return out

    def with_rows(self, rows: Rows, dtype: torch.dtype, needs: tuple[bool, ...]) -> Gradients:
        """And of the rows', in `dtype`, which is summed in: to be written first and then added to."""
        hidden, _, _, extra_hidden, _ = needs
        if hidden:
            self.hidden = torch.empty_like(rows.hidden, dtype=dtype, memory_format=torch.contiguous_format)
        if extra_hidden and rows.extra_hidden is not None:
            self.extra_hidden = rows.extra_hidden.new_empty(rows.extra_hidden.shape, dtype=dtype)
        return self

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias, self.extra_hidden, self.extra_weight

    def zero(self) -> None:
        for tensor in self.tensors():
            if tensor is not None:
                tensor.zero_()

    def finish(self, head: Head, rows: Rows, inputs: Inputs) -> Gradients:
        """Sum the rows' over the head's group, put them at their rows, and everything into its input's dtype."""
        if head.group_name:
            from .vocab_parallel import sum_over_group

            sum_over_group(head.group_name, [t for t in (self.hidden, self.extra_hidden) if t is not None])
        if self.hidden is not None:
            self.hidden = rows.spread(self.hidden.to(inputs.hidden.dtype))
        if self.extra_hidden is not None and inputs.extra_hidden is not None:
            self.extra_hidden = rows.spread(self.extra_hidden.to(inputs.extra_hidden.dtype))
        return self
