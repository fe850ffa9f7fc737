"""The tiled MLP as a scope: whom it touches, what it takes apart, what it leaves behind, backward after the block."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn

from scoped_patch import (
    BadOptionError,
    BadTargetError,
    ConflictError,
    SeamNotReachedError,
    TiledMLP,
    assert_clean,
    patched,
    wrap_call,
)
from tests.benchmarks.bench_tiled_mlp import LiveBytes
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, take_gradients
from tests.tiny_models import build

IDS = token_ids(2, 11)
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}


@pytest.fixture
def model() -> nn.Module:
    return build("qwen3", initializer_range=0.3)[0]


@pytest.fixture(autouse=True)
def _clean() -> Any:
    yield
    assert_clean()


def run(model: nn.Module, **batch: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model(**{**BATCH, **batch}).loss.backward()
    return take_gradients(model)


def check(model: nn.Module, tiles: int = 4, rtol: float = 1e-5, **batch: Any) -> Any:
    right = run(model, **batch)
    with patched(model, tiled_mlp=tiles) as scope:
        found = run(model, **batch)
    assert_gradients(found, right, rtol)
    return scope


def calls_of(scope: Any) -> list[int]:
    return [r.calls for r in scope.records if r.patch == "tiled_mlp" and not r.edit.hidden]


# ------------------------------------------------------------------------------------------------- whom it touches
def test_another_model_of_the_class_is_untouched(model: nn.Module) -> None:
    other = build("qwen3", seed=2, initializer_range=0.3)[0]
    wanted = other(**BATCH).logits
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls is not object}
    before = {cls: dict(vars(cls)) for cls in classes}
    own = [dict(module.__dict__) for module in other.modules()]
    with patched(model, tiled_mlp=4):
        run(model)
        assert torch.equal(other(**BATCH).logits, wanted)
        assert {cls: dict(vars(cls)) for cls in classes} == before
        assert [dict(module.__dict__) for module in other.modules()] == own


def test_nothing_is_left_behind_and_no_weight_moves(model: nn.Module) -> None:
    keys = [set(module.__dict__) for module in model.modules()]
    children = [list(module._modules.items()) for module in model.modules()]
    parameters = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    with patched(model, tiled_mlp=4):
        assert [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()] == parameters
        assert model.state_dict().keys() == state.keys()
        model.load_state_dict(state)
        model(**BATCH).loss.backward()
        optimizer.step()
    twin(**BATCH).loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert [set(module.__dict__) for module in model.modules()] == keys
    assert [list(module._modules.items()) for module in model.modules()] == children


def test_a_copy_taken_inside_is_unpatched(model: nn.Module) -> None:
    with patched(model, tiled_mlp=4):
        inside = copy.deepcopy(model)
    assert not any("forward" in module.__dict__ for module in inside.modules())


def test_signature_stays_and_unwrapping_keeps_the_patch(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    wanted = inspect.signature(mlp.forward)
    accelerator = accelerate.Accelerator(cpu=True)
    with patched(model, tiled_mlp=4) as scope:
        assert inspect.signature(mlp.forward) == wanted
        prepared = accelerator.prepare(model)
        for keep in (False, True):
            before = sum(calls_of(scope))
            accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep)(**BATCH)
            assert sum(calls_of(scope)) == before + 2


def test_planning_works_on_the_meta_device() -> None:
    for family in ("llama", "apertus", "glm4v", "gemma3_text", "qwen3_moe"):
        model = build(family)[0].to("meta")
        text = str(patched(model, tiled_mlp=8).plan())
        assert "8 tiles, one operation" in text
        assert ("8 tiles of the experts, router untouched" in text) == (family == "qwen3_moe")


# ------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("length", [3, 5, 7, 9])
@pytest.mark.parametrize("tiles", [4, 16])
def test_short_sequences_accumulate(model: nn.Module, length: int, tiles: int) -> None:
    ids = [token_ids(1, length, seed) for seed in range(3)]

    def accumulate() -> dict[str, Tensor]:
        for one in ids:
            model(input_ids=one, labels=one).loss.backward()
        return take_gradients(model)

    right = accumulate()
    with patched(model, tiled_mlp=tiles):
        assert_gradients(accumulate(), right, 1e-5)


def test_hooks_fire_once_per_backward_and_two_backwards_double(model: nn.Module) -> None:
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    with patched(model, tiled_mlp=4):
        loss = model(**BATCH).loss
        loss.backward(retain_graph=True)
        assert sorted(fired) == sorted(name for name, _ in model.named_parameters())
        once = {name: p.grad.clone() for name, p in model.named_parameters()}
        loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name])


def test_frozen_weights(model: nn.Module) -> None:
    model.model.layers[0].mlp.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.requires_grad_(False)
    check(model)
    model.requires_grad_(False)
    model.model.layers[1].mlp.down_proj.requires_grad_(True)
    check(model)


@pytest.mark.parametrize("family", ["qwen3", "apertus", "glm4v", "qwen3_moe"])
def test_autocast(family: str) -> None:
    model = build(family, initializer_range=0.1)[0]
    seen: list[torch.dtype] = []
    for layer in getattr(model.model, "language_model", model.model).layers:
        # A hook inside the block: it is seen to, so the block is computed with its own forward, a tile at a time.
        for name in ("down_proj", "experts"):
            if name in layer.mlp._modules:
                layer.mlp._modules[name].register_forward_hook(lambda module, args, out: seen.append(out.dtype))

    def step() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**BATCH).loss
        loss.backward()
        return take_gradients(model)

    right = step()
    expected, plain_calls = set(seen), len(seen)
    seen.clear()
    with patched(model, tiled_mlp=4):
        found = step()
    assert set(seen) == expected
    assert plain_calls == 2
    assert len(seen) > 2
    for name, theirs in right.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - theirs).norm() <= 0.06 * theirs.norm() + 1e-6, name


def test_peak_memory_falls_as_tiles_rise() -> None:
    model = build("llama", intermediate_size=2048, num_hidden_layers=1, initializer_range=0.3)[0]
    batch = {"input_ids": token_ids(1, 256), "labels": token_ids(1, 256), "use_cache": False}
    peaks, saved = [], []
    for tiles in (None, 1, 4, 16):
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(0 if isinstance(tensor, nn.Parameter) else tensor.numel() * tensor.element_size())
            return tensor

        with (
            patched(model, tiled_mlp=tiles),
            LiveBytes() as live,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            model(**batch).loss.backward()
        take_gradients(model)
        peaks.append(live.peak)
        saved.append(max(sizes))
    assert saved[0] == 256 * 2048 * 4
    assert max(saved[1:]) < saved[0] / 4
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3]


def test_generation_is_as_outside(model: nn.Module) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = model.eval().generate(IDS, **options)
    with patched(model, tiled_mlp=4):
        assert torch.equal(model.generate(IDS, **options), wanted)


def test_few_tokens_are_not_cut_without_gradients_and_many_are(model: nn.Module) -> None:
    widths: list[int] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: widths.append(out.shape[-2]))
    with torch.no_grad(), patched(model, tiled_mlp=4):
        model(**BATCH)
        assert widths == [11]
        widths.clear()
        model(input_ids=token_ids(8, 160))
    assert max(widths) == 320
    assert widths.count(320) == 4


@pytest.mark.parametrize("tiled_first", [False, True])
def test_fused_and_tiled_nest_and_compose(model: nn.Module, tiled_first: bool) -> None:
    def objective() -> tuple[Tensor, dict[str, Tensor]]:
        out = model(**BATCH)
        (out.log_probs.square().sum() + out.entropy.sum() + out.loss).backward()
        return out.log_probs.detach(), take_gradients(model)

    with patched(model, fused="torch"):
        values, right = objective()
    with patched(model, fused="torch", tiled_mlp=4):
        composed, found = objective()
    assert torch.allclose(composed, values, atol=1e-6)
    assert_gradients(found, right, 1e-5)
    scopes = [patched(model, fused="torch"), patched(model, tiled_mlp=4)]
    outer, inner = reversed(scopes) if tiled_first else scopes
    with outer, inner:
        nested, found = objective()
    assert torch.equal(nested, composed)
    assert_gradients(found, right, 1e-5)


def test_verify(model: nn.Module) -> None:
    with patched(model, tiled_mlp=4) as scope:
        assert scope.verify({"input_ids": IDS, "labels": IDS}).ok


# ------------------------------------------------------------------------------------------------- inside the block
def lora(model: nn.Module, **options: Any) -> Any:
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["gate_proj", "down_proj"], "task_type": "CAUSAL_LM", **options})
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return adapted


def test_lora_inside(model: nn.Module) -> None:
    adapted = lora(model)
    scope = check(adapted)
    assert calls_of(scope) == [1, 1]
    with patched(adapted, tiled_mlp=4):
        with adapted.disable_adapter():
            inside = adapted(**BATCH).logits
    with adapted.disable_adapter():
        assert torch.allclose(inside, adapted(**BATCH).logits, atol=1e-5)


def test_lora_that_comes_after_entering(model: nn.Module) -> None:
    scope = patched(model, tiled_mlp=4).apply()
    adapted = lora(model)
    found = run(adapted)
    assert any("lora_A" in name and "gate_proj" in name for name in found)
    scope.restore()
    assert_gradients(found, run(adapted), 1e-5)


def test_lora_dropout_is_replayed(model: nn.Module) -> None:
    adapted = lora(model, lora_dropout=0.5).train()
    with patched(adapted, tiled_mlp=4):
        first = run(adapted)
        assert_gradients(run(adapted), first, 1e-7)
    # One tile draws what the untiled block draws.
    right = run(adapted)
    with patched(adapted, tiled_mlp=1):
        assert_gradients(run(adapted), right, 1e-5)
    assert max(float((first[n] - right[n]).abs().max()) for n in right) > 1e-3


def test_lora_on_expert_weights() -> None:
    model = build("qwen3_moe", initializer_range=0.3)[0]
    adapted = lora(model, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    right = run(adapted)
    assert any("experts" in name and "lora" in name for name in right)
    check(adapted)


def test_modules_to_save(model: nn.Module) -> None:
    adapted = lora(model, target_modules=["q_proj"], modules_to_save=["mlp"])
    scope = check(adapted)
    assert sum(calls_of(scope)) == 2
    with patched(adapted, tiled_mlp=4) as scope, adapted.disable_adapter():
        adapted(**BATCH)
        assert sum(calls_of(scope)) == 2


def test_a_patch_inside_the_block_is_kept_also_after_the_scope(model: nn.Module) -> None:
    """Backward comes after both scopes are left: the recomputation runs as the forward ran."""
    up_proj = model.model.layers[0].mlp.up_proj

    def doubled(original: Any, x: Tensor) -> Tensor:
        return original(x) * 2

    with patched(model, wrap_call(up_proj, "forward", doubled)):
        right = run(model)
    assert not torch.allclose(right["model.layers.0.mlp.up_proj.weight"], run(model)["model.layers.0.mlp.up_proj.weight"])
    with patched(model, wrap_call(up_proj, "forward", doubled), tiled_mlp=4):
        loss = model(**BATCH).loss
    loss.backward()
    assert_gradients(take_gradients(model), right, 1e-5)
    for scopes in (
        [patched(model, tiled_mlp=4), patched(model, wrap_call(up_proj, "forward", doubled))],
        [patched(model, wrap_call(up_proj, "forward", doubled)), patched(model, tiled_mlp=4)],
    ):
        with scopes[0], scopes[1]:
            loss = model(**BATCH).loss
        loss.backward()
        assert_gradients(take_gradients(model), right, 1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_gradient_checkpointing_and_backward_after_the_scope(family: str, reentrant: bool, inside: bool) -> None:
    model = build(family, initializer_range=0.3)[0].train()
    target = model.model.layers[1].mlp
    target = target._modules.get("experts", target)
    right = run(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    extra = ()
    if inside:
        # A patch of the block's child, so that what is recomputed inside the recomputation matters too.
        child = target._modules["down_proj" if "down_proj" in target._modules else "act_fn"]
        extra = (wrap_call(child, "forward", lambda original, x: original(x) * 2),)
        with patched(model, *extra):
            right = run(model)
    with patched(model, *extra, tiled_mlp=4):
        loss = model(**BATCH).loss
    loss.backward()
    assert_gradients(take_gradients(model), right, 1e-5)


def test_a_forward_that_somebody_put_on_the_instance_is_tiled_and_named(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    original = mlp.forward

    def halved(x: Tensor) -> Tensor:
        return original(x) * 0.5

    mlp.forward = halved
    scope = check(model)
    assert "halved" in str(scope.explain())
    assert mlp.__dict__["forward"] is halved
    del mlp.forward


def test_a_projection_exchanged_inside_the_scope_is_used(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    with patched(model, tiled_mlp=4):
        run(model)
        mlp.up_proj = nn.Linear(64, 128, bias=True)
        found = run(model)
    assert_gradients(found, run(model), 1e-5)
    assert "model.layers.0.mlp.up_proj.bias" in found
    with patched(model, tiled_mlp=4):
        mlp.act_fn = nn.Tanh()
        found = run(model)
    assert_gradients(found, run(model), 1e-5)


def test_a_block_that_returns_a_tuple(model: nn.Module) -> None:
    class Pair(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), x.reshape(-1, x.shape[-1])

    class First(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.mlp = Pair(layer.mlp)
            self.layer = [layer]
            self.attention_type = getattr(layer, "attention_type", None)  # which the model asks for

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            mixed, flat = self.mlp(hidden_states)
            assert torch.equal(flat, hidden_states.reshape(-1, 64))
            return hidden_states + mixed + flat.view_as(hidden_states)

    model.model.layers[0] = First(model.model.layers[0])
    scope = check(model)
    assert "whole forward recomputed" in str(scope.explain())


# ------------------------------------------------------------------------------------------------- compiled
def test_compiled_models_see_it_both_ways(model: nn.Module) -> None:
    torch._dynamo.reset()
    widths: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        widths.append(sum(node.target in (torch._C._nn.linear, torch.nn.functional.linear) for node in graph.graph.nodes))
        return graph.forward

    wanted = model(input_ids=IDS, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.allclose(compiled(input_ids=IDS, use_cache=False).logits, wanted, atol=1e-5)
        with patched(compiled, tiled_mlp=4):
            out = compiled(input_ids=IDS, use_cache=False)
            assert torch.allclose(out.logits, wanted, atol=1e-5)
            out.logits.square().sum().backward()
            found = take_gradients(model)
    model(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    assert_gradients(found, take_gradients(model), 1e-5)


# ------------------------------------------------------------------------------------------------- refusals
def test_a_decoder_that_computes_its_blocks_another_way_is_an_error(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    with pytest.raises(SeamNotReachedError, match=r"the decoder ran 1 times .* none of its 2 feed-forward blocks was called"):
        with patched(model, tiled_mlp=4):
            model(**BATCH)


def test_two_numbers_of_tiles_on_one_model(model: nn.Module) -> None:
    with patched(model, tiled_mlp=4), patched(model, tiled_mlp=4):
        run(model)
        with pytest.raises(ConflictError, match="tiled_mlp"):
            patched(model, tiled_mlp=2).apply()


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_wrong_options(model: nn.Module, value: Any) -> None:
    with pytest.raises(BadOptionError, match="tiled_mlp"):
        patched(model, tiled_mlp=value)
    if not isinstance(value, str):
        with pytest.raises(BadOptionError, match="an int of at least 1"):
            TiledMLP(value)


def test_a_target_that_is_no_model() -> None:
    with pytest.raises(BadTargetError, match="tiled_mlp acts on a model"):
        patched(object(), tiled_mlp=4)
