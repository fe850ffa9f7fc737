"""Ask the kernel for large pages under memory that is about to be filled.

A staged copy of a model in main memory is fresh memory: touching it for the first time in pages of 4 KB costs more than all the
copying. Linux gives pages of 2 MB to whoever asks; where it does not, nothing is lost.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch

LARGE = 2 << 20  # bytes


def advise(tensor: torch.Tensor) -> None:
    """Large pages for the part of a CPU tensor's memory that is made of whole ones; its content stays."""
    call = _madvise() if tensor.nbytes >= 2 * LARGE and tensor.device.type == "cpu" else None
    if call is not None:
        start = -(-tensor.data_ptr() // LARGE) * LARGE
        stop = (tensor.data_ptr() + tensor.nbytes) // LARGE * LARGE
        call(start, stop - start, mmap.MADV_HUGEPAGE)  # a refusal is no error: the pages are small then


@functools.cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        call.restype = ctypes.c_int
    return call
