"""A head whose vocabulary rows are spread over the processes of a group: layout, merged statistics, summed gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...engine.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

# By weight and group: finding out costs a collective and a wait, and a parameter's share does not change.
_layouts: Any = WeakTensorKeyDictionary()


def layout(process_group: ProcessGroup, weight: Tensor) -> tuple[str, int, int]:
    """(group name, first row held here, rows in all), from one gather of every rank's row count per weight tensor."""
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "process_group: not under torch.compile, where the shares of the ranks cannot be asked for; call "
            "linear_cross_entropy outside of the compiled region (torch.compiler.disable)"
        )
    name = process_group.group_name
    known: dict[str, tuple[str, int, int]] = _layouts.setdefault(weight, {})
    if name not in known:
        count = torch.tensor([weight.shape[0]], device=weight.device)
        counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(counts, count, group=process_group)
        sizes = [int(c) for c in counts]
        known[name] = (name, sum(sizes[: dist.get_rank(process_group)]), sum(sizes))
    return known[name]


def is_dtensor(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether it is a `torch.distributed.tensor.DTensor`, without importing that."""
    return tensor is not None and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_weight(weight: DTensor, hidden: Tensor, process_group: ProcessGroup | None) -> tuple[Tensor, tuple[str, int, int]]:
    """This rank's rows of a weight that is sharded on dimension 0 over a one-dimensional mesh, and their layout.

    Sharded by tensor parallelism, the ranks see the same tokens and every rank's rows count for all of them. Sharded by
    FSDP, they see different tokens, and the whole weight must be put together first. The tensors look alike: it is the
    first where the group was named, or the hidden states are a replicated DTensor of the same mesh.
    """
    mesh, placements = weight.device_mesh, weight.placements
    sharded = len(placements) == 1 and placements[0].is_shard(0)
    same = is_dtensor(hidden) and getattr(hidden, "device_mesh", None) == mesh
    if not sharded or (process_group is None and not same):
        raise UnsupportedError(
            f"weight: a DTensor with placements {tuple(placements)} over a mesh of {mesh.ndim} dimension(s). Where FSDP "
            "sharded it, call from within the forward of the module that FSDP manages, where the weight is whole. "
            "Where it is tensor-parallel (Shard(0), one dimension), name the group with process_group=mesh.get_group() "
            "or hand over the hidden states as a replicated DTensor of that mesh"
        )
    group = mesh.get_group()
    if process_group is not None and process_group.group_name != group.group_name:
        raise ValueError("process_group: it is not the group of the mesh that the weight is sharded over")
    rows, chunk = weight.shape[0], -(-weight.shape[0] // mesh.size())
    return weight.to_local(), (group.group_name, min(rows, mesh.get_local_rank() * chunk), rows)


def to_local(tensor: Tensor, name: str) -> Tensor:
    """A replicated DTensor's tensor; anything that is no DTensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    placements = tensor.placements
    if not all(p.is_replicate() for p in placements):
        raise UnsupportedError(f"{name}: a DTensor with placements {tuple(placements)}, wanted Replicate or a plain tensor")
    return tensor.to_local()


def local_rows(tensor: Tensor | None) -> Tensor | None:
    """This rank's rows of a bias or a second weight that is sharded like the weight."""
    return tensor.to_local() if tensor is not None and is_dtensor(tensor) else tensor


def _resolve(group_name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]


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
    group = _resolve(group_name)
    new_top = top.clone()
    dist.all_reduce(new_top, op=dist.ReduceOp.MAX, group=group)
    step = top - new_top
    decay = step.exp()
    sums = [total * decay, label_logit]
    if centred is not None:
        sums.append(decay * (centred + total * step))
    if squares is not None:
        sums.append(decay * decay * squares)
    if topk_logits is not None:
        sums.extend(topk_logits.unbind(1))
    packed = torch.stack(sums)
    dist.all_reduce(packed, group=group)
    rows = iter(packed.unbind(0))
    total, label_logit = next(rows), next(rows)
    centred = next(rows) if centred is not None else None
    squares = next(rows) if squares is not None else None
    if topk_logits is not None:
        topk_logits = torch.stack(list(rows), 1) if topk_logits.shape[1] else topk_logits
    return new_top, total, centred, squares, label_logit, topk_logits


def sum_over_group(group_name: str, tensors: list[Tensor]) -> None:
    """Sum each tensor over the group, in place."""
    group = _resolve(group_name)
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
