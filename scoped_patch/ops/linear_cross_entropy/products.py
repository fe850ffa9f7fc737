"""Matrix products that are summed in fp32 where their result is fp32, whatever the operands."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def has_out_dtype() -> bool:  # GPU only: asked nowhere else
    """Whether this torch can ask cuBLAS for an fp32 result of half-precision operands."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


def multiply(out: Tensor, a: Tensor, b: Tensor, accumulate: bool = False) -> None:
    """out (+)= a @ b. An fp32 `out` of half-precision operands gets the fp32 sums, not rounded ones."""
    if out.dtype == a.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif out.dtype != torch.float32:
        product = torch.mm(a, b).to(out.dtype)
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)
    elif a.is_cuda and has_out_dtype():  # GPU only
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        multiply(out, a.float(), b.float(), accumulate)
