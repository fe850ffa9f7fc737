"""What both forms of tiling share: cutting tokens into tiles, summing gradients, refusing a second derivative."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


def check_tiles(tiles: int) -> None:
    if isinstance(tiles, bool) or not isinstance(tiles, int):
        raise TypeError(f"tiles: got {tiles!r} of type {type(tiles).__name__}, wanted the number of tiles as an int")
    if tiles < 1:
        raise ValueError(f"tiles: got {tiles}, wanted at least 1")


def tile_slices(tokens: int, tiles: int) -> Iterator[slice]:
    """At most `tiles` slices that cover `range(tokens)` in order, all of one size but the last; one empty for 0."""
    size = max(-(-tokens // tiles), 1)
    for start in range(0, max(tokens, 1), size):
        yield slice(start, min(start + size, tokens))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of tensors of `dtype` are summed over the tiles: never below float32."""
    return torch.promote_types(dtype, torch.float32)


def add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + left.T @ right` with the products summed in `dtype`, in the storage of `total`; None stands for zero.

    left: [tokens, M], right: [tokens, N]; returns [M, N].
    """
    transposed = left.t()
    if left.dtype != dtype and left.is_cuda:
        # cuBLAS takes 16-bit operands and a float32 result in one call: no product is rounded on its way into the sum.
        if total is None:
            return torch.mm(transposed, right, out_dtype=dtype)
        torch.addmm(total, transposed, right, out_dtype=dtype, out=total)
        return total
    transposed, right = transposed.to(dtype), right.to(dtype)
    return torch.mm(transposed, right) if total is None else total.addmm_(transposed, right)


def add_rows(total: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + rows.sum(0)` in `dtype`; rows: [tokens, N], returns [N]."""
    summed = rows.sum(0, dtype=dtype)
    return summed if total is None else total.add_(summed)


class _RefuseSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.operation} has no second derivative: its backward recomputes a tile at a time and keeps no graph. "
            "Take gradients of gradients (gradient penalties, Hessian products) without tiling."
        )


def refuse_second_derivative(operation: str, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients as they are. If a graph of them is being built, its use will raise `RuntimeError`."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    present = [gradient.detach().requires_grad_() for gradient in gradients if gradient is not None]
    refused = iter(_RefuseSecondDerivative.apply(operation, *present) if present else ())  # type: ignore[no-untyped-call]
    return tuple(None if gradient is None else next(refused) for gradient in gradients)


class AutocastState:
    """The autocast settings that hold now, to be entered again later and on another thread."""

    def __init__(self, device_type: str) -> None:
        self._settings = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device_type, "cpu"))
            if torch.amp.is_autocast_available(kind)
        ]

    @property
    def active(self) -> bool:
        return any(enabled for _, enabled, _ in self._settings)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._settings:
                # Without the cache: a copy of a weight that was cast under no_grad has no way back to that weight, and
                # a recomputation that found it there would lose the weight's gradient.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
