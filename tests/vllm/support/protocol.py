"""What trainers of the older protocol do after each step: prepare, `load_weights`, process every layer by hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def process(model: torch.nn.Module) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module.__dict__.get("_parameters", {}).get("weight"), torch.Tensor) and not module.weight.numel():
            continue  # vLLM on CPU has dropped it
        if hasattr(method, "process_weights_after_loading") and not hasattr(module, "kv_cache"):
            method.process_weights_after_loading(module)


def without_router(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """vLLM on CPU drops the plain weight of an unquantised linear layer, so nothing but reload_weights can load a router."""
    return ((n, t) for n, t in state.items() if not n.endswith("mlp.gate.weight"))


def moved(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """On CPU vLLM packs lm_head and embeddings anew each time it processes them; that is not the targets' doing."""
    return [k for k, v in before.items() if after.get(k) != v and "cpu_linear" not in k]
