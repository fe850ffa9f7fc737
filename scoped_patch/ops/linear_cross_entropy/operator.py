"""The fused head in autograd: as two operators of the dispatcher for torch.compile, as a plain function otherwise.

Dynamo and AOTAutograd pass an operator through as one node. Called outside of them, an operator's way through the
dispatcher and back costs some 0.3 ms of Python, as much as a tenth of a small head's time: there the same two functions
are called from an `autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...engine.errors import UnsupportedError
from . import memory as budgets
from .backends import run_backward, run_forward
from .errors import SecondOrderGradientError
from .problem import Inputs, Settings
from .stats import Outputs, Upstream

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor temperature, Tensor? bias, Tensor? extra_hidden, "
    "Tensor? extra_weight, Tensor? topk_ids"
)
_SETTINGS = (
    "float? softcap, float logit_scale, int ignore_index, SymInt vocab_start, SymInt vocab_size, str group_name, "
    "ScalarType compute_dtype, str backend, int memory"
)
_OUTPUTS = (
    "Tensor log_probs, Tensor entropy, Tensor sum_sq_probs, Tensor is_top1, Tensor topk_log_probs, Tensor lse, "
    "Tensor kept, Tensor kept_tops"
)
_UPSTREAM = "Tensor? grad_log_probs, Tensor? grad_entropy, Tensor? grad_sum_sq_probs, Tensor? grad_topk_log_probs"
# Whether the backward that runs in this thread was asked to retain its graph; torch has it for its own donated buffers.
_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_N_INPUTS, _N_SETTINGS, _N_OUTPUTS = len(Inputs._fields), len(Settings._fields), len(Outputs._fields)
_KEPT = Outputs._fields.index("kept")
# hidden, weight, bias, extra_hidden, extra_weight among the forward's arguments
_DIFFERENTIABLE = (0, 1, 4, 5, 6)


def _split(args: tuple[Any, ...]) -> tuple[Inputs, Settings, tuple[Any, ...]]:
    end = _N_INPUTS + _N_SETTINGS
    return Inputs(*args[:_N_INPUTS]), Settings(*args[_N_INPUTS:end]), args[end:]


def _room(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
    scores, tops = budgets.kept_shapes(inputs.labels.shape[0] if keep else 0, inputs.weight.shape[0])
    return inputs.hidden.new_empty(scores, dtype=torch.float16), inputs.hidden.new_empty(tops, dtype=torch.float32)


def _forward(*args: Any) -> Outputs:
    inputs, settings, (entropy, sum_sq, keep) = _split(args)
    return run_forward(inputs, settings, entropy, sum_sq, *_room(inputs, keep))


forward_op = torch.library.custom_op(
    "scoped_patch::linear_cross_entropy",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}, {_SETTINGS}, bool entropy, bool sum_sq, bool keep) -> ({', '.join(['Tensor'] * _N_OUTPUTS)})",
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
    return Outputs(row(), row(entropy), row(sum_sq), row(dtype=torch.bool), chosen, row(), *_room(inputs, keep))


def _backward_parts(args: tuple[Any, ...]) -> tuple[Upstream, Outputs, Inputs, Settings, tuple[bool, ...]]:
    start = 4 + _N_OUTPUTS
    inputs, settings, (needs,) = _split(args[start:])
    return Upstream(*args[:4]), Outputs(*args[4:start]), inputs, settings, tuple(needs)


def _gradients(*args: Any) -> tuple[Tensor, ...]:
    return _found(args, False)  # an operator must not write to its arguments


def _unspoilt(ctx: Any, once: bool) -> list[Tensor]:
    """What was saved, without kept scores that an earlier backward may have used up: those are computed anew.

    With `once` this backward may use them up. A graph that autograd frees behind itself is freed only where nothing raises
    (no memory left, a hook of the user's): else another backward may follow. What saved-tensor hooks make each time, as a
    recomputing checkpoint does, is another storage each time.
    """
    saved = list(ctx.saved_tensors)
    kept = saved[_KEPT]
    if kept.numel() and (once or ctx.used_up is not None):
        storage = StorageWeakRef(kept.untyped_storage())  # type: ignore[no-untyped-call]
        if ctx.used_up is not None and storage == ctx.used_up:
            saved[_KEPT] = kept.new_empty((0, kept.shape[1]))
        elif once:
            ctx.used_up = storage
    return saved


def _found(args: tuple[Any, ...], once: bool) -> tuple[Tensor, ...]:
    upstream, forward, inputs, settings, needs = _backward_parts(args)
    found = run_backward(inputs, settings, forward, upstream, needs, once).tensors()
    return tuple(inputs.hidden.new_empty(0) if grad is None else grad for grad in found)


backward_op = torch.library.custom_op(
    "scoped_patch::linear_cross_entropy_backward",
    _gradients,
    mutates_args=(),
    schema=f"({_UPSTREAM}, {_OUTPUTS}, {_INPUTS}, {_SETTINGS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    _, _, inputs, _, needs = _backward_parts(args)
    grads = []
    for position, needed in zip(_DIFFERENTIABLE, needs, strict=True):
        tensor = inputs[position]
        if tensor is None or not needed:
            grads.append(inputs.hidden.new_empty(0))
        elif position in (0, 5):
            grads.append(tensor.new_empty(tensor.shape))
        else:
            grads.append(torch.empty_like(tensor))
    return tuple(grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _remember(ctx, Outputs(*output), *_split(inputs))


def _remember(ctx: Any, outputs: Outputs, inputs: Inputs, settings: Settings, options: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(outputs.is_top1, outputs.lse, outputs.kept, outputs.kept_tops)
    want_entropy, want_sum_sq, _ = options
    ctx.wanted = (True, want_entropy, want_sum_sq, inputs.topk_ids is not None)
    ctx.save_for_backward(*outputs, *inputs)
    ctx.settings = settings
    ctx.used_up = None


def _backward(ctx: Any, plain: bool, needs: list[bool], grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Gradients of hidden, weight, bias, extra_hidden and extra_weight."""
    log_probs, entropy, sum_sq, _, topk, *_ = grads
    # Under AOTAutograd the empty stand-ins of outputs that were not asked for get (empty) gradients too.
    upstream = [g if w else None for g, w in zip((log_probs, entropy, sum_sq, topk), ctx.wanted, strict=True)]
    if not any(needs) or all(g is None for g in upstream):
        return [None] * len(needs)
    # Grad mode is on where a graph of the backward is wanted: the operator refuses to be differentiated.
    plain = plain and not torch.is_grad_enabled()
    # Where autograd frees the graph behind itself, nobody reads again what the forward kept.
    once = plain and _keeps_graph is not None and not _keeps_graph()
    args = (*upstream, *_unspoilt(ctx, once), *ctx.settings, needs)
    found = _found(args, once) if plain else backward_op(*args)
    return [grad if needed else None for needed, grad in zip(needs, found, strict=True)]


def _operator_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _backward(ctx, False, [bool(ctx.needs_input_grad[i]) for i in _DIFFERENTIABLE], grads)
    results: list[Tensor | None] = [None] * (_N_INPUTS + _N_SETTINGS + 3)
    for position, grad in zip(_DIFFERENTIABLE, found, strict=True):
        results[position] = grad
    return tuple(results)


def _refuse_second_order(ctx: Any, *grads: Tensor | None) -> Any:
    raise SecondOrderGradientError(
        "linear_cross_entropy: a gradient of its gradient was asked for (create_graph=True, or a gradient penalty); the "
        "fused head keeps no logits and has no second-order formula. Compute this loss from F.linear and log_softmax"
    )


forward_op.register_autograd(_operator_backward, setup_context=_setup_context)
backward_op.register_autograd(_refuse_second_order)


class _Function(torch.autograd.Function):
    """The same without the dispatcher. Autograd is handed what it may differentiate; the rest comes in one piece."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Outputs:
        inputs, settings, options = args[len(_DIFFERENTIABLE) :]
        entropy, sum_sq, keep = options
        outputs = run_forward(inputs, settings, entropy, sum_sq, *_room(inputs, keep))
        _remember(ctx, outputs, inputs, settings, options)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_transforms()
        found = _backward(ctx, True, list(ctx.needs_input_grad[: len(_DIFFERENTIABLE)]), grads)
        return *found, None, None, None


def refuse_transforms() -> None:
    """Raise within a torch.func transform."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(
            "linear_cross_entropy: there are no rules for torch.func's transforms (grad, vjp, jvp, vmap, ...) and for batched "
            "gradients; use torch.autograd.grad or backward() on its outputs, one gradient at a time, or compute this loss "
            "from F.linear and log_softmax"
        )


def _plain(inputs: Inputs) -> bool:
    """Whether nothing looks on that would want to see an operator: no compiler, no dispatch mode, no odd tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(t is None or (type(t) in (Tensor, torch.nn.Parameter) and t.device.type in ("cpu", "cuda")) for t in inputs)


def apply(inputs: Inputs, settings: Settings, entropy: bool, sum_sq: bool, keep: bool) -> Outputs:
    """The outputs, in the graph of autograd."""
    if _plain(inputs):
        hidden, weight, _, _, bias, extra_hidden, extra_weight, _ = inputs
        options = entropy, sum_sq, keep
        return Outputs(*_Function.apply(hidden, weight, bias, extra_hidden, extra_weight, inputs, settings, options))  # type: ignore[no-untyped-call]
    return Outputs(*forward_op(*inputs, *settings, entropy, sum_sq, keep))
