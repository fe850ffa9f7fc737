"""`fake_quant=`: what linear layers compute, what trains, what is left alone, and what is packed afterwards."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scoped_patch import (
    BadOptionError,
    ConflictError,
    FakeQuant,
    SeamNotReachedError,
    UnsupportedError,
    assert_clean,
    patched,
    wrap_call,
)
from scoped_patch.ops.nvfp4 import largest, quantize_dequantize, tensor_scale
from scoped_patch.patches.fake_quant import siblings
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, gradients
from tests.support.stacks import rounded
from tests.tiny_models import build
from tests.vllm.support.checkpoints import dequantize

IDS = token_ids()
HAVE_PACKER = importlib.util.find_spec("compressed_tensors") is not None
needs_packer = pytest.mark.skipif(not HAVE_PACKER, reason="needs the compressed-tensors package")


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_those_of_rounded_weights(dtype):
    model, _ = build("qwen3", dtype=dtype)
    before = logits(model)
    twin = rounded(model)
    with patched(model, fake_quant="w4a16") as scope:
        out = logits(model)
        assert torch.equal(out, logits(twin))
        assert (out - before).abs().max() > 0.1 * before.abs().max(), "rounding to four bits is seen"
        grads = gradients(model, lambda: logits(model).float().square().mean())
    assert_gradients(grads, gradients(twin, lambda: logits(twin).float().square().mean()), rtol=1e-6)
    assert torch.equal(logits(model), before), "evaluation after the block is in full precision"
    text = str(scope.explain())
    assert "NVFP4 w4a16, straight-through gradient" in text
    assert "model.layers.*.self_attn.q_proj.forward" in text
    assert "lm_head" not in text


def test_a_step_changes_what_is_rounded():
    model, _ = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with patched(model, fake_quant="w4a16"):
        for _ in range(2):
            assert torch.equal(logits(model), logits(rounded(model)))
            F.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_training_through_it_lowers_the_rounded_loss():
    model, _ = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with patched(model, fake_quant="w4a16", fused="torch"):
        for _ in range(12):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses


def test_fused_layers_share_a_scale_and_others_do_not():
    model, _ = build("llama")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.mul_(5)
    x = torch.randn(3, 64)
    scale = tensor_scale(largest([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
    with patched(model, fake_quant="w4a16"):
        assert torch.equal(attention.q_proj(x), F.linear(x, quantize_dequantize(attention.q_proj.weight, scale)))
        own = tensor_scale(largest([attention.o_proj.weight]))
        assert torch.equal(attention.o_proj(x), F.linear(x, quantize_dequantize(attention.o_proj.weight, own)))


def test_inputs_are_rounded_by_the_largest_that_was_seen():
    model, _ = build("llama")
    layer = model.model.layers[0].mlp.down_proj
    small, large = torch.randn(2, 128), 4 * torch.randn(2, 128)
    patch = FakeQuant("w4a4")

    def wanted(x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        weight = quantize_dequantize(layer.weight, tensor_scale(largest([layer.weight])))
        return F.linear(quantize_dequantize(x, tensor_scale(largest(seen))), weight)

    with patched(model, fake_quant=patch):
        layer.eval()
        assert torch.equal(layer(large), wanted(large, [large]))  # none seen yet: its own
        layer.train()
        assert torch.equal(layer(small), wanted(small, [small]))
        assert torch.equal(layer(large), wanted(large, [large]))
        assert torch.equal(layer(small), wanted(small, [large]))
        layer.eval()
        assert torch.equal(layer(100 * small), wanted(100 * small, [large])), "evaluation does not calibrate"
    fixed = FakeQuant("w4a4", input_global_scales=448 * 6 / 8.0)
    with patched(model, fake_quant=fixed):
        assert torch.equal(layer(small), wanted(small, [torch.tensor(8.0)]))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("other", [{"fused": "torch"}, {"tiled_mlp": 3}, {"fused": "torch", "tiled_mlp": 3}])
def test_with_the_other_patches_and_checkpointing_in_both_orders(other, reentrant):
    model, _ = build("llama")
    twin = rounded(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    wanted = gradients(twin, lambda: twin(input_ids=IDS, labels=IDS, use_cache=False).loss)
    for outer, inner in (({"fake_quant": "w4a16"}, other), (other, {"fake_quant": "w4a16"})):
        with patched(model, **outer):
            with patched(model, **inner):
                loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        # Backward after the blocks: what is recomputed runs as it ran.
        assert_gradients(gradients(model, lambda: loss), wanted)  # noqa: B023
    with patched(model, fake_quant="w4a16", **other):
        assert_gradients(gradients(model, lambda: model(input_ids=IDS, labels=IDS, use_cache=False).loss), wanted)


def test_only_this_model():
    model, _ = build("llama")
    other, _ = build("llama")
    before = logits(other)
    with patched(model, fake_quant="w4a16"):
        assert torch.equal(logits(other), before)
        assert nn.Linear.__dict__["forward"] is nn.Linear.forward


def test_ignore_by_glob_and_by_regular_expression():
    model, _ = build("llama")
    patch = FakeQuant(ignore=["*.self_attn.*", r"re:model\.layers\.1\..*", "lm_head"])
    assert sorted(patch.layers(model)) == [f"model.layers.0.mlp.{n}_proj" for n in ("down", "gate", "up")]
    assert "lm_head" in FakeQuant(ignore=[]).layers(model)
    with patched(model, fake_quant=FakeQuant(ignore=[])):
        assert torch.equal(logits(model), logits(rounded(model, FakeQuant(ignore=[]))))


def test_a_pattern_that_matches_nothing_is_named():
    """A slip in it would quantise what was to stay as it is; those of the default are for every model, and say nothing."""
    model, _ = build("llama")
    given = ["*.mlp.*", "model.layer.1.*", "re:layers", "*lm_head", "*router*"]
    said = [
        remark for remark in patched(model, fake_quant=FakeQuant(ignore=given)).plan().explain().remarks if "pattern" in remark
    ]
    assert [remark.split("'")[1] for remark in said] == ["model.layer.1.*", "re:layers"]
    assert not [remark for remark in patched(model, fake_quant="w4a16").plan().explain().remarks if "pattern" in remark]


def test_experts_are_named_as_left_alone():
    model, _ = build("qwen3_moe")
    plan = patched(model, fake_quant="w4a16").plan()
    assert "blocks of experts are 3-D parameters" in str(plan)
    assert not any(name.endswith(".gate") for name in FakeQuant().layers(model))
    with patched(model, fake_quant="w4a16"):
        assert torch.equal(logits(model), logits(rounded(model)))


def test_a_layer_that_does_not_divide_is_skipped_by_name():
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 32))
    plan = patched(model, fake_quant="w4a16").plan()
    assert "0 has 24 input features, no multiple of 16" in str(plan)
    with pytest.raises(UnsupportedError, match="no linear layer that can be quantised: 0 has 24"):
        patched(model[:1], fake_quant="w4a16").plan()


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_refusals():
    model, _ = build("llama")
    with pytest.raises(UnsupportedError, match="is a Odd with a forward of its own"):
        patched(nn.Sequential(Odd(16, 16)), fake_quant="w4a16").plan()
    with pytest.raises(UnsupportedError, match=r"q_proj and .*k_proj are fused by rollout engines"):
        patched(model, fake_quant=FakeQuant(ignore=["*k_proj", "lm_head"])).plan()
    with pytest.raises(UnsupportedError, match=r"has none for model\.layers\.0\.self_attn\.q_proj \(14 are missing\)"):
        patched(model, fake_quant=FakeQuant("w4a4", input_global_scales={"x": 1.0})).plan()
    with patched(model, fake_quant="w4a16"), pytest.raises(ConflictError):
        patched(model, fake_quant="w4a4").__enter__()
    model.model.layers[0].mlp.up_proj.forward = lambda x: x
    with pytest.raises(UnsupportedError, match=r"the forward of model\.layers\.0\.mlp\.up_proj was replaced"):
        patched(model, fake_quant="w4a16").__enter__()


def test_an_adapter_beside_the_layer():
    peft = pytest.importorskip("peft", reason="needs the peft package")
    adapted = peft.get_peft_model(build("llama")[0], peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedError, match=r"q_proj\.base_layer .* has an adapter beside it"):
        patched(adapted, fake_quant="w4a16").plan()
    ignoring = FakeQuant(ignore=["*lm_head", "*.self_attn.*", "*lora_*"])
    with patched(adapted, fake_quant=ignoring):
        assert logits(adapted).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int4"}, "must be 'w4a16', 'w4a4' or a FakeQuant"),
        ({"ignore": "lm_head"}, "ignore must be a list of patterns"),
        ({"ignore": ["re:("]}, "is no regular expression"),
        ({"input_global_scales": 1.0}, "belong to scheme 'w4a4'"),
        ({"scheme": "w4a4", "input_global_scales": 0.0}, "must be a number > 0"),
        ({"scheme": "w4a4", "input_global_scales": {"a": "b"}}, "must be a number > 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(BadOptionError, match=message):
        FakeQuant(**options)


def test_observed_inputs_and_tiles_do_not_go_together():
    """The first tile would be rounded by its own largest value, not by the layer's."""
    model, _ = build("llama")
    with pytest.raises(ConflictError, match="input_global_scales"):
        patched(model, fake_quant="w4a4", tiled_mlp=2)
    fixed = FakeQuant("w4a4", input_global_scales=448 * 6 / 30.0)
    with patched(model, fake_quant=fixed):
        wanted = logits(model)
    with patched(model, fake_quant=fixed, tiled_mlp=2):
        torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)


