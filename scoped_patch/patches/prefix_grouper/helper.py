"""Building packed rows of shared prefixes, and taking results apart again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...engine.errors import BadOptionError


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """One packed row: per group its prefix, then each of its responses.

    Use it as `model(**packed.inputs())`.

    Attributes:
        input_ids, position_ids: int64 [1, N]; a response's positions go on from its prefix's.
        cu_seqlens: int32 [segments + 1].
        group_ids: int64 [segments].
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor

    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of the model's call."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seqlens": self.cu_seqlens,
            "group_ids": self.group_ids,
        }

    def segments(self, values: Tensor) -> list[list[Tensor]]:
        """[1, N, ...] -> per group, its prefix's and its responses' parts (views)."""
        parts = torch.split(values[0], self.cu_seqlens.diff().tolist())
        groups: dict[int, list[Tensor]] = {}
        for part, group in zip(parts, self.group_ids.tolist(), strict=True):
            groups.setdefault(group, []).append(part)
        return list(groups.values())

    def responses(self, values: Tensor, padding: float = 0) -> Tensor:
        """[1, N, ...] -> [responses, longest response, ...], padded on the right."""
        parts = [part for group in self.segments(values) for part in group[1:]]
        if not parts:
            return values.new_empty(0, 0, *values.shape[2:])
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=padding)


def pack_prefix_groups(
    prefixes: Sequence[Sequence[int] | Tensor], responses: Sequence[Sequence[Sequence[int] | Tensor]]
) -> PackedGroups:
    """Pack prompts and their responses into one row, each prompt once.

    Args:
        prefixes: per group, the token ids of its prefix.
        responses: per group, the token ids of each response.

    Raises:
        BadOptionError: not as many groups of responses as prefixes.
    """
    if len(prefixes) != len(responses):
        raise BadOptionError(f"pack_prefix_groups: {len(prefixes)} prefixes and {len(responses)} groups of responses")
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    groups: list[int] = []
    for number, (prefix, members) in enumerate(zip(prefixes, responses, strict=True)):
        length = len(prefix)
        for segment, start in ((prefix, 0), *((member, length) for member in members)):
            ids.append(torch.as_tensor(segment, dtype=torch.int64).reshape(-1))
            positions.append(torch.arange(start, start + len(segment), device=ids[-1].device))
            groups.append(number)
    if not ids:
        raise BadOptionError("pack_prefix_groups: there is nothing to pack")
    device = ids[0].device
    lengths = torch.tensor([0, *(len(one) for one in ids)], device=device)
    return PackedGroups(
        torch.cat(ids)[None],
        torch.cat(positions)[None],
        lengths.cumsum(0).to(torch.int32),
        torch.tensor(groups, device=device),
    )
