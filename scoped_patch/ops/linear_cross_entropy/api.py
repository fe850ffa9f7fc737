"""The public function: arguments checked and brought to the operator's plain form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from . import memory as budgets
from .checks import autocast_dtype, form, integer, number, settled
from .operator import apply, refuse_transforms
from .problem import Inputs, Settings
from .vocab_parallel import is_dtensor, local_rows, local_weight, to_local
from .vocab_parallel import layout as find_layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class LinearCrossEntropyOutput:
    """Per-token results, each of the labels' shape (fp32; fp64 for fp64 inputs); None where not asked for.

    - `log_probs`: log softmax of the logits at the label. Differentiable.
    - `entropy`: of the softmax, in nats. Differentiable, unless `entropy_grad=False`.
    - `sum_sq_probs`: the sum of the squared probabilities. Differentiable.
    - `is_top1`: whether no logit is larger than the label's (bool; a tie counts).
    - `topk_log_probs`: [..., K], log softmax at `topk_ids`. Differentiable.

    Where the label is `ignore_index`: 0 (False), and no gradient.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None
    topk_log_probs: Tensor | None = None


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    extra_hidden_states: Tensor | None = None,
    extra_weight: Tensor | None = None,
    topk_ids: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    memory: Literal["auto", "low"] | int = "auto",
    backend: Literal["auto", "torch", "triton"] = "auto",
    outputs: Sequence[str] = ("log_probs", "entropy"),
    entropy_grad: bool = True,
) -> LinearCrossEntropyOutput:
    """Log-probability of each label and entropy of each row under a linear head, without keeping the logits.

    In exactly this order::

        z      = hidden_states @ weight.T + bias + extra_hidden_states @ extra_weight.T
        z      = logit_scale * z
        z      = softcap * tanh(z / softcap)
        logits = z / temperature

    At most one block of the logits is alive at a time, forward and backward, unless `memory` lets them be kept. Logits
    and statistics are fp32 whatever the inputs' dtype (fp64 for fp64), and gradients are summed in fp32. Inputs without
    `requires_grad` cost nothing in the backward; neither do rows whose label is `ignore_index` (forward and backward) or
    whose upstream gradient is exactly 0 (backward: on CUDA it waits once for the device, to learn how many there are).

    Args:
        hidden_states: [..., H], fp16, bf16, fp32 or fp64.
        weight: [V, H], the head's weight, of the hidden states' dtype (under autocast: of any of these dtypes).
        labels: [...] int64, already aligned: row t is scored against labels[t], nothing is shifted.
        bias: [V]. -inf entries give probability 0 and no gradient.
        temperature: a float > 0, or an fp32 or fp64 tensor with one value per token ([...]), per leading dimension
            ([B] for [B, S] labels) or in all ([]). It gets no gradient.
        ignore_index: rows with this label give 0 in every output.
        softcap: bound of the logits, as in Gemma 2.
        logit_scale: factor on the logits, as in Cohere; 1 / logits_scaling for Granite.
        extra_hidden_states: [..., R], input of a second linear term, as a LoRA adapter on the head has; multiply it by
            the adapter's scaling.
        extra_weight: [V, R].
        topk_ids: [..., K] int64, further vocabulary rows whose log-probability is wanted: the support of a teacher's
            distribution, for `topk_kl_divergence`.
        process_group: the vocabulary's rows are spread over this group in rank order: `weight`, `bias` and
            `extra_weight` hold this rank's, or are DTensors sharded on dimension 0 over it. The other arguments, and the
            upstream gradients, are the same on every rank; so are the results. Not under torch.compile.
        memory: bytes of logits that may be alive. Where all of them fit (as float16), the triton backend keeps them for
            the backward, which saves one of four matrix products. "auto": a block of 512 MiB on a GPU, or all logits
            where they take at most a quarter of the memory that is free; "low": what costs the least memory.
        backend: "auto" takes triton on CUDA where it is installed, else torch.
        outputs: what to compute, out of `OUTPUT_NAMES`. What is not asked for costs nothing.
        entropy_grad: False makes the entropy a metric without gradient.

    Returns:
        LinearCrossEntropyOutput: its fields have the labels' shape.

    Raises:
        LabelOutOfRangeError: (a ValueError and IndexError) a label is outside [0, V) and not `ignore_index`, or a chosen
            id is. The triton backend does not wait for the device to find that out: its log-probability is NaN there.
        ValueError, TypeError: a bad argument; fp8 weights; a temperature tensor below fp32.
        UnsupportedError: (a NotImplementedError) triton was asked for where it cannot run; a DTensor weight that cannot
            be told to be tensor-parallel; torch.func's transforms; batched gradients.
        SecondOrderGradientError: (a NotImplementedError) in a backward of a backward.
    """
    refuse_transforms()
    layout = None
    if is_dtensor(weight):
        weight, layout = local_weight(weight, hidden_states, process_group)
        bias, extra_weight = local_rows(bias), local_rows(extra_weight)
    hidden_states, labels = to_local(hidden_states, "hidden_states"), to_local(labels, "labels")
    wanted = tuple(outputs)
    settings = settled(
        (
            (hidden_states.shape, hidden_states.dtype),
            (weight.shape, weight.dtype),
            (labels.shape, labels.dtype),
            form(bias),
            form(extra_hidden_states),
            form(extra_weight),
            form(topk_ids),
            weight.device,
            autocast_dtype(hidden_states),
            wanted,
            None if softcap is None else number("softcap", softcap),
            1.0 if logit_scale is None else number("logit_scale", logit_scale),
            integer("ignore_index", ignore_index),
            _memory(memory),
            backend,
        )
    )
    if layout is None and process_group is not None:
        layout = find_layout(process_group, weight)
    if layout is not None:
        group_name, vocab_start, vocab_size = layout
        settings = settings._replace(group_name=group_name, vocab_start=vocab_start, vocab_size=vocab_size)
    shape, count = labels.shape, labels.numel()
    inputs = Inputs(
        hidden=hidden_states.reshape(count, hidden_states.shape[-1]),
        weight=weight,
        labels=labels.reshape(-1),
        temperature=_temperature(temperature, labels, hidden_states),
        bias=bias,
        extra_hidden=None if extra_hidden_states is None else extra_hidden_states.reshape(count, extra_hidden_states.shape[-1]),
        extra_weight=extra_weight,
        topk_ids=None if topk_ids is None else topk_ids.reshape(count, topk_ids.shape[-1]),
    )
    got = apply(inputs, settings, "entropy" in wanted, "sum_sq_probs" in wanted, _keep(inputs, settings))
    out = LinearCrossEntropyOutput()
    if "log_probs" in wanted:
        out.log_probs = got.log_probs.view(shape)
    if "entropy" in wanted:
        out.entropy = (got.entropy if entropy_grad else got.entropy.detach()).view(shape)
    if "sum_sq_probs" in wanted:
        out.sum_sq_probs = got.sum_sq_probs.view(shape)
    if "is_top1" in wanted:
        out.is_top1 = got.is_top1.view(shape)
    if topk_ids is not None:
        out.topk_log_probs = got.topk_log_probs.view(topk_ids.shape)
    return out


