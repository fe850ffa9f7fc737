"""A call's tensors: whole or cut, checked, and what a rank must learn of the others' tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...engine.errors import BadOptionError
from ...models.attention import bind_positional
from ...models.packing import CU_SEQLENS, IGNORE_INDEX, aligned_targets
from ...models.sharding import SequenceShard
from ...models.spec import describe, is_multimodal
from ...ops.group_devices import device_for
from ...ops.sequence_parallel import all_gather, all_reduce_sum, pad_sequence, shard_length

#: [batch, sequence] arguments of a model's call
_PER_TOKEN = ("attention_mask", "position_ids", "labels", "shift_labels", "mm_token_type_ids", "token_type_ids")

#: what padding tokens have, where it is not the last token's value
_PADDING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "temperature": 1.0}


def sequence_length(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Tokens of `input_ids` or `inputs_embeds`.

    Raises:
        BadOptionError: the call has neither.
    """
    for name in ("input_ids", "inputs_embeds"):
        given = kwargs.get(name)
        if isinstance(given, Tensor) and given.ndim >= 2:
            return int(given.shape[1])
    raise BadOptionError(f"ulysses: {describe(model)} was called without input_ids [B, S] or inputs_embeds [B, S, H]")


def check_whole(kwargs: dict[str, Any], length: int, ranks: int) -> None:
    """Every per-token argument must have as many tokens as the ids.

    Raises:
        BadOptionError: one has not; says which, and what a cut layout would need.
    """
    for name in _PER_TOKEN:
        given = kwargs.get(name)
        if not isinstance(given, Tensor) or given.ndim not in (2, 3) or given.shape[-1] == length:
            continue
        if name == "attention_mask" and given.ndim == 3:
            continue
        keep = kwargs.get("logits_to_keep")
        if name == "shift_labels" and isinstance(keep, Tensor) and given.shape[1:] == keep.shape:
            continue  # aligned with the rows that are kept
        raise BadOptionError(
            f"ulysses: {name} has {given.shape[-1]} tokens and the input {length}. With inputs='full' (the default) every "
            f"rank passes the whole sequence; for tensors that are cut over the {ranks} ranks already, use "
            f"sp=Ulysses(..., inputs='sharded')"
        )


def learn_of_others(shard: SequenceShard, kwargs: dict[str, Any]) -> None:
    """In a cut layout: gather position ids, padding mask and tokens of all ranks, in one collective.

    Afterwards `position_ids` and `attention_mask` in `kwargs` are whole, `shard.targets` holds this rank's aligned
    targets, and where labels were given `shift_labels` and `num_items_in_batch` say what this rank's share of the loss is.
    """
    ids = kwargs.get("input_ids")
    first = ids if ids is not None else kwargs["inputs_embeds"]
    batch, size = first.shape[:2]
    rows: dict[str, Tensor] = {}
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(shard.rank * size, (shard.rank + 1) * size, device=first.device)[None]
    _check_cut("position_ids", positions, shard)
    axes = positions if positions.ndim == 3 else positions[None]
    for axis, values in enumerate(axes):
        rows[f"position_ids.{axis}"] = values.expand(batch, -1)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] != shard.length:
        _check_cut("attention_mask", mask, shard)
        rows["attention_mask"] = mask
    elif isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] != shard.length:
        raise BadOptionError(
            f"ulysses: a custom attention_mask {list(mask.shape)} must be of the whole sequence, padding included: "
            f"{shard.length} keys here (scope.shard() pads it)"
        )
    given = next((name for name in ("shift_labels", "labels") if kwargs.get(name) is not None), None)
    if given is not None:
        _check_cut(given, kwargs[given], shard)
        rows["targets"] = kwargs[given]
    elif ids is not None:
        rows["targets"] = ids
    stacked = torch.stack([x.to(first.device, torch.int64) for x in rows.values()])  # labels may have stayed on the CPU
    if shard.group is not None:
        gathered = all_gather(stacked, shard.group).permute(1, 2, 0, 3).flatten(2)
    else:
        gathered = stacked
    whole = dict(zip(rows, gathered, strict=True))

    ids_of_axes = [whole[f"position_ids.{axis}"] for axis in range(len(axes))]
    shard.position_ids = torch.stack(ids_of_axes) if positions.ndim == 3 else ids_of_axes[0]
    kwargs["position_ids"] = shard.position_ids
    if "attention_mask" in whole:
        kwargs["attention_mask"] = whole["attention_mask"].to(mask.dtype)  # type: ignore[union-attr]
    if "targets" not in whole:
        return
    known = {"position_ids": shard.position_ids, **{name: kwargs.get(name) for name in CU_SEQLENS}}
    targets = aligned_targets({**known, "input_ids" if given is None else given: whole["targets"]})
    assert targets is not None
    shard.targets = targets.narrow(1, shard.rank * size, size).contiguous()
    if kwargs.get("labels") is not None:
        _share_of_loss(shard, kwargs, _count(targets))


def cut_targets(shard: SequenceShard, kwargs: dict[str, Any]) -> None:
    """Whole inputs, cut outputs (multimodal models in a cut layout): this rank's aligned targets and share of the loss."""
    given = kwargs.get("shift_labels")
    if isinstance(given, Tensor) and given.shape[1] == shard.size != shard.length:
        shard.targets = kwargs["shift_labels"] = given.contiguous()
        if kwargs.get("labels") is not None:
            count = _count(given)
            if shard.group is not None:
                count = all_reduce_sum(count.to(device_for(shard.group, count)), shard.group)
            _share_of_loss(shard, kwargs, count)
        return
    whole = aligned_targets(kwargs)
    if whole is None:
        return
    shard.targets = shard.cut(whole, 1, IGNORE_INDEX).contiguous()  # losses take it flat
    if kwargs.get("labels") is not None:
        _share_of_loss(shard, kwargs, _count(whole))


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum()


