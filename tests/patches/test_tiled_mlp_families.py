"""Tiled equals untiled on every family: outputs to 1e-6, gradients to 1e-5, routers recorded once."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scoped_patch import TiledMLP, UnsupportedError, patched
from scoped_patch.models.feed_forward import find_feed_forwards
from scoped_patch.models.vision import find_vision
from scoped_patch.patches.tiled_mlp import _Tiled
from tests.support import versions
from tests.support.models import gpt2, token_ids
from tests.support.scores import assert_gradients, take_gradients
from tests.tiny_models import BUILDERS, VLMS, build, text_decoder

MIXTURES = (
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v3",
    "kimi_linear",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "kimi_k25",
    "glm4v_moe",
)

#: what each family's blocks are, by place
PLACES = {
    "qwen3_moe": ["dense", "experts"],
    "glm4_moe": ["dense", "experts", "dense"],
    "gpt_oss": ["experts", "experts"],
    "deepseek_v3": ["dense", "experts", "dense"],
    "kimi_linear": ["dense", "experts", "dense"],
    "qwen3_vl_moe": ["dense", "experts"],
    "glm4v_moe": ["dense", "experts", "dense"],
    "qwen3_5_moe": ["experts", "dense", "experts", "dense"],
    "kimi_k25": ["dense", "experts", "dense"],
    "kimi_vl": ["dense"] * 6,  # one, then four experts that are modules of their own and a shared one
}


def drawn(family: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    attention = "eager" if family in ("gpt_oss", "kimi_vl") else "sdpa"
    return build(family, attn=attention, **{"initializer_range": 0.3, **options})


def step(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    out = model(**batch)
    out.loss.backward()
    return out, take_gradients(model)


def assert_equal_runs(model: nn.Module, batch: dict[str, Any], tiles: int) -> Any:
    exact = copy.deepcopy(model)
    wanted, right = step(model, batch)
    with patched(model, tiled_mlp=tiles) as scope:
        out, found = step(model, batch)
    assert (out.loss - wanted.loss).abs() <= 1e-6 * wanted.loss.abs()
    assert (out.logits - wanted.logits).abs().max() <= 1e-6 * wanted.logits.abs().max()
    off = relative_errors(found, right)
    assert max(off.values()) <= 1e-4, off
    if max(off.values()) > 1e-5:
        # Some gradients (of a number that scales a whole layer, say) are small sums of large terms.
        if "set_experts_implementation" in dir(exact):
            exact.set_experts_implementation("eager")  # the grouped product takes no float64
        exact.double()
        batch = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in batch.items()}
        _, right = step(exact, batch)
        with patched(exact, tiled_mlp=tiles):
            _, found = step(exact, batch)
        off = relative_errors(found, right)
        assert max(off.values()) <= 1e-5, off
    return scope, wanted, out


def relative_errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """By parameter. A gradient that is zero but for rounding is measured against the largest of all."""
    assert found.keys() == right.keys()
    largest = max(float(g.abs().max()) for g in right.values())
    return {n: float((found[n] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * largest) for n, g in right.items()}


def gives_router_logits(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Can the unpatched model return them beside a loss? Where it cannot, the rest is tested without."""
    try:
        with torch.no_grad():
            given = getattr(model(**batch, output_router_logits=True), "router_logits", None)
    except AttributeError as error:  # it reads an option that its config does not have
        versions.leave_out(f"router logits of {type(model).__name__}: {error}")
        return False
    if given is None:
        versions.leave_out(f"router logits of {type(model).__name__}")
    return given is not None


