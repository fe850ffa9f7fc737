"""A head as linear terms: `logits = hidden @ weight.T + bias + extra_hidden @ extra_weight.T`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.errors import UnsupportedError
from .modules import changed_linear, is_plain_linear
from .unwrap import class_names


@dataclass(frozen=True)
class HeadTerms:
    """The tensors of a head for one call.

    Attributes:
        weight: [V, H].
        bias: [V] or None.
        extra_hidden_states: [..., R] or None: the input of LoRA's second matrix, dropout and scaling applied.
        extra_weight: [V, R] or None.
    """

    weight: Tensor
    bias: Tensor | None
    extra_hidden_states: Tensor | None = None
    extra_weight: Tensor | None = None

    def float(self) -> HeadTerms:
        """The same terms in fp32."""
        return HeadTerms(*(None if t is None else t.float() for t in vars(self).values()))  # type: ignore[arg-type]


def head_problem(head: nn.Module) -> str | None:
    """Why this head cannot be taken apart into linear terms, or None. Looks at structure only."""
    if is_lora(head):
        base = head._modules.get("base_layer")
        if base is None or not is_plain_linear(base):
            return f"its LoRA layer stands on a {type(base).__name__}, whose product is not a plain one"
        variants = getattr(head, "lora_variant", None) or {}
        if variants:
            names = sorted({type(v).__name__ for v in variants.values()})
            return f"its LoRA layer uses {', '.join(names)}, which changes more than a low-rank term"
        return None
    if is_plain_linear(head):
        return None
    hint = ""
    if changed := changed_linear(head):
        return changed
    if hasattr(head, "quant_state") or "bnb" in type(head).__module__ or "bitsandbytes" in type(head).__module__:
        hint = "; keep the head out of quantisation (llm_int8_skip_modules=['lm_head'])"
    elif "peft" in type(head).__module__:
        hint = "; only LoRA and modules_to_save are supported on the head"
    elif type(head).__module__.startswith("torch.ao"):
        hint = "; leave the head out of the quantisation config"
    return f"it is a {type(head).__module__}.{type(head).__qualname__}, which is no plain linear layer{hint}"


def is_lora(module: nn.Module) -> bool:
    return "LoraLayer" in class_names(module) and isinstance(module._modules.get("lora_A"), nn.ModuleDict)


def head_terms(head: Any, hidden_states: Tensor) -> HeadTerms:
    """Read a head's tensors as they are for this call: merged, disabled or active adapters, dropout included.

    Args:
        head: a linear layer or a PEFT LoRA layer on one.
        hidden_states: [..., H].

    Raises:
        UnsupportedError: the head has become something that cannot be taken apart.
    """
    problem = head_problem(head)
    if problem is not None:
        raise UnsupportedError(f"fused_head: the head cannot be fused: {problem}")
    if not is_lora(head):
        return HeadTerms(_whole(head, head.weight), head.bias)
    base = head.base_layer
    weight, bias = _whole(base, base.weight), base.bias
    if head.disable_adapters:
        if head.merged:
            head.unmerge()
        return HeadTerms(base.weight, bias)
    if head.merged:
        return HeadTerms(base.weight, bias)
    inputs: list[Tensor] = []
    weights: list[Tensor] = []
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        down, up = head.lora_A[name], head.lora_B[name]
        x = hidden_states.to(down.weight.dtype)
        inputs.append((down(head.lora_dropout[name](x)) * head.scaling[name]).to(hidden_states.dtype))
        weights.append(up.weight.to(weight.dtype))
        if up.bias is not None:
            scaled = up.bias * head.scaling[name]
            bias = scaled.to(weight.dtype) if bias is None else bias + scaled
    if not inputs:
        return HeadTerms(weight, bias)
    if len(inputs) == 1:
        return HeadTerms(weight, bias, inputs[0], weights[0])
    return HeadTerms(weight, bias, torch.cat(inputs, -1), torch.cat(weights, -1))


def _whole(head: nn.Module, weight: Tensor) -> Tensor:
    if weight.ndim != 2:
        shape, zero3 = list(weight.shape), hasattr(weight, "ds_id")
        what = "ZeRO-3 has not gathered it" if zero3 else "something has flattened or emptied it"
        deepspeed = getattr(sys.modules.get("deepspeed"), "__version__", "")
        raise UnsupportedError(
            f"fused_head: the weight of the head has shape {shape} inside its own forward: {what} {deepspeed}".rstrip()
            + ". Gather it around the call, or leave the head out of the sharding"
        )
    return weight
