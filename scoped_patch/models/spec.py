"""What the patches must know of a model: its decoder, its layers, its head, and what the model does to logits after the head.

Structure answers nearly all of it: transformers' accessors find the decoder and the head of every family, and a
transform of the logits shows in the config. A `ModelSpec` entry says what structure cannot, or confirms it; a model
without an entry works by inference, and `explain()` says so.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..engine.errors import UnsupportedError

#: config attribute -> how the model applies it to the logits
_SOFTCAPS: tuple[str, ...] = ("final_logit_softcapping",)
_SCALES: tuple[str, ...] = ("logit_scale", "lm_head_multiplier")
_DIVISORS: tuple[str, ...] = ("logits_scaling",)

#: losses whose labels mean "token t+1", as `fused` and cut layouts of `sp` assume
CAUSAL_LOSSES = (None, "ForCausalLM", "ForConditionalGeneration")


@dataclass(frozen=True)
class ModelSpec:
    """What is known of a family beyond its structure.

    Attributes:
        model_type: `config.model_type` of the model (or of its text part).
        softcap: config attribute of a tanh softcap on the logits.
        scale: config attribute that multiplies the logits.
        divisor: config attribute that divides the logits.
    """

    model_type: str
    softcap: str | None = None
    scale: str | None = None
    divisor: str | None = None


_SPECS = {
    spec.model_type: spec
    for spec in (
        ModelSpec("llama"),
        ModelSpec("mistral"),
        ModelSpec("qwen2"),
        ModelSpec("qwen3"),
        ModelSpec("gemma3_text", softcap="final_logit_softcapping"),
    )
}


@dataclass(frozen=True)
class LogitsTransform:
    """`logits = softcap * tanh(scale * head(h) / softcap)`, each part optional."""

    softcap: float | None = None
    scale: float | None = None

    def __call__(self, logits: Any) -> Any:
        if self.scale is not None:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def __bool__(self) -> bool:
        return self.softcap is not None or self.scale is not None

    def __str__(self) -> str:
        parts = [f"scale {self.scale:g}"] if self.scale is not None else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(parts) or "none"


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model.

    Attributes:
        model: the unwrapped model.
        model_type: its type, or its class name where it has none.
        head: the module that makes logits.
        head_leaves: the linear layers that can be the active head (several under PEFT's `modules_to_save`).
        transform: what the model does to the logits after the head.
        own_loss: the model computes its loss itself instead of through `loss_function`.
        notes: remarks for `explain()`.
    """

    model: nn.Module
    model_type: str
    head: nn.Module
    head_leaves: tuple[nn.Module, ...]
    transform: LogitsTransform
    own_loss: bool
    notes: tuple[str, ...] = field(default=())


def describe(model: nn.Module) -> str:
    """`Qwen2ForCausalLM (model type 'qwen2', transformers 5.24.0)`, for messages."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    version = getattr(sys.modules.get("transformers"), "__version__", None)
    parts = [f"model type {kind!r}"] if kind else []
    parts += [f"transformers {version}"] if version else []
    return plain_name(model) + (f" ({', '.join(parts)})" if parts else "")


def plain_name(model: nn.Module) -> str:
    """The class name without FSDP2's dynamic front."""
    cls = type(model)
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__) and cls.__name__.startswith("FSDP"):
        return next((b.__name__ for b in cls.__mro__[1:] if b.__name__ != "FSDPModule"), cls.__name__)
    return cls.__name__


def is_multimodal(model: nn.Module) -> bool:
    """Does a vision (or another) tower feed the text decoder?"""
    return getattr(getattr(model, "config", None), "vision_config", None) is not None


def text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if getter is not None else config


#: what families call the list of their layers
_LAYER_LISTS = ("layers", "h", "blocks")


