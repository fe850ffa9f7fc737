"""Where things are in a packed row of shared prefixes and their responses, and which blocks of it attend to which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: queries of one banded block when a sliding window is in force (more would mean larger masks of mostly nothing)
_BAND_ROWS = 512


@dataclass(frozen=True)
class Block:
    """A rectangle of the attention matrix that is neither empty nor known to be more than one piece.

    Attributes:
        queries: rows, as (start, stop) in the packed row.
        keys: columns, likewise.
        offset: position of the first query minus position of the first key, within their sequence.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    offset: int

    def kind(self, window: int | None) -> str:
        """`"full"`, `"causal"` (a square with its diagonal) or `"band"` (needs a mask)."""
        rows, columns = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        if self.offset >= columns - 1 and (window is None or self.offset + rows <= window):
            return "full"
        if self.offset == 0 and rows == columns and (window is None or rows <= window):
            return "causal"
        return "band"

    def mask(self, window: int | None, device: torch.device | str) -> Tensor:
        """bool [rows, columns], True where a query sees a key: 0 <= distance < window."""
        rows = torch.arange(self.queries[1] - self.queries[0], device=device)[:, None] + self.offset
        distance = rows - torch.arange(self.keys[1] - self.keys[0], device=device)
        seen = distance >= 0
        return seen if window is None else seen & (distance < window)


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """The packed row of several groups: all prefixes, in order, then all responses, group by group.

    Token j of a response is at position `len(prefix) + j` of its sequence. It sees its group's prefix and the earlier
    tokens of its own response; a prefix sees itself. With one group this is `[prefix, response 1, ..., response G]`.

    Args:
        prefix_lengths: tokens of each group's prefix. Groups without one (0) come last.
        response_lengths: tokens of each response, per group; a response, and a whole group, may be empty.

    Raises:
        ValueError: lengths that are negative, of different numbers of groups, or a group without a prefix before one with.
    """

    prefix_lengths: tuple[int, ...]
    response_lengths: tuple[tuple[int, ...], ...]
    _on_device: dict[tuple[str, torch.device], Any] = field(default_factory=dict, repr=False)

    def __init__(self, prefix_lengths: Sequence[int], response_lengths: Sequence[Sequence[int]]) -> None:
        prefixes = tuple(int(n) for n in prefix_lengths)
        responses = tuple(tuple(int(n) for n in group) for group in response_lengths)
        if len(prefixes) != len(responses):
            raise ValueError(f"prefix_lengths has {len(prefixes)} groups, response_lengths {len(responses)}; they must agree")
        if any(n < 0 for n in (*prefixes, *(n for group in responses for n in group))):
            raise ValueError("prefix_lengths and response_lengths must not be negative")
        if any(here == 0 and after > 0 for here, after in pairwise(prefixes)):
            raise ValueError(f"groups without a prefix must come last, got prefix_lengths {list(prefixes)}")
        object.__setattr__(self, "prefix_lengths", prefixes)
        object.__setattr__(self, "response_lengths", responses)
        object.__setattr__(self, "_on_device", {})

    # ------------------------------------------------------------------------------------------------- sizes
    @cached_property
    def prefix_tokens(self) -> int:
        return sum(self.prefix_lengths)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the packed row: each prefix once, every response."""
        return self.prefix_tokens + sum(map(sum, self.response_lengths))

    @cached_property
    def repeated_tokens(self) -> int:
        """Tokens of the same sequences with the prefix repeated for every response."""
        return sum(len(group) * p + sum(group) for p, group in zip(self.prefix_lengths, self.response_lengths, strict=True))

    @cached_property
    def longest(self) -> int:
        """The longest sequence, prefix and response together."""
        return max(
            (p + max(group, default=0) for p, group in zip(self.prefix_lengths, self.response_lengths, strict=True)), default=0
        )

    @cached_property
    def prefix_bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each group's prefix."""
        return _bounds(self.prefix_lengths, 0)

    @cached_property
    def response_bounds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(start, stop) of each response, per group."""
        found, start = [], self.prefix_tokens
        for group in self.response_lengths:
            found.append(_bounds(group, start))
            start += sum(group)
        return tuple(found)

    @cached_property
    def shared_stop(self) -> int:
        """End of the responses that have a prefix to attend to; they begin at `prefix_tokens`."""
        with_prefix = [sum(g) for p, g in zip(self.prefix_lengths, self.response_lengths, strict=True) if p]
        return self.prefix_tokens + sum(with_prefix)

    # ------------------------------------------------------------------------------------------------- blocks
    def effective_window(self, window: int | None) -> int | None:
        """The window, or None when no sequence is long enough to notice it."""
        return None if window is None or window >= self.longest else window

    def blocks(self, window: int | None = None) -> tuple[Block, ...]:
        """The blocks that make up this attention: those of each segment with itself first, so that every row is begun.

        Args:
            window: a query sees this many positions, its own included; None for all.
        """
        window = self.effective_window(window)
        own: list[Block] = []
        cross: list[Block] = []
        for prefix, responses in zip(self.prefix_bounds, self.response_bounds, strict=True):
            for segment in (prefix, *responses):
                own += _own_blocks(segment, window)
            length = prefix[1] - prefix[0]
            real = [one for one in responses if one[1] > one[0]]
            if not length or not real:
                continue
            if window is None:
                # All of them in one piece: a full block does not ask which response a query belongs to.
                cross.append(Block((real[0][0], real[-1][1]), prefix, length))
                continue
            for start, stop in real:
                rows = min(stop - start, window - 1)
                first = max(0, length - window + 1)
                if rows:
                    cross.append(Block((start, start + rows), (prefix[0] + first, prefix[1]), length - first))
        own.sort(key=lambda block: block.queries)
        return (*own, *cross)

    # ------------------------------------------------------------------------------------------------- device tensors
    def cumulative(self, of: str, device: torch.device) -> Tensor:
        """int32 cumulative lengths: of `"segments"` (prefixes and responses), `"prefixes"`, or `"responses"` (per group).

        Groups without a prefix are left out of the last two; empty segments of the first.
        """
        return self.remember(of, device, lambda: torch.tensor(_cumulate(self._lengths(of)), dtype=torch.int32, device=device))

    def longest_of(self, of: str) -> int:
        return max(self._lengths(of), default=0)

    def _lengths(self, of: str) -> list[int]:
        if of == "segments":
            return [n for n in (*self.prefix_lengths, *(n for group in self.response_lengths for n in group)) if n]
        if of == "prefixes":
            return [p for p in self.prefix_lengths if p]
        return [sum(group) for p, group in zip(self.prefix_lengths, self.response_lengths, strict=True) if p]

    def seen(self, window: int | None, device: torch.device) -> Tensor:
        """int32 [4, N]: per query, the keys it sees as two ranges (start and stop of its own segment's, then its prefix's)."""
        return self.remember(f"seen {window}", device, lambda: self._seen(window).to(device))

    def remember(self, what: str, device: torch.device, make: Callable[[], T]) -> T:
        """What was made of this layout before: all layers of a model ask for the same."""
        key = (what, device)
        if key not in self._on_device:
            self._on_device[key] = make()
        found: T = self._on_device[key]
        return found

    def _seen(self, window: int | None) -> Tensor:
        ranges = torch.zeros(4, self.tokens, dtype=torch.int32)
        ranges[1] = torch.arange(1, self.tokens + 1)
        for prefix, responses in zip(self.prefix_bounds, self.response_bounds, strict=True):
            for start, stop in (prefix, *responses):
                ranges[0, start:stop] = start
                if (start, stop) != prefix:
                    ranges[2, start:stop], ranges[3, start:stop] = prefix
                    if window is not None:
                        first = torch.arange(start, stop) - start + prefix[1] - window + 1
                        ranges[2, start:stop] = first.clamp(prefix[0], prefix[1])
        if window is not None:
            ranges[0] = torch.maximum(ranges[0], ranges[1] - window)
        return ranges


def _bounds(lengths: Sequence[int], start: int) -> tuple[tuple[int, int], ...]:
    edges = _cumulate(lengths)
    return tuple((start + a, start + b) for a, b in pairwise(edges))


def _cumulate(lengths: Sequence[int]) -> list[int]:
    edges = [0]
    for n in lengths:
        edges.append(edges[-1] + n)
    return edges


def _own_blocks(segment: tuple[int, int], window: int | None) -> list[Block]:
    start, stop = segment
    if stop == start:
        return []
    if window is None or stop - start <= window:
        return [Block(segment, segment, 0)]
    rows = max(_BAND_ROWS, min(window, 4 * _BAND_ROWS))
    blocks = []
    for first in range(start, stop, rows):
        keys = max(start, first - window + 1)
        last = min(first + rows, stop)
        blocks.append(Block((first, last), (keys, last), first - keys))
    return blocks
