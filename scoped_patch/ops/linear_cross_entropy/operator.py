"""The fused head as two operators of the dispatcher, so that Dynamo and AOTAutograd pass it through as one node each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import memory as budgets
from .errors import SecondOrderGradientError
from .problem import Head, Rows, capturing, check_labels, select
from .torch_backend import RowGrads, Stats

# A schema needs plain types: memory is bytes (or one of budgets.LOW, budgets.AUTO), the group goes by its name.


def _head(
    weight: Tensor,
    bias: Tensor | None,
    extra_weight: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    group_name: str,
    compute_dtype: torch.dtype,
) -> Head:
    return Head(
        weight.to(compute_dtype),
        bias,
        extra_weight,
        softcap,
        logit_scale,
        ignore_index,
        vocab_start,
        vocab_size,
        group_name,
        compute_dtype,
        weight.dtype,
    )


def _backend(name: str, weight: Tensor) -> Any:
    from . import torch_backend

    if name == "torch":
        return torch_backend
    from .backends import choose

    return choose(name, weight)


@torch.library.custom_op("scoped_patch::linear_cross_entropy", mutates_args=())
def forward_op(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    extra_hidden: Tensor | None,
    extra_weight: Tensor | None,
    topk_ids: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    entropy: bool,
    sum_sq: bool,
    vocab_start: int,
    vocab_size: int,
    group_name: str,
    compute_dtype: torch.dtype,
    backend: str,
    memory: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log_probs, entropy, sum_sq_probs, is_top1, topk_log_probs, lse), each [total] ([total, K]), empty if not asked for."""
    head = _head(
        weight,
        bias,
        extra_weight,
        softcap,
        logit_scale,
        ignore_index,
        vocab_start,
        vocab_size,
        group_name,
        compute_dtype,
    )
    total = labels.shape[0]
    if not capturing(labels):
        check_labels(labels, head)
    rows = select(head, hidden, extra_hidden, labels, temperature, labels != ignore_index)
    topk = topk_ids if topk_ids is None or rows.index is None else topk_ids[rows.index]
    impl = _backend(backend, weight)
    stats = impl.forward(head, rows, budgets.block_bytes(memory, weight), entropy, sum_sq, topk)
    # Rows with an ignored label are only still here when nothing could be compacted (graph capture).
    real = rows.labels != ignore_index

    def place(values: Tensor | None, mask: bool = True) -> Tensor:
        if values is None:
            return stats.lse.new_empty(0)
        if mask:
            values = torch.where(real if values.ndim == 1 else real[:, None], values, 0)
        return rows.spread(values)

    top1 = stats.label_logit >= stats.top_logit
    return (
        place(stats.label_logit - stats.lse),
        place(stats.entropy),
        place(stats.sum_sq_probs),
        place(top1).to(torch.bool) if total else top1,
        place(stats.topk_logits - stats.lse[:, None] if stats.topk_logits is not None else None),
        place(stats.lse, mask=False).clone(),
    )


@forward_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    extra_hidden: Tensor | None,
    extra_weight: Tensor | None,
    topk_ids: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    entropy: bool,
    sum_sq: bool,
    vocab_start: int,
    vocab_size: int,
    group_name: str,
    compute_dtype: torch.dtype,
    backend: str,
    memory: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    row = hidden.new_empty(labels.shape, dtype=dtype)
    none = hidden.new_empty(0, dtype=dtype)
    return (
        row,
        torch.empty_like(row) if entropy else none,
        torch.empty_like(row) if sum_sq else none.clone(),
        torch.empty_like(row, dtype=torch.bool),
        hidden.new_empty(topk_ids.shape, dtype=dtype) if topk_ids is not None else none.clone(),
        torch.empty_like(row),
    )


