"""Single calls of vision-language models: images at a cut, position ids, other models, recomputation, failures, remote code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scoped_patch import Ulysses, UnsupportedError, assert_clean, patched
from scoped_patch.models.sharding import SequenceShard, active_shard
from scoped_patch.models.vision import find_vision, infer_vision
from tests.support import remote
from tests.support.checks import run_checks
from tests.support.scores import reference, shifted
from tests.support.ulysses import reduced_gradients, relative, snapshot, take
from tests.support.vlm import (
    CONTENTS,
    FAMILIES,
    ROUTERS,
    Case,
    Image,
    compare,
    enable_checkpointing,
    has_routers,
    make_batch,
    position_ids,
    tolerance,
)
from tests.tiny_models import IMG, VEND, VSTART, build


# ---------------------------------------------------------------------------------------------------- images at a cut
def _placed(*starts: int, length: int = 12) -> dict[str, Any]:
    """One image of four tokens per row, its placeholders beginning there."""
    ids = torch.randint(3, 100, (len(starts), length), generator=torch.Generator().manual_seed(5))
    for row, start in enumerate(starts):
        ids[row, start - 1 : start + 5] = torch.tensor([VSTART, IMG, IMG, IMG, IMG, VEND])
    pixels = torch.randn(16 * len(starts), 96, generator=torch.Generator().manual_seed(6))
    return {
        "input_ids": ids,
        "labels": torch.where(ids == IMG, -100, ids),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(starts)),
        "mm_token_type_ids": (ids == IMG).long(),
    }


def check_images_that_straddle_a_cut(rank: int, world: int) -> None:
    """Row 0's image at 4-7, row 1's at 2-5, cut at 6: rows of deep features go by the mask's order, row after row."""
    batch = _placed(4, 2)
    assert [row.nonzero()[[0, -1], 0].tolist() for row in batch["input_ids"] == IMG] == [[4, 7], [2, 5]]
    for family in ("qwen3_vl", "qwen3_vl_moe"):
        model, _ = build(family)
        given: list[tuple[int, ...]] = []
        process = type(model.model.language_model)._deepstack_process

        def look(self, hidden, mask, rows, process=process, given=given):
            given.append((hidden.shape[1], *mask.sum(1).tolist(), len(rows)))
            return process(self, hidden, mask, rows)

        type(model.model.language_model)._deepstack_process = look
        try:
            compare(model, batch, Case(family, batch=2, call="fused"), world, rank)
        finally:
            type(model.model.language_model)._deepstack_process = process
        # the whole rows in one process; then this rank's six tokens: two and four visual ones, or two and none
        assert given == [(12, 4, 4, 8), (6, 2, 4, 6) if rank == 0 else (6, 2, 0, 2)], given


def check_every_place_of_the_cut(rank: int, world: int) -> None:
    model, _ = build("qwen3_vl")
    for first in range(1, 7):
        for second in (1, 4, 7):
            compare(model, _placed(first, second), Case("qwen3_vl", batch=2), world, rank)


# ---------------------------------------------------------------------------------------------------- position ids
def check_axes_are_no_rows_and_images_no_boundaries(rank: int, world: int) -> None:
    """[3, 1, 4] ids are one row of four tokens; ids that stand still over an image, or go down after a video, one sample."""
    model, _ = build("qwen2_vl")
    for ids in (
        torch.arange(4).expand(3, 1, 4),
        torch.tensor([0, 1, 2, 2, 2, 2, 4, 5]).expand(3, 1, 8),
        torch.tensor([[0, 1, 2, 3, 4, 2, 3], [0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 2, 3]])[:, None],
    ):
        tokens = torch.randint(3, 100, (1, ids.shape[-1]), generator=torch.Generator().manual_seed(2))
        batch = {"input_ids": tokens, "position_ids": ids.contiguous()}
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits
            wanted = reference(logits, shifted(tokens)).log_probs
            with patched(model, sp=world, fused="torch"):
                found = model(**batch).log_probs
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
        assert (found[0] == 0).tolist() == [False] * (ids.shape[-1] - 1) + [True]


def check_positions_are_made_before_the_cut(rank: int, world: int) -> None:
    """The decoder is given the model's own three axes of the whole sequence, and its layers this rank's part."""
    for family in ("qwen2_5_vl", "glm4v"):
        model, _ = build(family)
        batch = make_batch(family, CONTENTS["images"], "left")
        wanted = position_ids(model, family, batch, "axes3")
        seen: list[Tensor] = []
        with patched(model, sp=world):
            decoder = model.get_decoder()

            def look(module, args, kwargs, seen=seen):
                seen.append(kwargs["position_ids"])

            handle = decoder.register_forward_pre_hook(look, with_kwargs=True)
            model(**batch)
            handle.remove()
        assert torch.equal(seen[0], wanted), family


