"""One compiled FlexAttention call with a block mask: for short sequences, windows, softcaps, and fp32 on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernels import Score
from .layout import PrefixLayout

_BLOCK = 128
#: (token, block) pairs that are looked at in one go
_CELLS = 1 << 24


def flex_problem(q: Tensor, v: Tensor) -> str | None:
    """Why FlexAttention cannot do this, or None."""
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}, its backward needs cuda"
    if q.dtype == torch.float64:
        return "the tensors are float64"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: PrefixLayout, how: Score, compiled: bool = True
) -> Tensor:
    """q [1, H, N, D], k [1, KV, N, D], v [1, KV, N, Dv] -> [1, H, N, Dv]; differentiable by torch's own means."""
    run: Any = _compiled() if compiled else _flex()
    mask = block_mask(layout, how.window, q.device)
    options = {
        "block_mask": mask,
        "scale": how.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "score_mod": _softcap(how.softcap),
        # Below 128 tokens the compiler would take a kernel for decoding, which has no tiles for a mask in blocks of 128.
        "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True},
    }
    from torch.nn.attention.flex_attention import AuxRequest

    if sinks is None:
        out: Tensor = run(q, k, v, **options)
        return out
    out, aux = run(q, k, v, return_aux=AuxRequest(lse=True), **options)
    # A sink takes its share of the softmax and gives nothing.
    share: Tensor = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
    return (out * share[..., None]).to(q.dtype)


def block_mask(layout: PrefixLayout, window: int | None, device: torch.device) -> Any:
    """The block mask of a layout, made of the blocks' counts and never of all pairs of tokens; remembered by the layout."""
    return layout.remember(f"block mask {window}", device, lambda: _block_mask(layout, window, device))


def _block_mask(layout: PrefixLayout, window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    window = layout.effective_window(window)
    seen = layout.seen(window, device)
    tokens = layout.tokens
    blocks = -(-tokens // _BLOCK)
    starts = torch.arange(blocks, device=device, dtype=torch.int32) * _BLOCK
    stops = (starts + _BLOCK).clamp(max=tokens)
    # Rows beyond the last token see nothing.
    padded = torch.nn.functional.pad(seen, (0, blocks * _BLOCK - tokens)).view(4, blocks, _BLOCK, 1)
    counts = []
    for piece in torch.split(padded, max(1, _CELLS // (_BLOCK * blocks)), 1):
        shares = [
            (torch.minimum(last, stops) - torch.maximum(first, starts)).clamp(min=0) for first, last in (piece[:2], piece[2:])
        ]
        counts.append((shares[0] + shares[1]).sum(1))
    total = torch.cat(counts)
    # A last block that is not filled up is never full: its mask keeps what lies beyond the row out.
    full = total == _BLOCK * _BLOCK
    partial = (total > 0) & ~full
    partial_count, partial_index = _ordered(partial)
    full_count, full_index = _ordered(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=_BLOCK,
        mask_mod=_mask_mod(seen),
        seq_lengths=(tokens, tokens),
    )


def _mask_mod(seen: Tensor) -> Callable[..., Tensor]:
    own_start, _, prefix_start, prefix_stop = seen

    def prefix_shared(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own: Tensor = (key >= own_start[query]) & (key <= query)
        shared: Tensor = (key >= prefix_start[query]) & (key < prefix_stop[query])
        return own | shared

    return prefix_shared


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] bool -> (count [1, 1, rows], column numbers with the chosen ones first [1, 1, rows, columns])."""
    index = torch.argsort(chosen.to(torch.int8), dim=1, descending=True, stable=True)
    return chosen.sum(1).to(torch.int32)[None, None], index.to(torch.int32)[None, None].contiguous()


@functools.cache
def _softcap(softcap: float | None) -> Callable[..., Tensor] | None:
    """The score's change, with the number in its code: a number from a closure is an input of a graph of dynamic shapes, and
    FlexAttention's kernels take none.
    """
    if softcap is None:
        return None
    number = repr(float(softcap))
    names: dict[str, Any] = {"torch": torch}
    exec(f"def capped(score, b, h, query, key):\n    return {number} * torch.tanh(score / {number})", names)
    made: Callable[..., Tensor] = names["capped"]
    return made


def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled() -> Any:  # GPU only
    return torch.compile(_flex(), dynamic=True)
