"""Modules that are replaced, put in, taken out or wrapped while a scope is open: an error by name, or the values of the model
that it has become; and nothing left behind in the old ones or the new ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from scoped_patch import SeamNotReachedError, assert_clean, patched
from scoped_patch.models.placement import Placement
from tests.support.models import token_ids
from tests.tiny_models import build

IDS = token_ids(2, 11)
IDS[1, :5] = IDS[0, :5]
OPTIONS: dict[str, dict[str, Any]] = {
    "tiled_mlp": {"tiled_mlp": 2},
    "fused_head": {"fused": "torch"},
    "ulysses": {"sp": 1},
    "prefix_grouper": {"prefix_grouper": True, "fused": "torch"},
    "fake_quant": {"fake_quant": "w4a16"},
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert_clean()


@pytest.fixture
def model() -> nn.Module:
    return build("llama", initializer_range=0.3)[0].double().eval()


def anew(module: nn.Module) -> nn.Module:
    """Another module of the same kind with other weights, which nobody has patched."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    return other


def put(path: str, make: Callable[[nn.Module], nn.Module] = anew) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        holder, _, name = path.rpartition(".")
        setattr(model.get_submodule(holder), name, make(model.get_submodule(path)))

    return change


def put_in(model: nn.Module) -> None:
    model.model.layers.append(anew(model.model.layers[1]))
    model.config.num_hidden_layers += 1


def take_out(model: nn.Module) -> None:
    del model.model.layers[0]


def adapt(model: nn.Module) -> None:
    torch.manual_seed(3)
    targets = ["q_proj", "up_proj", "down_proj"]
    get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model.double()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "mlp": put("model.layers.0.mlp"),
    "projection": put("model.layers.1.mlp.up_proj"),
    "activation": put("model.layers.0.mlp.act_fn", lambda _: nn.Tanh()),
    "attention": put("model.layers.0.self_attn"),
    "layer": put("model.layers.1"),
    "layers": put("model.layers"),
    "decoder": put("model"),
    "head": put("lm_head"),
    "embeddings": lambda model: model.resize_token_embeddings(model.config.vocab_size + 13, mean_resizing=False),
    "one more layer": put_in,
    "one layer less": take_out,
    "adapters": adapt,
    "wrapped mlp": put("model.layers.0.mlp", Around),
}

#: what is refused, and the module that is named; all else gives the values of the model as it has become
REFUSED: dict[str, dict[str, str]] = {
    "tiled_mlp": {
        "mlp": "model.layers.0.mlp (LlamaMLP)",
        "layer": "model.layers.1 (LlamaDecoderLayer)",
        "layers": "model.layers (ModuleList)",
        "decoder": "model (LlamaModel)",
        "one more layer": "model.layers.2 (LlamaDecoderLayer)",
    },
    "fused_head": {"head": "lm_head (Linear)", "embeddings": "lm_head (Linear)"},
    "ulysses": {
        "attention": "model.layers.0.self_attn (LlamaAttention)",
        "layer": "model.layers.1 (LlamaDecoderLayer)",
        "layers": "model.layers (ModuleList)",
        "decoder": "model (LlamaModel)",
        "one more layer": "model.layers.2 (LlamaDecoderLayer)",
    },
    "prefix_grouper": {
        "attention": "model.layers.0.self_attn (LlamaAttention)",
        "layer": "model.layers.1 (LlamaDecoderLayer)",
        "layers": "model.layers (ModuleList)",
        "decoder": "model (LlamaModel)",
        "head": "lm_head (Linear)",
        "embeddings": "lm_head (Linear)",
        "one more layer": "model.layers.2 (LlamaDecoderLayer)",
    },
    "fake_quant": {
        "mlp": "model.layers.0.mlp (LlamaMLP)",
        "projection": "model.layers.1.mlp.up_proj (Linear)",
        "attention": "model.layers.0.self_attn (LlamaAttention)",
        "layer": "model.layers.1 (LlamaDecoderLayer)",
        "layers": "model.layers (ModuleList)",
        "decoder": "model (LlamaModel)",
        "one more layer": "model.layers.2 (LlamaDecoderLayer)",
        "adapters": "model.layers.0.self_attn.q_proj (Linear)",
    },
}


