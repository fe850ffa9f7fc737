"""Which implementation runs."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ...engine.errors import UnsupportedError
from .problem import Inputs, Settings
from .stats import Gradients, Outputs, Upstream

#: looked for here, because torch.compile traces what calls `triton_available` and cannot trace a search
_FOUND = importlib.util.find_spec("triton") is not None


def triton_available() -> bool:
    """Whether triton can be imported; it is not imported for the answer."""
    return _FOUND


def choose(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """ "torch" or "triton", for "auto", "torch" or "triton". Refuses triton where it cannot run."""
    if name == "torch" or (name == "auto" and not (device.type == "cuda" and triton_available())):
        return "torch"
    if dtype == torch.float64:
        if name == "auto":
            return "torch"
        raise UnsupportedError('backend="triton": float64 is not computed there; use backend="torch" (or "auto")')
    if not triton_available():
        raise UnsupportedError('backend="triton": triton is not installed; install it, or use backend="torch"')
    if device.type != "cuda":
        if not _interpreted():
            raise UnsupportedError(
                f'backend="triton": the weight is on {device}, and triton needs a GPU; use backend="torch" or "auto"'
            )
        if dtype == torch.bfloat16:
            raise UnsupportedError(
                'backend="triton": Triton\'s interpreter multiplies bfloat16 wrongly; use float32 there, or backend="torch"'
            )
    return "triton"


def _interpreted() -> bool:
    from .kernels import INTERPRETED

    return INTERPRETED


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever it is given."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


@cache
def _triton() -> tuple[ModuleType, ModuleType]:
    """The forward's module and the backward's. An import costs time each time, even of what is there."""
    from . import triton_backward, triton_forward

    return triton_forward, triton_backward


def run_forward(inputs: Inputs, settings: Settings, entropy: bool, sum_sq: bool, kept: Tensor, kept_tops: Tensor) -> Outputs:
    """The forward of the settings' backend; `kept` and `kept_tops` are room for what it may keep, empty for nothing."""
    if settings.backend == "torch":
        from .torch_backend import run_forward as run_on_torch

        return run_on_torch(inputs, settings, entropy, sum_sq, kept, kept_tops)
    with _on(inputs.weight):
        outputs: Outputs = _triton()[0].run_forward(inputs, settings, entropy, sum_sq, kept, kept_tops)
    return outputs


def run_backward(
    inputs: Inputs, settings: Settings, forward: Outputs, upstream: Upstream, needs: tuple[bool, ...], once: bool
) -> Gradients:
    """The backward of the settings' backend.

    Args:
        needs: hidden, weight, bias, extra_hidden, extra_weight.
        once: whether no other backward over `forward` will follow, so that what it kept may be used up.
    """
    if settings.backend == "torch":
        from .torch_backend import run_backward as run_on_torch

        return run_on_torch(inputs, settings, forward, upstream, needs)
    with _on(inputs.weight):
        gradients: Gradients = _triton()[1].run_backward(inputs, settings, forward, upstream, needs, once)
    return gradients