def find_decoder(model: nn.Module) -> nn.Module:
    """The text decoder: the module that holds and runs the list of layers.

    Raises:
        UnsupportedError: no such module; the message names what was looked for.
    """
    getter = getattr(model, "get_decoder", None)
    decoder = getter() if getter is not None else None
    for _ in range(4):  # a multimodal model may answer with the model that holds its language model
        if not isinstance(decoder, nn.Module):
            break
        if any(isinstance(decoder._modules.get(name), nn.ModuleList) for name in _LAYER_LISTS):
            return decoder
        inside = ("language_model", "text_model", "model", "transformer")
        decoder = next((decoder._modules[name] for name in inside if name in decoder._modules), None)
    raise UnsupportedError(
        f"{describe(model)} has no text decoder that could be found: get_decoder() gave no module with a list of layers "
        f"named {', '.join(_LAYER_LISTS)}"
    )


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The list of layers of a decoder that `find_decoder` gave."""
    return next(layers for name in _LAYER_LISTS if isinstance(layers := decoder._modules.get(name), nn.ModuleList))


def find_head(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, or None."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    return head if isinstance(head, nn.Module) else None


def head_leaves(head: nn.Module) -> tuple[nn.Module, ...]:
    """The layers under PEFT's `modules_to_save`, FSDP1 and torch's checkpoint wrapper that can be the active head."""
    saved = head._modules.get("modules_to_save")
    if saved is not None and "original_module" in head._modules:
        original = head._modules["original_module"]
        return tuple(m for m in (original, *saved._modules.values()) if m is not None)
    inner = next((head._modules[n] for n in ("_checkpoint_wrapped_module", "_fsdp_wrapped_module") if n in head._modules), None)
    return head_leaves(inner) if inner is not None else (head,)


def anatomy(model: nn.Module) -> Anatomy:
    """Find the parts of a causal language model that `fused` needs.

    Raises:
        UnsupportedError: it is not one, or does to its logits what nothing here can reproduce; says which and why.
    """
    config = text_config(model)
    model_type = getattr(config, "model_type", None) or plain_name(model)
    head = find_head(model)
    if head is None:
        other = next((n for n in ("score", "classifier", "qa_outputs", "v_head") if n in model._modules), None)
        found = f"its head is `{other}`, which makes no token logits" if other else "get_output_embeddings() gave nothing"
        raise UnsupportedError(f"{describe(model)} has no language-model head: {found}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(f"{describe(model)} is an encoder-decoder: its labels are not shifted, so nothing here fits it")
    loss_type = getattr(model, "loss_type", None)
    if loss_type not in CAUSAL_LOSSES:
        raise UnsupportedError(
            f"{describe(model)} trains with {loss_type!r}, not with next-token labels; only causal language models fit"
        )
    spec = _SPECS.get(model_type)
    notes: tuple[str, ...] = ()
    if spec is None:
        notes = (f"structure of {model_type!r} inferred (no entry of its own)",)
    names = forward_names(model)
    own_loss = "loss_function" not in names
    if own_loss:
        notes += ("this model computes its loss itself, so the loss is made here from the log-probs (labels shifted by one)",)
    return Anatomy(model, model_type, head, head_leaves(head), _transform(config, names, spec), own_loss, notes)


def _transform(config: Any, names: frozenset[str], spec: ModelSpec | None) -> LogitsTransform:
    """What the config says and the forward uses: a family may have the setting and not apply it (gemma3 with images)."""
    softcaps, scales, divisors = _SOFTCAPS, _SCALES, _DIVISORS
    if spec is not None:
        softcaps, scales, divisors = _maybe(spec.softcap), _maybe(spec.scale), _maybe(spec.divisor)
    softcap, scale, divisor = (
        _number(config, tuple(one for one in found if one in names)) for found in (softcaps, scales, divisors)
    )
    if divisor is not None:
        scale = (1.0 if scale is None else scale) / divisor
    return LogitsTransform(softcap or None, None if scale == 1.0 else scale)


def _maybe(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _number(config: Any, names: tuple[str, ...]) -> float | None:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    return None


def forward_names(model: nn.Module) -> frozenset[str]:
    """The attribute and global names that a model's forward uses, through decorators and `super().forward`."""
    names: set[str] = set()
    for cls in type(model).__mro__:
        forward = cls.__dict__.get("forward")
        if forward is None:
            continue
        code = getattr(inspect.unwrap(forward), "__code__", None)
        if code is None:
            break
        names.update(code.co_names)
        if "super" not in code.co_names:
            break
    return frozenset(names)