def loss(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss.detach().double()


def entries(module: nn.Module) -> list[dict[str, int]]:
    """What each module has of its own, by identity."""
    return [{key: id(value) for key, value in one.__dict__.items()} for one in module.modules()]


#: not a layer less under prefix sharing, where layers are counted: see below
PAIRS = [(p, c) for p in OPTIONS for c in CHANGES if (p, c) != ("prefix_grouper", "one layer less")]


@pytest.mark.parametrize(("patch", "change"), PAIRS)
def test_a_change_inside_the_scope_is_an_error_by_name_or_takes_part(model: nn.Module, patch: str, change: str) -> None:
    step = patched(model, **OPTIONS[patch])
    old = [(module, set(module.__dict__)) for module in model.modules()]
    before = loss(model)
    with step:
        inside = loss(model)
        CHANGES[change](model)
        named = REFUSED[patch].get(change)
        if named is not None:
            with pytest.raises(SeamNotReachedError, match=re.escape(f"{named} of LlamaForCausalLM")) as caught:
                loss(model)
            assert (
                "was put into the model" in str(caught.value) or "was replaced by" in str(caught.value) or change == "adapters"
            )
            assert "enter the scope" in str(caught.value)
            with pytest.raises(SeamNotReachedError):  # and again, as long as it is so
                loss(model)
        else:
            found = loss(model)
            assert (found - inside).abs() > 1e-3 or change in ("wrapped mlp", "embeddings")
    assert not any("forward" in module.__dict__ or "__getstate__" in module.__dict__ for module in model.modules())
    if change != "adapters":  # which change modules of their own accord
        assert [set(module.__dict__) for module, _ in old] == [own for _, own in old]
    right = loss(model)
    assert (right - before).abs() > 1e-3 or change in ("wrapped mlp", "embeddings")
    if named is None and patch != "fake_quant":
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
    if (patch, change) == ("fake_quant", "adapters"):
        return  # refused at entry too: adapters beside a quantised weight are not packed with it
    with step:  # planned anew
        again = loss(model)
    if patch != "fake_quant":
        torch.testing.assert_close(again, right, rtol=1e-6, atol=1e-6)
    elif named is None:
        torch.testing.assert_close(found, again)


def test_a_module_that_is_put_back_is_patched_as_it_was(model: nn.Module) -> None:
    before, mlp = loss(model), model.model.layers[0].mlp
    own = entries(mlp)
    with patched(model, tiled_mlp=2) as scope:
        model.model.layers[0].mlp = anew(mlp)
        with pytest.raises(SeamNotReachedError):
            loss(model)
        model.model.layers[0].mlp = mlp
        torch.testing.assert_close(loss(model), before)
        calls = [record.calls for record in scope.records if record.slot.owner is mlp]
        assert calls == [1]
    assert entries(mlp) == own
    assert torch.equal(loss(model), before)


def test_a_layer_that_is_taken_out_under_prefix_sharing(model: nn.Module) -> None:
    with patched(model, prefix_grouper=True, fused="torch"):
        take_out(model)
        with pytest.raises(SeamNotReachedError, match="prefix_grouper: layer"):
            loss(model)
    right = loss(model)
    with patched(model, prefix_grouper=True, fused="torch"):
        torch.testing.assert_close(loss(model), right, rtol=1e-6, atol=1e-6)


def test_the_decoder_called_on_its_own_looks_too(model: nn.Module) -> None:
    for options in ({"tiled_mlp": 2}, {"sp": 1}):
        with patched(model, **options):
            model.model(input_ids=IDS, use_cache=False)
            layer = model.model.layers[0]
            model.model.layers[0] = anew(layer)
            with pytest.raises(SeamNotReachedError, match=r"model\.layers\.0 \(LlamaDecoderLayer\)"):
                model.model(input_ids=IDS, use_cache=False)
            model.model.layers[0] = layer


def test_a_vision_tower_that_is_replaced() -> None:
    model = build("qwen2_vl")[0]
    with patched(model, vlm_mixed_batch=True):
        model(input_ids=IDS)
        model.model.visual = anew(model.model.visual)
        with pytest.raises(SeamNotReachedError, match=r"vlm_mixed_batch: model\.visual .* was replaced by another"):
            model(input_ids=IDS)


def test_a_wrapped_module_is_looked_for_once(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    original = Placement._changed
    monkeypatch.setattr(Placement, "_changed", lambda self: (searches.append(1), original(self))[1])
    with patched(model, tiled_mlp=2):
        put("model.layers.0.mlp", Around)(model)
        for _ in range(3):
            model.model(input_ids=IDS)
    assert len(searches) == 1
