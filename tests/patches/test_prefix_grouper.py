"""Prefix sharing of ordinary batches: every family against its unpatched self, and what it saves."""

from __future__ import annotations

import importlib

import pytest
import torch

from scoped_patch import FusedHead, PrefixGrouper, UnsupportedError, patched
from scoped_patch.engine.errors import BadOptionError, SeamNotReachedError
from tests import tiny_models
from tests.support.groups import assemble, count, text_groups
from tests.support.scores import (
    assert_gradients,
    assert_scores,
    gradients,
    objective,
    reference,
    shifted,
    unpatched,
)

#: transformers norms in float32 whatever the model is, so that gradients of a float64 model agree to that
EXACT = 2e-6
EXPERTS = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3")
LINEAR = ("kimi_linear", "qwen3_5_text")
FAMILIES = [name for name in tiny_models.TEXT if name not in LINEAR]


def build(name="qwen3", **options):
    return tiny_models.build(name, **{"train": False, **options})[0]


def assert_equal_to_unpatched(model, groups, tolerance=1e-5, gradient_tolerance=1e-4, **call):
    """Scores and gradients of the grouped call against the model's own logits, relative to their size."""
    batch = groups.batch
    wanted = unpatched(model, batch)
    right = gradients(model, lambda: objective(unpatched(model, batch)))
    with patched(model, prefix_grouper=True, fused="torch"):
        found = model(**batch, group_ids=groups.group_ids, **call)
        left = gradients(model, lambda: objective(model(**batch, group_ids=groups.group_ids, **call)))
    for name in ("log_probs", "entropy"):
        ours, theirs = getattr(found, name).detach().double(), getattr(wanted, name).detach()
        assert ours.shape == theirs.shape
        worst, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
        assert worst <= tolerance * scale, f"{name} is off by {worst:.1e} of {scale:.1f}"
    assert_gradients(left, right, gradient_tolerance)
    return found


# --- families


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    """In float64 nothing but the order of sums differs: log-probs are equal to 10 digits. (Experts exist in float32 only.)"""
    if name in EXPERTS:
        assert_equal_to_unpatched(build(name), text_groups())
    else:
        assert_equal_to_unpatched(build(name, dtype=torch.float64), text_groups(), 1e-10, EXACT)


