"""The activations of feed-forward blocks and their derivatives, on Triton where there is one, on torch elsewhere."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = str | Callable[[Tensor], Tensor]
"""A name of `ACTIVATIONS`, or an elementwise function of one tensor, without randomness."""

_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

_DERIVATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": functools.partial(torch.ops.aten.threshold_backward, threshold=0),
}

ACTIVATIONS: tuple[str, ...] = tuple(sorted(_FORWARD))
"""The activations known by name."""


def identify_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """The name in `ACTIVATIONS` of what `function` computes, found by its float64 values; None for any other."""
    points = torch.linspace(-12.0, 12.0, 97, dtype=torch.float64)
    with torch.no_grad():
        try:
            values = function(points.clone())
        except Exception:
            # Any failure of a foreign callable means the same here: it is not one of the functions we know.
            return None
        if not isinstance(values, Tensor) or values.shape != points.shape or values.dtype != points.dtype:
            return None
        for name, known in _FORWARD.items():
            if torch.allclose(values, known(points), rtol=1e-10, atol=1e-12):
                return name
    return None


def check_activation(activation: Activation) -> None:
    if isinstance(activation, str):
        if activation not in _FORWARD:
            raise ValueError(
                f"activation: got {activation!r}, wanted one of {', '.join(ACTIVATIONS)}, or an elementwise function"
            )
    elif not callable(activation):
        raise TypeError(f"activation: got {type(activation).__name__}, wanted a name or a function of one tensor")


@functools.cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _on_triton(tensor: Tensor) -> bool:
    return (
        tensor.is_cuda
        and torch.version.hip is None
        and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and _triton_is_there()
    )


def act(activation: Activation, argument: Tensor, factor: Tensor | None) -> Tensor:
    """`activation(argument) * factor`, or without the product for None. May overwrite `argument`.

    argument, factor: [tokens, I], rows may be strided; returns [tokens, I].
    """
    if not isinstance(activation, str):
        value = activation(argument)
        return (value if factor is None else value * factor).to(argument.dtype)
    if _on_triton(argument):
        from scoped_patch.ops.tiled_mlp import kernels

        return kernels.act(activation, argument, factor)
    value = _FORWARD[activation](argument)
    return value if factor is None else value.mul_(factor)


class ActGradients(NamedTuple):
    """What the backward of `act` needs: its gradients, and its own value again."""

    argument: Tensor
    factor: Tensor | None
    value: Tensor
    parameters: tuple[Tensor | None, ...]


def act_backward(
    activation: Activation,
    argument: Tensor,
    factor: Tensor | None,
    gradient: Tensor,
    parameters: Sequence[Tensor] = (),
) -> ActGradients:
    """The gradients of `act` with respect to its inputs, and to those of `parameters` that `activation` computes with.

    All of [tokens, I]. The inputs are the caller's to lose: each may be overwritten and come back as a result.
    """
    if not isinstance(activation, str):
        return _foreign_act_backward(activation, argument, factor, gradient, parameters)
    if _on_triton(argument):
        from scoped_patch.ops.tiled_mlp import kernels

        return ActGradients(*kernels.act_backward(activation, argument, factor, gradient), ())
    value = _FORWARD[activation](argument)
    if factor is None:
        return ActGradients(_DERIVATIVE[activation](gradient, argument), None, value, ())
    product = value * factor
    d_factor = value.mul_(gradient)
    return ActGradients(_DERIVATIVE[activation](gradient.mul_(factor), argument), d_factor, product, ())


class _NoLeaf(torch.autograd.Function):
    """The same memory as a tensor that is no leaf and no view of one: an activation may overwrite it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _no_leaf(leaf: Tensor) -> Tensor:
    return _NoLeaf.apply(leaf)  # type: ignore[no-any-return,no-untyped-call]


def _foreign_act_backward(
    activation: Callable[[Tensor], Tensor],
    argument: Tensor,
    factor: Tensor | None,
    gradient: Tensor,
    parameters: Sequence[Tensor],
) -> ActGradients:
    leaf = argument.detach().requires_grad_()
    with torch.enable_grad():
        graph = activation(_no_leaf(leaf))
    value = graph.detach()
    d_value = gradient if factor is None else gradient * factor
    d_argument, *d_parameters = torch.autograd.grad(graph, [leaf, *parameters], d_value.to(graph.dtype), allow_unused=True)
    return ActGradients(
        torch.zeros_like(argument) if d_argument is None else d_argument,
        None if factor is None else (value * gradient).to(factor.dtype),
        (value if factor is None else value * factor).to(argument.dtype),
        tuple(d_parameters),
    )
