"""The fused head equals the unpatched model on every text family: values, gradients, loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scoped_patch import FusedHead, patched
from tests.support.scores import (
    assert_gradients,
    assert_scores,
    gradients,
    objective,
    reference,
    shifted,
    take_gradients,
    unpatched,
)
from tests.tiny_models import TEXT, VLMS, build

SEQ = 10
MIXTURES = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "kimi_linear")


def ids_of(batch: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 100, (batch, SEQ), generator=torch.Generator().manual_seed(seed))


def holes(ids: torch.Tensor) -> torch.Tensor:
    """Labels: the prompt and a token in the middle are ignored."""
    labels = ids.clone()
    labels[:, :3] = -100
    labels[0, 6] = -100
    return labels


def per_token(batch: int) -> torch.Tensor:
    return torch.rand(batch, SEQ, generator=torch.Generator().manual_seed(9)) + 0.4


PER_ROW = torch.tensor([0.6, 1.7])

# name -> (batch of the call, temperature of the call, temperature of the scope)
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "plain": ({"input_ids": ids_of(1)}, None, 1.0),
    "batch of 2, temperature of the call": ({"input_ids": ids_of(2)}, 0.7, 1.0),
    "temperature of the scope": ({"input_ids": ids_of(2)}, None, 0.7),
    "the call's temperature wins": ({"input_ids": ids_of(1)}, 0.7, 3.0),
    "temperature per row": ({"input_ids": ids_of(2)}, PER_ROW, 1.0),
    "temperature per token": ({"input_ids": ids_of(2)}, per_token(2), 1.0),
    "temperature per row, on the scope": ({"input_ids": ids_of(2)}, None, PER_ROW),
    "temperature per token, on the scope": ({"input_ids": ids_of(2)}, None, per_token(2)),
    "labels with holes": ({"input_ids": ids_of(2), "labels": holes(ids_of(2))}, 0.7, 1.0),
    "labels of other tokens": ({"input_ids": ids_of(1), "labels": ids_of(1, seed=5)}, None, 1.0),
    "shift_labels": ({"input_ids": ids_of(2), "shift_labels": holes(ids_of(2, seed=6))}, None, 1.0),
}


@pytest.fixture(scope="module", params=TEXT)
def model(request):
    made, _ = build(request.param)
    return made


def call(model: Any, batch: dict[str, Any], temperature: Any) -> Any:
    return model(**batch, use_cache=False, **({} if temperature is None else {"temperature": temperature}))


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients(model, case):
    batch, on_call, on_scope = CASES[case]
    temperature = on_scope if on_call is None else on_call
    wanted = unpatched(model, {**batch, "use_cache": False}, temperature)
    wanted_gradients = gradients(model, lambda: objective(wanted))
    with patched(model, fused=FusedHead("torch", temperature=on_scope)):
        out = call(model, batch, on_call)
        assert out.logits is None
        assert_scores(out, wanted)
        assert out.log_probs[:, -1].abs().max() == 0 or "shift_labels" in batch
        assert (out.loss is None) == ("labels" not in batch)
        assert_gradients(gradients(model, lambda: objective(out)), wanted_gradients)


@pytest.mark.parametrize("keep", [4, torch.tensor([1, 4, 8]), torch.tensor([], dtype=torch.int64)], ids=["int", "rows", "none"])
def test_logits_to_keep(model, keep):
    """Zero tokens at the head, too (`none`): nothing is scored, and backward works."""
    ids = ids_of(2)
    rows = slice(-keep, None) if isinstance(keep, int) else keep
    targets = shifted(ids)[:, rows]
    temperature = per_token(2)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
    wanted = reference(logits, targets, temperature[:, rows])
    wanted_gradients = gradients(model, lambda: objective(wanted))
    with patched(model, fused="torch"):
        out = model(input_ids=ids, use_cache=False, logits_to_keep=keep, temperature=temperature)
        assert out.log_probs.shape == (2, targets.shape[1])
        assert_scores(out, wanted)
        found = gradients(model, lambda: objective(out))
    if targets.numel():
        assert_gradients(found, wanted_gradients)
    else:
        assert all(not g.any() for g in found.values())


def test_all_labels_ignored(model):
    ids = ids_of(2)
    with patched(model, fused="torch"):
        out = model(input_ids=ids, labels=torch.full_like(ids, -100), use_cache=False)
        assert not out.log_probs.any()
        assert not out.entropy.any()
        assert out.loss == 0
        found = gradients(model, lambda: out.loss + objective(out))
    assert found
    assert all(not g.any() for g in found.values())


@pytest.mark.parametrize("items", [None, 13, torch.tensor(13)], ids=["mean", "items", "items tensor"])
def test_loss(model, items):
    """The model's own loss, through its own code: the mean over labels, or the sum over `num_items_in_batch`."""
    batch = {"input_ids": ids_of(2), "labels": holes(ids_of(2)), "use_cache": False}
    if items is not None:
        batch["num_items_in_batch"] = items
    loss = model(**batch).loss
    wanted = gradients(model, lambda: loss)
    with patched(model, fused="torch"):
        out = model(**batch)
        torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-5)
        assert_gradients(gradients(model, lambda: out.loss), wanted)


