"""What runs in place of a softmax attention, and around a recurrence, while a sequence is spread over ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engine.errors import ScopeStateError, UnsupportedError
from ...models.attention import ModuleView, attention_function
from ...models.packing import CU_SEQLENS
from ...models.sharding import SequenceShard
from ...ops.sequence_parallel import HeadLayout, heads_from_sequence, sequence_from_heads

#: the keyword argument that carries the call's shard through a layer: it is there too when the layer is recomputed
SHARD = "sequence_shard"

#: per-head arguments of attention functions -> the dimension of the heads
_PER_HEAD = {"s_aux": 0, "position_bias": 1}


class _Heads(NamedTuple):
    """A `HeadLayout` as one rank sees it."""

    per_rank: int
    groups: int
    kv_sent: tuple[int, ...] | None
    kv_of_heads: tuple[int, ...] | None


@functools.lru_cache(maxsize=256)
def _heads(heads: int, kv_heads: int, ranks: int, rank: int) -> _Heads:
    layout = HeadLayout(heads, kv_heads, ranks)
    return _Heads(layout.per_rank, layout.groups(rank), layout.kv_sent, layout.kv_of_heads(rank))


def attend(
    shard: SequenceShard,
    module: nn.Module,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """The model's own attention function on this rank's heads of the whole sequence.

    Args:
        shard: the call.
        module, config: the attention and its own config.
        query: [B, H, S/n, D]; key, value: [B, KV, S/n, D].
        attention_mask: whatever the implementation uses, of the whole sequence.
        kwargs: the other arguments of the attention function.

    Returns:
        [B, S/n, H, D] and None: attention weights are not gathered.
    """
    heads = query.shape[1]
    # Dynamo traces through the cache, and warns that it does.
    find = _heads.__wrapped__ if torch.compiler.is_dynamo_compiling() else _heads
    layout = find(heads, key.shape[1], shard.ranks, shard.rank)
    overrides: dict[str, Any] = {"config": config, "num_key_value_groups": layout.groups}
    function = attention_function(module, config._attn_implementation)
    if shard.group is None:
        return function(ModuleView(module, config=config), query, key, value, attention_mask, **kwargs)[0], None

    if layout.kv_sent is not None:
        key, value = (_pick(x, layout.kv_sent) for x in (key, value))
    query, key, value = heads_from_sequence((query, key, value), shard.group)
    used = layout.kv_of_heads
    if used is not None:
        key, value = (_pick(x, used) for x in (key, value))
    length = shard.length
    if length < shard.padded:
        query, key, value = (x.narrow(2, 0, length) for x in (query, key, value))

    def of_this_rank(x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, shard.rank * layout.per_rank, layout.per_rank) if x.shape[dim] == heads > 1 else x

    attention_mask = _checked_mask(shard, module, attention_mask)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
        attention_mask = of_this_rank(attention_mask, 1)
    for name, dim in _PER_HEAD.items():
        if isinstance(kwargs.get(name), Tensor):
            kwargs[name] = of_this_rank(kwargs[name], dim)
    sinks = getattr(module, "sinks", None)
    if isinstance(sinks, Tensor):
        overrides["sinks"] = of_this_rank(sinks, 0)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = text_positions(shard)
        if "flash" in str(config._attn_implementation) and attention_mask is None:
            _say_samples(shard, query.shape[0], kwargs)
    out = function(ModuleView(module, **overrides), query, key, value, attention_mask, **kwargs)[0]
    if length < shard.padded:
        out = F.pad(out, (0, 0, 0, 0, 0, shard.padded - length))
    return sequence_from_heads(out, shard.group), None


def text_positions(shard: SequenceShard) -> Tensor | None:
    """The whole [B, S] position ids that a layer would have been given: the first axis of a multi-axis model's four."""
    ids = shard.position_ids
    if ids is None or ids.ndim != 3:
        return ids
    return ids[0]


def _say_samples(shard: SequenceShard, batch: int, kwargs: dict[str, Any]) -> None:
    """Tell flash attention where packed samples begin, found once per call.

    Left to itself it looks at the values of the position ids in every layer, and takes every smallest id for a beginning.
    """
    if batch != 1 or any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k")):
        return
    kwargs["position_ids"] = None
    samples = shard.samples()
    if samples is not None:
        cumulative, longest = samples
        kwargs.update(cu_seq_lens_q=cumulative, cu_seq_lens_k=cumulative, max_length_q=longest, max_length_k=longest)