@torch.library.custom_op("scoped_patch::linear_cross_entropy_backward", mutates_args=())
def backward_op(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_sum_sq: Tensor | None,
    grad_topk: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    sum_sq: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    extra_hidden: Tensor | None,
    extra_weight: Tensor | None,
    topk_ids: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    group_name: str,
    compute_dtype: torch.dtype,
    backend: str,
    memory: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (hidden, weight, bias, extra_hidden, extra_weight); empty where `needs` is false."""
    head = _head(
        weight,
        bias,
        extra_weight,
        softcap,
        logit_scale,
        ignore_index,
        vocab_start,
        vocab_size,
        group_name,
        compute_dtype,
    )
    real = labels != ignore_index
    upstream = [grad_log_probs, grad_entropy, grad_sum_sq, grad_topk]
    flows = torch.zeros_like(real)
    for grad in upstream:
        if grad is not None:
            flows = flows | ((grad != 0) if grad.ndim == 1 else (grad != 0).any(1))
    rows = select(head, hidden, extra_hidden, labels, temperature, real & flows)

    def take(values: Tensor | None, mask: bool = False) -> Tensor | None:
        if values is None or values.shape[0] != labels.shape[0]:
            return None
        if mask and rows.index is None:
            values = torch.where(real if values.ndim == 1 else real[:, None], values, 0)
        return values if rows.index is None else values[rows.index]

    taken = take(lse)
    assert taken is not None
    stats = Stats(taken, taken, taken, take(entropy), take(sum_sq), None)
    grads = RowGrads(*(take(grad.to(lse.dtype) if grad is not None else None, mask=True) for grad in upstream))
    impl = _backend(backend, weight)
    result = impl.backward(head, rows, stats, grads, take(topk_ids), budgets.block_bytes(memory, weight), tuple(needs))
    none = hidden.new_empty(0)

    def finish(grad: Tensor | None, like: Tensor | None, rowwise: bool) -> Tensor:
        if grad is None or like is None:
            return none.clone()
        if rowwise and rows.index is not None:
            return rows.spread(grad.to(like.dtype), torch.zeros_like(like))
        return grad.to(like.dtype)

    return (
        finish(result.hidden, hidden, True),
        finish(result.weight, weight, False),
        finish(result.bias, bias, False),
        finish(result.extra_hidden, extra_hidden, True),
        finish(result.extra_weight, extra_weight, False),
    )


@backward_op.register_fake
def _(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_sum_sq: Tensor | None,
    grad_topk: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    sum_sq: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    extra_hidden: Tensor | None,
    extra_weight: Tensor | None,
    topk_ids: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    group_name: str,
    compute_dtype: torch.dtype,
    backend: str,
    memory: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, needed: bool) -> Tensor:
        return torch.empty_like(tensor) if tensor is not None and needed else hidden.new_empty(0)

    return (
        like(hidden, needs[0]),
        like(weight, needs[1]),
        like(bias, needs[2]),
        like(extra_hidden, needs[3]),
        like(extra_weight, needs[4]),
    )


_DIFFERENTIABLE = (0, 1, 4, 5, 6)  # hidden, weight, bias, extra_hidden, extra_weight among forward_op's arguments


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    hidden, weight, labels, temperature, bias, extra_hidden, extra_weight, topk_ids, *rest = inputs
    softcap, logit_scale, ignore_index, want_entropy, want_sum_sq, *where = rest
    _, entropy, sum_sq, _, _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.wanted = (want_entropy, want_sum_sq, topk_ids is not None)
    ctx.save_for_backward(
        lse, entropy, sum_sq, hidden, weight, labels, temperature, bias, extra_hidden, extra_weight, topk_ids
    )
    ctx.options = (softcap, logit_scale, ignore_index, *where)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    log_probs, entropy, sum_sq, _, topk, _ = grads
    # Under AOTAutograd the empty stand-ins of outputs that were not asked for get (empty) gradients too.
    entropy, sum_sq, topk = (g if w else None for g, w in zip((entropy, sum_sq, topk), ctx.wanted, strict=True))
    needs = [bool(ctx.needs_input_grad[i]) for i in _DIFFERENTIABLE]
    results: list[Tensor | None] = [None] * 19
    if any(g is not None for g in (log_probs, entropy, sum_sq, topk)) and any(needs):
        found = backward_op(log_probs, entropy, sum_sq, topk, *ctx.saved_tensors, *ctx.options, needs)
        for position, needed, grad in zip(_DIFFERENTIABLE, needs, found, strict=True):
            if needed:
                results[position] = grad
    return tuple(results)


forward_op.register_autograd(_backward, setup_context=_setup_context)


def _refuse_second_order(ctx: Any, *grads: Tensor | None) -> Any:
    raise SecondOrderGradientError(
        "linear_cross_entropy: a gradient of its gradient was asked for (create_graph=True, or a gradient penalty); the fused head "
        "keeps no logits and has no second-order formula. Compute this loss from F.linear and log_softmax instead"
    )


backward_op.register_autograd(_refuse_second_order)

__all__ = ["Rows", "backward_op", "forward_op"]
