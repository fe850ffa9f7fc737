"""Kinds of layers beyond the main ones: tied embeddings, biases, KV-cache scales, FP8, loaders that write directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scoped_patch.vllm import IncompleteReload, RejectedWeight, UnsupportedLayer, reload_weights

from .support import checkpoints
from .support.addresses import addresses


class Pair:
    """An engine on the first of two states, and what a fresh engine on the second answers."""

    def __init__(self, root: Path, cfg: dict[str, Any], states: list[checkpoints.State], **options: Any) -> None:
        from .support import engine

        self.states = states
        for seed, state in enumerate(states):
            checkpoints.save(root / str(seed), cfg, state)
        other = engine.start(root / "1", **options)
        self.llm = engine.start(root / "0", **options)
        self.fresh = [engine.generate(self.llm), engine.generate(other)]
        self.model = engine.model(self.llm)

    def check(self, **options: Any) -> Any:
        """Three alternating reloads, exact and in place."""
        from .support.engine import generate

        assert self.fresh[0] != self.fresh[1]
        before = addresses(self.model)
        for seed in (1, 0, 1):
            with reload_weights(self.llm, **options) as update:
                update.load(self.states[seed].items())
            assert generate(self.llm) == self.fresh[seed]
            assert addresses(self.model) == before
            assert update.report.moved == 0
        return update.report


def make(
    root: Path, scheme: str, quantized: dict[str, Any] | None = None, **changes: Any
) -> tuple[dict[str, Any], list[checkpoints.State]]:
    cfg = checkpoints.config("dense", **changes)
    states = [checkpoints.weights(cfg, seed) for seed in (0, 1)]
    if scheme != "bf16":
        states = [checkpoints.quantize(state, scheme) for state in states]
        cfg["quantization_config"] = checkpoints.quantization_config(scheme, **(quantized or {}))
    return cfg, states


@pytest.fixture(autouse=True)
def _first(engines: Any) -> None:
    engines("moe", "w4a16")


@pytest.mark.parametrize("scheme", ["bf16", "w4a16"])
def test_tied_embeddings(tmp_path: Path, scheme: str) -> None:
    pair = Pair(tmp_path, *make(tmp_path, scheme, tie_word_embeddings=True))
    for atomic in ("model", "layer"):
        pair.check(atomic=atomic)


def test_biases(tmp_path: Path) -> None:
    cfg, states = make(tmp_path, "w4a16", attention_bias=True)
    # Qwen3 puts attention_bias on the output projection too.
    gen = torch.Generator().manual_seed(0)
    for state in states:
        for layer in range(2):
            state[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.randn(128, generator=gen).bfloat16()
    pair = Pair(tmp_path, cfg, states)
    pair.check()
    with pytest.raises(IncompleteReload, match=r"self_attn\.k_proj\.bias"):
        with reload_weights(pair.llm) as update:
            update.load((n, t) for n, t in states[0].items() if n != "model.layers.0.self_attn.k_proj.bias")


def test_kv_cache_scales(tmp_path: Path) -> None:
    scheme = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False, observer="minmax")
    cfg, states = make(tmp_path, "w4a16", quantized=dict(kv_cache_scheme=scheme))
    for seed, state in enumerate(states):
        for layer in range(2):
            for at, which in enumerate("kv"):
                state[f"model.layers.{layer}.self_attn.{which}_scale"] = torch.tensor(0.05 * (1 + seed + at + layer))
    pair = Pair(tmp_path, cfg, states, kv_cache_dtype="fp8")
    found = [m for m in pair.model.modules() if hasattr(m, "_k_scale_float")]
    pair.check()
    assert [round(m._k_scale_float, 3) for m in found] == [0.1, 0.15]
    assert [round(float(m._v_scale), 3) for m in found] == [0.15, 0.2]


def fp8(state: checkpoints.State, block: bool) -> checkpoints.State:
    out: checkpoints.State = {}
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            out[name] = tensor
            continue
        wide = tensor.float()
        if block:
            parts = wide.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            scale = parts.abs().amax((1, 3)) / 448
            out[name] = (parts / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            out[name + "_scale_inv"] = scale
        else:
            scale = wide.abs().max() / 448
            out[name] = (wide / scale).to(torch.float8_e4m3fn)
            out[name + "_scale"] = scale.reshape(())
            out[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
    return out


@pytest.mark.parametrize("block", [False, True], ids=["per-tensor", "block"])
def test_fp8_through_the_same_path(tmp_path: Path, block: bool) -> None:
    cfg, states = make(tmp_path, "bf16")
    states = [fp8(state, block) for state in states]
    cfg["quantization_config"] = dict(quant_method="fp8", activation_scheme="dynamic" if block else "static")
    if block:
        cfg["quantization_config"]["weight_block_size"] = [32, 32]
    try:
        pair = Pair(tmp_path, cfg, states)
    except Exception as error:
        pytest.skip(f"this vLLM does not run FP8 on this CPU: {type(error).__name__}: {str(error)[:120]}")
    pair.check()


def test_after_vllm_s_own_reload(engines: Any) -> None:
    """Its wrappers stay on the loaders that vLLM recorded, and swallow what they are given."""
    engine = engines("dense", "w4a16")
    engine.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(engine.state[1].items())))
    assert engine.generate() == engine.fresh[1]
    with reload_weights(engine.llm) as update:
        update.load(engine.state[0].items())
    assert engine.generate() == engine.fresh[0]
    engine.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(engine.state[1].items())))
    assert engine.generate() == engine.fresh[1]
    with reload_weights(engine.llm) as update:
        update.load(engine.state[0].items())


def test_a_loader_that_writes_without_weight_loader(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models copy into a parameter themselves; the copy lands in the staging, not in the live model."""
    engine = engines("dense", "w4a16")
    original = type(engine.model).load_weights

    def direct(self: torch.nn.Module, weights: Any) -> Any:
        def rest() -> Any:
            for name, tensor in weights:
                if name.endswith(("norm.weight", "embed_tokens.weight")):
                    parameter = self.get_parameter(name)
                    parameter.data[: len(tensor)].copy_(tensor)
                else:
                    yield name, tensor

        return original(self, rest())

    monkeypatch.setattr(type(engine.model), "load_weights", direct)
    with reload_weights(engine.llm) as update:
        update.load(engine.state[1].items())
        assert engine.generate() == engine.fresh[0]
    assert engine.generate() == engine.fresh[1]
    assert update.report.ignored == ()
    with reload_weights(engine.llm) as update:
        update.load(engine.state[0].items())
    assert engine.generate() == engine.fresh[0]


