# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Triton kernels: an activation with its product, and all of its backward, in one pass over memory each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_KIND = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


@triton.jit
def _value_and_slope(x, KIND: tl.constexpr):
    """The activation and its derivative at x, in float32."""
    if KIND == 0:
        s = 1.0 / (1.0 + tl.exp(-x))
        value = x * s
        slope = s + value * (1.0 - s)
    elif KIND == 1:
        c = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        value = x * c
        slope = c + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 2:
        # tanh(z) written with one exponential of a number that is never positive, so that nothing overflows.
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        e = tl.exp(-2.0 * tl.abs(z))
        t = (1.0 - e) / (1.0 + e)
        t = tl.where(z < 0, -t, t)
        value = 0.5 * x * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    else:
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    return value, slope


@triton.jit
def _act_kernel(X, F, OUT, sx, sf, so, columns, blocks, KIND: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    column = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    keep = column < columns
    x = tl.load(X + row * sx + column, mask=keep, other=0.0).to(tl.float32)
    value, _ = _value_and_slope(x, KIND)
    if HAS_FACTOR:
        value = value * tl.load(F + row * sf + column, mask=keep, other=0.0).to(tl.float32)
    tl.store(OUT + row * so + column, value.to(OUT.dtype.element_ty), mask=keep)


@triton.jit
def _act_backward_kernel(
    X, F, D, sx, sf, sd, columns, blocks, KIND: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr
):
    """In place: X becomes its gradient, F becomes its gradient, D (the incoming gradient) becomes act's value."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    column = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    keep = column < columns
    x = tl.load(X + row * sx + column, mask=keep, other=0.0).to(tl.float32)
    d = tl.load(D + row * sd + column, mask=keep, other=0.0).to(tl.float32)
    value, slope = _value_and_slope(x, KIND)
    if HAS_FACTOR:
        f = tl.load(F + row * sf + column, mask=keep, other=0.0).to(tl.float32)
        tl.store(F + row * sf + column, (d * value).to(F.dtype.element_ty), mask=keep)
        tl.store(D + row * sd + column, (value * f).to(D.dtype.element_ty), mask=keep)
        d = d * f
    else:
        tl.store(D + row * sd + column, value.to(D.dtype.element_ty), mask=keep)
    tl.store(X + row * sx + column, (d * slope).to(X.dtype.element_ty), mask=keep)


def _grid(tensor: Tensor) -> tuple[int, int, int]:
    rows, columns = tensor.shape
    blocks = triton.cdiv(columns, _BLOCK)
    return rows * blocks, columns, blocks


def act(activation: str, argument: Tensor, factor: Tensor | None) -> Tensor:
    """`activation(argument) * factor` in the storage of `argument`, computed in float32. [tokens, I] each."""
    programs, columns, blocks = _grid(argument)
    other = argument if factor is None else factor
    strides: tuple[Any, ...] = (argument.stride(0), other.stride(0), argument.stride(0))
    with torch.cuda.device_of(argument):
        _act_kernel[(programs,)](
            argument, other, argument, *strides, columns, blocks,
            KIND=_KIND[activation], HAS_FACTOR=factor is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return argument


def act_backward(
    activation: str, argument: Tensor, factor: Tensor | None, gradient: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(d_argument, d_factor, value of `act`) in the storage of (argument, factor, gradient). [tokens, I] each."""
    programs, columns, blocks = _grid(argument)
    other = argument if factor is None else factor
    strides: tuple[Any, ...] = (argument.stride(0), other.stride(0), gradient.stride(0))
    with torch.cuda.device_of(argument):
        _act_backward_kernel[(programs,)](
            argument, other, gradient, *strides, columns, blocks,
            KIND=_KIND[activation], HAS_FACTOR=factor is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return argument, factor, gradient
