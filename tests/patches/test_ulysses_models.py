"""Families beyond those of the grid: other ways of mixing tokens work, or are refused by name; multimodal models."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from scoped_patch import UnsupportedError, patched
from tests.support import models as odd_models
from tests.support.checks import run_checks
from tests.support.models import SMALL
from tests.support.ulysses import reduced_gradients, snapshot, take
from tests.support.versions import exported, present
from tests.tiny_models import VLMS, build

IDS = torch.randint(3, 100, (2, 17), generator=torch.Generator().manual_seed(1))

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LLAMA4 = {
    "intermediate_size_mlp": 128,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention"],
    "moe_layers": [1],
    "no_rope_layers": [1, 0],
}
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "head_dim": 16}

#: class -> options of its config
WORK: dict[str, dict[str, Any]] = {
    "Llama4Text": {**_LLAMA4, "attn_temperature_tuning": False},  # chunks of 8, no rope in one layer
    "Qwen3Next": {**_EXPERTS, **_DELTA, "head_dim": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 128, "block_auto_adjust_ff_dim": False},
    "FalconH1": _MAMBA,  # attention and a state space model side by side in each layer
    "Olmo2": {},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "attn_implementation": "eager"},  # softcap inside attention
    "Granite": {},
    "Cohere": {},
    "Phi": {"attention_dropout": 0.0},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Llama4Text": (
        {**_LLAMA4, "attn_temperature_tuning": True, "floor_scale": 4},
        "Llama4TextAttention that looks at where tokens stand.*arange",
    ),
    "DeepseekV32": ({}, "layers of kind (indexed|deepseek_sparse)_attention"),
    "MiniMax": ({"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}, "MiniMaxLightningAttention"),
}


def _build(kind: str, options: dict[str, Any]) -> nn.Module:
    options = dict(options)
    attention = options.pop("attn_implementation", "sdpa")
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    return odd_models._drawn(model_class._from_config(config, attn_implementation=attention)).train()


def _compare(model: nn.Module, batch: dict[str, Any], world: int, what: str) -> None:
    wanted = model(**batch, use_cache=False)
    wanted.loss.backward()
    gradients = take(model)
    before = snapshot(model)
    for fused in (None, "torch"):
        with patched(model, sp=world, fused=fused):
            out = model(**batch)
            out.loss.backward()
        assert snapshot(model) == before, what
        torch.testing.assert_close(out.loss, wanted.loss, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")
        found = reduced_gradients(model, world, "mean")
        assert found.keys() == gradients.keys(), what
        largest = max(g.abs().max().item() for g in gradients.values())
        for name, right in gradients.items():
            scale = max(right.abs().max().item(), 1e-3 * largest)
            off = (found[name] - right).abs().max().item() / scale
            assert off <= 1e-4, f"{what}: the gradient of {name} is off by {off:.1e}"


def check_other_families(rank: int, world: int) -> None:
    for kind, options in WORK.items():
        if not exported(f"{kind}Config"):
            continue
        _compare(_build(kind, options), {"input_ids": IDS, "labels": IDS}, world, kind)


def check_multimodal_models(rank: int, world: int) -> None:
    for family in present(VLMS):
        model, batch = build(family)
        del batch["use_cache"]
        _compare(model, batch, world, family)


def check_what_is_not_known_is_refused_by_name(rank: int, world: int) -> None:
    for kind, (options, text) in REFUSED.items():
        if not exported(f"{kind}Config"):
            continue
        model = _build(kind, options)
        if kind == "Llama4Text" and "cache_position" in inspect.signature(model.model.layers[0].self_attn.forward).parameters:
            # Before transformers 5.4 it does not look where tokens stand in its own input, but is told.
            _compare(model, {"input_ids": IDS, "labels": IDS}, world, kind)
            continue
        before = snapshot(model)
        with pytest.raises(UnsupportedError, match=f"ulysses: .*{text}"):
            patched(model, sp=world).apply()
        assert snapshot(model) == before
    for make, text in (
        (odd_models.gpt2, "adds learned positions to its embeddings"),
        (odd_models.encoder_decoder, "is an encoder-decoder"),
        (odd_models.masked_lm, "has no text decoder"),
    ):
        with pytest.raises(UnsupportedError, match=f"ulysses: .*{text}"):
            patched(make(), sp=world).apply()


def test_models_on_two_ranks():
    names = ["check_other_families", "check_multimodal_models", "check_what_is_not_known_is_refused_by_name"]
    run_checks(__name__, names, 2, timeout=280)
