"""Batches without images: zero gradients for the tower, and not a bit of difference anywhere else; ranks stay in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_outputs import BaseModelOutput

from scoped_patch import BadOptionError, UnsupportedError, VLMMixedBatch, assert_clean, patched
from scoped_patch.models.vision import find_vision, infer_vision
from tests.support.checks import run_checks
from tests.support.scores import take_gradients
from tests.support.vlm import CONTENTS, FAMILIES, make_batch
from tests.tiny_models import build


def _text(family: str, rows: int = 2, **options: Any) -> dict[str, Any]:
    return make_batch(family, CONTENTS["text"][:rows], **options)


def _images(family: str, seed: int = 0) -> dict[str, Any]:
    return make_batch(family, CONTENTS["images"], seed=seed)


def _vision_names(model: Any) -> set[str]:
    own = {id(p) for p in find_vision(model).parameters()}
    return {name for name, p in model.named_parameters() if id(p) in own}


def _step(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return out, take_gradients(model)


def test_features_that_an_output_class_does_not_declare_are_reached() -> None:
    """As gemma4 gave them before transformers 5.24: an attribute of the tower's output."""
    model, _ = build("gemma3")
    plain = model.model.get_image_features

    def undeclared(*args: Any, **kwargs: Any) -> Any:
        features = plain(*args, **kwargs)
        out = BaseModelOutput(last_hidden_state=features.last_hidden_state)
        out.pooler_output = features.pooler_output
        return out

    model.model.get_image_features = undeclared
    with patched(model, vlm_mixed_batch=True):
        _, found = _step(model, _text("gemma3"))
    assert _vision_names(model) <= found.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_text_gives_the_tower_zeros_and_changes_nothing_else(family):
    model, _ = build(family)
    vision = _vision_names(model)
    _, with_images = _step(model, _images(family))
    assert vision <= with_images.keys()
    plain, right = _step(model, _text(family))
    assert not vision & right.keys(), "without care the tower has no gradient at all"
    with patched(model, vlm_mixed_batch=True):
        out, found = _step(model, _text(family))
        _, shown_gradients = _step(model, _images(family))
    assert torch.equal(out.loss, plain.loss)
    assert torch.equal(out.logits, plain.logits)
    assert found.keys() == right.keys() | vision
    for name, g in found.items():
        assert torch.equal(g, right[name]) if name in right else not g.any(), name
    assert shown_gradients.keys() == with_images.keys()
    assert all(torch.equal(g, with_images[name]) for name, g in shown_gradients.items())
    assert_clean()


@pytest.mark.parametrize("family", FAMILIES)
def test_structure_alone_says_what_the_entries_say(family):
    model, _ = build(family)
    vision = find_vision(model)
    assert not vision.inferred
    assert infer_vision(model) == vision.spec


def test_it_comes_with_sp_and_can_be_turned_off():
    model, _ = build("qwen3_vl")
    vision = _vision_names(model)
    with patched(model, sp=1, fused="torch") as scope:
        _, found = _step(model, _text("qwen3_vl"))
    assert vision <= found.keys()
    assert "features of a blank image" in str(scope.explain())
    for options in ({"sp": 1, "vlm_mixed_batch": False}, {"fused": "torch"}):
        with patched(model, **options) as scope:
            _, found = _step(model, _text("qwen3_vl"))
        assert not vision & found.keys()
        assert "features of a blank image" not in str(scope.explain())
    with patched(model, VLMMixedBatch(), sp=1):  # said twice, done once
        _, found = _step(model, _text("qwen3_vl"))
    assert vision <= found.keys()
    with patched(model, vlm_mixed_batch=True), patched(model, sp=1):
        _, found = _step(model, _text("qwen3_vl"))
    assert vision <= found.keys()


def _passes(model: Any) -> list[int]:
    """Grows by one at every run of the tower."""
    seen: list[int] = []
    find_vision(model).tower.register_forward_hook(lambda *_: seen.append(1))
    return seen


def test_the_tower_runs_only_where_somebody_wants_its_gradient():
    model, _ = build("qwen2_5_vl")
    passes = _passes(model)
    batch = _text("qwen2_5_vl")
    with patched(model, vlm_mixed_batch=True):
        with torch.no_grad():
            model(**batch)
            model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
        assert not passes
        model(**batch).loss.backward()
        assert len(passes) == 1
        model(
            **{k: v for k, v in batch.items() if k != "input_ids"},
            inputs_embeds=model.get_input_embeddings()(batch["input_ids"]),
        )
        assert len(passes) == 2
        model.model.visual.requires_grad_(False)
        model(**batch).loss.backward()
        assert len(passes) == 2


def test_random_numbers_are_those_without_it():
    """Dropout in the decoder, and in the tower, which would draw before it."""
    model, _ = build("qwen2_vl", attention_dropout=0.3)
    for layer in model.model.visual.blocks:
        layer.mlp.act = torch.nn.Sequential(layer.mlp.act, torch.nn.Dropout(0.5))
    plain, right = _step(model, _text("qwen2_vl"))
    with patched(model, vlm_mixed_batch=True):
        out, found = _step(model, _text("qwen2_vl"))
    assert torch.equal(out.logits, plain.logits)
    assert all(torch.equal(found[name], g) for name, g in right.items())


