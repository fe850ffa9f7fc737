"""How many bytes of logits may be alive at once."""

from __future__ import annotations

from torch import Tensor

AUTO = 0
LOW = -1

# On the CPU a block that stays in the shared cache makes the element-wise passes nearly free.
_CPU_BLOCK = 16 << 20
_CPU_LOW = 4 << 20
_CUDA_BLOCK = 1 << 30
_CUDA_LOW = 128 << 20


def block_bytes(memory: int, weight: Tensor) -> int:
    """Bytes for one block: `memory` itself where it is a number of bytes, else the default of the device."""
    if memory > 0:
        return memory
    if weight.is_cuda:
        return _CUDA_LOW if memory == LOW else _CUDA_BLOCK
    return _CPU_LOW if memory == LOW else _CPU_BLOCK