@pytest.mark.parametrize("family", BUILDERS)
def test_every_family(family: str) -> None:
    model, batch = drawn(family)
    kinds = [place.kind for place in find_feed_forwards(model).places]
    assert kinds == PLACES.get(family, ["dense", "dense"])
    routers = family in MIXTURES and gives_router_logits(model, batch)
    if routers:
        batch["output_router_logits"] = True
    scope, wanted, out = assert_equal_runs(model, batch, tiles=5)
    calls = [record.calls for record in scope.records if not record.edit.hidden and record.patch == "tiled_mlp"]
    assert calls == [1] * len(kinds)
    if routers:
        assert len(out.router_logits) == len(wanted.router_logits) > 0
        for ours, theirs in zip(out.router_logits, wanted.router_logits, strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def gradient_errors(family: str, implementation: str, whole: bool, autocast: bool = False, device: str = "cpu") -> None:
    """Each kind of block of a family by itself, in bfloat16: untiled and in 16 tiles, against float64."""
    model = drawn(family, initializer_range=0.1)[0].to(device)
    if implementation:
        model.set_experts_implementation(implementation)
    places = {place.kind: place for place in find_feed_forwards(model).places}
    generator = torch.Generator().manual_seed(7)
    for place in places.values():
        module = place.module
        exact = copy.deepcopy(module).double()
        if not autocast:
            module.to(torch.bfloat16)
            exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
        x, dy = (torch.randn(512, 64, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        rest = []
        if place.kind == "experts":
            exact.config = copy.deepcopy(module.config)
            exact.config._experts_implementation = "eager"  # the grouped product takes no float64
            count = module.num_experts
            index = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(512)])
            rest = [index.to(device), torch.rand(512, 2, generator=generator).to(device, torch.bfloat16)]
        if whole:
            place = replace(place, kind="whole", roles=None)
        tiled = _Tiled(place, 16, model)

        def run(module: nn.Module, forward: Any, x: Tensor, *rest: Tensor, dy: Tensor = dy) -> dict[str, Tensor]:
            with torch.autocast(device, torch.bfloat16, enabled=autocast and x.dtype != torch.float64):
                out = forward(x, *rest)
            out.backward(dy.to(out.dtype))
            return take_gradients(module)

        given = x.float() if autocast else x
        true = run(exact, exact, x.double(), *(t.double() if t.is_floating_point() else t for t in rest))
        untiled = run(module, module, given, *rest)
        found = run(module, lambda *args, p=place, t=tiled: t.forward(p.module.forward, p.module, *args), given, *rest)
        assert found.keys() == true.keys() != set()
        for name, wanted in true.items():
            if wanted.numel() == 1:
                continue  # an activation's only number: how its one rounding turns out says nothing
            ours, theirs = (float((one[name].double() - wanted).norm()) for one in (found, untiled))
            # where both are sums in float32 the order of terms is all that differs
            assert ours <= 1.01 * theirs + 1e-6 * float(wanted.norm()), (place.kind, name, ours / theirs)


@pytest.mark.parametrize("family", BUILDERS)
def test_bfloat16_weight_gradients_are_no_worse_than_untiled(family: str) -> None:
    gradient_errors(family, "", whole=False)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("family", "implementation"), [("llama", ""), ("glm4v", ""), ("qwen3_moe", "eager"), ("gpt_oss", "eager")]
)
def test_bfloat16_weight_gradients_of_blocks_that_are_recomputed_whole(
    family: str, implementation: str, autocast: bool
) -> None:
    gradient_errors(family, implementation, whole=True, autocast=autocast)


@pytest.mark.parametrize("family", ["llama", "apertus", "gemma3_text", "qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_5_text"])
@pytest.mark.parametrize(("rows", "length", "tiles"), [(3, 7, 4), (2, 5, 16), (1, 9, 1)])
def test_several_rows_and_odd_lengths(family: str, rows: int, length: int, tiles: int) -> None:
    model, batch = drawn(family)
    ids = token_ids(rows, length)
    assert_equal_runs(model, {**batch, "input_ids": ids, "labels": ids}, tiles)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "kimi_linear"])
def test_routers_run_once_per_layer_and_carry_the_aux_loss(family: str) -> None:
    model, batch = drawn(family)
    ids = token_ids(2, 11)
    batch |= {"input_ids": ids, "labels": ids}
    if not gives_router_logits(model, batch):
        raise versions.NotInThisTransformersError(f"router logits of {type(model).__name__}")
    batch["output_router_logits"] = True
    routers = [m for n, m in text_decoder(model).named_modules() if n.endswith((".gate", ".router"))]
    calls: list[int] = []
    handles = [router.register_forward_hook(lambda *_: calls.append(1)) for router in routers]

    def auxiliary() -> dict[str, Tensor]:
        logits = model(**batch).router_logits
        assert [len(one) for one in logits] == [22] * len(routers)
        sum(one.float().softmax(-1).square().sum() for one in logits).backward()
        return take_gradients(model)

    right = auxiliary()
    calls.clear()
    with patched(model, tiled_mlp=4):
        found = auxiliary()
    assert len(calls) == len(routers) > 0, "once per layer: not per tile, and not again in the backward"
    assert any("gate" in name or "router" in name for name in right)
    for name, theirs in right.items():
        assert (found[name] - theirs).abs().max() <= 1e-5 * max(float(theirs.abs().max()), 1e-6), name
    for handle in handles:
        handle.remove()


