"""PEFT: adapters on attention, feed-forward blocks and head, put on before and inside, switched off inside."""

from __future__ import annotations

import peft
import pytest
import torch

from scoped_patch import assert_clean, patched
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, gradients, objective, unpatched
from tests.support.wrapped import VARIANTS, assert_close_scores, scores_of, unchanged
from tests.tiny_models import build

IDS = token_ids()
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}
TARGETS = {
    "attention": ["q_proj", "v_proj"],
    "feed-forward": ["gate_proj", "up_proj", "down_proj"],
    "head": ["lm_head"],
    "all": ["q_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],
}


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


def adapted(targets, model=None, **options):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    made = peft.get_peft_model(build("llama")[0] if model is None else model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def check(model, variant):
    wanted = unpatched(model, BATCH)
    right = gradients(model, lambda: objective(wanted))
    with unchanged(model), patched(model, **variant):
        found = scores_of(model(**BATCH), BATCH)
        assert_close_scores(found, wanted)
        assert_gradients(gradients(model, lambda: objective(found)), right)
    assert_close_scores(scores_of(model(**BATCH), BATCH), wanted)


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_on(variant, targets):
    check(adapted(TARGETS[targets]), variant)


def test_saved_modules(variant):
    check(adapted(["up_proj"], modules_to_save=["lm_head"]), variant)


def test_put_on_inside(variant):
    """A model gets its adapters while it is patched: the projections of the blocks are looked up at each call."""
    plain, _ = build("llama")
    targets = ["q_proj", "gate_proj", "down_proj"]
    wanted = unpatched(adapted(targets), BATCH)
    with patched(plain, **variant):
        model = adapted(targets, plain)
        assert_close_scores(scores_of(model(**BATCH), BATCH), wanted)
    assert_close_scores(scores_of(model(**BATCH), BATCH), wanted)
    check(model, variant)


def test_switched_off_inside(variant):
    model = adapted(TARGETS["all"])
    wanted = unpatched(model, BATCH)
    with model.disable_adapter():
        base = unpatched(model, BATCH)
    with patched(model, **variant):
        with model.disable_adapter():
            assert_close_scores(scores_of(model(**BATCH), BATCH), base)
        assert_close_scores(scores_of(model(**BATCH), BATCH), wanted)


def test_merged_and_unloaded_inside(variant):
    """Unloading puts other modules in the place of the patched ones; leaving does not mind."""
    model = adapted(TARGETS["attention"])
    wanted = unpatched(model, BATCH)
    with patched(model, **variant):
        plain = model.merge_and_unload()
        assert_close_scores(scores_of(plain(**BATCH), BATCH), wanted, atol=1e-4)
    assert_close_scores(scores_of(plain(**BATCH), BATCH), wanted, atol=1e-4)


def test_prompt_learning_switched_off_inside(variant):
    """PEFT leaves a forward on its own wrapper there; it is not ours to put back, and does no harm."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(build("llama")[0], config)
    loss = model(**BATCH).loss
    base = unpatched(build("llama")[0], BATCH)
    with patched(model, **variant):
        with model.disable_adapter():
            assert_close_scores(scores_of(model(**BATCH), BATCH), base)
        torch.testing.assert_close(model(**BATCH).loss, loss)
    torch.testing.assert_close(model(**BATCH).loss, loss)


def test_a_frozen_base_gets_no_gradients_and_the_adapters_do(variant):
    model = adapted(TARGETS["feed-forward"])
    with patched(model, **variant):
        objective(scores_of(model(**BATCH), BATCH)).backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, p in model.named_parameters() if p.requires_grad}
    assert with_gradient


def test_saved_adapters_are_those_of_the_unpatched_model(variant, tmp_path):
    model = adapted(TARGETS["all"])
    wanted = peft.get_peft_model_state_dict(model)
    with patched(model, **variant):
        inside = peft.get_peft_model_state_dict(model)
        model.save_pretrained(tmp_path)
    assert list(inside) == list(wanted)
    loaded = peft.PeftModel.from_pretrained(build("llama")[0], tmp_path)
    assert_close_scores(unpatched(loaded, BATCH), unpatched(model, BATCH))
