"""A stand-in for flash-attn on the CPU, so that transformers' flash path runs without a GPU or the package.

It keeps the contract of flash-attn 2: [B, S, H, D] dense or [tokens, H, D] with int32 cumulative lengths, fewer key-value
heads, causality aligned at the bottom right, inclusive windows, softcap, sinks; and it refuses what the real one refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch import Tensor, nn

IMPLEMENTATION = "flash_attention_2"

#: one entry per call: ("dense", query shape, key shape) or ("varlen", query shape, key shape, cumulative lengths)
calls: list[tuple[Any, ...]] = []


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    _check(q, k, v, 4)
    calls.append(("dense", tuple(q.shape), tuple(k.shape)))
    rows = [_attention(*row, softmax_scale, causal, window_size, softcap, s_aux) for row in zip(q, k, v, strict=True)]
    return torch.stack(rows)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    _check(q, k, v, 3)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32, "cumulative lengths must be int32"
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert starts[0] == ends[0] == 0, "cumulative lengths begin with 0"
    assert starts[-1] == len(q), f"cumulative lengths end at {starts[-1]}, there are {len(q)} queries"
    assert ends[-1] == len(k), f"cumulative lengths end at {ends[-1]}, there are {len(k)} keys"
    assert int(max_seqlen_q) >= max(b - a for a, b in itertools.pairwise(starts))
    calls.append(("varlen", tuple(q.shape), tuple(k.shape), starts))
    samples = [
        _attention(q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size, softcap, s_aux)
        for a, b, c, d in zip(starts, starts[1:], ends, ends[1:], strict=False)
    ]
    return torch.cat(samples)


@contextmanager
def installed() -> Iterator[list[tuple[Any, ...]]]:
    """Let transformers find the stand-in as flash_attention_2; what it had loaded comes back afterwards."""
    names = (
        "_loaded_implementation",
        "_flash_fn",
        "_flash_varlen_fn",
        "_flash_with_kvcache_fn",
        "_pad_fn",
        "_unpad_fn",
        "_process_flash_kwargs_fn",
        "_process_with_kvcache_kwargs_fn",
    )
    before = {name: getattr(flash_utils, name) for name in names if hasattr(flash_utils, name)}
    values: tuple[Any, ...] = (
        IMPLEMENTATION,
        flash_attn_func,
        flash_attn_varlen_func,
        None,
        flash_utils._pad_input,
        flash_utils._unpad_input,
        flash_utils._lazy_define_process_function(flash_attn_varlen_func),
        dict,
    )
    for name, value in zip(names, values, strict=True):
        if name in before:
            setattr(flash_utils, name, value)
    calls.clear()
    try:
        yield calls
    finally:
        for name, value in before.items():
            setattr(flash_utils, name, value)


def use_flash(model: nn.Module) -> nn.Module:
    """Name flash_attention_2 in every config of a built model; the public setter would look for the package."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = IMPLEMENTATION
    return model


def _check(q: Tensor, k: Tensor, v: Tensor, ndim: int) -> None:
    for x in (q, k, v):
        assert x.ndim == ndim, f"wanted {ndim} dimensions, got {list(x.shape)}"
        assert x.stride(-1) == 1, "the last dimension must be contiguous"
        assert x.numel(), "an empty tensor"
    assert k.shape == v.shape, f"keys {list(k.shape)} and values {list(v.shape)} differ"
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-2] % k.shape[-2] == 0, f"{q.shape[-2]} query heads are no multiple of {k.shape[-2]}"


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """One sample: q [Q, H, D], k and v [K, KV, D] -> [Q, H, D]."""
    queries, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keys = len(k)
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None]
    seen = (j <= i) if causal else torch.ones(queries, keys, dtype=torch.bool)
    if window[0] >= 0:
        seen = seen & (j >= i - window[0])
    if window[1] >= 0:
        seen = seen & (j <= i + window[1])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        assert sinks.shape == (heads,), f"one sink per head: {list(sinks.shape)} for {heads} heads"
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, queries, 1)], -1)
    weights = scores.softmax(-1)[..., :keys]
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
