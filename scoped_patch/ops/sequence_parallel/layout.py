"""Who has which tokens, and who computes which heads. Pure arithmetic, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def shard_length(length: int, ranks: int) -> int:
    """Tokens per rank: ceil(length / ranks), at least 1. Ranks hold equal shards; the last ones may be padding."""
    return max(1, -(-length // ranks))


def shard_bounds(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """The real tokens [start, end) of a rank's shard; start == end where it is all padding."""
    size = shard_length(length, ranks)
    return min(rank * size, length), min((rank + 1) * size, length)


def pad_sequence(x: Tensor, dim: int, length: int, value: float | None = None) -> Tensor:
    """Lengthen `x` along `dim` to `length`, with `value`, or by repeating its last entry where value is None."""
    missing = length - x.shape[dim]
    if missing <= 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    if value is None and x.shape[dim]:
        tail = x.narrow(dim, x.shape[dim] - 1, 1).expand(shape)
    else:
        tail = x.new_full(shape, 0 if value is None else value)
    return torch.cat([x, tail], dim)


@dataclass(frozen=True)
class HeadLayout:
    """Which heads a rank computes, and which key-value heads it needs for them.

    Rank j computes query heads [j * H/n, (j+1) * H/n). Query head i belongs to key-value head i // (H / KV), and a rank
    is sent exactly the run of key-value heads that its query heads need, so that nothing is repeated where KV heads are
    at least as many as ranks and divide evenly; with fewer, each goes to n / KV neighbouring ranks.

    Attributes:
        heads: H, query heads.
        kv_heads: KV, key-value heads; divides H.
        ranks: n.

    Raises:
        ValueError: H is no multiple of n, or of KV.
    """

    heads: int
    kv_heads: int
    ranks: int

    def __post_init__(self) -> None:
        if self.heads % self.ranks:
            raise ValueError(
                f"{self.heads} attention heads cannot be shared by {self.ranks} ranks: sequence parallelism needs a degree "
                f"that divides them (here: {', '.join(str(d) for d in range(1, self.heads + 1) if self.heads % d == 0)})"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are no multiple of {self.kv_heads} key-value heads")

    @property
    def per_rank(self) -> int:
        """Query heads of one rank."""
        return self.heads // self.ranks

    @property
    def kv_per_rank(self) -> int:
        """Key-value heads that each rank is sent."""
        return max(last - first + 1 for first, last in (self._needed(j) for j in range(self.ranks)))

    def kv_start(self, rank: int) -> int:
        """The first key-value head that a rank is sent."""
        return min(self._needed(rank)[0], self.kv_heads - self.kv_per_rank)

    @property
    def kv_sent(self) -> tuple[int, ...] | None:
        """Key-value heads in the order of sending, `kv_per_rank` for each rank; None when that is 0, 1, ... KV-1."""
        order = tuple(self.kv_start(j) + i for j in range(self.ranks) for i in range(self.kv_per_rank))
        return None if order == tuple(range(self.kv_heads)) else order

    def kv_of_heads(self, rank: int) -> tuple[int, ...] | None:
        """For each query head of a rank the received key-value head it uses.

        None when they go in equal groups, as every attention kernel expects; then `groups` heads share one.
        """
        size, start = self.heads // self.kv_heads, self.kv_start(rank)
        used = tuple((rank * self.per_rank + i) // size - start for i in range(self.per_rank))
        if self.per_rank % self.kv_per_rank == 0:
            group = self.per_rank // self.kv_per_rank
            if used == tuple(i // group for i in range(self.per_rank)):
                return None
        return used

    def groups(self, rank: int) -> int:
        """Query heads per key-value head on a rank, once `kv_of_heads` was applied."""
        return 1 if self.kv_of_heads(rank) is not None else self.per_rank // self.kv_per_rank

    def elements(self, tokens: int, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Elements of a rank's buffers for one layer: (query, key and value together; output).

        `tokens` is batch times tokens per rank. Forward sends both once, backward both once more, the other way.
        """
        exchanged = self.heads * head_dim + self.ranks * self.kv_per_rank * (head_dim + value_dim)
        return tokens * exchanged, tokens * self.heads * value_dim

    def _needed(self, rank: int) -> tuple[int, int]:
        size = self.heads // self.kv_heads
        return rank * self.per_rank // size, ((rank + 1) * self.per_rank - 1) // size