class Reader(nn.Module):
    """Reads its layer's weight and never calls it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return x @ self.inner.weight


def test_a_layer_that_is_never_called_is_told():
    model = Reader()
    with pytest.raises(SeamNotReachedError, match="called none of its 1 linear layers"):
        with patched(model, fake_quant="w4a16"):
            model(torch.randn(2, 16))


def test_a_changed_linear_class_is_refused_by_name():
    model, _ = build("llama")
    changed = wrap_call(nn.Linear, "forward", lambda original, x: 2 * original(x))
    with patched(changed), pytest.raises(UnsupportedError, match=r"q_proj .*: the forward of the class nn\.Linear was changed"):
        patched(model, fake_quant="w4a16").plan()
    with patched(model, fake_quant="w4a16"), patched(changed):
        with pytest.raises(UnsupportedError, match=r"q_proj: the forward of the class nn\.Linear was changed"):
            model(input_ids=IDS)


def test_compiled():
    model, _ = build("llama")
    layer = model.model.layers[0].mlp
    fast = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(3, 64)
    plain = layer(x)
    with patched(model, fake_quant="w4a16"):
        wanted = layer(x)
        assert torch.equal(fast(x), wanted)
    assert torch.equal(fast(x), plain)
    assert not torch.equal(wanted, plain)


# ------------------------------------------------------------------------------------------------- packing
@needs_packer
@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_trained_packed_and_read_back_gives_the_same_logits(scheme):
    """Train, pack with compressed-tensors, read the codes back by hand: the weights are bit-equal, and so are logits."""
    from scoped_patch.vllm import quantize_state_dict

    model, _ = build("qwen3")
    patch = FakeQuant(scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with patched(model, fake_quant=patch):
        for _ in range(2):
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        wanted = logits(model)
    packed = dict(quantize_state_dict(model, **patch.packing(model)))
    layers = patch.layers(model)
    assert {n.removesuffix(".weight_packed") for n in packed if n.endswith(".weight_packed")} == set(layers)
    back = dequantize(packed)
    for name, module in layers.items():
        together = [layers[other].weight for other in siblings(name) if other in layers]
        assert torch.equal(back[f"{name}.weight"], quantize_dequantize(module.weight, tensor_scale(largest(together)))), name
    twin, _ = build("qwen3")
    twin.load_state_dict(back, strict=False)
    twin.eval()
    if scheme == "w4a4":
        scales = {name: packed[f"{name}.input_global_scale"] for name in layers}
        for name, module in twin.named_modules():
            if name in scales:
                module.register_forward_pre_hook(lambda _, args, s=scales[name]: (quantize_dequantize(args[0], s[0]),))
    assert torch.equal(logits(twin), wanted)


def test_packing_wants_a_calibrated_model():
    model, _ = build("llama")
    patch = FakeQuant("w4a4")
    with pytest.raises(BadOptionError, match="has seen no input in training mode"):
        patch.packing(model)
    with patched(model, fake_quant=patch):
        logits(model)
    scales = patch.packing(model)["input_global_scales"]
    assert scales.keys() == patch.layers(model).keys()
    first = "model.layers.0.self_attn."
    assert scales[first + "q_proj"] == scales[first + "k_proj"] != scales[first + "o_proj"]
    assert FakeQuant().packing(model)["select"]("model.layers.0.mlp.up_proj")
    assert not FakeQuant().packing(model)["select"]("lm_head")
