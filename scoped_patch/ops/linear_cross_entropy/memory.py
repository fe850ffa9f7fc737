"""How many bytes of logits may be alive at once, and how that cuts the vocabulary."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

AUTO = 0
LOW = -1

# Vocabulary rows that a tile of the fused route covers.
TILE_COLUMNS = 256

# On the CPU a block that stays in the shared cache makes the element-wise passes nearly free.
_CPU_BLOCK = 16 << 20
_CPU_LOW = 4 << 20
# On a GPU the products stop gaining from wider blocks at about this size.
_CUDA_BLOCK = 512 << 20
_CUDA_LOW = (48 << 20, 128 << 20)
# Logits are kept from the forward to the backward while they take at most this share of the memory that is free then.
_KEPT_SHARE = 0.25
# Asking for the free memory takes a quarter of a millisecond, in which the device waits for its first product. What is at most
# half of what an answer allowed is kept without asking again for this many seconds.
_ANSWER_LASTS = 1.0
_answers: dict[torch.device, tuple[float, float]] = {}  # when it was, and how many bytes it allowed


def block_bytes(memory: int, hidden: Tensor, taken: int = 0) -> int:
    """Bytes for one block: `memory` less what is `taken` where it is a number of bytes, else the device's default."""
    if memory > 0:
        memory = max(memory - taken, 1)
    if not hidden.is_cuda:
        return memory if memory > 0 else _CPU_LOW if memory == LOW else _CPU_BLOCK
    if memory == LOW:
        # Twice the hidden states: the result's copy at the end of the backward would take half of that anyway.
        low, high = _CUDA_LOW
        return max(low, min(high, 2 * hidden.numel() * hidden.element_size()))
    return min(memory, _CUDA_BLOCK) if memory > 0 else _CUDA_BLOCK


def block_width(vocab: int, fitting: int, multiple: int) -> int:
    """Columns per block: at most `fitting` (but at least `multiple`), all blocks about equal, no thin last one."""
    width = min(vocab, max(multiple, fitting // multiple * multiple))
    count = -(-vocab // width)
    even = -(-vocab // count)
    return min(vocab, width, -(-even // multiple) * multiple)


def kept_shapes(rows: int, vocab: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of what is kept from the forward: float16 scores in 16-byte rows, and the fp32 maximum of each tile of them."""
    return (rows, -(-vocab // 8) * 8), (-(-vocab // TILE_COLUMNS), rows)


def keeps_logits(memory: int, rows: int, vocab: int, device: torch.device) -> bool:
    """Whether the logits are kept for the backward, as `kept_shapes` says."""
    size = rows * (-(-vocab // 8) * 16 + -(-vocab // TILE_COLUMNS) * 4)
    if memory > 0:
        return size <= memory
    if memory == LOW or torch.compiler.is_compiling() or device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    if 2 * size <= _CUDA_BLOCK:
        # With the backward's block, which is no larger, no more than that block may take by itself. Asking takes longer.
        return True
    when, allowed = _answers.get(device, (-math.inf, 0.0))
    if time.monotonic() - when < _ANSWER_LASTS and 2 * size <= allowed:
        return True
    free, _ = torch.cuda.mem_get_info(device)
    if size > _KEPT_SHARE * free:
        # What the allocator holds without using it counts too; asking for it is slow, so only where it matters.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    _answers[device] = time.monotonic(), _KEPT_SHARE * free
    return size <= _KEPT_SHARE * free
