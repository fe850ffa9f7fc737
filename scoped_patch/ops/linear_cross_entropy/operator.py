"""The fused head as two operators of the dispatcher: Dynamo and AOTAutograd pass it through as one node each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import memory as budgets
from .backends import run_backward, run_forward
from .errors import SecondOrderGradientError
from .problem import Head, capturing, select
from .stats import Backward, Outputs, RowGrads

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor temperature, Tensor? bias, Tensor? extra_hidden, "
    "Tensor? extra_weight, Tensor? topk_ids"
)
_SETTINGS = (
    "float? softcap, float logit_scale, int ignore_index, SymInt vocab_start, SymInt vocab_size, str group_name, "
    "ScalarType compute_dtype, str backend, int memory"
)
# The forward's outputs that the backward reads, in the order of `Outputs` without is_top1.
_SAVED = (
    "Tensor log_probs, Tensor entropy, Tensor sum_sq_probs, Tensor topk_log_probs, Tensor lse, Tensor kept, Tensor kept_tops"
)


class Inputs(NamedTuple):
    """The tensors of a call, flat: hidden [N, H], weight [V, H], labels [N], temperature [] or [N], topk_ids [N, K]."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: Tensor
    bias: Tensor | None
    extra_hidden: Tensor | None
    extra_weight: Tensor | None
    topk_ids: Tensor | None


class Settings(NamedTuple):
    """The rest of a call, in types that a schema has."""

    softcap: float | None
    logit_scale: float
    ignore_index: int
    vocab_start: int
    vocab_size: int
    group_name: str
    compute_dtype: torch.dtype
    backend: str  # "torch" or "triton": "auto" is settled before
    memory: int  # bytes, or budgets.LOW or budgets.AUTO

    def head(self, inputs: Inputs) -> Head:
        return Head(
            weight=inputs.weight.to(self.compute_dtype),
            bias=inputs.bias,
            extra_weight=inputs.extra_weight,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            ignore_index=self.ignore_index,
            vocab_start=self.vocab_start,
            vocab_size=self.vocab_size,
            group_name=self.group_name,
            compute_dtype=self.compute_dtype,
            weight_dtype=inputs.weight.dtype,
        )


_N_INPUTS, _N_SETTINGS = len(Inputs._fields), len(Settings._fields)


def _split(args: tuple[Any, ...]) -> tuple[Inputs, Settings, tuple[Any, ...]]:
    end = _N_INPUTS + _N_SETTINGS
    return Inputs(*args[:_N_INPUTS]), Settings(*args[_N_INPUTS:end]), args[end:]


def _forward(*args: Any) -> Outputs:
    inputs, settings, (entropy, sum_sq, keep) = _split(args)
    return run_forward(
        settings.backend,
        settings.head(inputs),
        inputs.hidden,
        inputs.extra_hidden,
        inputs.labels,
        inputs.temperature,
        inputs.topk_ids,
        settings.memory,
        entropy,
        sum_sq,
        *_room(inputs, keep),
    )


def _room(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
    scores, tops = budgets.kept_shapes(inputs.labels.shape[0] if keep else 0, inputs.weight.shape[0])
    return inputs.hidden.new_empty(scores, dtype=torch.float16), inputs.hidden.new_empty(tops, dtype=torch.float32)


forward_op = torch.library.custom_op(
    "scoped_patch::linear_cross_entropy",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}, {_SETTINGS}, bool entropy, bool sum_sq, bool keep) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@forward_op.register_fake
def _(*args: Any) -> Outputs:
    inputs, settings, (entropy, sum_sq, keep) = _split(args)
    dtype = torch.float64 if settings.compute_dtype == torch.float64 else torch.float32
    rows = inputs.labels.shape[0]

    def row(wanted: bool = True, dtype: torch.dtype = dtype) -> Tensor:
        return inputs.hidden.new_empty((rows,) if wanted else (0,), dtype=dtype)

    topk = inputs.topk_ids
    chosen = inputs.hidden.new_empty(topk.shape, dtype=dtype) if topk is not None else row(False)
    return row(), row(entropy), row(sum_sq), row(dtype=torch.bool), chosen, row(), *_room(inputs, keep)


_BackwardOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _run_backward(*args: Any) -> _BackwardOutputs:
    upstream: tuple[Tensor | None, ...] = args[:4]
    log_probs, entropy, sum_sq, topk, lse, kept, kept_tops = args[4:11]
    inputs, settings, (needs,) = _split(args[11:])
    head, total = settings.head(inputs), inputs.labels.shape[0]
    real = inputs.labels != settings.ignore_index
    flows = torch.zeros_like(real)
    for grad in upstream:
        if grad is not None:
            flows = flows | ((grad != 0) if grad.ndim == 1 else (grad != 0).any(1))
    rows = select(head, inputs.hidden, inputs.extra_hidden, inputs.labels, inputs.temperature, real & flows)

    def take(values: Tensor | None) -> Tensor | None:
        if values is None or values.shape[0] != total:  # not asked for, so empty
            return None
        return values if rows.index is None else values.index_select(0, rows.index)

    def take_grad(values: Tensor | None) -> Tensor | None:
        if values is not None and rows.index is None:
            # Nothing is left out where nothing could be counted (graph capture): make it explicit.
            values = torch.where(real if values.ndim == 1 else real[:, None], values, 0)
        return take(values.to(lse.dtype)) if values is not None else None

    kept_rows = None
    if kept.shape[0] and (rows.index is not None or capturing(kept)):
        # The forward brought the rows that count to the front.
        kept_rows = (real.cumsum(0) - 1).clamp(min=0)
        kept_rows = kept_rows if rows.index is None else kept_rows.index_select(0, rows.index)
    found = run_backward(
        settings.backend,
        Backward(
            head=head,
            rows=rows,
            log_probs=log_probs if rows.index is None else log_probs.index_select(0, rows.index),
            lse=lse if rows.index is None else lse.index_select(0, rows.index),
            entropy=take(entropy),
            sum_sq_probs=take(sum_sq),
            grads=RowGrads(*map(take_grad, upstream)),
            topk_ids=take(inputs.topk_ids),
            topk_log_probs=take(topk),
            kept=kept if kept.shape[0] else None,
            kept_tops=kept_tops,
            kept_rows=kept_rows,
            memory=settings.memory,
            needs=tuple(needs),
        ),
    )

    def finish(grad: Tensor | None, like: Tensor | None, rowwise: bool = False) -> Tensor:
        if grad is None or like is None:
            return inputs.hidden.new_empty(0)
        grad = grad.to(like.dtype)
        return rows.spread(grad) if rowwise else grad

    return (
        finish(found.hidden, inputs.hidden, rowwise=True),
        finish(found.weight, inputs.weight),
        finish(found.bias, inputs.bias),
        finish(found.extra_hidden, inputs.extra_hidden, rowwise=True),
        finish(found.extra_weight, inputs.extra_weight),
    )


backward_op = torch.library.custom_op(
    "scoped_patch::linear_cross_entropy_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor? grad_log_probs, Tensor? grad_entropy, Tensor? grad_sum_sq_probs, Tensor? grad_topk_log_probs, "
    f"{_SAVED}, {_INPUTS}, {_SETTINGS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _gradient_like(tensor: Tensor | None, needed: bool, hidden: Tensor) -> Tensor:
    return torch.empty_like(tensor) if tensor is not None and needed else hidden.new_empty(0)


@backward_op.register_fake
def _(*args: Any) -> _BackwardOutputs:
    inputs, _settings, (needs,) = _split(args[11:])
    hidden, weight, bias, extra_hidden, extra_weight = needs
    return (
        inputs.hidden.new_empty(inputs.hidden.shape if hidden else (0,)),
        _gradient_like(inputs.weight, weight, inputs.hidden),
        _gradient_like(inputs.bias, bias, inputs.hidden),
        inputs.hidden.new_empty(0)
        if inputs.extra_hidden is None or not extra_hidden
        else inputs.extra_hidden.new_empty(inputs.extra_hidden.shape),
        _gradient_like(inputs.extra_weight, extra_weight, inputs.hidden),
    )


_DIFFERENTIABLE = (0, 1, 4, 5, 6)  # hidden, weight, bias, extra_hidden, extra_weight among the forward's arguments


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.set_materialize_grads(False)
    log_probs, entropy, sum_sq, _, topk, lse, kept, kept_tops = output
    ctx.mark_non_differentiable(lse, kept, kept_tops)
    tensors, settings, (want_entropy, want_sum_sq, _) = _split(inputs)
    ctx.wanted = (True, want_entropy, want_sum_sq, tensors.topk_ids is not None)
    ctx.save_for_backward(log_probs, entropy, sum_sq, topk, lse, kept, kept_tops, *tensors)
    ctx.settings = settings


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    log_probs, entropy, sum_sq, _, topk, *_ = grads
    # Under AOTAutograd the empty stand-ins of outputs that were not asked for get (empty) gradients too.
    upstream = [g if w else None for g, w in zip((log_probs, entropy, sum_sq, topk), ctx.wanted, strict=True)]
    needs = [bool(ctx.needs_input_grad[i]) for i in _DIFFERENTIABLE]
    results: list[Tensor | None] = [None] * (_N_INPUTS + _N_SETTINGS + 3)
    if any(g is not None for g in upstream) and any(needs):
        found = backward_op(*upstream, *ctx.saved_tensors, *ctx.settings, needs)
        for position, needed, grad in zip(_DIFFERENTIABLE, needs, found, strict=True):
            if needed:
                results[position] = grad
    return tuple(results)


def _refuse_second_order(ctx: Any, *grads: Tensor | None) -> Any:
    raise SecondOrderGradientError(
        "linear_cross_entropy: a gradient of its gradient was asked for (create_graph=True, or a gradient penalty); the "
        "fused head keeps no logits and has no second-order formula. Compute this loss from F.linear and log_softmax"
    )


forward_op.register_autograd(_backward, setup_context=_setup_context)
backward_op.register_autograd(_refuse_second_order)
