"""The three ways a call says what is shared: full rows with group ids, packed segments, a `prefix_grouper` object."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.errors import BadOptionError
from .grouping import read_group_ids
from .packing import Packing, pack_segments


def from_segments(input_ids: Tensor, cu_seqlens: Any, group_ids: Any) -> Packing:
    """A packed row [1, N] cut at `cu_seqlens`; the first segment of each group is its prefix.

    Raises:
        BadOptionError: the boundaries do not fit the row, or there is not one group id per segment.
    """
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    tokens = input_ids.shape[1]
    if input_ids.shape[0] != 1 or len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise BadOptionError(
            f"prefix_grouper: cu_seqlens must rise from 0 to the {tokens} tokens of one row [1, N], got {bounds} for input_ids "
            f"{list(input_ids.shape)}"
        )
    groups = read_group_ids(group_ids, len(bounds) - 1, "segments of the packed row")
    cells = [[torch.arange(bounds[s], bounds[s + 1]) for s in group] for group in groups]
    return pack_segments((1, tokens), cells, input_ids.device)


def from_object(input_ids: Tensor, grouper: Any) -> Packing:
    """Rows [groups, L] of a prefix and its suffixes, as `PrefixGrouper.concat_input` of the package `prefix_grouper` makes.

    Raises:
        BadOptionError: the object does not describe these rows.
    """
    info, mask = getattr(grouper, "group_info", None), getattr(grouper, "padding_mask", None)
    if info is None or not isinstance(mask, Tensor):
        raise BadOptionError(
            f"prefix_grouper= must be an initialised prefix_grouper.PrefixGrouper, got {type(grouper).__name__} without "
            f"group_info or padding_mask"
        )
    shape = (input_ids.shape[0], input_ids.shape[1])
    if tuple(mask.shape) != shape:
        raise BadOptionError(
            f"prefix_grouper: input_ids are {list(shape)}, and the prefix_grouper object describes rows {list(mask.shape)}; "
            f"pass what its concat_input() gives"
        )
    groups = []
    for row, one in enumerate(info):
        cells = (mask[row].to("cpu").nonzero()[:, 0]) + row * shape[1]
        lengths = [one.prefix_len, *one.suffix_lens]
        if sum(lengths) != len(cells):
            raise BadOptionError(
                f"prefix_grouper: row {row} has {len(cells)} real tokens, and the object's group {sum(lengths)} ({lengths})"
            )
        groups.append(list(torch.split(cells, lengths)))
    return pack_segments(shape, groups, input_ids.device)