def check_text_as_embeddings_after_a_batch_of_images(rank: int, world: int) -> None:
    """The models keep the offset of the last batch's images, and count on from it: below 0, and through it."""
    for family in ("qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "glm4v"):
        model, _ = build(family)
        images = make_batch(family, CONTENTS["images"])
        embeds = model.get_input_embeddings()(torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(8)))
        embeds = embeds.detach()
        with torch.no_grad():
            model(**images)
            wanted = model(inputs_embeds=embeds, use_cache=False).logits
            model(**images)
            with patched(model, sp=world):
                found = model(inputs_embeds=embeds).logits
        assert float((found - wanted).abs().max()) <= tolerance(family) * float(wanted.abs().max()), family


# ---------------------------------------------------------------------------------------------------- other models
def check_siblings_are_bit_equal(rank: int, world: int) -> None:
    """A second model of the class, and one of the sibling class, while the first is patched and after."""
    for family, sibling in (("qwen2_vl", "qwen2_5_vl"), ("qwen3_vl", "qwen3_vl_moe")):
        model, _ = build(family)
        others = [(build(family, seed=1)[0], family), (build(sibling)[0], sibling)]
        before = [_everything(other, name) for other, name in others]
        classes = [dict(vars(type(m))) for other, _ in others for m in other.modules()]
        with patched(model, sp=world, fused="torch", tiled_mlp=3):
            model(**make_batch(family, CONTENTS["images"])).loss.backward()
            inside = [_everything(other, name) for other, name in others]
            generated = model.generate(**_prompt(family), max_new_tokens=3, do_sample=False)
        after = [_everything(other, name) for other, name in others]
        assert before == inside == after, family
        assert classes == [dict(vars(type(m))) for other, _ in others for m in other.modules()]
        assert torch.equal(generated, model.generate(**_prompt(family), max_new_tokens=3, do_sample=False))


def _prompt(family: str) -> dict[str, Any]:
    batch = make_batch(family, CONTENTS["image"][:1])
    del batch["labels"]
    return batch


def _everything(model: Any, family: str) -> list[bytes]:
    """Loss, logits, gradients and generated tokens, bit for bit."""
    out = model(**make_batch(family, CONTENTS["images"]), use_cache=False)
    out.loss.backward()
    tensors = [out.loss, out.logits, *take(model).values()]
    with torch.no_grad():
        tensors.append(model.generate(**_prompt(family), max_new_tokens=3, do_sample=False))
    return [x.detach().numpy().tobytes() for x in tensors]


# ---------------------------------------------------------------------------------------------------- several calls
REDONE = ("qwen3_vl", "qwen3_5", "kimi_vl", "gemma3")