def test_what_has_no_images_or_no_known_tower_is_refused_by_name():
    text, _ = build("qwen2")
    with pytest.raises(UnsupportedError, match=r"vlm_mixed_batch: Qwen2ForCausalLM .* is no vision-language model"):
        patched(text, vlm_mixed_batch=True).apply()
    with pytest.raises(BadOptionError, match="vlm_mixed_batch must be True, False or None"):
        patched(text, vlm_mixed_batch="yes")
    model, _ = build("gemma3")
    model.model.get_image_features = None
    model.config.model_type = "gemma3_of_tomorrow"
    try:
        with pytest.raises(UnsupportedError, match="no blank image that could be made: nothing is known of the pixels"):
            patched(model, vlm_mixed_batch=True).apply()
        with patched(model, sp=1) as scope:
            explained = str(scope.explain())
        assert "batches without images are as upstream" in explained
        assert "structure of 'gemma3_of_tomorrow' inferred (no entry of its own)" in explained
    finally:
        del model.config.model_type


# ---------------------------------------------------------------------------------------------------- ranks
#: one with its embedding as a unit apart, one with tied embeddings and a projector beside the tower
SHARDED = ("qwen3_vl", "gemma3")


def _shard(model: Any, mesh: Any) -> Any:
    vision = find_vision(model)
    blocks = next(m for m in vision.tower.modules() if isinstance(m, torch.nn.ModuleList))
    units = [model.get_input_embeddings()] if not model.config.get_text_config().tie_word_embeddings else []
    for unit in (*units, *blocks, vision.tower, *vision.decoder.layers):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _batch_of(family: str, rank: int) -> dict[str, Any]:
    return _images(family) if rank == 0 else _text(family, rows=1)


def _mean(family: str, ranks: int, steps: int = 1) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of all ranks' batches on one process, and the mean gradient, missing ones counted as zeros.

    Each on a model of its own: in some versions of transformers one keeps its last images' offset for texts that follow.
    """
    model, _ = build(family)
    found = [_step(build(family)[0], _batch_of(family, rank)) for rank in range(ranks)]
    names = sorted({name for _, g in found for name in g})
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    mean = {name: sum(g.get(name, zeros[name]) for _, g in found) / ranks for name in names}
    return [out.loss.detach() for out, _ in found], mean


def check_sharded_models_do_not_wait(rank: int, world: int) -> None:
    """FSDP2: images on the first rank only; forward, backward, and forward without gradients."""
    mesh = init_device_mesh("cpu", (world,))
    for family in SHARDED:
        losses, mean = _mean(family, world)
        model = _shard(build(family)[0], mesh)
        with patched(model, vlm_mixed_batch=True):
            for _ in range(2):
                out = model(**_batch_of(family, rank), use_cache=False)
                out.loss.backward()
                found = take_gradients(model)
            with torch.no_grad():
                scored = model(**_batch_of(family, rank), use_cache=False)
        torch.testing.assert_close(out.loss.detach(), losses[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scored.loss, losses[rank], rtol=1e-5, atol=1e-5)
        _assert_equal(found, mean)


def check_frozen_sharded_towers_do_not_wait(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model, _ = build("qwen3_vl")
    model.model.visual.requires_grad_(False)
    model = _shard(model, mesh)
    with patched(model, vlm_mixed_batch=True, fused="torch"):
        out = model(**_batch_of("qwen3_vl", rank), use_cache=False)
        out.log_probs.sum().backward()
    assert not {name for name in take_gradients(model) if "visual" in name}


def check_data_parallel_models_reduce(rank: int, world: int) -> None:
    """DDP expects every parameter's gradient from every rank."""
    from torch.nn.parallel import DistributedDataParallel

    _, mean = _mean("glm4v", world)
    wrapper = DistributedDataParallel(build("glm4v")[0])
    with patched(wrapper, vlm_mixed_batch=True):
        for _ in range(2):
            wrapper(**_batch_of("glm4v", rank), use_cache=False).loss.backward()
            found = take_gradients(wrapper)
    _assert_equal({name.removeprefix("module."): g for name, g in found.items()}, mean)


def check_sharded_over_both_meshes(rank: int, world: int) -> None:
    """FSDP2 over four ranks, sequences over two of them: one pair has images and the other none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    family = "qwen3_vl"
    losses, mean = _mean(family, 2)
    model = _shard(build(family)[0], mesh._flatten())
    with patched(model, sp=mesh["sp"]):
        out = model(**_batch_of(family, rank // 2), use_cache=False)
        out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), losses[rank // 2], rtol=1e-5, atol=1e-5)
    _assert_equal(take_gradients(model), mean)


def _assert_equal(found: dict[str, torch.Tensor], mean: dict[str, torch.Tensor]) -> None:
    found = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}
    assert mean.keys() <= found.keys(), sorted(mean.keys() - found.keys())
    largest = max(g.abs().max().item() for g in mean.values())
    for name, g in found.items():
        right = mean.get(name, torch.zeros_like(g))
        scale = max(right.abs().max().item(), 1e-3 * largest)
        assert (g - right).abs().max().item() <= 1e-4 * scale, name
    dist.barrier()


def test_two_ranks_one_with_images_and_one_without():
    names = ["check_sharded_models_do_not_wait", "check_frozen_sharded_towers_do_not_wait", "check_data_parallel_models_reduce"]
    run_checks(__name__, names, 2)


def test_four_ranks_two_with_images_and_two_without():
    run_checks(__name__, ["check_sharded_over_both_meshes"], 4)