@pytest.mark.parametrize("side", ["left", "both"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_padded_elsewhere(name, side):
    """transformers counts positions from the padding on, here they begin with the first real token.

    Rotary positions are relative, so that only rounding differs. apertus' activation has parameters whose gradients are
    what is left of large sums that cancel.
    """
    gradient_tolerance = 2e-3 if name == "apertus" else 1e-4
    assert_equal_to_unpatched(build(name), text_groups(side=side), gradient_tolerance=gradient_tolerance)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt_oss"])
def test_eager_attention(name):
    assert_equal_to_unpatched(build(name, attn="eager"), text_groups())


def other_family(family, name, **options):
    """A family without a builder of its own."""
    package = f"transformers.models.{family}"
    modeling = importlib.import_module(f"{package}.modeling_{family}")
    configuration = importlib.import_module(f"{package}.configuration_{family}")
    config = getattr(configuration, f"{name}Config")(**{**tiny_models._DENSE, **options})
    attn = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    torch.manual_seed(0)
    model = getattr(modeling, f"{name}ForCausalLM")._from_config(config, attn_implementation=attn)
    tiny_models._redraw(model, 0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        pytest.param(
            "qwen2_moe",
            "Qwen2Moe",
            {
                "use_sliding_window": True,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
                "num_experts": 4,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
            id="a window that only the mask of some layers knows",
        ),
        pytest.param("phimoe", "Phimoe", {"sliding_window": 6, "num_local_experts": 4}, id="a window that only masks know"),
        pytest.param(
            "gemma2",
            "Gemma2",
            {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
            id="softcaps",
        ),
    ],
)
def test_families_that_do_it_in_another_way(family, name, options):
    assert_equal_to_unpatched(other_family(family, name, **options), text_groups((20,), ((5, 9),)))


def test_masks_of_a_models_own_are_refused():
    model, groups = other_family("doge", "Doge"), text_groups()
    with patched(model, prefix_grouper=True), pytest.raises(UnsupportedError, match="DogeAttention makes a mask of its own"):
        model(**groups.batch, group_ids=groups.group_ids)


def test_learned_positions_are_refused():
    with pytest.raises(UnsupportedError, match=r"adds learned positions .*embed_positions"):
        patched(other_family("opt", "OPT"), prefix_grouper=True).plan()


def test_plans_on_the_meta_device():
    small = build()
    with torch.device("meta"):
        model = type(small)._from_config(small.config)
    plan = patched(model, prefix_grouper=True, fused="torch").plan()
    assert sum("scoped_patch_prefix" in one.edit.to for one in plan.edits) == 2


@pytest.mark.parametrize("name", LINEAR)
def test_recurrent_layers_are_refused_by_name(name):
    model = build(name)
    with pytest.raises(UnsupportedError, match=r"layer 0 of .* mixes tokens with a \w+Delta"):
        patched(model, prefix_grouper=True).plan()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_loss_without_a_fused_head(name):
    model, groups = build(name), text_groups()
    plain = model(**groups.batch)
    right = gradients(model, lambda: model(**groups.batch).loss)
    with patched(model, prefix_grouper=True):
        grouped = model(**groups.batch, group_ids=groups.group_ids)
        left = gradients(model, lambda: model(**groups.batch, group_ids=groups.group_ids).loss)
    assert type(grouped) is type(plain)
    assert grouped.logits.shape == plain.logits.shape
    scale = float(plain.logits.abs().max())
    torch.testing.assert_close(grouped.logits[groups.real], plain.logits[groups.real], rtol=0, atol=1e-5 * scale)
    assert not grouped.logits[~groups.real].any()
    torch.testing.assert_close(grouped.loss, plain.loss, rtol=1e-5, atol=0)
    assert_gradients(left, right)


# --- what it saves


@pytest.mark.parametrize("name", FAMILIES)
def test_each_prefix_token_is_embedded_once_and_only_scored_rows_reach_the_head(name):
    model, groups = build(name), text_groups()
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
    assert counted.embedded[0] == groups.tokens
    assert counted.head_rows == [groups.scored]


def test_tokens_are_p_plus_sum_of_r():
    groups = text_groups((20,), ((5, 6, 7),))
    model = build()
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
    assert counted.embedded == [20 + 5 + 6 + 7]
    assert counted.head_rows == [5 + 6 + 7]


def test_without_labels_prefix_tokens_are_scored_once_per_group():
    """All next tokens are scored; of a prefix of P tokens P - 1 rows are shared, the last is scored per response."""
    groups = text_groups((20,), ((5, 6, 7),))
    batch = {k: v for k, v in groups.batch.items() if k != "labels"}
    model = build(dtype=torch.float64)
    with patched(model, prefix_grouper=True, fused="torch"):
        out = []
        counted = count(model, lambda: out.append(model(**batch, group_ids=groups.group_ids)))
    assert counted.head_rows == [19 + 5 + 6 + 7]
    ids, real = batch["input_ids"], groups.real
    targets = shifted(torch.where(real, ids, -100)).masked_fill(~real, -100)
    right = reference(model(input_ids=ids, attention_mask=batch["attention_mask"]).logits, targets)
    torch.testing.assert_close(out[0].log_probs, right.log_probs, rtol=0, atol=1e-10)
    torch.testing.assert_close(out[0].entropy, right.entropy, rtol=0, atol=1e-10)


def test_shared_rows_get_the_gradient_of_every_member():
    groups = text_groups((20,), ((5, 6, 7),))
    groups.batch["labels"] = torch.where(groups.real, groups.batch["input_ids"], -100)
    assert_equal_to_unpatched(build(dtype=torch.float64), groups, 1e-10, EXACT)


def test_members_that_disagree_about_a_prefix_label_are_scored_apart():
    groups = text_groups((20,), ((5, 6, 7),))
    labels = groups.batch["labels"]
    labels[0, 3], labels[1, 3], labels[1, 8], labels[2, 8] = 11, 12, 13, 13
    model = build(dtype=torch.float64)
    assert_equal_to_unpatched(model, groups, 1e-10, EXACT)
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
    # Rows 1 and 2 agree on a label, but the first row of the group has none there and cannot stand for them.
    assert counted.head_rows == [18 + 4]


# --- padding (D21)


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("fused", [None, "torch"])
@pytest.mark.parametrize("labels", ["responses", "ids", None])
def test_what_padding_holds_changes_nothing(side, fused, labels):
    model, groups = build(), text_groups(side=side)
    results = []
    for pad in (0, 17, 99):
        batch = dict(groups.batch)
        batch["input_ids"] = torch.where(groups.real, batch["input_ids"], pad)
        if labels != "responses":
            batch["labels"] = batch["input_ids"].clone()
        if labels is None:
            del batch["labels"]
        with patched(model, prefix_grouper=True, fused=fused):
            out = model(**batch, group_ids=groups.group_ids)
        shown = (out.logits,) if fused is None else (out.log_probs, out.entropy)
        results.append([*shown, *(() if labels is None else (out.loss,))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_pads_of_one_member_never_become_a_prefix():
    """Two rows that differ in real tokens at once and agree in padding share nothing."""
    ids = torch.tensor([[0, 0, 5, 6], [0, 0, 7, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    model = build()
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(input_ids=ids, attention_mask=mask, group_ids=torch.tensor([1, 1])))
    assert counted.embedded == [4]


def test_padding_between_real_tokens():
    """Prompts padded on the right, answers behind them: positions count the columns, as transformers does."""
    ids = torch.tensor([[5, 6, 7, 0, 0, 8, 9, 0], [5, 6, 7, 0, 0, 8, 3, 4], [5, 6, 0, 0, 0, 8, 3, 4]])
    mask = (ids != 0).long()
    model = build()
    batch = {"input_ids": ids, "attention_mask": mask}
    plain = model(**batch).logits
    with patched(model, prefix_grouper=True):
        out = []
        counted = count(model, lambda: out.append(model(**batch, group_ids=[0, 0, 0]).logits))
    torch.testing.assert_close(out[0][mask.bool()], plain[mask.bool()], rtol=0, atol=1e-4)
    assert counted.embedded == [2 + 3 + 4 + 3]
    with (
        patched(build("mistral"), prefix_grouper=True) as scope,
        pytest.raises(UnsupportedError, match="padding between the real tokens"),
    ):
        scope.target(**batch, group_ids=[0, 0, 0])


# --- shapes of groups


@pytest.mark.parametrize(
    ("prefixes", "responses"),
    [
        pytest.param((8,), ((5,),), id="group of one"),
        pytest.param((8, 5, 3), ((5,), (4,), (2,)), id="only groups of one"),
        pytest.param((1,), ((5, 3),), id="prefix of one token"),
        pytest.param((4, 40, 2), ((3, 2), (30, 2, 17, 9, 25, 1), (1, 1)), id="one group much larger"),
        pytest.param((30,), ((1, 1, 1, 1),), id="responses of one token"),
        pytest.param((0,), ((5, 3),), id="nothing in common"),
    ],
)
def test_shapes_of_groups(prefixes, responses):
    assert_equal_to_unpatched(build(dtype=torch.float64), text_groups(prefixes, responses), 1e-10, EXACT)


def test_empty_and_identical_responses():
    """A row that is all prefix leaves its last token out of it; equal rows share all but their last."""
    prefix, answer = torch.arange(10, 18), torch.tensor([30, 31, 32])
    rows = [(0, prefix, answer[:0]), (0, prefix, answer), (1, prefix + 9, answer), (1, prefix + 9, answer)]
    groups = assemble(rows, "right", 1, 0)
    model = build(dtype=torch.float64)
    assert_equal_to_unpatched(model, groups, 1e-10, EXACT)
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
    assert counted.embedded == [7 + (1 + 4) + 10 + (1 + 1)]
    # two of the first group's other row; all three of either row of the second, two of them the same
    assert counted.head_rows == [3 + 2 + 2]


def test_rows_of_nothing_but_padding():
    groups = text_groups((6,), ((3, 4),))
    for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        row = torch.full_like(groups.batch[name][:1], fill)
        groups.batch[name] = torch.cat([groups.batch[name], row])
    model = build()
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(**groups.batch, group_ids=[0, 0, 0])
    assert not out.log_probs[2].any()
    batch = {k: v[:2] for k, v in groups.batch.items()}
    assert_scores_of(out.log_probs[:2], unpatched(model, batch).log_probs)


def assert_scores_of(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("fused", [None, "torch"])
def test_a_batch_of_nothing_but_padding(fused):
    """What a rank without data is given: everything is 0, whatever the padding holds, and every parameter has a gradient."""
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 4]])
    model = build()
    batch = {"input_ids": ids, "attention_mask": torch.zeros_like(ids), "labels": ids}
    with patched(model, prefix_grouper=True, fused=fused):
        out = model(**batch, group_ids=[0, 0])
        (out.logits.sum() if fused is None else out.loss + out.log_probs.sum()).backward()
    # the models' own loss is a mean of nothing
    assert out.loss.isnan() if fused is None else out.loss == 0
    shown = (out.logits,) if fused is None else (out.log_probs, out.entropy)
    assert all(x.shape[:2] == ids.shape and not x.any() for x in shown)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_nothing_to_score():
    groups = text_groups()
    groups.batch["labels"][:] = -100
    model = build()
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(**groups.batch, group_ids=groups.group_ids)
        out.loss.backward()
    assert out.loss == 0
    assert not out.log_probs.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_no_mask_means_no_padding():
    groups = text_groups((8,), ((5, 5),), extra=0)
    del groups.batch["attention_mask"]
    assert_equal_to_unpatched(build(dtype=torch.float64), groups, 1e-10, EXACT)


# --- the caller's arguments


def test_given_position_ids_are_used():
    """Ids that the unpacked batch would use: counted from 5, with a gap, and shifted in one row of a group."""
    groups = text_groups((8,), ((5, 4),), extra=0)
    groups.batch["labels"] = torch.where(groups.real, groups.batch["input_ids"], -100)
    ids = torch.arange(5, 18).expand(2, -1).clone()
    ids[:, 4:] += 3
    model = build(dtype=torch.float64)
    assert_equal_to_unpatched(model, Given(groups, ids), 1e-10, EXACT)
    ids[1] += 40
    assert_equal_to_unpatched(model, Given(groups, ids), 1e-5, 1e-4)


def Given(groups, position_ids):
    groups.batch["position_ids"] = position_ids
    return groups


def test_tokens_at_other_positions_are_other_tokens():
    groups = text_groups((8,), ((5, 4),), extra=0)
    ids = torch.arange(13).expand(2, -1).clone()
    ids[1, 6:] += 2
    groups.batch["position_ids"] = ids
    model = build(dtype=torch.float64)
    assert_equal_to_unpatched(model, groups, 1e-10, EXACT)
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
    assert counted.embedded == [6 + (2 + 5) + (2 + 4)]


@pytest.mark.parametrize("step", [3, -1], ids=["ahead", "twice the same"])
def test_position_ids_that_jump_need_a_mask(step):
    """Without a mask and a cache the unpatched model splits the rows where ids jump, and attends to nothing before it."""
    groups = text_groups((8,), ((5, 4),), extra=0)
    ids = torch.arange(13).expand(2, -1).clone()
    ids[:, 4:] += step
    groups.batch |= {"position_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    model = build(dtype=torch.float64)
    assert_equal_to_unpatched(model, groups, 1e-10, EXACT)
    masked = model(input_ids=groups.batch["input_ids"], position_ids=ids, attention_mask=torch.ones_like(ids)).logits
    del groups.batch["attention_mask"]
    bare = model(input_ids=groups.batch["input_ids"], position_ids=ids, use_cache=False).logits
    assert (masked - bare).abs().max() > 0.1
    with patched(model, prefix_grouper=True), pytest.raises(BadOptionError, match="position_ids jump within a row"):
        model(**groups.batch, group_ids=groups.group_ids)


def test_one_set_of_position_ids_for_all_rows():
    groups = text_groups((8,), ((5, 5),), extra=0)
    groups.batch["position_ids"] = torch.arange(13)[None]
    assert_equal_to_unpatched(build(dtype=torch.float64), groups, 1e-10, EXACT)


def test_shift_labels_are_taken_as_aligned():
    groups = text_groups()
    groups.batch["shift_labels"] = shifted(groups.batch.pop("labels"))
    model = build(dtype=torch.float64)
    assert_equal_to_unpatched(model, groups, 1e-10, EXACT)


@pytest.mark.parametrize("keep", [4, 9, 0, torch.tensor([3, 12, 9])])
def test_logits_to_keep(keep):
    """`logits_to_keep` counts columns of the caller's batch, and only rows of those are computed."""
    model, groups = build(dtype=torch.float64), text_groups(side="left")
    columns = slice(-keep, None) if isinstance(keep, int) and keep else slice(None) if isinstance(keep, int) else keep
    call = {**groups.batch, "group_ids": groups.group_ids, "logits_to_keep": keep}
    wanted = unpatched(model, groups.batch)
    with patched(model, prefix_grouper=True, fused="torch"):
        out = []
        counted = count(model, lambda: out.append(model(**call)))
    torch.testing.assert_close(out[0].log_probs, wanted.log_probs[:, columns], rtol=0, atol=1e-5)
    assert counted.head_rows == [int((shifted(groups.batch["labels"])[:, columns] != -100).sum())]
    del call["labels"]
    plain = model(**{k: v for k, v in call.items() if k != "group_ids"}).logits
    with patched(model, prefix_grouper=True):
        logits = model(**call).logits
    real = groups.real[:, columns]
    torch.testing.assert_close(logits[real], plain[real], rtol=0, atol=1e-4)


def temperatures(groups):
    generator = torch.Generator().manual_seed(4)
    rows = 0.5 + torch.rand(groups.real.shape[0], generator=generator)
    return {
        "number": 0.7,
        "0-d": torch.tensor(0.7),
        "per row": rows,
        "per token": 0.5 + torch.rand(groups.real.shape, generator=generator),
    }


@pytest.mark.parametrize("kind", ["number", "0-d", "per row", "per token"])
@pytest.mark.parametrize("where", ["call", "scope"])
@pytest.mark.parametrize("labels", ["responses", "all"])
def test_temperature(kind, where, labels):
    """Aligned with the caller's rows, whether it comes with the call or lies on the fused head's scope."""
    model, groups = build(dtype=torch.float64), text_groups()
    if labels == "all":
        groups.batch["labels"] = torch.where(groups.real, groups.batch["input_ids"], -100)
    heat = temperatures(groups)[kind]
    wanted = unpatched(model, groups.batch, heat)
    right = gradients(model, lambda: objective(unpatched(model, groups.batch, heat)))
    call = {"temperature": heat} if where == "call" else {}
    fused = FusedHead("torch", temperature=heat) if where == "scope" else "torch"
    with patched(model, prefix_grouper=True, fused=fused):
        out = model(**groups.batch, group_ids=groups.group_ids, **call)
        left = gradients(model, lambda: objective(model(**groups.batch, group_ids=groups.group_ids, **call)))
    torch.testing.assert_close(out.log_probs, wanted.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.entropy, wanted.entropy, rtol=0, atol=1e-6)
    assert_gradients(left, right, 1e-6)


def test_loss_counts_every_member_of_a_shared_row():
    groups = text_groups((20,), ((5, 6, 7),))
    groups.batch["labels"] = torch.where(groups.real, groups.batch["input_ids"], -100)
    model = build(dtype=torch.float64)
    plain = model(**groups.batch)
    counted = model(**groups.batch, num_items_in_batch=11)
    for fused in (None, "torch"):
        with patched(model, prefix_grouper=True, fused=fused):
            out = model(**groups.batch, group_ids=groups.group_ids)
            other = model(**groups.batch, group_ids=groups.group_ids, num_items_in_batch=11)
        torch.testing.assert_close(out.loss.double(), plain.loss.double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(other.loss.double(), counted.loss.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("outputs", ["entropy", "log_probs"])
def test_a_fused_head_that_gives_one_output(outputs):
    groups = text_groups((20,), ((5, 6, 7),))
    groups.batch["labels"] = torch.where(groups.real, groups.batch["input_ids"], -100)
    model = build(dtype=torch.float64)
    plain, wanted = model(**groups.batch), unpatched(model, groups.batch)
    with patched(model, prefix_grouper=True, fused=FusedHead("torch", outputs=(outputs,))):
        out = model(**groups.batch, group_ids=groups.group_ids)
    torch.testing.assert_close(out.loss.double(), plain.loss.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(getattr(out, outputs), getattr(wanted, outputs), rtol=0, atol=1e-10)
    assert (out.log_probs if outputs == "entropy" else out.entropy) is None


def test_hidden_states_and_tuples_come_back_in_the_callers_layout():
    model, groups = build(dtype=torch.float64), text_groups()
    plain = model(**groups.batch, output_hidden_states=True)
    with patched(model, prefix_grouper=True):
        out = model(**groups.batch, group_ids=groups.group_ids, output_hidden_states=True)
        parts = model(**groups.batch, group_ids=groups.group_ids, return_dict=False)
    assert len(out.hidden_states) == len(plain.hidden_states)
    for ours, theirs in zip(out.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(ours[groups.real], theirs[groups.real], rtol=0, atol=1e-9)
        assert not ours[~groups.real].any()
    assert isinstance(parts, tuple)
    torch.testing.assert_close(parts[0], out.loss)
    torch.testing.assert_close(parts[1], out.logits)


def test_positional_arguments():
    model, groups = build(), text_groups()
    with patched(model, prefix_grouper=True, fused="torch"):
        named = model(**groups.batch, group_ids=groups.group_ids)
        positional = model(
            groups.batch["input_ids"],
            groups.batch["attention_mask"],
            labels=groups.batch["labels"],
            group_ids=groups.group_ids.tolist(),
        )
    assert torch.equal(named.log_probs, positional.log_probs)


# --- groups that nobody names


def test_groups_are_found_by_tokens():
    model, groups = build(), text_groups()
    wanted = unpatched(model, groups.batch)
    with patched(model, prefix_grouper=True, fused="torch"):
        out = []
        counted = count(model, lambda: out.append(model(**groups.batch)))
    assert counted.embedded == [groups.tokens]
    assert_scores(out[0], wanted, 1e-4)


def test_the_grouping_found_leaves_the_fewest_tokens():
    """All rows begin with the same 3 tokens; four of them go on together. One group of seven would save less."""
    system, question = torch.tensor([3, 4, 5]), torch.arange(20, 40)
    rows = [(0, torch.cat([system, question]), torch.tensor([50 + i])) for i in range(4)]
    rows += [(0, system, torch.tensor([60 + i, 61, 62])) for i in range(3)]
    groups = assemble([rows[i] for i in (4, 0, 5, 1, 2, 6, 3)], "right", 0, 0)
    model = build()
    with patched(model, prefix_grouper=True, fused="torch"):
        counted = count(model, lambda: model(**groups.batch))
    assert counted.embedded == [(23 + 4) + (3 + 9)]


def test_calls_that_share_nothing_run_as_they_are():
    model, groups = build(), text_groups()
    plain = model(input_ids=groups.batch["input_ids"][:1]).logits
    rows = torch.tensor([[3, 4, 5], [6, 4, 5]])
    two = model(input_ids=rows).logits
    with patched(model, prefix_grouper=True):
        assert torch.equal(model(input_ids=groups.batch["input_ids"][:1]).logits, plain)
        assert torch.equal(model(input_ids=rows).logits, two)
        model(**groups.batch)


def test_find_false_leaves_calls_without_group_ids_alone():
    model, groups = build(), text_groups()
    plain = model(**groups.batch).logits
    with patched(model, prefix_grouper=PrefixGrouper(find=False)):
        assert torch.equal(model(**groups.batch).logits, plain)
        model(**groups.batch, group_ids=groups.group_ids)


def test_a_scope_in_which_nothing_was_shared_says_so():
    model, groups = build(), text_groups()
    with (
        pytest.raises(SeamNotReachedError, match=r"ran 1 times .* no call shared a prefix"),
        patched(model, prefix_grouper=PrefixGrouper(find=False)),
    ):
        model(**groups.batch)


# --- refusals


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"group_ids": torch.tensor([0, 1])}, BadOptionError, "group_ids must be 6 integers"),
        ({"group_ids": torch.zeros(6)}, BadOptionError, r"group_ids must be int64 \[6\].*float32"),
        ({"group_ids": "abcdef"}, BadOptionError, "group_ids must be 6 integers"),
        ({"input_ids": None}, BadOptionError, "input_ids .* are needed"),
        ({"use_cache": True}, BadOptionError, "leave out use_cache"),
        ({"past_key_values": object()}, BadOptionError, "cannot have a past_key_values"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions=True .* no attention weights exist"),
        ({"output_router_logits": True}, UnsupportedError, "output_router_logits=True .* each prefix token once"),
        ({"attention_mask": torch.ones(6, 1, 18, 18)}, BadOptionError, r"attention_mask must be \[B, S\]"),
        ({"attention_mask": torch.ones(6, 4)}, BadOptionError, r"attention_mask is \[6, 4\] and input_ids \[6, 18\]"),
        ({"labels": torch.zeros(6, 4, dtype=torch.int64)}, BadOptionError, r"labels is \[6, 4\], wanted \[6, 18\]"),
        ({"position_ids": torch.zeros(6, 4)}, BadOptionError, r"position_ids are \[6, 4\], wanted \[6, 18\]"),
        ({"position_ids": torch.arange(18).expand(6, -1) % 5}, BadOptionError, "position_ids restart within a row"),
        ({"temperature": torch.ones(6, 4)}, BadOptionError, r"temperature is \[6, 4\]"),
        ({"logits_to_keep": torch.zeros(6, 4).long()}, BadOptionError, "logits_to_keep must be"),
        ({"inputs_embeds": torch.zeros(6, 18, 64)}, UnsupportedError, r"a tensor inputs_embeds \[6, 18, 64\]"),
        ({"pixel_values": torch.zeros(6, 18)}, UnsupportedError, "looked for image_grid_thw"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_calls_that_cannot_be_grouped(change, kind, message):
    model, groups = build(), text_groups(extra=2)
    groups.batch["group_ids"] = groups.group_ids
    assert groups.real.shape == (6, 18)
    with patched(model, prefix_grouper=True, fused="torch") as scope, pytest.raises(kind, match=message):
        model(**(groups.batch | change))
    assert scope.state == "closed"


def test_temperature_needs_a_fused_head():
    model, groups = build(), text_groups()
    with patched(model, prefix_grouper=True), pytest.raises(BadOptionError, match="temperature= needs fused="):
        model(**groups.batch, group_ids=groups.group_ids, temperature=0.5)


def test_active_dropout_is_refused_and_dropout_in_eval_is_not():
    groups = text_groups()
    model = build(attention_dropout=0.1)
    assert_equal_to_unpatched(model, groups)
    model.train()
    with patched(model, prefix_grouper=True), pytest.raises(UnsupportedError, match=r"Qwen3Attention drops .*p=0\.1"):
        model(**groups.batch, group_ids=groups.group_ids)
    model = build()
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.2))
    model.train()
    with patched(model, prefix_grouper=True), pytest.raises(UnsupportedError, match=r"active dropout \(Dropout\(p=0.2"):
        model(**groups.batch, group_ids=groups.group_ids)


@pytest.mark.parametrize(("family", "name"), [("mixtral", "Mixtral"), ("phimoe", "Phimoe")])
def test_noise_of_routers_is_refused_while_training(family, name):
    groups = text_groups()
    model = other_family(family, name, num_local_experts=4, router_jitter_noise=0.1, input_jitter_noise=0.1)
    assert_equal_to_unpatched(model, groups)
    model.train()
    with patched(model, prefix_grouper=True), pytest.raises(UnsupportedError, match=r"active noise \(\w*jitter_noise\)"):
        model(**groups.batch, group_ids=groups.group_ids)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_images_that_see_ahead_are_refused(name):
    with pytest.raises(UnsupportedError, match="lets image tokens see ahead"):
        patched(tiny_models.build(name)[0], prefix_grouper=True).plan()


@pytest.mark.parametrize("value", ["yes", 3, 0.5])
def test_options_that_are_none(value):
    with pytest.raises(BadOptionError, match="prefix_grouper must be True or a PrefixGrouper"):
        patched(build(), prefix_grouper=value)


def test_options_of_the_patch():
    with pytest.raises(BadOptionError, match="find must be True or False"):
        PrefixGrouper(find="tokens")
    with pytest.raises(BadOptionError, match="backend must be one of 'auto'"):
        PrefixGrouper(backend="fast")
    names = [patch.name for patch in patched(build(), prefix_grouper=False).patches]
    assert "prefix_grouper" not in names
