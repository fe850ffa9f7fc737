"""How one call of a model is spread over ranks: which tokens are here, and how to cut and gather tensors of it.

The patch that cuts sequences makes one `SequenceShard` per call and announces it for the length of that call; patches
that look at tokens ask for it. Nothing else in the process knows of it, and no group is global.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.errors import BadOptionError, ScopedPatchError
from ..ops.sequence_parallel import gather_sequence, pad_sequence, shard_bounds, shard_length
from .packing import sample_starts


class SequenceShard:
    """One call's sequence, spread over the ranks of a group.

    Attributes:
        model: the (unwrapped) model that was called.
        group: the ranks, or None where there is one.
        ranks, rank: how many, and which one this is.
        length: S, real tokens of the whole sequence.
        size: tokens per rank, padding included.
        cuts_inputs: the caller gave the whole sequence; otherwise ids, labels and temperature came cut.
        gathers_outputs: the caller gets the whole sequence back.
        position_ids: whole, [B, S] or [axes, B, S], or None until it is known.
        attention_mask: whole, as given.
        targets: in a cut layout, this rank's aligned targets [B, size]; otherwise None.
        loss_arguments: in a cut layout with labels, what makes a loss function return this rank's share.
        wants_local_hidden: who reads the decoder's output wants this rank's tokens, and gathers itself.
        attended: how often an attention of this call exchanged heads.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        length: int,
        *,
        cuts_inputs: bool = True,
        gathers_outputs: bool = True,
    ) -> None:
        self.model = model
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.set_length(length)
        self.cuts_inputs = cuts_inputs
        self.gathers_outputs = gathers_outputs
        self.position_ids: Tensor | None = None
        self.attention_mask: Any = None
        self.cu_seqlens: Tensor | None = None
        self.targets: Tensor | None = None
        self.loss_arguments: dict[str, Tensor] = {}
        self.wants_local_hidden = False
        self.attended = 0
        self.config: Any = None
        self.thread = 0 if torch.compiler.is_dynamo_compiling() else threading.get_ident()
        self._cuts: list[tuple[Tensor, Tensor]] = []
        self._starts: tuple[Tensor | None] | None = None
        self._samples: tuple[tuple[Tensor, int] | None] | None = None

    def set_length(self, length: int) -> None:
        """S is known better now (a model may lengthen its sequence before its decoder)."""
        self.length = length
        self.size = shard_length(length, self.ranks)

    @property
    def padded(self) -> int:
        """Tokens of all ranks together, padding included."""
        return self.size * self.ranks

    def cut(self, x: Tensor, dim: int, value: float | None = None) -> Tensor:
        """This rank's tokens of [.., S, ..]; padding repeats the last token, or is `value`."""
        if x.shape[dim] != self.length:
            raise BadOptionError(
                f"sequence parallelism: a tensor {list(x.shape)} should have {self.length} tokens in dimension {dim}"
            )
        start, end = shard_bounds(self.length, self.ranks, self.rank)
        if start == end and value is None:
            start = end - 1
        mine = x.narrow(dim, start, end - start)
        if end - start < self.size:
            return pad_sequence(mine, dim, self.size, value)
        # Floats that the whole sequence has are big: a view would keep them all in memory.
        return mine.clone() if self.ranks > 1 and x.is_floating_point() else mine

    def cut_once(self, x: Tensor, dim: int) -> Tensor:
        """As `cut`, the same tensor again for the same tensor: every layer is given the same rotary embeddings."""
        for known, made in self._cuts:
            if known is x:
                return made
        made = self.cut(x, dim)
        self._cuts.append((x, made))
        return made

    def cut_kept(self, values: Tensor, keep: Any, fill: float) -> Tensor:
        """This rank's part of [B, k] values that belong to the rows `logits_to_keep=keep` of the whole sequence.

        Rows that are not kept, and padding, get `fill`.
        """
        if not isinstance(keep, int):
            whole = values.new_full((values.shape[0], self.length), fill)
            whole[:, keep] = values
        elif keep and values.shape[1] < self.length:
            whole = torch.nn.functional.pad(values, (self.length - values.shape[1], 0), value=fill)
        else:
            whole = values
        return self.cut(whole, 1, fill)

    def kept_rows(self, keep: Tensor) -> KeptRows:
        """How the listed rows (int64 [K], of the whole sequence, any order, repeats too) are divided among the ranks."""
        keep = torch.where(keep < 0, keep + self.length, keep)
        owner = torch.div(keep, self.size, rounding_mode="floor")
        own = owner[:, None] == torch.arange(self.ranks, device=keep.device)
        before = own.long().cumsum(0) - 1
        size = max(1, int(before[-1].max()) + 1) if len(keep) else 1
        places = owner * size + before.gather(1, owner[:, None])[:, 0]
        mine = own[:, self.rank].nonzero()[:, 0]
        return KeptRows(self, size, mine, keep[mine] - self.rank * self.size, places)

    def gather(self, x: Tensor, dim: int, *, backward: Any = "sum") -> Tensor:
        """Every rank's tokens, without padding: [.., size, ..] -> [.., S, ..]."""
        if self.group is None:
            return x
        return gather_sequence(x, dim, self.group, length=self.length, backward=backward)

    def starts(self) -> Tensor | None:
        """Where packed samples begin, [B or 1, S] bool, or None where nothing is packed; found once per call."""
        if self._starts is None:
            found = sample_starts(self.position_ids, self.cu_seqlens, self.length)
            self._starts = (found if found is not None and bool(found.any()) else None,)
        return self._starts[0]

    def samples(self) -> tuple[Tensor, int] | None:
        """Cumulative lengths (int32) of one packed row and its longest sample, or None where nothing is packed."""
        if self._samples is None:
            starts = self.starts()
            if starts is None:
                self._samples = (None,)
            else:
                at = [0, *starts[0].nonzero().flatten().tolist(), self.length]
                cumulative = torch.tensor(at, dtype=torch.int32, device=starts.device)
                self._samples = ((cumulative, max(b - a for a, b in itertools.pairwise(at))),)
        return self._samples[0]

    def bounds(self) -> tuple[int, int]:
        """The real tokens [start, end) of this rank."""
        return shard_bounds(self.length, self.ranks, self.rank)


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Listed rows of a whole sequence, each computed by the rank that has its token.

    Attributes:
        shard: the call.
        size: rows that every rank computes, padding included.
        mine: int64, which of the listed rows are this rank's.
        local: int64, where those are in this rank's part.
        places: int64 [K], where each listed row is among all ranks' results.
    """

    shard: SequenceShard
    size: int
    mine: Tensor
    local: Tensor
    places: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [size], the rows of this rank's part to compute; padding is its first row."""
        return torch.nn.functional.pad(self.local, (0, self.size - len(self.local)))

    def cut(self, values: Tensor, fill: float) -> Tensor:
        """[B, K] values of the listed rows -> [B, size] of this rank's."""
        mine = values.index_select(1, self.mine.to(values.device))
        return torch.nn.functional.pad(mine, (0, self.size - mine.shape[1]), value=fill)

    def gather(self, x: Tensor) -> Tensor:
        """[B, size, ...] of this rank's -> [B, K, ...] of all listed rows, on every rank."""
        whole = x if self.shard.group is None else gather_sequence(x, 1, self.shard.group)
        return whole.index_select(1, self.places.to(x.device))