def _temperature(temperature: float | Tensor, labels: Tensor, hidden: Tensor) -> Tensor:
    """[] or [N], fp32 or fp64, on the hidden states' device."""
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}, wanted a number > 0")
        if not torch.compiler.is_compiling():
            return (_number.__wrapped__ if torch._C._len_torch_dispatch_stack() else _number)(float(temperature))
        # A product keeps a changed float a symbol under torch.compile; torch.full would compile again for each value.
        return torch.ones((), dtype=torch.float64, device=hidden.device) * temperature
    if temperature.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"temperature: got a {temperature.dtype} tensor, wanted float32 or float64; mixed precision (FSDP's "
            "cast_forward_inputs, for one) casts float tensors on their way in: hand it over as a float, or keep it from "
            "the cast"
        )
    if temperature.requires_grad:
        raise ValueError("temperature: it requires a gradient, which is not computed; hand over temperature.detach()")
    if temperature.ndim == 0:
        return temperature
    missing = labels.ndim - temperature.ndim
    shape = (*temperature.shape, *(1,) * missing)
    if missing < 0 or any(have not in (1, want) for have, want in zip(shape, labels.shape, strict=True)):
        raise ValueError(
            f"temperature: got shape {list(temperature.shape)}, wanted one value per token {list(labels.shape)}, per "
            "leading dimension of that, or a scalar"
        )
    return temperature.view(shape).expand(labels.shape).reshape(-1)


@lru_cache(maxsize=64)
def _number(value: float) -> Tensor:
    """On the CPU, where a kernel takes it without waiting for the device. Nobody writes to it.

    Shared by all that follow: not to be called where a mode would make it a tensor of its own kind.
    """
    with torch.inference_mode(False):  # a training step may be the next to ask, and must save it
        return torch.tensor(value, dtype=torch.float64, device="cpu")


def _memory(memory: str | int) -> int:
    if memory == "auto":
        return budgets.AUTO
    if memory == "low":
        return budgets.LOW
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    raise ValueError(f'memory: got {memory!r}, wanted "auto", "low" or a number of bytes > 0')


def _keep(inputs: Inputs, settings: Settings) -> bool:
    """Whether logits are kept from the forward to the backward. Only the triton backend's tiles can write them."""
    if settings.backend != "triton" or inputs.extra_weight is not None or settings.compute_dtype == torch.float32:
        return False
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return False
    return budgets.keeps_logits(settings.memory, inputs.labels.shape[0], inputs.weight.shape[0], inputs.hidden.device)
