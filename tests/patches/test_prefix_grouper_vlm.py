"""Prefixes with images: the tower runs once per group, pictures are compared, results are the unpatched model's."""

from __future__ import annotations

import pytest
import torch

from scoped_patch import UnsupportedError, pack_prefix_groups, patched
from scoped_patch.engine.errors import BadOptionError
from tests import tiny_models
from tests.support.groups import count, image_groups, text_groups
from tests.support.scores import assert_gradients, gradients, objective, unpatched

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "kimi_k25")
REQUIRED = FAMILIES[:3]


def build(name):
    return tiny_models.build(name, train=False)[0]


def batch_for(name, groups):
    if name == "kimi_k25":
        groups.batch["pixel_values"] = groups.batch["pixel_values"][:, :48].reshape(-1, 3, 4, 4)
        del groups.batch["mm_token_type_ids"]
    return groups


def assert_equal_to_unpatched(model, groups, fused="torch"):
    batch = groups.batch
    wanted = unpatched(model, batch)
    right = gradients(model, lambda: objective(unpatched(model, batch)))
    with patched(model, prefix_grouper=True, fused=fused):
        found = model(**batch, group_ids=groups.group_ids)
        left = gradients(model, lambda: objective(model(**batch, group_ids=groups.group_ids)))
    for name in ("log_probs", "entropy"):
        theirs = getattr(wanted, name)
        torch.testing.assert_close(getattr(found, name).double(), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert_gradients(left, right)


@pytest.mark.parametrize("in_responses", [False, True], ids=["", "images in responses too"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, side, in_responses):
    assert_equal_to_unpatched(build(name), batch_for(name, image_groups(side=side, in_responses=in_responses)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_with_another_picture_shares_only_what_comes_before_it(name):
    model, groups = build(name), batch_for(name, image_groups(alike=False))
    assert_equal_to_unpatched(model, groups)
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
    # The placeholder comes after 5 tokens in a prompt of 18, and after 15 in one of 28: each row goes its own way from there.
    rest = sum(map(len, groups.responses))
    assert counted.embedded == [5 + 3 * (18 - 5) + 15 + 3 * (28 - 15) + rest]


@pytest.mark.parametrize("name", REQUIRED)
def test_the_tower_runs_once_per_picture_of_a_group(name):
    model, groups = build(name), image_groups(in_responses=True)
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
    assert counted.embedded == [groups.tokens]
    assert counted.head_rows == [groups.scored]
    # 1 + 2 pictures of the prompts and 6 of the responses, 16 patches each, where the repeated rows have 9 + 6
    assert counted.patches == [(3 + 6) * 16]
    assert groups.batch["pixel_values"].shape[0] == (9 + 6) * 16


@pytest.mark.parametrize("name", REQUIRED)
def test_logits_of_the_callers_layout(name):
    model, groups = build(name), image_groups(side="left")
    plain = model(**groups.batch)
    with patched(model, prefix_grouper=True):
        out = model(**groups.batch, group_ids=groups.group_ids)
    scale = float(plain.logits.detach().abs().max())
    torch.testing.assert_close(out.logits[groups.real], plain.logits[groups.real], rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", REQUIRED)
def test_position_ids_of_three_and_four_axes(name):
    """Given position ids, as a trainer computes them once; four axes carry the text positions too."""
    model, groups = build(name), image_groups()
    batch = groups.batch
    ids, _ = model.model.get_rope_index(
        batch["input_ids"],
        image_grid_thw=batch["image_grid_thw"],
        mm_token_type_ids=batch["mm_token_type_ids"],
        attention_mask=batch["attention_mask"],
    )
    wanted = unpatched(model, batch).log_probs
    text = torch.arange(ids.shape[-1]).expand(1, *ids.shape[1:])
    for given in (ids, torch.cat([text, ids])):
        with patched(model, prefix_grouper=True, fused="torch"):
            found = model(**batch, position_ids=given, group_ids=groups.group_ids).log_probs
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_a_temporal_axis_that_goes_down_after_a_long_video_is_no_restart():
    model, groups = build("qwen2_vl"), image_groups()
    batch = dict(groups.batch)
    grids, types, mask = (batch[name] for name in ("image_grid_thw", "mm_token_type_ids", "attention_mask"))
    ids, _ = model.model.get_rope_index(batch["input_ids"], image_grid_thw=grids, mm_token_type_ids=types, attention_mask=mask)
    batch["position_ids"] = ids.clone()
    batch["position_ids"][0] += 10 * types
    wanted = unpatched(model, batch).log_probs
    with patched(model, prefix_grouper=True, fused="torch"):
        found = model(**batch, group_ids=groups.group_ids).log_probs
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    batch["position_ids"][:, :, 9:] -= batch["position_ids"][:, :, 9:10]
    with patched(model, prefix_grouper=True), pytest.raises(BadOptionError, match="position_ids restart within a row"):
        model(**batch, group_ids=groups.group_ids)


@pytest.mark.parametrize("name", REQUIRED)
def test_batches_without_images(name):
    assert_equal_to_unpatched(build(name), text_groups())


@pytest.mark.parametrize("name", REQUIRED)
def test_groups_are_found_by_tokens_and_pictures(name):
    model, groups = build(name), image_groups(alike=False)
    with patched(model, prefix_grouper=True, fused="torch"):
        out = []
        counted = count(model, lambda: out.append(model(**groups.batch)))
    wanted = unpatched(model, groups.batch).log_probs
    torch.testing.assert_close(out[0].log_probs.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    # Best is for the first prompt: two rows share all 18 tokens. For the second: three share the 15 before the odd picture.
    rest = sum(map(len, groups.responses))
    assert counted.embedded == [2 * 18 + (15 + 3 * 13) + rest]


def test_a_prefix_never_ends_within_a_picture():
    """Rows that end with a picture leave all of it out of their prefix, not only its last token."""
    model = build("qwen2_vl")
    groups = image_groups((1,))
    ids = torch.tensor([3, 4, tiny_models.VSTART, *[tiny_models.IMG] * 4])
    picture = groups.batch["pixel_values"][:16]
    batch = {
        "input_ids": ids.expand(2, -1).contiguous(),
        "pixel_values": torch.cat([picture, picture]),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == tiny_models.IMG).long().expand(2, -1).contiguous(),
    }
    plain = model(**batch).logits
    with patched(model, prefix_grouper=True):
        out = []
        counted = count(model, lambda: out.append(model(**batch, group_ids=[0, 0]).logits))
    assert counted.embedded == [3 + 4 + 4]
    torch.testing.assert_close(out[0], plain, rtol=0, atol=1e-4)


def test_packed_rows_with_images_take_their_positions():
    model = build("qwen2_vl")
    groups = image_groups((1,))
    packed = pack_prefix_groups([groups.prefixes[0]], [groups.responses])
    pictures = {"pixel_values": groups.batch["pixel_values"][:16], "image_grid_thw": torch.tensor([[1, 4, 4]])}
    one = {name: value[:1] for name, value in groups.batch.items() if name not in pictures} | pictures
    with patched(model, prefix_grouper=True, fused="torch"):
        inputs = packed.inputs()
        del inputs["position_ids"]
        with pytest.raises(BadOptionError, match="packed rows with images need position_ids"):
            model(**inputs, **pictures)
    ids, _ = model.model.get_rope_index(
        groups.batch["input_ids"],
        image_grid_thw=groups.batch["image_grid_thw"],
        mm_token_type_ids=groups.batch["mm_token_type_ids"],
        attention_mask=groups.batch["attention_mask"],
    )
    start, parts = len(groups.prefixes[0]), [ids[:, 0, : len(groups.prefixes[0])]]
    parts += [ids[:, row, start : start + len(r)] for row, r in enumerate(groups.responses)]
    labels = packed.input_ids.clone()
    labels[0, :start] = -100
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(**(packed.inputs() | {"position_ids": torch.cat(parts, 1)[:, None]}), **pictures, labels=labels)
    wanted = unpatched(model, one).log_probs[0, start - 1 : start - 1 + len(groups.responses[0])]
    torch.testing.assert_close(packed.segments(out.log_probs)[0][1].double(), wanted, rtol=0, atol=1e-4)


def test_pictures_and_placeholders_must_match():
    model, groups = build("qwen2_vl"), image_groups()
    cases = [
        ({"pixel_values": groups.batch["pixel_values"][:-1]}, BadOptionError, "has 143 patches, and image_grid_thw says 144"),
        ({"image_grid_thw": None}, UnsupportedError, "looked for image_grid_thw in the call"),
        ({"mm_encoder_outputs": {"image": object()}}, UnsupportedError, "called with mm_encoder_outputs"),
        (
            {
                "pixel_values": groups.batch["pixel_values"][:-16],
                "image_grid_thw": groups.batch["image_grid_thw"][:-1],
            },
            BadOptionError,
            "have 36 placeholder tokens .* which makes 32",
        ),
    ]
    for change, kind, message in cases:
        with patched(model, prefix_grouper=True), pytest.raises(kind, match=message):
            model(**(groups.batch | change), group_ids=groups.group_ids)