def test_a_loader_that_reaches_the_live_model_is_stopped(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("dense", "w4a16")
    live = engine.model.model.norm.weight
    monkeypatch.setattr(type(engine.model), "load_weights", lambda self, weights: [live.data.copy_(t) for _, t in weights])
    with pytest.raises(UnsupportedLayer, match=r"model\.norm\.weight: .* live tensor"):
        with reload_weights(engine.llm) as update:
            update.load([("model.norm.weight", engine.state[1]["model.norm.weight"])])
    monkeypatch.undo()
    assert engine.generate() == engine.fresh[0]


def test_a_loader_that_collects_first_notices_reused_memory(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("dense", "w4a16")
    original = type(engine.model).load_weights
    monkeypatch.setattr(type(engine.model), "load_weights", lambda self, weights: original(self, iter(list(weights))))
    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def reused() -> Any:
        for name, tensor in engine.state[1].items():
            data = tensor.contiguous().view(-1).view(torch.uint8)
            buffer[: data.numel()].copy_(data)
            yield name, buffer[: data.numel()].view(tensor.dtype).view(tensor.shape)

    with pytest.raises(RejectedWeight, match="was reused for") as caught:
        with reload_weights(engine.llm) as update:
            update.load(reused())
    assert caught.value.reason == "source"
    assert engine.generate() == engine.fresh[0]
    with reload_weights(engine.llm) as update:
        update.load(engine.state[1].items())
    assert engine.generate() == engine.fresh[1]
    with reload_weights(engine.llm) as update:
        update.load(engine.state[0].items())


def test_tied_names_with_different_values_are_refused(engines: Any) -> None:
    """vLLM may tie a head to the embedding after loading equal ones; an update that parts them cannot be honoured."""
    engine = engines("dense", "w4a16")
    head, embedding = engine.model.lm_head, engine.model.model.embed_tokens
    own = head._parameters["weight"]
    head._parameters["weight"] = embedding._parameters["weight"]
    try:
        with pytest.raises(RejectedWeight, match="is tied to") as caught:
            with reload_weights(engine.llm) as update:
                update.load(engine.state[1].items())
        assert {caught.value.weight, caught.value.reason} == {"lm_head.weight", "tied"}
        equal = dict(engine.state[1])
        equal["lm_head.weight"] = equal["model.embed_tokens.weight"].clone()
        with reload_weights(engine.llm, keep_previous=True) as update:
            for pair in equal.items():
                update.load([pair])  # the two names in buckets of their own
        assert update.report.ignored == ()
        update.rollback_to_previous()
    finally:
        head._parameters["weight"] = own
    assert engine.generate() == engine.fresh[0]


@pytest.mark.parametrize("direct", [True, False])
def test_a_loader_that_writes_to_a_layer_that_was_complete_is_stopped(
    engines: Any, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """The write would reach neither the live weights nor those that are to be committed."""
    engine = engines("dense", "w4a16")
    original = type(engine.model).load_weights

    def late(self: torch.nn.Module, weights: Any) -> Any:
        norm = self.get_parameter("model.norm.weight")
        out = original(self, weights)
        zeros = torch.zeros_like(norm, device="cpu")
        norm.data.copy_(zeros) if direct else norm.weight_loader(norm, zeros)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "load_weights", late)
        with pytest.raises(RejectedWeight, match=r"^model\.norm\.weight: arrived after model\.norm was complete"):
            with reload_weights(engine.llm) as update:
                update.load(engine.state[1].items())
    assert engine.generate() == engine.fresh[0]
    for seed in (1, 0):
        with reload_weights(engine.llm) as update:
            update.load(engine.state[seed].items())
        assert engine.generate() == engine.fresh[seed]
