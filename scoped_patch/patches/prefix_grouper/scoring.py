"""Which logit rows a call needs, and its results back in the caller's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...engine.errors import BadOptionError
from ...models.packing import shift
from .packing import Packing, scatter


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The logit rows that are scored, each once.

    Attributes:
        rows: int64 [K], tokens of the packed row.
        targets: int64 [K], what each is scored against.
        temperature: [1, K], or a number.
        of_cell: int64 [B * S], the scored row whose result a cell shows, -1 for none.
        shape: (B, S).
    """

    rows: Tensor
    targets: Tensor
    temperature: float | Tensor
    of_cell: Tensor
    shape: tuple[int, int]

    def unpack(self, values: Tensor) -> Tensor:
        """[1, K] -> [B, S], 0 where nothing is scored."""
        return scatter(values[0], self.of_cell, self.shape)


def targets_of(packing: Packing, kwargs: dict[str, Any], real: Tensor, ignore_index: int) -> Tensor:
    """int64 [B, S]: what each cell's result is scored against; `ignore_index` for nothing.

    In full rows that is the next token's label, in packed and grouped rows the token's own. A label of a padding token is
    no label, nor is the first token of a sequence scored: whatever padding holds has no say.
    """
    given = kwargs.get("shift_labels")
    labels = kwargs.get("labels")
    if packing.by_token:
        if given is not None:
            raise BadOptionError(
                "prefix_grouper: packed and grouped rows take labels=, one per token; shift_labels= cannot say what follows "
                "the last prefix token, which is another token for every response"
            )
        labels = kwargs["input_ids"] if labels is None else labels
        _check_shape("labels", labels, packing)
        own: Tensor = labels.masked_fill((packing.before < 0).view(packing.shape).to(labels.device), ignore_index)
        return own
    if given is not None:
        _check_shape("shift_labels", given, packing)
        return given.masked_fill(~real.to(given.device), ignore_index)  # type: ignore[no-any-return]
    labels = kwargs["input_ids"] if labels is None else labels
    _check_shape("labels", labels, packing)
    real = real.to(labels.device)
    counted = real & shift(real.long(), 0).bool()
    return shift(labels, ignore_index).masked_fill(~counted, ignore_index)


def scored_rows(
    packing: Packing, targets: Tensor, temperature: float | Tensor, keep: Any, ignore_index: int, share: bool = True
) -> ScoredRows:
    """The rows to score: each response token's, the last prefix token's once per response, and each of the other prefix
    tokens' once per group wherever its members agree on the target and the temperature.

    Args:
        targets: int64 [B, S], from `targets_of`.
        temperature: a number, [], [B], or [B, S] like the targets.
        keep: columns to score, as `logits_to_keep` says.
        share: False scores prefix tokens once per member.
    """
    device = packing.source.device
    flat = targets.to(device).flatten()
    wanted = kept_columns(packing.shape, keep, device)
    origin = packing.before if packing.by_token else packing.source
    scored = (flat != ignore_index) & (origin >= 0) & wanted.flatten()
    heat = _per_cell(temperature, packing)
    cell = torch.arange(len(flat), device=device)
    twin = packing.twin if share else cell
    same = scored[twin] & (flat == flat[twin])
    if heat is not None:
        same &= heat[twin] == heat
    twin = torch.where(same, twin, cell)
    chosen = (scored & (twin == cell)).nonzero()[:, 0]
    number = torch.full_like(cell, -1)
    number[chosen] = torch.arange(len(chosen), device=device)
    of_cell = number[twin].masked_fill(~scored, -1)
    per_row = heat[chosen][None] if heat is not None else temperature
    return ScoredRows(origin[chosen], flat[chosen], per_row, of_cell, packing.shape)


def kept_columns(shape: tuple[int, int], keep: Any, device: torch.device) -> Tensor:
    """bool [B, S]: the columns that `logits_to_keep` asks for."""
    column = torch.zeros(shape[1], dtype=torch.bool, device=device)
    column[_column_index(keep)] = True
    return column.expand(shape)


def keep_columns(values: Tensor, keep: Any) -> Tensor:
    """[B, S, ...] cut as `logits_to_keep` says."""
    return values[:, _column_index(keep)]


def _column_index(keep: Any) -> Any:
    if isinstance(keep, Tensor):
        if keep.ndim != 1:
            raise BadOptionError(
                f"prefix_grouper: logits_to_keep must be a number or a list of columns, got {list(keep.shape)}"
            )
        return keep
    return slice(-keep, None) if keep else slice(None)


def _per_cell(temperature: float | Tensor, packing: Packing) -> Tensor | None:
    """[B * S], or None for one number."""
    if not isinstance(temperature, Tensor) or temperature.ndim == 0:
        return None
    heat = temperature.to(packing.source.device)
    if heat.ndim == 1 and heat.shape[0] in (1, packing.shape[0]):
        heat = heat[:, None]
    if heat.ndim == 2 and heat.shape[0] in (1, packing.shape[0]) and heat.shape[1] in (1, packing.shape[1]):
        return heat.expand(packing.shape).flatten()
    raise BadOptionError(
        f"prefix_grouper: temperature is {list(temperature.shape)}, wanted a number, [{packing.shape[0]}] or "
        f"{list(packing.shape)}"
    )


def _check_shape(name: str, values: Tensor, packing: Packing) -> None:
    if tuple(values.shape) != packing.shape:
        raise BadOptionError(f"prefix_grouper: {name} is {list(values.shape)}, wanted {list(packing.shape)} like input_ids")


def needed_rows(packing: Packing, keep: Any) -> tuple[Tensor, Tensor]:
    """The packed tokens whose logits are shown, each once (int64 [K]), and which of them each cell shows ([B * S], -1 none)."""
    shown = kept_columns(packing.shape, keep, packing.source.device).flatten() & (packing.source >= 0)
    needed = torch.zeros(packing.layout.tokens, dtype=torch.bool, device=shown.device)
    needed[packing.source[shown]] = True
    number = needed.long().cumsum(0) - 1
    return needed.nonzero()[:, 0], number[packing.source.clamp(min=0)].masked_fill(~shown, -1)


def every_scored_cell(packing: Packing, targets: Tensor, keep: Any, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(packed token, target) of every scored cell, int64 [M] each: as often as the repeated rows would count it."""
    flat = targets.to(packing.source.device).flatten()
    origin = packing.before if packing.by_token else packing.source
    scored = (flat != ignore_index) & (origin >= 0) & kept_columns(packing.shape, keep, flat.device).flatten()
    return origin[scored], flat[scored]


def row_of_token(packing: Packing, rows: Tensor) -> Tensor:
    """int64 [N]: where each packed token is among `rows`, -1 if it is not."""
    found = torch.full((packing.layout.tokens,), -1, dtype=torch.int64, device=rows.device)
    found[rows] = torch.arange(len(rows), device=rows.device)
    return found


def loss_of(log_probs: Tensor, scored: Tensor, num_items: Any) -> Tensor:
    """Mean negative log-prob over the scored cells, or the sum over `num_items`; 0 where there are none."""
    if num_items is None:
        num_items = scored.sum().clamp(min=1)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(log_probs.device)
    loss: Tensor = -log_probs.sum() / num_items
    return loss
