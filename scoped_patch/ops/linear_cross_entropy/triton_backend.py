"""The fused head on a GPU: products by cuBLAS or by our own tiles, everything else in one pass of a Triton kernel.

Two routes. The fused one (half precision, Hopper or newer, aligned rows) makes the softmax statistics and the logits'
gradients in the epilogue of a matrix product, so fp32 logits never reach memory. The other, for everything else, lets
the library's product write a block in fp32 and passes over it once. In both the backward hands blocks of the logits'
gradient to cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import kernels as k
from . import memory as budgets
from .problem import Head, Rows
from .products import multiply

LOG2E = 1 / math.log(2)
# Rows, columns, inner, stages, warps: on an H200 the fastest of 14 variants forward and of 10 backward, both with one
# program per multiprocessor and a flattened loop.
_TILE = (128, budgets.TILE_COLUMNS, 64, 3, 8)
_INTERPRETED_TILE = (16, budgets.TILE_COLUMNS, 32, 2, 4)
GROUP = 16
# Rows that one step of a program that numbers rows looks at.
SCAN_BLOCK = 4096
# Shared memory that the widest variant (the product's stages and an output tile) needs.
_SHARED_BYTES = 214_000


@cache
def _device(index: int) -> tuple[int, bool]:
    """(multiprocessors, whether tiles fit and tensor descriptors are in hardware)."""
    if index < 0:
        return 3, True
    properties = torch.cuda.get_device_properties(index)
    fits = getattr(properties, "shared_memory_per_block_optin", 0) >= _SHARED_BYTES
    return properties.multi_processor_count, torch.version.hip is None and properties.major >= 9 and fits


def programs(tensor: Tensor) -> int:
    """One program per multiprocessor."""
    return _device(tensor.device.index if tensor.is_cuda else -1)[0]


def tile_sizes() -> tuple[int, int, int, int, int]:
    """(rows, columns, inner, stages, warps) of a product tile."""
    return _INTERPRETED_TILE if k.INTERPRETED else _TILE


def fused_route(head: Head) -> bool:
    """Whether the tiles can run: half precision, rows of 16-byte multiples, one linear term, a chip that holds a tile."""
    weight, itemsize = head.weight, head.weight.element_size()
    half = weight.dtype in (torch.float16, torch.bfloat16) or (k.INTERPRETED and weight.dtype == torch.float32)
    aligned = (
        weight.stride(1) == 1
        and weight.stride(0) >= weight.shape[1]
        and weight.stride(0) * itemsize % 16 == 0
        and weight.shape[1] * itemsize % 16 == 0
        and weight.data_ptr() % 16 == 0
    )
    return half and aligned and head.extra_weight is None and _device(weight.device.index if weight.is_cuda else -1)[1]


def descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """A tensor descriptor with blocks of [rows, columns]; reads past the edge give 0, writes there are dropped."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def scales(head: Head) -> tuple[float, float]:
    """(what a row's scale is divided by its temperature from, `pre`): see the kernels' module."""
    if head.softcap is None:
        return head.logit_scale * LOG2E, 1.0
    return head.softcap * LOG2E, head.logit_scale / head.softcap


def scalar(temperature: Tensor) -> tuple[float, Tensor | None, int]:
    """(what to divide by on the host, a tensor to divide by per row, its stride)."""
    if temperature.ndim == 0 and not temperature.is_cuda:
        return float(temperature) or math.nan, None, 0  # 0, which only a tensor can be, gives NaN on a device too
    return 1.0, temperature, temperature.stride(0) if temperature.ndim else 0


def options(head: Head) -> dict[str, Any]:
    """Which terms the kernels compile in."""
    return {"HAS_BIAS": head.bias is not None, "SOFTCAP": head.softcap is not None}


class Launch:
    """A kernel for one kind of arguments: same types, alignment and, but for floats, numbers.

    What Triton compiled for the first of them is launched as it is from then on. To find it takes two thirds of a launch.
    """

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any], **options: int) -> None:
        self._kernel, self._grid, self._constants, self._options = kernel, (programs, 1, 1), constants, options
        self._compiled: Any = None
        # A compiled kernel takes these too, in the order of its signature.
        self._last = tuple(constants[name] for name in kernel.arg_names if name in constants)

    def __call__(self, *args: Any) -> None:
        if self._compiled is None:
            self._compiled = self._kernel[self._grid](*args, **self._constants, **self._options)
        else:  # GPU only
            self._compiled[self._grid](*args, *self._last)


class ProductBlocks:
    """Blocks of hidden @ weight.T (and the extra term) in fp32, one alive at a time; for the route that is not fused."""

    def __init__(self, head: Head, rows: Rows, memory: int) -> None:
        self.head, self.rows = head, rows
        self.n, self.vocab = rows.hidden.shape[0], head.weight.shape[0]
        budget = budgets.block_bytes(memory, rows.hidden)
        self.width = budgets.block_width(self.vocab, budget // (4 * max(1, self.n)), 64)
        self._buffer = rows.hidden.new_empty((self.n, -(-self.width // 4) * 4), dtype=torch.float32)

    def __len__(self) -> int:
        return -(-self.vocab // self.width)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for low in range(0, self.vocab, self.width):
            yield low, min(self.vocab, low + self.width)

    def product(self, low: int, high: int) -> Tensor:
        out = self._buffer[:, : high - low]
        multiply(out, self.rows.hidden, self.head.weight[low:high].t())
        if self.head.extra_weight is not None and self.rows.extra_hidden is not None:
            extra = self.head.extra_weight[low:high].to(self.rows.extra_hidden.dtype)
            multiply(out, self.rows.extra_hidden, extra.t(), accumulate=True)
        return out
