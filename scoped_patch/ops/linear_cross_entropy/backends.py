"""Which implementation runs."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from torch import Tensor

from ...engine.errors import UnsupportedError


def triton_available() -> bool:
    """Whether triton can be imported; it is not imported for the answer."""
    return importlib.util.find_spec("triton") is not None


def choose(name: str, weight: Tensor) -> Any:
    """The backend module for "auto", "torch" or "triton"."""
    from . import torch_backend

    if name == "torch" or (name == "auto" and not (weight.is_cuda and triton_available())):
        return torch_backend
    if name == "auto":
        return torch_backend
    if not triton_available():
        raise UnsupportedError(
            'backend="triton": triton is not installed; install it or use backend="torch" (or "auto")'
        )
    if not weight.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            f'backend="triton": the weight is on {weight.device}, and triton needs a GPU; use backend="torch" (or "auto")'
        )
    raise UnsupportedError('backend="triton" is not built yet; use backend="torch"')
