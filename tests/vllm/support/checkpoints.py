"""Tiny random Qwen3 checkpoints: bf16, NVFP4 W4A16 and W4A4 in compressed-tensors layout, dense and MoE.

The quantiser here is written out by hand, apart from the library's, so that tests do not check the library against itself.
Layout of a linear layer [out, in]: `weight_packed` uint8 [out, in/2] (low nibble first), `weight_scale` float8_e4m3fn
[out, in/16], `weight_global_scale` float32 [1] (a divisor: 448 * 6 / amax), `input_global_scale` float32 [1] for W4A4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
State = dict[str, torch.Tensor]


def config(kind: str, layers: int = 2, **changes: Any) -> dict[str, Any]:
    moe = kind == "moe"
    out: dict[str, Any] = dict(
        architectures=["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        model_type="qwen3_moe" if moe else "qwen3",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    )
    if moe:
        out |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
        out |= dict(decoder_sparse_step=1, mlp_only_layers=[])
    return out | changes


def weights(cfg: dict[str, Any], seed: int) -> State:
    """Every tensor random, norms and biases too, so that one that is not updated shows."""
    gen = torch.Generator().manual_seed(seed)
    hidden, heads, kv, dim = (cfg[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=gen) * 1.3 / columns**0.5).bfloat16()

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(size, generator=gen)).bfloat16()

    out = {"model.embed_tokens.weight": torch.randn(cfg["vocab_size"], hidden, generator=gen).bfloat16()}
    out["model.norm.weight"] = norm(hidden)
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(cfg["vocab_size"], hidden)
    for i in range(cfg["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {at + f"{n}.weight": norm(hidden) for n in ("input_layernorm", "post_attention_layernorm")}
        out |= {at + f"self_attn.{n}.weight": norm(dim) for n in ("q_norm", "k_norm")}
        for name, rows, columns in (
            ("q_proj", heads * dim, hidden),
            ("k_proj", kv * dim, hidden),
            ("v_proj", kv * dim, hidden),
            ("o_proj", hidden, heads * dim),
        ):
            out[at + f"self_attn.{name}.weight"] = matrix(rows, columns)
            if cfg["attention_bias"] and name != "o_proj":
                out[at + f"self_attn.{name}.bias"] = (0.3 * torch.randn(rows, generator=gen)).bfloat16()
        if "num_experts" in cfg:
            out[at + "mlp.gate.weight"] = matrix(cfg["num_experts"], hidden)
            blocks = [(f"{at}mlp.experts.{e}.", cfg["moe_intermediate_size"]) for e in range(cfg["num_experts"])]
        else:
            blocks = [(at + "mlp.", cfg["intermediate_size"])]
        for prefix, inner in blocks:
            out[prefix + "gate_proj.weight"] = matrix(inner, hidden)
            out[prefix + "up_proj.weight"] = matrix(inner, hidden)
            out[prefix + "down_proj.weight"] = matrix(hidden, inner)
    return out


def quantize(state: State, scheme: str) -> State:
    """Every `*_proj` to NVFP4, with one global scale for the shards that vLLM fuses."""
    amax = {n: t.float().abs().max() for n, t in state.items() if n.endswith("_proj.weight")}
    out: State = {}
    for name, tensor in state.items():
        if name not in amax:
            out[name] = tensor
            continue
        parent, leaf = name.removesuffix(".weight").rsplit(".", 1)
        group = next((g for g in FUSED if leaf in g), (leaf,))
        top = max(amax[f"{parent}.{other}.weight"] for other in group)
        global_scale = 448 * 6 / top
        blocks = tensor.float().unflatten(1, (-1, 16))
        scale = (blocks.abs().amax(-1) / 6 * global_scale).clamp(max=448).to(torch.float8_e4m3fn)
        step = (scale.float() / global_scale).clamp(min=1e-12)[..., None]
        index = ((blocks / step).abs()[..., None] - E2M1).abs().argmin(-1)
        code = (index + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
        base = name.removesuffix(".weight")
        out[base + ".weight_packed"] = code[:, 0::2] | (code[:, 1::2] << 4)
        out[base + ".weight_scale"] = scale
        out[base + ".weight_global_scale"] = global_scale.reshape(1).float()
        if scheme == "w4a4":
            out[base + ".input_global_scale"] = torch.tensor([448 * 6 / 8.0])
    return out


def quantize_shapes(cfg: dict[str, Any], scheme: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of a dense quantised state, without making it."""
    hidden, inner, dim = cfg["hidden_size"], cfg["intermediate_size"], cfg["head_dim"]
    heads, kv = cfg["num_attention_heads"] * dim, cfg["num_key_value_heads"] * dim
    plain = torch.bfloat16
    out: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"model.embed_tokens.weight": ((cfg["vocab_size"], hidden), plain)}
    for i in range(cfg["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {at + f"{n}.weight": ((hidden,), plain) for n in ("input_layernorm", "post_attention_layernorm")}
        out |= {at + f"self_attn.{n}.weight": ((dim,), plain) for n in ("q_norm", "k_norm")}
        for name, rows, columns in (
            ("self_attn.q_proj", heads, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, heads),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            out[at + name + ".weight_packed"] = ((rows, columns // 2), torch.uint8)
            out[at + name + ".weight_scale"] = ((rows, columns // 16), torch.float8_e4m3fn)
            out[at + name + ".weight_global_scale"] = ((1,), torch.float32)
            if scheme == "w4a4":
                out[at + name + ".input_global_scale"] = ((1,), torch.float32)
    out["model.norm.weight"] = ((hidden,), plain)
    out["lm_head.weight"] = ((cfg["vocab_size"], hidden), plain)
    return out


def dequantize(state: State) -> State:
    """The bf16 twin of a quantised state, in float32."""
    out: State = {}
    for name, tensor in state.items():
        base, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            code = torch.stack((tensor & 15, tensor >> 4), -1).flatten(1).long()
            value = E2M1[code & 7] * torch.where(code > 7, -1.0, 1.0)
            step = state[base + ".weight_scale"].float() / state[base + ".weight_global_scale"]
            out[base + ".weight"] = (value.unflatten(1, (-1, 16)) * step[..., None]).flatten(1)
        elif leaf not in ("weight_scale", "weight_global_scale", "input_global_scale"):
            out[name] = tensor.float()
    return out


def quantization_config(scheme: str, **changes: Any) -> dict[str, Any]:
    args = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, observer="minmax")
    group = dict(
        targets=["Linear"],
        weights=args | dict(dynamic=False),
        input_activations=args | dict(dynamic="local") if scheme == "w4a4" else None,
        output_activations=None,
    )
    return (
        dict(
            quant_method="compressed-tensors",
            format="nvfp4-pack-quantized",
            quantization_status="compressed",
            config_groups={"group_0": group},
            ignore=["lm_head", "re:.*mlp.gate$"],
            kv_cache_scheme=None,
        )
        | changes
    )


def write(root: Path, kind: str, scheme: str, seed: int, layers: int = 2, **changes: Any) -> tuple[Path, State]:
    """A checkpoint folder for vLLM, and the state it holds."""
    cfg = config(kind, layers, **changes)
    state = weights(cfg, seed)
    if scheme != "bf16":
        state = quantize(state, scheme)
        cfg["quantization_config"] = quantization_config(scheme)
    path = root / f"{kind}-{scheme}-{seed}"
    save(path, cfg, state)
    return path, state


def save(path: Path, cfg: dict[str, Any], state: State) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(cfg, indent=1))
    replace(path, state)


def replace(path: Path, state: State) -> None:
    save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors", metadata={"format": "pt"})


def read(path: Path) -> State:
    return load_file(path / "model.safetensors")