_active: list[SequenceShard] = []


class _Resumed(threading.local):
    """The calls that are being recomputed on this thread; autograd recomputes on threads of its own."""

    def __init__(self) -> None:
        self.shards: tuple[SequenceShard, ...] = ()


_resumed = _Resumed()


def announce(shard: SequenceShard) -> None:
    _active.append(shard)


def withdraw(shard: SequenceShard) -> None:
    """Also takes away what later calls left behind, should they have been interrupted."""
    while _active:
        if _active.pop() is shard:
            return


def announced() -> tuple[SequenceShard, ...]:
    """The calls that run now, for `resumed`."""
    return (*_resumed.shards, *_active)


@contextmanager
def resumed(shards: tuple[SequenceShard, ...]) -> Iterator[None]:
    """For a recomputation: what was announced at its forward, on this thread."""
    before = _resumed.shards
    _resumed.shards = shards
    try:
        yield
    finally:
        _resumed.shards = before


def resumed_shard(model: nn.Module) -> SequenceShard | None:
    """How the call of `model` was spread that is being recomputed on this thread, or None."""
    return next((shard for shard in reversed(_resumed.shards) if shard.model is model), None)


def active_shard(model: nn.Module) -> SequenceShard | None:
    """How the present call of `model` is spread, or None where it is not."""
    for shard in reversed(_active):
        if shard.model is model:
            return _of_this_thread(shard)
    return None


def shard_of_config(config: Any) -> SequenceShard | None:
    """The present call whose decoder builds its masks with this very config object."""
    if config is None:
        return None
    for shard in reversed(_active):
        if shard.config is config:
            return _of_this_thread(shard)
    return None


def _of_this_thread(shard: SequenceShard) -> SequenceShard | None:
    if shard.thread and not torch.compiler.is_dynamo_compiling() and shard.thread != threading.get_ident():
        raise ScopedPatchError(
            "two threads run one sequence-parallel model at once; patched models are run from one thread at a time"
        )
    return shard
