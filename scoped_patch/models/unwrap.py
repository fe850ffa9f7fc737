"""The real model under what people wrap it in, found by structure, without importing any wrapper's package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..engine.errors import BadTargetError

# (attribute that holds the wrapped module, class names (anywhere in the MRO) that mark the wrapper)
_WRAPPERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("_orig_mod", ("OptimizedModule",)),
    ("module", ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")),
    ("_fsdp_wrapped_module", ("FullyShardedDataParallel",)),
    ("_checkpoint_wrapped_module", ("ActivationWrapper",)),
)


@dataclass(frozen=True)
class Unwrapped:
    """A model and the wrappers around it.

    Attributes:
        model: the innermost model, whose own class defines what a forward is.
        outer: what the caller gave.
        wrappers: class names, from the outside in.
        compiled: one of the wrappers is `torch.compile`'s, or the model was compiled in place.
        value_head: the wrapper that holds a value head beside the model, or None.
    """

    model: nn.Module
    outer: nn.Module
    wrappers: tuple[str, ...]
    compiled: bool
    value_head: nn.Module | None = None


def class_names(module: object) -> set[str]:
    """The names of all classes of an object: FSDP2 puts a dynamic class in front, so one name is not enough."""
    return {cls.__name__ for cls in type(module).__mro__}


def unwrap(target: Any) -> Unwrapped:
    """Find the real model under DDP, FSDP1, `torch.compile`, PEFT, checkpoint and value-head wrappers.

    FSDP2 and accelerate change a model in place and need no unwrapping.

    Raises:
        BadTargetError: the target is no `nn.Module`.
    """
    if not isinstance(target, nn.Module):
        raise BadTargetError(
            f"this patch needs a model (an nn.Module), got {type(target).__name__}; pass the model as the first argument"
        )
    model: nn.Module = target
    wrappers: list[str] = []
    compiled = False
    value_head: nn.Module | None = None
    while True:
        compiled = compiled or getattr(model, "_compiled_call_impl", None) is not None
        inner = _inside(model)
        if inner is None:
            return Unwrapped(model, target, tuple(wrappers), compiled, value_head)
        names = class_names(model)
        compiled = compiled or "OptimizedModule" in names
        if is_value_head_wrapper(model):
            value_head = model
        wrappers.append(type(model).__name__)
        model = inner


def is_value_head_wrapper(module: nn.Module) -> bool:
    """A value-head model by structure: a language model in `pretrained_model` and a head in `v_head`."""
    return isinstance(module._modules.get("pretrained_model"), nn.Module) and isinstance(
        module._modules.get("v_head"), nn.Module
    )


def _inside(module: nn.Module) -> nn.Module | None:
    names = class_names(module)
    for attribute, marks in _WRAPPERS:
        if names.intersection(marks):
            inner = getattr(module, attribute)
            return inner if isinstance(inner, nn.Module) else None
    if "PeftModel" in names:
        tuner = module._modules.get("base_model")
        if tuner is None:
            return None
        # tuners (LoraModel, ...) hold the model once more; prompt learning holds it directly
        inner = tuner._modules.get("model") if "BaseTuner" in class_names(tuner) else tuner
        return inner
    if "BaseTuner" in names:
        return module._modules.get("model")
    if is_value_head_wrapper(module):
        return module._modules["pretrained_model"]
    return None
