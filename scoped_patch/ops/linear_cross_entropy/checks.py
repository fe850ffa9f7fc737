"""Refusing what cannot work, once for each kind of calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from .backends import choose
from .problem import Settings
from .remember import Remembered

OUTPUT_NAMES = ("log_probs", "entropy", "sum_sq_probs", "is_top1")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: (shape, dtype)
Form = tuple[torch.Size, torch.dtype]
_right: Remembered[Settings] = Remembered()


def form(tensor: Tensor | None) -> Form | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return None


def number(name: str, value: float) -> float:
    """A float of what is one, which text is not."""
    if isinstance(value, str):
        raise TypeError(f"{name}: got {value!r}, wanted a number")
    return float(value)


def integer(name: str, value: int) -> int:
    """Looked at in each call: a float may equal an integer that was right before."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)  # of another library's
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, wanted an integer") from None


def settled(call: tuple[Any, ...]) -> Settings:
    """The settings of a call that is right. Checked once for each kind: the device waits for its first product meanwhile."""
    if torch.compiler.is_compiling():
        return _settle(*call)
    return _right.get(call, lambda: _settle(*call))


def _settle(
    hidden: Form,
    weight: Form,
    labels: Form,
    bias: Form | None,
    extra_hidden: Form | None,
    extra_weight: Form | None,
    topk_ids: Form | None,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    wanted: tuple[str, ...],
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    memory: int,
    backend: str,
) -> Settings:
    """Refuse what cannot work."""
    _check_dtypes(hidden=hidden, weight=weight, bias=bias, extra_hidden_states=extra_hidden, extra_weight=extra_weight)
    _check_shapes(hidden[0], weight[0], labels, bias, extra_hidden, extra_weight, topk_ids)
    if autocast_dtype is None and hidden[1] != weight[1]:
        raise TypeError(
            f"hidden_states and weight: got {hidden[1]} and {weight[1]}, wanted one dtype (or autocast, which picks it)"
        )
    unknown = [name for name in wanted if name not in OUTPUT_NAMES]
    if unknown or not (wanted or topk_ids is not None):
        raise ValueError(f"outputs: got {wanted!r}, wanted one or more of {', '.join(OUTPUT_NAMES)}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, wanted a number > 0, or None")
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f'backend: got {backend!r}, wanted "auto", "torch" or "triton"')
    dtype = autocast_dtype or hidden[1]
    return Settings(
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        vocab_start=0,
        vocab_size=weight[0][0],
        group_name="",
        compute_dtype=dtype,
        backend=choose(backend, device, dtype),
        memory=memory,
    )


def _check_dtypes(**floats: Form | None) -> None:
    for name, form in floats.items():
        if form is not None and form[1] not in _DTYPES:
            hint = "; dequantise it to bf16 first" if "float8" in str(form[1]) else ""
            raise TypeError(f"{name}: got {form[1]}, wanted float16, bfloat16, float32 or float64{hint}")


def _check_shapes(
    hidden: torch.Size,
    weight: torch.Size,
    labels: Form,
    bias: Form | None,
    extra_hidden: Form | None,
    extra_weight: Form | None,
    topk_ids: Form | None,
) -> None:
    if len(weight) != 2 or weight[0] == 0:
        raise ValueError(f"weight: got shape {list(weight)}, wanted [vocabulary, hidden] with at least one row")
    vocab = weight[0]
    if len(hidden) < 1 or hidden[-1] != weight[1]:
        raise ValueError(f"hidden_states: got shape {list(hidden)}, wanted [..., {weight[1]}] to match weight")
    tokens, dtype = labels
    if dtype != torch.int64:
        raise TypeError(f"labels: got {dtype}, wanted int64")
    if tokens != hidden[:-1]:
        raise ValueError(f"labels: got shape {list(tokens)}, wanted {list(hidden[:-1])}: one label per row, aligned")
    if bias is not None and bias[0] != (vocab,):
        raise ValueError(f"bias: got shape {list(bias[0])}, wanted [{vocab}]")
    if (extra_hidden is None) != (extra_weight is None):
        raise ValueError("extra_hidden_states and extra_weight belong together: got one of them")
    if extra_hidden is not None and extra_weight is not None:
        rank = extra_weight[0][-1]
        if extra_weight[0] != (vocab, rank):
            raise ValueError(f"extra_weight: got shape {list(extra_weight[0])}, wanted [{vocab}, R]")
        if extra_hidden[0] != (*tokens, rank):
            raise ValueError(f"extra_hidden_states: got shape {list(extra_hidden[0])}, wanted {[*tokens, rank]}")
    if topk_ids is not None:
        shape, dtype = topk_ids
        if dtype != torch.int64:
            raise TypeError(f"topk_ids: got {dtype}, wanted int64")
        if shape[:-1] != tokens:
            raise ValueError(f"topk_ids: got shape {list(shape)}, wanted {[*tokens, 'K']}")
