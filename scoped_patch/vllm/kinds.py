"""What layers, methods and attributes are: asked for every one of thousands, so answered by type, and once for each."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from .graph import is_closed_kind

KINDS: dict[Any, str] = {}
_BUILT_IN = {
    list: "items",
    tuple: "items",
    set: "items",
    dict: "dict",
    types.MethodType: "bound",
    types.FunctionType: "function",
}


def kind_of(of: Any) -> str:
    """How the shadow takes attributes of this type: "shared" as they are, "copied", or as the type wants it."""
    if issubclass(of, torch.Tensor):
        found = "tensor"
    elif issubclass(of, functools.partial):
        found = "partial"
    elif is_copied(of):
        found = "copied"
    else:
        found = _BUILT_IN.get(of, "module" if issubclass(of, torch.nn.Module) else "shared")
    KINDS[of] = found
    return found


@functools.lru_cache(maxsize=1024)
def is_copied(kind: Any) -> bool:
    """vLLM's own objects that a layer has for itself: methods, schemes, kernels."""
    if not kind.__module__.startswith(("vllm.model_executor", "vllm.v1.attention")) or is_closed_kind(kind):
        return False
    # What owns a C++ handle frees it when it dies: two owners would free it twice.
    if issubclass(kind, (type, torch.Tensor)) or hasattr(kind, "__del__"):
        return False
    return issubclass(kind, torch.nn.Module) or "__new__" not in vars(kind)


def is_method(method: Any) -> bool:
    return _is_method(type(method))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _is_method(kind: Any) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return issubclass(kind, QuantizeMethodBase)


def is_attention(module: torch.nn.Module) -> bool:
    """Layers whose processing reads other layers' weights, so that vLLM processes them last."""
    return _is_attention(type(module))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _is_attention(kind: Any) -> bool:
    return any(
        of.__name__ in ("AttentionLayerBase", "MMEncoderAttention", "Attention", "MLAAttention") for of in kind.__mro__
    ) and callable(getattr(kind, "process_weights_after_loading", None))


def is_plain(method: Any) -> bool:
    """Does the live parameter keep the checkpoint's format and content?"""
    return not is_method(method) or type(method).__name__.startswith("Unquantized")


def is_kv_cache_method(method: Any) -> bool:
    return _is_kv_cache_method(type(method))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _is_kv_cache_method(kind: Any) -> bool:
    return any(of.__name__ == "BaseKVCacheMethod" for of in kind.__mro__)


def why_optional(module: torch.nn.Module, name: str) -> str | None:
    """Parameters that vLLM creates and a checkpoint of this kind need not have."""
    method = getattr(module, "quant_method", None)
    if is_kv_cache_method(method):
        return "KV-cache scales default to 1"
    if name.endswith("input_global_scale") and is_weight_only(method):
        return "a weight-only scheme reads no activation scale"
    return None


def is_weight_only(method: Any) -> bool:
    """Whether an NVFP4 MoE method runs without quantised activations, however its version says so."""
    if getattr(method, "use_a16", False):
        return True
    return getattr(getattr(method, "nvfp4_backend", None), "name", "") == "MARLIN"
