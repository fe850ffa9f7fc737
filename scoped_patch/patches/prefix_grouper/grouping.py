"""Which rows share which prefix: given by group ids, or found by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...engine.errors import BadOptionError
from .packing import RealTokens


def read_group_ids(group_ids: Any, count: int, what: str = "rows of the batch") -> list[list[int]]:
    """Group ids in any order -> the indices of each group, groups and members in order of appearance.

    Raises:
        BadOptionError: not one integer per row.
    """
    if isinstance(group_ids, Tensor):
        if group_ids.is_floating_point() or group_ids.ndim != 1:
            raise BadOptionError(
                f"group_ids must be int64 [{count}], one for each of the {what}; got {group_ids.dtype} {list(group_ids.shape)}"
            )
        group_ids = group_ids.tolist()
    ids = list(group_ids) if isinstance(group_ids, Sequence) and not isinstance(group_ids, str) else None
    if ids is None or len(ids) != count or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise BadOptionError(f"group_ids must be {count} integers, one for each of the {what}; got {group_ids!r}")
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(ids):
        groups.setdefault(group, []).append(index)
    return list(groups.values())


def shared_lengths(keys: Tensor, tokens: RealTokens, groups: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens the rows of each group have in common, leaving at least one to every row that has any.

    A group of one row shares nothing: its row is all response.

    Args:
        keys: int64 [B, S], equal where tokens are equal.
    """
    rows = torch.arange(keys.shape[0])
    lengths = torch.tensor(tokens.lengths)
    for group in groups:
        real = [row for row in group if tokens.lengths[row]]
        rows[group] = real[0] if real else group[0]
    leader = rows.to(keys.device)
    aligned = tokens.aligned(keys)
    limit = torch.minimum(lengths, lengths[rows]).to(keys.device)
    within = torch.arange(keys.shape[1], device=keys.device) < limit[:, None]
    common = ((aligned == aligned[leader]) & within).long().cumprod(1).sum(1).tolist()
    found = []
    for group in groups:
        real = [row for row in group if tokens.lengths[row]]
        found.append(min(min(common[row], tokens.lengths[row] - 1) for row in real) if len(real) > 1 else 0)
    return found


def find_groups(keys: Tensor, tokens: RealTokens) -> list[list[int]]:
    """The grouping that leaves the fewest tokens to compute, rows being compared token by token.

    Rows in lexicographic order share more with a neighbour than with anything further, so the best groups are runs of
    that order; which runs is a shortest-path question over it.
    """
    count = keys.shape[0]
    aligned = tokens.aligned(keys).cpu()
    rows = [aligned[row, : tokens.lengths[row]].tolist() for row in range(count)]
    order = sorted(range(count), key=rows.__getitem__)
    common = [_common(rows[a], rows[b]) for a, b in pairwise(order)]
    saved, begins = [0] * (count + 1), [0] * (count + 1)
    for stop in range(1, count + 1):
        saved[stop], begins[stop] = saved[stop - 1], stop - 1
        shared = shortest = len(rows[order[stop - 1]])
        for begin in range(stop - 2, -1, -1):
            shared = min(shared, common[begin])
            shortest = min(shortest, len(rows[order[begin]]))
            if not shared:
                break
            gain = saved[begin] + (stop - begin - 1) * min(shared, shortest - 1)
            if gain > saved[stop]:
                saved[stop], begins[stop] = gain, begin
    groups, stop = [], count
    while stop:
        groups.append(sorted(order[begins[stop] : stop]))
        stop = begins[stop]
    return sorted(groups)


def _common(left: list[int], right: list[int]) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
