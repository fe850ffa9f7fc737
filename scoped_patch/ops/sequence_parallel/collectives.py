"""The four collectives that everything here is made of: counted, watched, without gradients of their own.

The first dimension of every buffer is the rank. Bytes are those of the whole buffer that a rank hands in (of an
all-to-all 1/n stays where it is; an all-gather sends its buffer n - 1 times).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..group_devices import check_device
from . import failures

# Renamed in torch 2.13; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class CollectiveLog:
    """What was communicated by this process: one (kind, bytes) per collective, in order.

    Kinds: `all_to_all`, `all_gather`, `reduce_scatter`, `all_reduce`.
    """

    calls: list[tuple[str, int]] = field(default_factory=list)

    def count(self, kind: str | None = None) -> int:
        return sum(1 for one, _ in self.calls if kind in (None, one))

    def bytes(self, kind: str | None = None) -> int:
        return sum(size for one, size in self.calls if kind in (None, one))


_logs: list[CollectiveLog] = []


@contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Count this package's collectives, of all threads (backward may run on another), for the length of a block.

    Collectives inside a compiled graph are not seen.
    """
    log = CollectiveLog()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [one for one in _logs if one is not log]


def _note(kind: str, sent: Tensor) -> None:
    for log in _logs:
        log.calls.append((kind, sent.numel() * sent.element_size()))


def all_to_all(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row j goes to rank j; row i of the result came from rank i. [n, ...] -> [n, ...]."""
    check_device(group, buffer, "an all-to-all")
    buffer = buffer.contiguous()
    out = torch.empty_like(buffer)
    _note("all_to_all", buffer)
    _finish(dist.all_to_all_single(out, buffer, group=group, async_op=_watched(buffer)), group, "an all-to-all")
    return out


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x`. [...] -> [n, ...]."""
    check_device(group, x, "an all-gather")
    x = x.contiguous()
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    _note("all_gather", x)
    # Flat: gloo does not take the extra dimension.
    work = _all_gather(out.view(-1), x.view(-1), group=group, async_op=_watched(x))
    _finish(work, group, "an all-gather")
    return out


def reduce_scatter_sum(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of the row that is this rank's. [n, ...] -> [...]."""
    check_device(group, buffer, "a reduce-scatter")
    buffer = buffer.contiguous()
    _note("reduce_scatter", buffer)
    if _watched(buffer):
        # gloo's own is an all-reduce of the whole buffer, and waiting for it cannot be interrupted to look for notes.
        received = torch.empty_like(buffer)
        _finish(dist.all_to_all_single(received, buffer, group=group, async_op=True), group, "a reduce-scatter")
        return received.sum(0, dtype=buffer.dtype)
    out = buffer.new_empty(buffer.shape[1:])
    _finish(_reduce_scatter(out.view(-1), buffer.view(-1), group=group), group, "a reduce-scatter")
    return out


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, in a new tensor."""
    check_device(group, x, "an all-reduce")
    out = x.clone(memory_format=torch.contiguous_format)
    _note("all_reduce", out)
    _finish(dist.all_reduce(out, group=group, async_op=_watched(out)), group, "an all-reduce")
    return out


def _watched(x: Tensor) -> bool:
    """Waits on the host can look around meanwhile; a CUDA collective of NCCL is waited for by its stream."""
    return not x.is_cuda


def _finish(work: Any, group: dist.ProcessGroup, what: str) -> None:
    failures.begin_collective(group)
    if work is None:
        return
    patience = timedelta(seconds=failures.POLL_SECONDS)
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError as error:
            if work.is_completed():
                raise failures.ended_badly(group, what, error) from error
            failures.check(group, what)
            if "timed out" not in str(error).lower():
                raise
