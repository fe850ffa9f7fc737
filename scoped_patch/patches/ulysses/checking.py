"""What `scope.verify()` needs to compare one rank's part with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...engine.errors import UnsupportedError
from ...models.packing import aligned_targets
from ...models.spec import describe, is_multimodal
from ...ops.sequence_parallel import all_reduce_sum, gather_sequence, shard_bounds, shard_length
from .batch import sequence_length, shard_batch


class SpreadCheck:
    """One comparison: a whole batch, the same on every rank of the group, against the part of it that a rank computes.

    Args:
        group: the ranks, or None for one.
        sharded: inputs and outputs are cut.
        mean: gradients are averaged over the ranks of the group; otherwise summed.
        model: as it was patched, under its wrappers, and the model inside.
        batch: the whole batch.

    Raises:
        UnsupportedError: a multimodal model in a cut layout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sharded: bool,
        mean: bool,
        model: nn.Module,
        inner: nn.Module,
        batch: dict[str, Any],
    ) -> None:
        if sharded and is_multimodal(inner):
            raise UnsupportedError(
                f"verify() of {describe(inner)}: with inputs='sharded' a multimodal model takes whole inputs and gives cut "
                f"outputs, which are not compared; use a scope with inputs='full'"
            )
        self.group = group
        self.sharded = sharded and group is not None
        self.mean = mean
        # DDP and FSDP have reduced the gradients over all ranks already, with and without the scope.
        self.reduced = any(isinstance(m, DistributedDataParallel) for m in model.modules())
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.length = sequence_length(inner, batch)
        self.size = shard_length(self.length, self.ranks)

    def local(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The arguments of this rank's call."""
        return shard_batch(self.group, batch) if self.sharded else batch

    def scored(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What says which tokens this rank's outputs are scored against."""
        targets = aligned_targets(batch)
        if not self.sharded or targets is None:
            return batch
        made = shard_batch(self.group, {"input_ids": targets, "shift_labels": targets})
        return {"shift_labels": made["shift_labels"]}

    def own(self, x: Tensor) -> Tensor:
        """An output's real tokens: padding belongs to no objective."""
        if not self.sharded or x.ndim < 2 or x.shape[1] != self.size:
            return x
        start, end = shard_bounds(self.length, self.ranks, dist.get_rank(self.group))
        return x.narrow(1, 0, end - start)

    def whole(self, x: Tensor, of_layer: bool = False) -> Tensor:
        """All ranks' tokens of an output (before `own`), or of a layer's output, which is cut in both layouts."""
        if self.group is None or not (self.sharded or of_layer) or x.ndim < 2 or x.shape[1] != self.size:
            return x
        return gather_sequence(x.detach(), 1, self.group, length=self.length)

    def reduce(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """Gradients as a trainer reduces them; a parameter that no rank has a gradient for is left out."""
        from torch.distributed.tensor import DTensor  # not at the top: it takes half a second, which scopes do not need

        found = {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None}
        if self.group is None or self.reduced or any(isinstance(p, DTensor) for p in parameters.values()):
            return found
        device = next(iter(parameters.values())).device
        has = torch.tensor([name in found for name in parameters], dtype=torch.int64, device=device)
        anywhere = all_reduce_sum(has, self.group).tolist()
        made = {}
        for (name, p), count in zip(parameters.items(), anywhere, strict=True):
            if count:
                total = all_reduce_sum(found[name] if name in found else torch.zeros_like(p), self.group)
                made[name] = total / self.ranks if self.mean else total
        return made