def test_experts_beside_the_dense_block_of_a_layer() -> None:
    """gemma4 with experts: they are a child of the layer itself."""
    model, batch = drawn("gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
    assert sorted(place.kind for place in find_feed_forwards(model).places) == ["dense", "dense", "experts", "experts"]
    assert_equal_runs(model, batch, tiles=4)


def test_the_implementation_of_experts_is_the_users() -> None:
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model, batch = drawn("qwen3_moe")
        model.set_experts_implementation(implementation)
        assert_equal_runs(model, batch, tiles=4)


def test_blocks_of_unknown_inside_are_recomputed_whole_and_said_to_be() -> None:
    """gpt2's projections are no `nn.Linear`."""
    model = gpt2()
    assert {place.kind for place in find_feed_forwards(model).places} == {"whole"}
    ids = token_ids(2, 11)
    scope, _, _ = assert_equal_runs(model, {"input_ids": ids, "labels": ids}, tiles=4)
    assert "4 tiles, whole forward recomputed" in str(scope.explain())


def test_a_block_that_is_called_with_more_than_hidden_states() -> None:
    """bloom hands the residual to the block."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3))
    ids = token_ids(2, 11)
    assert_equal_runs(model, {"input_ids": ids, "labels": ids, "use_cache": False}, tiles=4)


def test_a_block_that_mixes_tokens_is_refused() -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    model = RwkvForCausalLM(RwkvConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, initializer_range=0.3)).train()
    for name, parameter in model.named_parameters():
        if "time_mix" in name:
            parameter.data.uniform_(0.2, 0.8)
    with (
        patched(model, tiled_mlp=4),
        pytest.raises(UnsupportedError, match=r"feed_forward \(RwkvFeedForward\) .* does not compute token by token"),
    ):
        model(input_ids=token_ids(1, 11), use_cache=False)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Mamba", r"no decoder layer has a feed-forward child of its own; looked for mlp, feed_forward, .* in backbone"),
        ("JetMoe", "mlp: a JetMoeMoE of unknown inside that holds JetMoeTopKGating, whose outputs are recorded"),
        ("Llama4Text", "experts: Llama4TextExperts.forward takes hidden states alone"),
        ("BertLMHeadModel", "has no text decoder that could be found"),
    ],
)
def test_models_without_a_block_to_tile_are_refused_by_name(family: str, message: str) -> None:
    import transformers

    name = "Bert" if family.startswith("Bert") else family
    cls = getattr(transformers, family if name == "Bert" else f"{name.removesuffix('Text')}ForCausalLM")
    options = {"interleave_moe_layer_step": 1} if name == "Llama4Text" else {}
    config = getattr(transformers, f"{name}Config")(hidden_size=48, num_hidden_layers=1, vocab_size=64, **options)
    with torch.device("meta"):
        model = cls(config)
    if name == "Llama4Text":
        model.model.layers[0].feed_forward.shared_expert = None  # which could be tiled
    with pytest.raises(UnsupportedError, match=f"tiled_mlp: .*{cls.__name__}.*{message}"):
        patched(model, tiled_mlp=4).plan()


#: vision towers whose layers have a feed-forward child (the remote code's have their projections themselves)
TOWERS = [family for family in VLMS if family != "kimi_vl"]


@pytest.mark.parametrize("family", TOWERS)
def test_the_tower_in_tiles_too(family: str) -> None:
    model, batch = drawn(family)
    wanted, right = step(model, batch)
    text = len(find_feed_forwards(model).places)
    tower = find_feed_forwards(model, vision=True).places[text:]
    assert tower
    assert all(place.path.startswith(find_vision(model).spec.tower) for place in tower)
    with patched(model, tiled_mlp=TiledMLP(5, vision=True)) as scope:
        out, found = step(model, batch)
    calls = [record.calls for record in scope.records if not record.edit.hidden and record.patch == "tiled_mlp"]
    assert calls == [1] * (text + len(tower))
    assert (out.loss - wanted.loss).abs() <= 1e-6 * wanted.loss.abs()
    assert_gradients(found, right, rtol=2e-4)


def test_a_tower_without_blocks_is_refused_by_name() -> None:
    model, _ = drawn("kimi_vl")
    with pytest.raises(UnsupportedError, match="no layer of its vision tower vision_tower has a feed-forward child"):
        patched(model, tiled_mlp=TiledMLP(2, vision=True)).plan()
    with pytest.raises(UnsupportedError, match="is no vision-language model"):
        patched(drawn("llama")[0], tiled_mlp=TiledMLP(2, vision=True)).plan()