def check_two_forwards_before_one_backward_after_the_scope(rank: int, world: int) -> None:
    """Images and text, checkpointed or not; the backward comes when the scope is gone."""
    for family in REDONE:
        for reentrant in (None, True, False):
            model, _ = build(family)
            if reentrant is not None:
                enable_checkpointing(model, reentrant)
            batches = [make_batch(family, CONTENTS["images"], "left"), make_batch(family, CONTENTS["text"])]
            losses = [model(**batch, use_cache=False).loss for batch in batches]
            (losses[0] + 2 * losses[1]).backward()
            right = take(model)
            with patched(model, sp=world):
                found = [model(**batch).loss for batch in batches]
            assert_clean()
            (found[0] + 2 * found[1]).backward()
            for ours, theirs in zip(found, losses, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            _assert_gradients(
                reduced_gradients(model, world, "mean"), right, f"{family}, reentrant {reentrant}", tolerance(family)
            )


def _assert_gradients(found: dict[str, Tensor], right: dict[str, Tensor], what: str, rtol: float) -> None:
    largest = max(g.abs().max().item() for g in right.values())
    assert right.keys() <= found.keys(), what
    for name, ours in found.items():
        theirs = right.get(name, torch.zeros_like(ours))
        scale = max(theirs.abs().max().item(), 1e-3 * largest)
        off = (ours - theirs).abs().max().item() / scale
        assert off <= rtol, f"{what}: the gradient of {name} is off by {off:.1e}"


def check_a_forward_that_fails_leaves_nothing_behind(rank: int, world: int) -> None:
    """On every rank, in the tower and in a decoder layer; the next good forward is right, and the model as it was."""
    for family in ("qwen2_5_vl", "kimi_vl"):
        model, _ = build(family)
        batch = make_batch(family, CONTENTS["some"])
        wanted = model(**batch, use_cache=False).logits.detach()
        before = snapshot(model)
        with patched(model, sp=world):
            for part in (find_vision(model).tower, model.get_decoder().layers[1]):
                handle = part.register_forward_pre_hook(_fail)
                with pytest.raises(RuntimeError, match="in the middle"):
                    model(**batch)
                handle.remove()
                assert active_shard(model) is None
                dist.barrier()
                assert relative(model(**batch).logits.detach(), wanted) <= 1e-4
                text = make_batch(family, CONTENTS["text"])
                handle = model.get_input_embeddings().register_forward_pre_hook(_fail)
                with pytest.raises(RuntimeError, match="in the middle"):
                    model(**text)
                handle.remove()
                dist.barrier()
                model(**text).loss.backward()
        assert snapshot(model) == before


def _fail(*_: Any) -> None:
    raise RuntimeError("in the middle")


def check_a_decoder_inside_another_is_cut_once(rank: int, world: int) -> None:
    """Patched as a part of a VLM or on its own: the same decoder, called by its model and called alone."""
    model, _ = build("qwen3_vl")
    decoder = model.get_decoder()
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        wanted = decoder(input_ids=ids, use_cache=False).last_hidden_state
        with patched(model, sp=world):
            inside = decoder(input_ids=ids).last_hidden_state
            assert inside.shape == wanted.shape
        with patched(decoder, sp=world):
            alone = decoder(input_ids=ids).last_hidden_state
            whole = model(input_ids=ids, use_cache=False).logits
        right = model(input_ids=ids, use_cache=False).logits
    for found, right_one in ((inside, wanted), (alone, wanted), (whole, right)):
        assert relative(found, right_one) <= 1e-4


def check_hidden_states_and_router_logits_are_whole(rank: int, world: int) -> None:
    for family in (*ROUTERS, "kimi_vl"):
        model, _ = build(family)
        batch = make_batch(family, CONTENTS["images"])
        routed = has_routers(family, model)
        extra = {"output_hidden_states": True} | ({"output_router_logits": True} if routed else {})
        with torch.no_grad():
            wanted = model(**batch, use_cache=False, **extra)
            with patched(model, sp=world):
                found = model(**batch, **extra)
        states = list(zip(found.hidden_states, wanted.hidden_states, strict=True))
        routers = list(zip(found.router_logits, wanted.router_logits, strict=True)) if routed else []
        assert len(states) == 3
        for ours, theirs in states + routers:
            assert ours.shape == theirs.shape, family
            assert relative(ours, theirs) <= 1e-4, family


# ---------------------------------------------------------------------------------------------------- cut layout
def check_shard_leaves_a_models_own_arguments_whole(rank: int, world: int) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        model, _ = build(family)
        batch = make_batch(family, CONTENTS["images"])
        length = batch["input_ids"].shape[1]
        extra = {
            "position_ids": position_ids(model, family, batch, "axes4"),
            "shift_labels": shifted(batch["labels"]),
            "temperature": torch.rand(2, length) + 0.5,
            "advantages": torch.randn(2, length),
        }
        with patched(model, sp=Ulysses(world, inputs="sharded"), fused="torch") as scope:
            mine = scope.shard({**batch, **extra})
            size = -(-length // world)
            for name, value in mine.items():
                if name in ("shift_labels", "temperature", "advantages"):
                    assert value.shape == (2, size)
                else:
                    assert value is {**batch, **extra}[name], name
            advantages = mine.pop("advantages")
            out = model(**mine)
            assert out.log_probs.shape == advantages.shape
            whole = scope.gather(out.log_probs)
        logits = model(**batch, position_ids=extra["position_ids"], use_cache=False).logits
        wanted = reference(logits, extra["shift_labels"], extra["temperature"]).log_probs
        assert relative(whole, wanted) <= 1e-4


class _HandsOnLabelsOnly:
    """As forwards of vision models were before transformers 5.17: their loss is not told of `shift_labels` and such."""

    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, **kwargs)  # type: ignore[misc]
        if labels is not None:
            out.loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=self.config.text_config.vocab_size)
        return out


