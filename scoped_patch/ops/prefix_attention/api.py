"""The public function: arguments checked, a backend chosen, and one autograd node whose backward is exact."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import blockwise, cudnn, flash, flex
from .kernels import CpuKernel, Kernel, PlainKernel, Score
from .layout import PrefixLayout

Backend = Literal["auto", "blockwise", "plain", "flash", "flex", "cudnn"]
BACKENDS = ("auto", "blockwise", "plain", "flash", "flex", "cudnn")


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal attention over a packed row in which several responses share their prefix.

    The same numbers as attention over every prefix-and-response sequence of its own, with each prefix computed once: its
    keys are read by all its responses and never copied, and no mask of all pairs of tokens exists.

    Args:
        query: [1, H, N, D]; N = `layout.tokens`.
        key: [1, KV, N, D]; H is a multiple of KV (head h reads key head `h // (H / KV)`).
        value: [1, KV, N, Dv].
        layout: where the prefixes and responses are.
        scale: multiplies the scores; `D ** -0.5` by default.
        window: a query sees this many positions of its own sequence, its own included; None for all.
        softcap: `softcap * tanh(score / softcap)`.
        sinks: [H]; a score per head that takes its share of every softmax and gives nothing.
        backend: which kernels compute it.

            - `"flash"`: two variable-length flash calls, merged by log-sum-exp; CUDA, 16 bits
            - `"flex"`: one FlexAttention call; CUDA
            - `"cudnn"`: cuDNN's calls, merged likewise; CUDA, 16 bits, segments of 64 tokens and more
            - `"blockwise"`: a kernel call per segment; torch's CPU kernel where it fits, else plain products
            - `"plain"`: blockwise, plain products
            - `"auto"`: on CUDA cudnn for long equal segments on Hopper and later, else flash, else flex; blockwise elsewhere

    Returns:
        [1, H, N, Dv], of the query's dtype. Differentiable once, in query, key, value and sinks. Sums run in fp32 (fp64 for
        fp64).

    Raises:
        ValueError: shapes that do not fit each other or the layout, or a backend that cannot do this; says why.
        TypeError: dtypes that differ.
    """
    query, key, value = _cast(query, key, value)
    _check(query, key, value, layout, window, softcap, sinks)
    how = Score(query.shape[-1] ** -0.5 if scale is None else scale, layout.effective_window(window), softcap)
    chosen = choose_backend(query, value, layout, how, backend)
    if not layout.tokens:
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    if chosen == "flex":
        return flex.attend(query, key, value, sinks, layout, how)
    made: Tensor = _PrefixAttention.apply(query, key, value, sinks, layout, how, chosen)  # type: ignore[no-untyped-call]
    return made


def choose_backend(query: Tensor, value: Tensor, layout: PrefixLayout, how: Score, backend: Backend = "auto") -> Backend:
    """What `"auto"` stands for here, or the given backend if it can do this.

    Raises:
        ValueError: it cannot, or there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    problems = {
        "flash": flash.flash_problem(query, value, how.softcap, how.window),
        "flex": flex.flex_problem(query, value),
        "cudnn": cudnn.cudnn_problem(query, value, layout, how.softcap, how.window),
    }
    if backend == "auto":
        if query.device.type != "cuda":
            return "blockwise"
        if problems["cudnn"] is None and cudnn.pays(query, layout):
            return "cudnn"
        if problems["flash"] is None:
            return "flash"
        return "flex" if problems["flex"] is None else "plain"
    problem = problems.get(backend)
    if problem is not None:
        raise ValueError(f"backend={backend!r} cannot do this: {problem}; use 'auto' or 'blockwise'")
    return backend


class _PrefixAttention(torch.autograd.Function):
    """Everything but FlexAttention, which brings its own backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: PrefixLayout,
        how: Score,
        backend: str,
    ) -> Tensor:
        q, k, v = query[0], key[0], value[0]
        states: list[Tensor] = []
        if backend == "flash":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            out, norm = flash.forward(q, k, v, sinks, layout, how.scale)
            out = out.transpose(0, 1)
        elif backend == "cudnn":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            out, norm, *states = cudnn.forward(q, k, v, sinks, layout, how.scale)
            out = out.transpose(0, 1)
        else:
            out, norm = blockwise.forward(q, k, v, sinks, layout, how, _kernel(backend, q, v, how))
        ctx.save_for_backward(query, key, value, sinks, out, norm, *states)
        ctx.layout, ctx.how, ctx.backend = layout, how, backend
        return out[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, norm, *states = ctx.saved_tensors
        q, k, v, g = query[0], key[0], value[0], grad[0]
        if ctx.backend == "flash":
            q, k, v, rows, gr = (x.transpose(0, 1) for x in (q, k, v, out, g))
            dq, dk, dv = (x.transpose(0, 1) for x in flash.backward(gr, q, k, v, rows, norm, ctx.layout, ctx.how.scale))
        elif ctx.backend == "cudnn":
            q, k, v, rows, gr = (x.transpose(0, 1) for x in (q, k, v, out, g))
            found = cudnn.backward(gr, q, k, v, rows, norm, (states[0], states[1]), ctx.layout, ctx.how.scale)
            dq, dk, dv = (x.transpose(0, 1) for x in found)
        else:
            kernel = _kernel(ctx.backend, q, v, ctx.how)
            dq, dk, dv = blockwise.backward(g, q, k, v, out, norm, ctx.layout, ctx.how, kernel)
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = torch.exp(sinks.to(norm.dtype)[:, None] - norm)
            delta = (g.to(norm.dtype) * out.to(norm.dtype)).sum(-1)
            grad_sinks = -(share * delta).sum(-1).to(sinks.dtype)
        return (dq[None], dk[None], dv[None], grad_sinks, None, None, None)


def _kernel(backend: str, q: Tensor, v: Tensor, how: Score) -> Kernel:
    return CpuKernel() if backend == "blockwise" and CpuKernel.fits(q, v, how) else PlainKernel()


def _cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, what torch's own attention would run in."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4 or x.shape[0] != 1:
            raise ValueError(f"{name} must be [1, heads, tokens, size], got {list(x.shape)}")
        if x.shape[2] != layout.tokens:
            raise ValueError(f"{name} has {x.shape[2]} tokens, and the layout {layout.tokens}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} is {x.dtype} and query {query.dtype}; they must agree")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query has a head size of {query.shape[-1]} and key of {key.shape[-1]}; they must agree")
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, key {key.shape[1]} and value {value.shape[1]}; key and value must agree and "
            f"divide query's"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be a finite number > 0, got {softcap}")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(f"sinks must be [{query.shape[1]}], one per head, got {list(sinks.shape)}")
