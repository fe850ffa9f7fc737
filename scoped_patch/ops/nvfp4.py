"""NVFP4 numerics: blocks of 16 four-bit floats (E2M1), a scale per block (E4M3), and one float32 scale per tensor.

The numbers are those of the compressed-tensors package (`nvfp4-pack-quantized`), which vLLM loads, bit for bit: a value that
`fake_quantize` gives is what its codes and scales stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0

#: linear layers that rollout engines fuse into one, with one scale per tensor, by the last part of their names
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

_ZERO_BLOCK = 0.125  # the scale of a block of zeros, so that nothing is divided by zero


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest |value| of all, float32 []; 0 where there is none. Shards of a DTensor are looked at together."""
    found = []
    for x in tensors:
        if not x.numel():
            continue
        low, high = x.detach().aminmax() if not hasattr(x, "full_tensor") else (x.detach().amin(), x.detach().amax())
        top: Any = torch.maximum(low.abs(), high.abs())
        found.append((top.full_tensor() if hasattr(top, "full_tensor") else top).float())
    return torch.stack(found).amax() if found else torch.zeros(())


def tensor_scale(amax: Tensor) -> Tensor:
    """The scale of a tensor, or of several that share it, from their largest |value|: 448 * 6 / amax, float32 [].

    It multiplies block scales into the range of E4M3, and divides what they stand for.
    """
    scale = E4M3_MAX * E2M1_MAX / amax.float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0, neginf=1.0)


def block_scales(x: Tensor, scale: Tensor) -> Tensor:
    """The scale of each block of 16 in the last dimension, rounded to E4M3, in float32: [..., n] -> [..., n / 16].

    Args:
        scale: of the tensor, as `tensor_scale` gives it.
    """
    tops = x.detach().float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)  # type: ignore[no-untyped-call]
    scales = (scale * (tops / E2M1_MAX)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(scales == 0, _ZERO_BLOCK, scales)


def round_to_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; halfway to the one with an even code."""
    size = x.abs()
    # Steps of 0.5 up to 2, of 1 up to 4, of 2 above; torch.round goes to even, which is the even code in each range.
    step = torch.where(size <= 2, 0.5, torch.where(size <= 4, 1.0, 2.0))
    return torch.round(x / step) * step


def quantize_dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """What is left of a tensor after NVFP4, in its own dtype. No gradient.

    Args:
        x: [..., n], n a multiple of 16.
        scale: of the tensor, float32 [].
    """
    steps = (block_scales(x, scale) / scale).unsqueeze(-1)
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    codes = round_to_e2m1((blocks / steps).clamp(-E2M1_MAX, E2M1_MAX))
    return (codes * steps).flatten(-2).to(x.dtype)


def fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """`quantize_dequantize` with a straight-through gradient: that of the result is that of `x`, unchanged."""
    return _StraightThrough.apply(x, scale)  # type: ignore[no-untyped-call,no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return quantize_dequantize(x, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None
