"""Packing a batch into one row in which every shared prefix stands once, and finding its tokens again.

Everything here is index arithmetic on token ids; no weights, no gradients. A "cell" is a place of the caller's tensors,
numbered row by row; a "row" of the packed sequence is a token that the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.errors import BadOptionError
from ...ops.prefix_attention import PrefixLayout


@dataclass(frozen=True, eq=False)
class Packing:
    """How the cells of a batch and the tokens of its packed row belong together.

    Attributes:
        shape: (B, S) of the caller's token tensors.
        layout: the packed row, N tokens.
        cells: int64 [N], the cell that each packed token is read from.
        source: int64 [B * S], the packed token that computes a cell, -1 for padding.
        before: int64 [B * S], the packed token that predicts a cell's token, -1 where there is none.
        positions: int64 [N], the position of each packed token in its own sequence.
        leader: int64 [B], the first row of each row's group, which its prefix is read from.
        by_token: results belong to the token they score (packed and grouped rows), not to the row before it.
        twin: int64 [B * S], the cell that stands for a cell as a logit row: that of the group's first member for a shared
            prefix but for its last token (whose next tokens differ), the cell itself elsewhere.
    """

    shape: tuple[int, int]
    layout: PrefixLayout
    cells: Tensor
    source: Tensor
    before: Tensor
    positions: Tensor
    leader: Tensor
    by_token: bool
    twin: Tensor

    def pack(self, values: Tensor, dim: int = 0) -> Tensor:
        """[..., B, S, ...] -> [..., 1, N, ...], with B at `dim`."""
        flat = values.flatten(dim, dim + 1)
        return flat.index_select(dim, self.cells.to(values.device)).unsqueeze(dim)

    def unpack(self, values: Tensor) -> Tensor:
        """[1, N, ...] -> [B, S, ...], 0 at padding."""
        return scatter(values[0], self.source, self.shape)


def scatter(rows: Tensor, source: Tensor, shape: tuple[int, int]) -> Tensor:
    """Rows [K, ...] to cells [B, S, ...]: `source` [B * S] names the row of each cell, -1 for 0. Sums in the backward."""
    source = source.to(rows.device)
    if not rows.shape[0]:
        return rows.new_zeros(*shape, *rows.shape[1:]) + rows.sum()  # 0, and part of the graph
    found = rows.index_select(0, source.clamp(min=0))
    missing = (source < 0).view(-1, *(1,) * (rows.ndim - 1))
    return found.masked_fill(missing, 0).view(*shape, *rows.shape[1:])


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Where the real tokens of a batch are.

    Attributes:
        real: bool [B, S].
        lengths: per row.
        columns: int64 [B, S], the column of a row's j-th real token (columns of padding follow).
    """

    real: Tensor
    lengths: list[int]
    columns: Tensor

    @property
    def first(self) -> Tensor:
        """int64 [B], the column of each row's first real token."""
        return self.columns[:, 0]

    def aligned(self, values: Tensor, dim: int = 0) -> Tensor:
        """[..., B, S] with B at `dim`, each row's real tokens moved to its front."""
        columns = self.columns.to(values.device).expand(*values.shape[:dim], -1, -1)
        return values.gather(dim + 1, columns)

    @property
    def holes(self) -> bool:
        """Is there padding between real tokens of a row?"""
        span = torch.tensor(self.lengths, device=self.real.device)[:, None]
        inside = torch.arange(self.real.shape[1], device=self.real.device) < span
        return bool(((self.columns - self.first[:, None] >= span) & inside).any())

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor | None) -> RealTokens:
        """From a 2-D mask, or none.

        Raises:
            BadOptionError: a mask of another shape.
        """
        if attention_mask is None:
            real = torch.ones_like(input_ids, dtype=torch.bool)
        elif attention_mask.shape == input_ids.shape:
            real = attention_mask.to(input_ids.device) != 0
        else:
            raise BadOptionError(
                f"prefix_grouper: attention_mask is {list(attention_mask.shape)} and input_ids {list(input_ids.shape)}; a mask "
                f"of real and padding tokens of the same shape is wanted"
            )
        columns = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        return cls(real, real.sum(1).tolist(), columns)