def _pick(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Heads in that order, runs of neighbours at a time."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and head == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((head, 1))
    return torch.cat([x.narrow(1, start, count) for start, count in runs], 1)


def _checked_mask(shard: SequenceShard, module: nn.Module, mask: Any) -> Any:
    """Refuse a mask of a part of the sequence: it came from code that makes masks in a way of its own."""
    if not isinstance(mask, Tensor):
        return mask
    keys, queries = mask.shape[-1], mask.shape[-2] if mask.ndim == 4 else 1
    if keys < shard.length or queries not in (1, shard.length):
        raise UnsupportedError(
            f"ulysses: {type(module).__name__} was given a mask {list(mask.shape)} for a sequence of {shard.length} tokens, "
            f"{shard.size} of them on this rank: this model makes its masks without transformers' mask interface"
        )
    return mask


def mix(
    prior: Callable[..., Any], shard: SequenceShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A recurrence or convolution over the whole sequence, sample by sample; this rank's tokens of the result.

    Every rank computes all of it: correct for any mixer, and nothing is saved. State starts anew at every packed sample.
    """
    if "hidden_states" in kwargs:
        hidden_states = kwargs.pop("hidden_states")
    else:
        hidden_states, *rest = args
        args = tuple(rest)
    if args:
        raise UnsupportedError(f"ulysses: {type(module).__name__} takes {len(args)} more positional arguments; not known here")
    whole = shard.gather(hidden_states, 1)
    for name in (*CU_SEQLENS, "cu_seq_lens_k", "cu_seqlens_k", "max_length_q", "max_length_k", "seq_idx"):
        kwargs.pop(name, None)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = text_positions(shard)
    mask = _padding_mask(shard)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = mask

    def run(part: Tensor, mask: Tensor | None) -> Tensor:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = mask
        out = prior(hidden_states=part, **kwargs)
        mixed: Tensor = out[0] if isinstance(out, tuple) else out
        return mixed

    rows = []
    for start, end, row in _samples(shard, whole.shape[0], mask):
        part = whole.narrow(1, start, end - start)
        part_mask = None if mask is None else mask.narrow(1, start, end - start)
        if row is None:
            rows.append([run(part, part_mask)])
        else:
            while len(rows) <= row:
                rows.append([])
            rows[row].append(run(part[row : row + 1], None if part_mask is None else part_mask[row : row + 1]))
    out = torch.cat([torch.cat(samples, 1) for samples in rows], 0)
    return shard.cut(out, 1) if shard.group is not None else out


def attend_whole(prior: Callable[..., Any], shard: SequenceShard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An attention of unknown inside over the whole sequence; this rank's tokens of the result. Every rank computes all.

    Mask and positions are whole already: the decoder made them before its sequence was cut.
    """
    shard.attended += 1
    if shard.group is None:
        return prior(*args, **kwargs)
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = shard.gather(kwargs["hidden_states"], 1)
    else:
        args = (shard.gather(args[0], 1), *args[1:])
    out = prior(*args, **kwargs)
    if isinstance(out, tuple):
        return (shard.cut(out[0], 1), *out[1:])
    return shard.cut(out, 1)


def _samples(shard: SequenceShard, batch: int, mask: Tensor | None) -> list[tuple[int, int, int | None]]:
    """(start, end, row) of every packed sample; row None: all rows at once. Padding, which may stand at 0, starts nothing."""
    starts = shard.starts()
    if starts is None:
        return [(0, shard.length, None)]
    starts = starts.expand(batch, -1)
    if mask is not None:
        starts = starts & mask.bool()
        if not bool((starts & (mask.cumsum(1) > 1)).any()):
            # One sample a row, behind padding. Some mixers look at the mask only where there are several rows.
            return [(0, shard.length, None)]
    found: list[tuple[int, int, int | None]] = []
    for row in range(batch):
        at = [0, *starts[row].nonzero().flatten().tolist(), shard.length]
        found += [(start, end, row) for start, end in itertools.pairwise(at)]
    return found


def _padding_mask(shard: SequenceShard) -> Tensor | None:
    """The whole padding mask, or None where nothing is padded, as transformers gives it to recurrences."""
    mask = shard.attention_mask
    if isinstance(mask, dict):
        mask = mask.get("linear_attention")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or shard.length == 1 or bool(torch.all(mask == 1)):
        return None
    return mask


def no_shard(module: nn.Module) -> ScopeStateError:
    return ScopeStateError(
        f"ulysses: a {type(module).__name__} ran outside a call of its patched model: call the model (or its decoder), "
        f"not a layer of it. If this is a recomputation, the layer does not hand its keyword arguments on to its attention, "
        f"and cannot be checkpointed under sequence parallelism"
    )
