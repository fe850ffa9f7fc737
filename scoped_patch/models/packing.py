"""Token alignment: which token a logit row is scored against, and where packed rows begin.

Packed rows are found by restarts, not by gaps: a new sample begins where a position id is 0 again or goes down. Ids that
stand still (image tokens of multi-axis rope) or jump ahead belong to the same sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100

#: names under which cumulative sequence lengths reach a model
CU_SEQLENS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")


def shift(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Align labels with logit rows: row t is scored against label t+1; the last row is ignored.

    Args:
        labels: int64 [B, S].

    Returns:
        int64 [B, S].
    """
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


def sample_starts(position_ids: Tensor | None, cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """Where a packed sample begins.

    Args:
        position_ids: [B, S] ids, or those of multi-axis rope: [4, B, S], of which the first axis is the text's and decides;
            [3, B, S], of which all axes begin anew at once. (The temporal one alone may stand at 0 over a leading image, and
            goes down after a long video.)
        cu_seqlens: [N + 1] cumulative lengths of one packed row; wins over position_ids.
        length: S.

    Returns:
        bool [B, S] (or [1, S]), True at the first token of every sample but the row's first; None without information.
    """
    if cu_seqlens is not None:
        positions = torch.arange(length, device=cu_seqlens.device)
        inner = (positions[:, None] == cu_seqlens[None, 1:-1]).any(-1) & (positions > 0)
        return inner[None]
    if position_ids is None:
        return None
    axes = deciding_axes(position_ids)
    before, here = axes[..., :-1], axes[..., 1:]
    # Positions may rise through 0, as where a model adds the offset of an earlier batch's images; -1, -1, 0 is a filler's end.
    earlier = torch.nn.functional.pad(before[..., :-1], (1, 0), value=-2)
    rises = (before == -1) & (earlier == -2)
    restart = (here < before).all(0) | ((here == 0) & ~rises).all(0)
    return torch.nn.functional.pad(restart, (1, 0), value=False)


def deciding_axes(position_ids: Tensor) -> Tensor:
    """The axes [.., B, S] that have to agree on where a sample begins: of four the first, which is the text's; else all."""
    axes = position_ids if position_ids.ndim == 3 else position_ids.reshape(1, -1, position_ids.shape[-1])
    return axes[:1] if len(axes) == 4 else axes


def aligned_targets(kwargs: dict[str, Any], ignore_index: int = IGNORE_INDEX) -> Tensor | None:
    """The tokens that logit rows are scored against, from the keyword arguments of a model's call.

    `shift_labels` are taken as aligned; `labels` are shifted by one; without either, the input ids are shifted by one and
    the last token of every packed sample is ignored.

    Returns:
        int64 [B, S], or None when the call has neither labels nor input ids.
    """
    given = kwargs.get("shift_labels")
    if given is not None:
        return given  # type: ignore[no-any-return]
    labels = kwargs.get("labels")
    if labels is not None:
        return shift(labels, ignore_index)
    input_ids = kwargs.get("input_ids")
    if input_ids is None:
        return None
    targets = shift(input_ids, ignore_index)
    cu_seqlens = next((kwargs[name] for name in CU_SEQLENS if kwargs.get(name) is not None), None)
    starts = sample_starts(kwargs.get("position_ids"), cu_seqlens, input_ids.shape[-1])
    if starts is None:
        return targets
    last = torch.nn.functional.pad(starts[:, 1:], (0, 1), value=False)
    return targets.masked_fill(last.to(targets.device), ignore_index)