def check_the_loss_of_a_cut_layout_where_the_model_hands_on_labels_only(rank: int, world: int) -> None:
    for call in ("sharded", "sharded_fused"):
        model, _ = build("qwen2_vl")
        model.__class__ = type("HandsOnLabelsOnly", (_HandsOnLabelsOnly, type(model)), {})
        batch = make_batch("qwen2_vl", CONTENTS["images"], "left")
        compare(model, batch, Case("qwen2_vl", batch=2, call=call, ranks=world), world, rank)


CHECKS = [name for name in dir() if name.startswith("check_")]


def test_calls_on_two_ranks():
    run_checks(__name__, CHECKS, 2)


# ---------------------------------------------------------------------------------------------------- one process
@pytest.mark.parametrize("family", FAMILIES)
def test_explain_says_what_is_done_to_a_family(family):
    model, _ = build(family)
    with patched(model, sp=1, fused="torch", tiled_mlp=4) as scope:
        model(**make_batch(family, CONTENTS["image"]))
        explained = scope.explain(full=True)
    text = str(explained)
    spec = find_vision(model).spec
    assert f"vision tower {spec.tower}, projector {spec.projector}, decoder {spec.decoder}" in text
    assert "images are computed whole on every rank, and sequences cut at the decoder" in text
    patches = {row.cells(True)[0] for row in explained.rows}
    assert {"ulysses", "fused_head", "tiled_mlp", "vlm_mixed_batch"} <= patches
    assert ("deepstack" in text) == (family in ("qwen3_vl", "qwen3_vl_moe"))
    assert ("structure inferred" in text) == (family == "kimi_vl")


def test_a_family_that_nobody_knows_works_by_inference_and_says_so():
    model, batch = build("qwen3_vl")
    wanted = model(**batch).loss.detach()
    model.config.model_type = "qwen9_vl"
    try:
        with patched(model, sp=1) as scope:
            assert torch.equal(model(**batch).loss, wanted)
            text = str(scope.explain())
    finally:
        del model.config.model_type
    assert "structure of 'qwen9_vl' inferred (no entry of its own): vision tower model.visual" in text
    assert infer_vision(model).deepstack


def test_a_model_without_decoder_or_tower_is_refused_by_name():
    model, _ = build("gemma3")
    with pytest.raises(UnsupportedError, match=r"Gemma3MultiModalProjector.* has no text decoder .*get_decoder\(\)"):
        patched(model.model.multi_modal_projector, sp=1).apply()
    model.model._modules["eye"] = model.model._modules.pop("vision_tower")
    model.config.model_type = "nobody_knows"
    model.get_encoder = lambda modality: model
    try:
        with pytest.raises(UnsupportedError, match=r"has no vision tower that could be found: looked for visual, vision_tower"):
            find_vision(model)
        with patched(model, sp=1) as scope:
            text = str(scope.explain())
    finally:
        del model.config.model_type, model.get_encoder
    assert "has no vision tower that could be found" in text


def test_remote_code_is_loaded_from_a_folder_and_imports_nothing_that_is_not_installed():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(remote.KIMI_VL, trust_remote_code=True)
    assert type(config).__name__ == "KimiVLConfig"
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert type(model).__name__ == "KimiVLForConditionalGeneration"
    assert type(model.language_model).__name__ == "DeepseekV3ForCausalLM"
    assert type(model).__module__.startswith("transformers_modules.")
    batch = make_batch("kimi_vl", CONTENTS["images"])
    wanted = reference(model(**batch).logits, shifted(batch["labels"]))
    with patched(model, sp=1, fused="torch", tiled_mlp=3):
        out = model(**batch)
    torch.testing.assert_close(out.log_probs.double(), wanted.log_probs, rtol=1e-4, atol=1e-5)
    assert_clean()


def test_remote_code_that_makes_its_own_masks_takes_whole_inputs_only():
    model, _ = build("kimi_vl")
    with pytest.raises(UnsupportedError, match=r"makes its masks by itself.*DeepseekV3Attention knows no attention interface"):
        patched(model.language_model, sp=Ulysses(1, inputs="sharded")).apply()


def test_a_shard_is_of_its_call():
    """What `first call` means is kept with the call, and not on the model."""
    model, _ = build("qwen3_vl")
    seen: list[SequenceShard | None] = []
    model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(active_shard(model)))
    with patched(model, sp=1):
        for contents in ("images", "text", "images"):
            model(**make_batch("qwen3_vl", CONTENTS[contents]))
    assert len({id(shard) for shard in seen}) == 3
    assert active_shard(model) is None
    assert Image() == (4, 4)