def _share_of_loss(shard: SequenceShard, kwargs: dict[str, Any], count: Tensor) -> None:
    """The loss becomes this rank's sum over the count of all ranks, so that the shares add up to one process's mean."""
    kwargs["shift_labels"] = shard.targets
    kwargs["labels"] = shard.targets  # models ask whether there are labels, and use the shifted ones
    if kwargs.get("num_items_in_batch") is None:
        kwargs["num_items_in_batch"] = count.clamp(min=1)
    shard.loss_arguments = {name: kwargs[name] for name in ("shift_labels", "num_items_in_batch")}


def _check_cut(name: str, x: Tensor, shard: SequenceShard) -> None:
    if x.shape[-1] != shard.size:
        raise BadOptionError(
            f"ulysses: {name} has {x.shape[-1]} tokens, and this rank's share of the input {shard.size}. With "
            f"inputs='sharded' ids, position_ids, labels, shift_labels and temperature are this rank's part"
        )


def cut_cache_position(shard: SequenceShard, positions: Tensor) -> Tensor:
    """Where this rank's tokens stand in the whole sequence, [size], for layers that scale by it (up to transformers 5.3).

    A decoder counts the tokens that it sees, and so begins at 0 on every rank; a caller may have given the whole [S].
    """
    if len(positions) == shard.size:
        start = shard.rank * shard.size
        return torch.arange(start, start + shard.size, device=positions.device).clamp(max=shard.length - 1)
    return shard.cut_once(positions, 0) if len(positions) == shard.length else positions


def cut_rotary(shard: SequenceShard, value: Any) -> Any:
    """(cos, sin) [.., S, D], one tensor, or a dict of such: this rank's rows."""
    if isinstance(value, Tensor):
        whole = value.ndim >= 2 and value.shape[-2] == shard.length
        return shard.cut_once(value, value.ndim - 2) if whole else value
    if isinstance(value, dict):
        return {k: cut_rotary(shard, v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(cut_rotary(shard, v) for v in value)
    return value


def cut_visual_rows(shard: SequenceShard, kwargs: dict[str, Any]) -> None:
    """Rows of visual embeddings that a decoder adds to its first layers: those of this rank's visual tokens."""
    mask, embeds = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if not isinstance(mask, Tensor) or not embeds:
        return
    start, end = shard.bounds()
    order = torch.full(mask.shape, -1, dtype=torch.int64, device=mask.device)
    order[mask] = torch.arange(int(mask.sum()), device=mask.device)
    mine = order[:, start:end]
    rows = mine[mine >= 0]
    kwargs["deepstack_visual_embeds"] = [x[rows] for x in embeds]


def whole_inputs(model: nn.Module) -> tuple[str, ...]:
    """The arguments that a model takes whole in a cut layout: all that a multimodal model's forward names; else none."""
    return bind_positional(type(model).forward) if is_multimodal(model) else ()


def shard_batch(group: dist.ProcessGroup | None, batch: dict[str, Any], whole: Collection[str] = ()) -> dict[str, Any]:
    """This rank's part of a whole batch, padded to equal parts.

    What `whole` names stays as it is: a multimodal model takes whole inputs, since images may lie anywhere.

    Tensors [B, S, ...] are cut in dimension 1, `position_ids` in the last one; a 4-D mask and all else stays whole. Padding
    is labelled -100 (`shift_labels` are added where no labels are given), masked where there is a mask, and continues the
    last positions.
    """
    lengths = [x.shape[1] for name in ("input_ids", "inputs_embeds") if isinstance(x := batch.get(name), Tensor)]
    if not lengths:
        raise BadOptionError("shard(): the batch has neither input_ids [B, S] nor inputs_embeds [B, S, H]")
    length = lengths[0]
    if group is None:
        return dict(batch)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = shard_length(length, ranks)
    if not whole and size * ranks > length and all(batch.get(name) is None for name in ("labels", "shift_labels")):
        targets = aligned_targets(batch)
        if targets is not None:  # otherwise the last real token would be scored against padding
            batch = {**batch, "shift_labels": targets}
    made: dict[str, Any] = {}
    for name, x in batch.items():
        dim = -1 if name == "position_ids" else 1
        if name == "attention_mask" and name not in whole and isinstance(x, Tensor) and x.ndim == 4:
            made[name] = _padded_mask(x, ranks * size)
            continue
        if name in whole or not isinstance(x, Tensor) or x.ndim < 2 or x.shape[dim] != length:
            made[name] = x
            continue
        value = 0.0 if x.dtype == torch.bool or name.endswith(("mask", "masks")) else _PADDING.get(name)
        padded = pad_sequence(x, dim % x.ndim, ranks * size, value)
        if name == "position_ids":
            padded[..., length:] += torch.arange(1, ranks * size - length + 1, device=x.device)
        made[name] = padded.narrow(dim, rank * size, size).contiguous()
    return made


def _padded_mask(mask: Tensor, length: int) -> Tensor:
    """A custom [B, 1 or H, S, S] mask for a padded sequence: padding is seen by nobody, and sees what the last token sees."""
    unseen = 0.0 if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return pad_sequence(pad_sequence(mask, 3, length, unseen), 2, length)
