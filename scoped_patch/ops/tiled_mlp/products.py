"""Products with weights inside a function of unknown inside, whose weight gradients are summed over tiles in float32.

Autograd hands out the gradient of a 16-bit weight rounded to 16 bits, once per tile, where the untiled function rounds it
once. So while a tile is recomputed, products of 16-bit tensors with a weight that is listed add that weight's gradient to a
float32 sum themselves, with no rounding in between.

Whatever is not plainly such a product is left to autograd. Where something could look at or change a gradient on its way to
the weight (hooks, gradients that the function takes itself), the tiles are recomputed without all this: `StepAside`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scoped_patch.ops.tiled_mlp.tiles import add_product, add_rows

_HALVES = (torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter)

#: how autograd calls the steps that lead from a weight to a part of it, as it lies in memory
_VIEWS = frozenset(
    f"{name}Backward0" for name in ("Select", "View", "T", "Transpose", "Slice", "Alias", "UnsafeView", "Permute", "Unsqueeze")
)


class StepAside(RuntimeError):
    """The function does something with gradients that `WeightSums` would change: the tiles are recomputed without it."""


class WeightSums(TorchFunctionMode):
    """Float32 sums of the gradients of some tensors; while it is entered, products with them will add to these.

    Attributes:
        sums: one per tensor; None while nothing was added.
        backward: autograd's number for the tile's own backward, once that has begun. Any other is the function's own.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.sums: list[Tensor | None] = [None] * len(tensors)
        self.backward = -1
        self._first_node = 0
        self._tensors = tensors
        self._by_storage: dict[int, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if type(tensor) in _PLAIN and tensor.is_contiguous() and not tensor._backward_hooks:
                self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(index)

    def __enter__(self) -> WeightSums:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.backward = -1
        self._first_node = torch._C._autograd._get_sequence_nr()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        if func in _WATCHING:
            raise StepAside("tiled_call: a hook may be put on the way of a weight's gradient")
        rule = _RULES.get(func)
        if rule is not None and torch.is_grad_enabled() and not _saved_tensors_are_hooked() and not _is_transformed():
            try:
                operands = rule(*args, **kwargs)
            except TypeError:  # called in a form that the rule does not know
                operands = None
            if operands is not None:
                result = self._product(*operands)
                if result is not None:
                    return result
        return func(*args, **kwargs)

    def begin_backward(self, gradient: Tensor) -> None:
        """Hook on each output of the tile: the first that runs in its own backward."""
        self.backward = torch._C._current_graph_task_id()

    def _product(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, transposed: bool, offsets: Tensor | None
    ) -> Tensor | None:
        """The product, or the sum if there is no weight; None if it is not for us.

        `transposed`: of the weight as `F.linear` takes it.
        """
        if any(one is not None and type(one) not in _PLAIN for one in (x, weight, bias, offsets)):
            return None  # what a subclass makes of a product, and of its gradient, is its own affair
        if bias is not None and bias.shape != (_width(x, weight, transposed),):
            return None
        autocast = _autocast_dtype(x) if offsets is None and weight is not None else None
        dtype = autocast or x.dtype
        operands = [tensor for tensor in (weight, bias) if tensor is not None]
        if dtype not in _HALVES or any(one.dtype == torch.float64 for one in (x, *operands)):
            return None
        if autocast is None and any(one.dtype != dtype for one in operands):
            return None
        places = [None if one is None or not one.requires_grad else self._place(one) for one in (weight, bias)]
        ours = sum(place is not None for place in places)
        if ours == 0 or ours < sum(one.requires_grad for one in operands):
            return None  # one comes from elsewhere: autograd goes on to what it comes from
        return _Product.apply(self, places, x.to(dtype), weight, bias, dtype, transposed, offsets)  # type: ignore[no-any-return,no-untyped-call]

    def _place(self, part: Tensor) -> tuple[int, tuple[Any, ...]] | None:
        """Which tensor `part` is or lies in, and where; None for anything that is not simply a piece of one."""
        if part._backward_hooks:
            return None
        start = part.storage_offset()
        if any(stride == 0 and size > 1 for size, stride in zip(part.shape, part.stride(), strict=True)):
            return None
        end = start + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        for index in self._by_storage.get(part.untyped_storage()._cdata, ()):
            whole = self._tensors[index]
            first = whole.storage_offset()
            if part.dtype == whole.dtype and first <= start <= end < first + whole.numel() and self._leads_to(part, whole):
                return index, (part.shape, part.stride(), start - first)
        return None

    def _leads_to(self, part: Tensor, whole: Tensor) -> bool:
        """Is the gradient of `whole` that of `part`, put in its place, and nothing done to it on the way?

        A view that was there before may have a hook that cannot be seen from here.
        """
        if part is whole:
            return True
        node = part.grad_fn
        while node is not None and node is not whole.grad_fn:
            if type(node).__name__ == "AccumulateGrad":
                return node.variable is whole  # type: ignore[attr-defined]
            if type(node).__name__ not in _VIEWS or node._sequence_nr() < self._first_node:
                return False
            node = node.next_functions[0][0]
        return node is not None

    def add(self, place: tuple[int, tuple[Any, ...]], add: Callable[[Tensor], object]) -> None:
        """`add(sum)`, with the part of the float32 sum that belongs to the place."""
        index, where = place
        total = self.sums[index]
        if total is None:
            whole = self._tensors[index]
            total = self.sums[index] = torch.zeros(whole.shape, dtype=torch.float32, device=whole.device)
        add(total.as_strided(*where))


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias`, or `x @ weight` if transposed, or that in groups of rows; [..., in] -> [..., out].

    Without a weight, `x + bias`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sums: WeightSums,
        places: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        transposed: bool,
        offsets: Tensor | None,
    ) -> Tensor:
        ctx.sums, ctx.places, ctx.transposed = sums, places, transposed
        if weight is None:
            return torch.add(x, bias)  # type: ignore[arg-type]
        weight = weight.to(dtype)
        ctx.save_for_backward(x, weight, offsets)
        if offsets is not None:
            return F.grouped_mm(x, weight, offs=offsets)
        return F.linear(x, weight.t() if transposed else weight, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch._C._current_graph_task_id() != ctx.sums.backward:
            raise StepAside("tiled_call: a backward inside the tile, or inside its backward")
        of_weight, of_bias = ctx.places
        with torch.no_grad(), torch.autocast(dy.device.type, enabled=False):
            d_rows = dy.reshape(-1, dy.shape[-1])
            if of_bias is not None:
                ctx.sums.add(of_bias, lambda total: add_rows(total, d_rows, total.dtype))
            d_x = _backward_of_product(ctx, dy, d_rows, of_weight) if ctx.saved_tensors else dy
        # The gradients of weight and bias are in the sums: autograd has nothing to add to them.
        return None, None, d_x, None, None, None, None, None


def _backward_of_product(ctx: Any, dy: Tensor, d_rows: Tensor, of_weight: Any) -> Tensor | None:
    x, weight, offsets = ctx.saved_tensors
    rows = x.reshape(-1, x.shape[-1])
    if of_weight is None:
        pass
    elif offsets is not None:
        ctx.sums.add(of_weight, lambda total: _add_groups(total, rows, d_rows, offsets))
    else:
        left, right = (rows, d_rows) if ctx.transposed else (d_rows, rows)
        ctx.sums.add(of_weight, lambda total: _add_to(total, left, right))
    if not ctx.needs_input_grad[2]:
        return None
    if offsets is not None:
        return F.grouped_mm(dy, weight.transpose(-2, -1), offs=offsets)
    d_x: Tensor = dy @ (weight.t() if ctx.transposed else weight)
    return d_x


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _add_to(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left.T @ right`, also where the weight was handed to the product transposed."""
    if total.is_contiguous():
        add_product(total, left, right, total.dtype)
    else:
        add_product(total.t(), right, left, total.dtype)


def _add_groups(total: Tensor, rows: Tensor, d_rows: Tensor, offsets: Tensor) -> None:
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            _add_to(total[group], rows[start:end], d_rows[start:end])
        start = end


def _width(x: Tensor, weight: Tensor | None, transposed: bool) -> int:
    return x.shape[-1] if weight is None else weight.shape[1 if transposed else 0]


def _is_transformed() -> bool:
    """Inside `torch.func`: its transforms do not take an `autograd.Function` of our kind."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _saved_tensors_are_hooked() -> bool:
    """Is a checkpoint being recorded (it would recompute without us, and miss what we saved), or tensors moved elsewhere?"""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return (input, weight, bias, False, None) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _matmul(input: Any, other: Any, *, out: Any = None) -> Any:
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)) or other.ndim != 2 or input.ndim < 2 or out is not None:
        return None
    return input, other, None, True, None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    if beta != 1 or alpha != 1 or out is not None or input.ndim != 1:
        return None
    return mat1, mat2, input, True, None


def _add(input: Any, other: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    is_shift = isinstance(input, Tensor) and isinstance(other, Tensor) and other.ndim == 1 < input.ndim
    is_shift = is_shift and input.shape[-1] == other.shape[0]
    return (input, None, other, False, None) if is_shift and alpha == 1 and out is None else None


def _grouped(mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    # On a GPU the one kernel for all groups gives 16-bit results only; products one by one would cost more than they gain.
    if mat_a.is_cuda or mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None or out_dtype is not None:
        return None
    return mat_a, mat_b, None, True, offs


#: the function may do these to see or change gradients; nodes of the graph are reached by `grad_fn`
_WATCHING = frozenset((Tensor.register_hook, Tensor.grad_fn.__get__))  # type: ignore[union-attr]

_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
}
for _function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
    if _function is not None:
        _RULES[_function] = _grouped
for _function in (torch.add, Tensor.add, Tensor.__add__):
    _RULES[_function] = _add