def pack_rows(tokens: RealTokens, groups: Sequence[Sequence[int]], prefixes: Sequence[int]) -> Packing:
    """Pack a batch of full rows.

    Args:
        tokens: where the real tokens are.
        groups: the row numbers of each group.
        prefixes: how many tokens the rows of each group share; 0 for none.
    """
    rows, columns = tokens.real.shape
    if not any(tokens.lengths):
        return _nothing_real((rows, columns), tokens.real.device)
    order = sorted(range(len(groups)), key=lambda g: prefixes[g] == 0)  # stable: those without a prefix go last
    groups, prefixes = [groups[g] for g in order], [prefixes[g] for g in order]
    layout = PrefixLayout(
        prefixes, [[max(0, tokens.lengths[row] - p) for row in g] for g, p in zip(groups, prefixes, strict=True)]
    )
    device = tokens.real.device
    leader, shared, start = ([0] * rows for _ in range(3))
    first = [0] * rows
    for group, p, prefix, bounds in zip(groups, prefixes, layout.prefix_bounds, layout.response_bounds, strict=True):
        for row, (begin, _) in zip(group, bounds, strict=True):
            leader[row], shared[row], start[row], first[row] = group[0], p, begin, prefix[0]
    leader_t, shared_t, start_t, first_t = (torch.tensor(x, device=device)[:, None] for x in (leader, shared, start, first))
    offset = tokens.real.long().cumsum(1) - 1  # of a real token in its row
    in_prefix = offset < shared_t
    source = torch.where(in_prefix, first_t + offset, start_t + offset - shared_t).masked_fill(~tokens.real, -1)
    cell = torch.arange(rows * columns, device=device).view(rows, columns)
    own = tokens.real & (~in_prefix | (leader_t == torch.arange(rows, device=device)[:, None]))
    cells = torch.empty(layout.tokens, dtype=torch.int64, device=device)
    cells[source[own]] = cell[own]
    positions = torch.empty_like(cells)
    positions[source[own]] = offset[own]
    before = torch.where(offset == shared_t, first_t + shared_t - 1, source - 1).masked_fill(~tokens.real | (offset == 0), -1)
    of_leader = leader_t * columns + tokens.columns[leader_t[:, 0]].gather(1, offset.clamp(min=0))
    twin = torch.where(tokens.real & (offset < shared_t - 1), of_leader, cell)
    return Packing(
        (rows, columns),
        layout,
        cells,
        source.flatten(),
        before.flatten(),
        positions,
        leader_t[:, 0],
        by_token=False,
        twin=twin.flatten(),
    )


def _nothing_real(shape: tuple[int, int], device: torch.device) -> Packing:
    """All padding, as a rank without data makes it: models need a token, so one runs, and no cell shows it."""
    none = torch.full((shape[0] * shape[1],), -1, dtype=torch.int64, device=device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    leader, twin = torch.arange(shape[0], device=device), torch.arange(len(none), device=device)
    return Packing(shape, PrefixLayout([0], [[1]]), one, none, none, one, leader, by_token=False, twin=twin)


def pack_segments(shape: tuple[int, int], groups: Sequence[Sequence[Tensor]], device: torch.device) -> Packing:
    """Pack segments that the caller has laid out already: per group, the cells of its prefix and of each response.

    Args:
        shape: (B, S) of the caller's tensors.
        groups: per group, int64 cell numbers: the prefix first, then each response.
    """
    order = sorted(range(len(groups)), key=lambda g: len(groups[g][0]) == 0)
    ordered = [groups[g] for g in order]
    layout = PrefixLayout([len(g[0]) for g in ordered], [[len(r) for r in g[1:]] for g in ordered])
    nothing = torch.empty(0, dtype=torch.int64)
    cells = torch.cat([nothing, *(g[0] for g in ordered), *(r for g in ordered for r in g[1:])])
    source = torch.full((shape[0] * shape[1],), -1, dtype=torch.int64)
    source[cells] = torch.arange(len(cells))
    before, positions = source - 1, torch.empty_like(cells)
    before[source < 0] = -1
    for prefix, responses in zip(layout.prefix_bounds, layout.response_bounds, strict=True):
        length = prefix[1] - prefix[0]
        positions[slice(*prefix)] = torch.arange(length)
        if length:
            before[cells[prefix[0]]] = -1
        for begin, stop in responses:
            positions[begin:stop] = torch.arange(length, length + stop - begin)
            if stop > begin:
                before[cells[begin]] = prefix[1] - 1 if length else -1
    cells, source, before, positions = (x.to(device) for x in (cells, source, before, positions))
    leader, twin = torch.arange(shape[0], device=device), torch.arange(shape[0] * shape[1], device=device)
    return Packing(shape, layout, cells, source, before, positions, leader, by_token=True, twin=twin)
