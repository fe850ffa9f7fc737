"""Position ids of the packed row: what the unpacked batch has, each group on its first member's count."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.errors import BadOptionError
from ...models.packing import deciding_axes
from .packing import Packing, RealTokens


def own_positions(model: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """The position ids that a vision-language model works out for the batch itself, or None.

    They depend on the images of whole rows, so they are asked for before packing: [3, B, S].
    """
    inner = next((m for m in model.modules() if callable(getattr(m, "compute_3d_position_ids", None))), None)
    if inner is None:
        return None
    compute: Any = inner.compute_3d_position_ids
    wanted = inspect.signature(compute).parameters
    given = {name: kwargs[name] for name in wanted if kwargs.get(name) is not None}
    required = (
        name for name, p in wanted.items() if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    )
    found = compute(**{name: None for name in required} | given)
    return found if isinstance(found, Tensor) else None


def check_positions(position_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """[B, S] or [axes, B, S] ids, rows that stand for all of them expanded.

    Raises:
        BadOptionError: another shape.
    """
    if position_ids.ndim in (2, 3) and position_ids.shape[-1] == shape[1] and position_ids.shape[-2] in (1, shape[0]):
        return position_ids.expand(*position_ids.shape[:-2], *shape)
    raise BadOptionError(
        f"prefix_grouper: position_ids are {list(position_ids.shape)}, wanted {list(shape)} (or one set of them per axis)"
    )


def relative_positions(position_ids: Tensor, tokens: RealTokens) -> Tensor:
    """Counted from each row's first real token: rows may be padded, and so counted, differently.

    Raises:
        BadOptionError: a row counts backwards (all axes of it: the temporal one alone goes down after a long video), so that
            it holds several packed samples.
    """
    first = tokens.first.to(position_ids.device)[:, None]
    relative = position_ids - position_ids.gather(-1, first.expand(*position_ids.shape[:-1], 1))
    axes = deciding_axes(tokens.aligned(relative, relative.ndim - 2))
    lengths = torch.tensor(tokens.lengths, device=axes.device)[:, None]
    inside = torch.arange(1, axes.shape[-1], device=axes.device) < lengths
    if bool(((axes[..., 1:] < axes[..., :-1]).all(0) & inside).any()):
        raise BadOptionError(
            "prefix_grouper: position_ids restart within a row, so a row holds several samples. Give one sample per row, or "
            "the packed layout with cu_seqlens and one group id per segment"
        )
    return relative


def check_steps(position_ids: Tensor) -> None:
    """Without an attention mask (and a cache), transformers takes ids that jump for the border of two packed samples.

    Raises:
        BadOptionError: ids of text that do not go up by one.
    """
    if position_ids.ndim == 3 and position_ids.shape[0] != 4:
        return  # image axes, which no mask is made from
    text = position_ids if position_ids.ndim == 2 else position_ids[0]
    if bool((text.diff(dim=-1) != 1).any()):
        raise BadOptionError(
            "prefix_grouper: position_ids jump within a row and there is no attention_mask, from which transformers concludes "
            "that the row holds several samples. Give the attention_mask: ones, and zeros at padding"
        )


def packed_positions(
    packing: Packing, position_ids: Tensor | None, relative: Tensor | None, tokens: RealTokens | None
) -> Tensor:
    """[1, N] or [axes, 1, N].

    Args:
        position_ids: the batch's own, or None.
        relative: the same, counted from each row's first real token; None for grouped and packed rows, whose ids are
            taken as they are.
    """
    if position_ids is None:
        return packing.positions[None]
    if relative is None or tokens is None:
        return packing.pack(position_ids, position_ids.ndim - 2)
    leader = packing.leader.to(position_ids.device)
    first = tokens.first.to(position_ids.device)[:, None].expand(*position_ids.shape[:-1], 1)
    base = position_ids.gather(-1, first)[..., leader, :]
    return packing.pack(relative + base, position_ids.ndim - 2)
