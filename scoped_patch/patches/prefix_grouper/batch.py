"""A call's arguments checked and packed, in whichever of the three layouts they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.errors import BadOptionError, UnsupportedError
from ...models.modules import walk
from ...models.packing import CU_SEQLENS
from ...models.spec import text_config
from . import formats, grouping, positions
from .images import KINDS, Media, cut_at_media, find_media
from .packing import Packing, RealTokens, pack_rows

#: tensors of the call that have a value per token and go with the tokens
PER_TOKEN = ("mm_token_type_ids",)
#: what is taken care of by name; any other tensor argument is refused
KNOWN = frozenset(
    (
        "input_ids",
        "attention_mask",
        "position_ids",
        "labels",
        "shift_labels",
        "temperature",
        "num_items_in_batch",
        "second_per_grid_ts",
        "logits_to_keep",
        *PER_TOKEN,
        *(name for kind in KINDS for name in kind[:2]),
    )
)
CACHES = ("cache", "past_key_values")
#: what routers of experts multiply their input or scores with while training
_NOISE = ("jitter_noise", "router_jitter_noise", "input_jitter_noise")
_NOT_HAD = {
    "output_attentions": "no attention weights exist",
    "output_router_logits": "the auxiliary loss counts every token of the repeated rows, and here each prefix token once",
}


@dataclass(frozen=True, eq=False)
class Batch:
    """A call, packed.

    Attributes:
        packing: how cells and packed tokens belong together.
        real: bool [B, S], tokens that are not padding.
        position_ids: [1, N] or [axes, 1, N].
        media: the pictures that the packed row needs.
    """

    packing: Packing
    real: Tensor
    position_ids: Tensor
    media: dict[str, Tensor]


def pack(module: nn.Module, kwargs: dict[str, Any], group_ids: Any, grouper: Any, what: str) -> Batch | None:
    """The batch packed; None when nobody named groups and no two rows share a token.

    Args:
        what: the model, for messages.

    Raises:
        BadOptionError, UnsupportedError: arguments that do not fit each other, or that a packed row cannot have.
    """
    refuse(module, kwargs, what)
    input_ids: Tensor = kwargs["input_ids"]
    cu_seqlens = next((kwargs.pop(name) for name in CU_SEQLENS if kwargs.get(name) is not None), None)
    if grouper is not None and (group_ids is not None or cu_seqlens is not None):
        raise BadOptionError("prefix_grouper: a call has either prefix_grouper= or group_ids=, not both")
    shape = (input_ids.shape[0], input_ids.shape[1])
    position_ids = kwargs.get("position_ids")
    if position_ids is not None:
        position_ids = positions.check_positions(position_ids, shape)
    if grouper is None and cu_seqlens is None:
        return _pack_rows(module, kwargs, group_ids, position_ids, what)
    packing = (
        formats.from_object(input_ids, grouper)
        if grouper is not None
        else formats.from_segments(input_ids, cu_seqlens, group_ids)
    )
    real = (packing.source >= 0).view(shape)
    media = find_media(module, kwargs, real)
    if media and position_ids is None:
        raise BadOptionError(
            "prefix_grouper: packed rows with images need position_ids, as the model makes them for the rows apart"
        )
    return Batch(packing, real, positions.packed_positions(packing, position_ids, None, None), _chosen(media, packing))


def _pack_rows(
    module: nn.Module, kwargs: dict[str, Any], group_ids: Any, position_ids: Tensor | None, what: str
) -> Batch | None:
    input_ids: Tensor = kwargs["input_ids"]
    tokens = RealTokens.of(input_ids, kwargs.get("attention_mask"))
    given = position_ids
    media = find_media(module, kwargs, tokens.real)
    channels = [input_ids, *(one.keys() for one in media)]
    if position_ids is None and media:
        position_ids = positions.own_positions(module, kwargs)
    holes = tokens.holes
    if holes and getattr(text_config(module), "sliding_window", None):
        raise UnsupportedError(
            f"prefix_grouper: attention_mask has padding between the real tokens of a row, which a sliding window of {what} "
            f"counts and a packed row does not have; pad on the sides only"
        )
    if position_ids is None and holes:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    relative = None
    if position_ids is not None:
        relative = positions.relative_positions(position_ids, tokens)
        if given is not None and kwargs.get("attention_mask") is None:
            positions.check_steps(given)
        # Tokens at different positions are not the same token.
        channels += [relative] if relative.ndim == 2 else list(relative)
    keys = _one_key(channels, tokens.real)
    if group_ids is None:
        groups = grouping.find_groups(keys, tokens)
    else:
        groups = grouping.read_group_ids(group_ids, input_ids.shape[0])
    prefixes = grouping.shared_lengths(keys, tokens, groups)
    if group_ids is None and not any(prefixes):
        return None
    if media:
        prefixes = [cut_at_media(p, media, g[0], tokens.real) for p, g in zip(prefixes, groups, strict=True)]
    packing = pack_rows(tokens, groups, prefixes)
    return Batch(
        packing, tokens.real, positions.packed_positions(packing, position_ids, relative, tokens), _chosen(media, packing)
    )


def refuse(module: nn.Module, kwargs: dict[str, Any], what: str) -> None:
    """Raise for what a grouped call cannot have."""
    if not isinstance(kwargs.get("input_ids"), Tensor) or kwargs["input_ids"].ndim != 2:
        raise BadOptionError("prefix_grouper: rows are compared by their tokens, so input_ids [B, S] are needed")
    for name in CACHES:
        if kwargs.get(name) is not None:
            raise BadOptionError(f"prefix_grouper: a grouped call cannot have a {name}")
    if kwargs.get("use_cache"):
        raise BadOptionError("prefix_grouper: a grouped call cannot fill a cache: leave out use_cache=True")
    config = getattr(module, "config", None)
    for name, why in _NOT_HAD.items():
        given = kwargs.get(name)
        if given if given is not None else _from_config(config, name):
            raise UnsupportedError(f"prefix_grouper: {name}=True cannot be had for grouped rows of {what}: {why}")
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.ndim and name not in KNOWN and name not in CU_SEQLENS:
            raise UnsupportedError(
                f"prefix_grouper: {what} was called with a tensor {name} {list(value.shape)}, and how it belongs to "
                f"the tokens is not known here"
            )
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise BadOptionError("prefix_grouper: attention_mask must be [B, S]: which tokens see which is what this patch makes")
    if module.training:
        active = next((m for m in walk(module) if isinstance(m, nn.modules.dropout._DropoutNd) and m.p and m.training), None)
        if active is not None:
            raise UnsupportedError(
                f"prefix_grouper: {what} has active dropout ({active}), which would be one draw for all rows of a "
                f"group; set it to 0 or call model.eval()"
            )
        noisy = next(((m, name) for m in walk(module) if m.training for name in _NOISE if getattr(m, name, None)), None)
        if noisy is not None:
            raise UnsupportedError(
                f"prefix_grouper: {what} has a {type(noisy[0]).__name__} with active noise ({noisy[1]}), which would be one "
                f"draw for all rows of a group; set it to 0 on the module or call model.eval()"
            )


def _chosen(media: list[Media], packing: Packing) -> dict[str, Tensor]:
    return {name: value for one in media for name, value in one.chosen(packing.cells).items()}


def _one_key(channels: list[Tensor], real: Tensor) -> Tensor:
    """int64 [B, S], equal where all channels are equal."""
    if len(channels) == 1:
        return channels[0]
    stacked = torch.stack([one.to(real.device).masked_fill(~real, 0) for one in channels], -1)
    numbers: Tensor = torch.unique(stacked.flatten(0, 1), dim=0, return_inverse=True)[1]
    return numbers.view(real.shape)


def _from_config(config: Any, name: str) -> Any:
    """A default that transformers reads from the model's config or its text part's."""
    parts = (config, config.get_text_config() if hasattr(config, "get_text_config") else None)
    return any(getattr(part, name, None) for part in parts)