@pytest.mark.parametrize("items", [None, 13], ids=["mean", "items"])
@pytest.mark.parametrize("name", MIXTURES)
def test_auxiliary_loss_of_mixtures(name, items):
    """Router outputs stay, and the balance loss is added to the loss as it is outside."""
    model, _ = build(name)
    batch = {"input_ids": ids_of(2), "labels": holes(ids_of(2)), "use_cache": False, "output_router_logits": True}
    if items is not None:
        batch["num_items_in_batch"] = items
    plain = model(**batch)
    loss, extra = plain.loss, getattr(plain, "aux_loss", None)
    wanted = gradients(model, lambda: loss)
    with patched(model, fused="torch"):
        out = model(**batch)
        assert type(plain) in type(out).__mro__
        torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-5)
        assert (extra is not None) == (name in ("qwen3_moe", "gpt_oss"))  # the others add no balance loss
        if extra is not None:
            assert extra != 0
            torch.testing.assert_close(out.aux_loss, extra)
            for ours, theirs in zip(out.router_logits, plain.router_logits, strict=True):
                torch.testing.assert_close(ours, theirs)
        assert_gradients(gradients(model, lambda: out.loss), wanted)


def test_inputs_embeds_with_labels(model):
    ids = ids_of(2)
    embeds = model.get_input_embeddings()(ids).detach()
    wanted = reference(model(inputs_embeds=embeds, use_cache=False).logits, shifted(holes(ids)))
    wanted_gradients = gradients(model, lambda: objective(wanted))
    with patched(model, fused="torch"):
        out = model(inputs_embeds=embeds, labels=holes(ids), use_cache=False)
        assert_scores(out, wanted)
        assert_gradients(gradients(model, lambda: objective(out)), wanted_gradients)


def test_padding(model):
    """Left-padded rows with an attention mask: the same as outside, padding scored like any token unless ignored."""
    ids = ids_of(2)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    wanted = unpatched(model, batch)
    wanted_gradients = gradients(model, lambda: objective(wanted))
    with patched(model, fused="torch"):
        out = model(**batch)
        assert_scores(out, wanted)
        assert_gradients(gradients(model, lambda: objective(out)), wanted_gradients)


def test_nothing_is_left(model):
    before = [(id(module), dict(module.__dict__)) for module in model.modules()]
    with patched(model, fused="torch"):
        model(input_ids=ids_of(1), use_cache=False).log_probs.sum().backward()
    take_gradients(model)
    after = [(id(module), dict(module.__dict__)) for module in model.modules()]
    assert [(i, d.keys()) for i, d in before] == [(i, d.keys()) for i, d in after]
    for (_, own), (_, now) in zip(before, after, strict=True):
        assert all(own[key] is now[key] for key in own)


@pytest.mark.parametrize("name", VLMS)
def test_vision_models(name):
    """The same seams serve them: image tokens in, every parameter's gradient right."""
    vision, inputs = build(name)
    labels = inputs.pop("labels")
    wanted = reference(vision(**inputs).logits, shifted(labels))
    right = gradients(vision, lambda: objective(wanted))
    loss = vision(**inputs, labels=labels).loss
    with patched(vision, fused="torch"):
        out = vision(**inputs, labels=labels)
        assert_scores(out, wanted)
        torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-5)
        assert_gradients(gradients(vision, lambda: objective(out)), right)
