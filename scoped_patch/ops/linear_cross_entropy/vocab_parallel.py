"""A head whose vocabulary rows are spread over the processes of a group: merging statistics and summing gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def resolve(group_name: str) -> Any:
    """The process group of that name (`ProcessGroup.group_name`)."""
    return dist.distributed_c10d._resolve_process_group(group_name)


def merge_over_group(
    group_name: str,
    top: Tensor,
    total: Tensor,
    centred: Tensor | None,
    squares: Tensor | None,
    label_logit: Tensor,
    topk_logits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Two collectives: the maximum, then every sum in one tensor. A label lives on one process and is 0 on the others."""
    group = resolve(group_name)
    new_top = top.clone()
    dist.all_reduce(new_top, op=dist.ReduceOp.MAX, group=group)
    step = top - new_top
    decay = step.exp()
    parts = [(total * decay)[:, None], label_logit[:, None]]
    if centred is not None:
        parts.append((decay * (centred + total * step))[:, None])
    if squares is not None:
        parts.append((decay * decay * squares)[:, None])
    if topk_logits is not None:
        parts.append(topk_logits)
    packed = torch.cat(parts, 1)
    dist.all_reduce(packed, group=group)
    columns = iter(packed[:, : packed.shape[1] - (topk_logits.shape[1] if topk_logits is not None else 0)].unbind(1))
    total, label_logit = next(columns), next(columns)
    centred = next(columns) if centred is not None else None
    squares = next(columns) if squares is not None else None
    if topk_logits is not None:
        topk_logits = packed[:, packed.shape[1] - topk_logits.shape[1] :]
    return new_top, total, centred, squares, label_logit, topk_logits


def sum_over_group(group_name: str, tensors: list[Tensor]) -> None:
    """Sum each tensor over the group, in place."""
    group = resolve(group_name)
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def layout(process_group: Any, rows: int, device: torch.device) -> tuple[str, int, int]:
    """(group name, first row held here, rows in all), from one gather of every rank's row count."""
    count = torch.tensor([rows], device=device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(counts, count, group=process_group)
    sizes = [int(c) for c in counts]
    rank = dist.get_rank(process_group)
    return process_group.group_name, sum(sizes[:rank]), sum(sizes)
