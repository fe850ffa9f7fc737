"""verl's way of loading NVFP4 weights again and again: prepare, `load_weights`, process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...engine import Scope, Session
from ...engine.errors import BadOptionError, BadTargetError
from ...vllm.param_meta import ParamMeta
from ...vllm.targets import qat_targets


def apply_qat_patches() -> Session:
    """Make vLLM's NVFP4 schemes repeatable, for as long as the session is not restored.

    Call it before the engine is built, in the process that holds the model. Calling it again gives another session on the
    same edits.

    Raises:
        UnsupportedError: vLLM is not here, or of a version whose schemes are not known; nothing is changed then.
    """
    return Scope(None, qat_targets("nvfp4")).apply()


def prepare_qat_for_load_weights(model: nn.Module, device: torch.device | str | None = None) -> ParamMeta:
    """Put parameters in checkpoint format back on every layer, empty, so that `model.load_weights` finds them.

    Args:
        model: vLLM's model; where it holds the model proper in `.model`, that is prepared, as in verl.
        device: where the parameters are made. They are made where the processed ones are, and no other place is possible.

    Returns:
        ParamMeta: the parameters, by the names that they have in the prepared model.

    Raises:
        ScopeStateError: no layer was processed under the patches.
        BadOptionError: another device than that of the model.
        BadTargetError: this is no model.
    """
    inner = _inner(model)
    meta = ParamMeta(inner)
    found = next((p.device for p in inner.parameters() if not p.is_meta), None)
    if device is not None and found is not None:
        try:
            wanted = torch.device(device)
        except RuntimeError:
            raise BadOptionError(f"device={device!r} is no device; the live weights are on {found}") from None
        if wanted.type != found.type or wanted.index not in (None, found.index):
            raise BadOptionError(f"device={str(device)!r}: the weights are loaded where the live ones are, on {found}")
    meta.prepare()
    return meta


def manual_process_weights_after_loading(model: nn.Module) -> int:
    """Process the weights of every quantised layer that has been loaded since; returns how many layers were asked.

    Layers with nothing new are left as they are, and so are KV-cache scales and layers whose plain weights vLLM has dropped.

    Raises:
        BadTargetError: this is no model.
    """
    asked = 0
    for module in _inner(model).modules():
        scheme = getattr(module, "scheme", None)
        if scheme is not None:
            scheme.process_weights_after_loading(module)
            asked += 1
            continue
        method: Any = getattr(module, "quant_method", None)
        if not hasattr(method, "process_weights_after_loading") or "KVCache" in type(method).__name__:
            continue
        weight = module._parameters.get("weight")
        if weight is not None and not weight.numel():
            continue
        method.process_weights_after_loading(module)
        asked += 1
    return asked


def _inner(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise BadTargetError(
            f"this needs vLLM's model (an nn.Module), got {type(model).__name__}; a runner holds it in `.model`"
        )
    inner = getattr(model, "model", None)
    return inner if isinstance(inner, nn.Module) else model
