"""`generate()` inside the scope is `generate()` outside: same tokens, cache on."""

from __future__ import annotations

import pytest
import torch

from scoped_patch import patched
from tests.support.models import OwnLossLlama, of_class, token_ids
from tests.support.scores import assert_scores, unpatched
from tests.tiny_models import TEXT, build

IDS = token_ids(2, 5)
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "without a cache": {"do_sample": False, "use_cache": False},
    "scores": {"do_sample": False, "output_logits": True, "return_dict_in_generate": True},
}


def generate(model, way, **more):
    torch.manual_seed(4)
    return model.generate(IDS, max_new_tokens=6, min_new_tokens=6, **WAYS[way], **more)


def run(model, way):
    model.eval()
    wanted = generate(model, way)
    with patched(model, fused="torch"):
        found = generate(model, way)
        after = model(input_ids=IDS)
    assert after.logits is None
    return found, wanted, after


@pytest.mark.parametrize("way", WAYS)
def test_llama(way):
    model, _ = build("llama")
    found, wanted, after = run(model, way)
    if way == "scores":
        for ours, theirs in zip(found.logits, wanted.logits, strict=True):
            assert torch.equal(ours, theirs)
        found, wanted = found.sequences, wanted.sequences
    assert found.shape == (2, 11)
    assert torch.equal(found, wanted)
    assert_scores(after, unpatched(model, {"input_ids": IDS}))


@pytest.mark.parametrize("name", TEXT)
def test_every_family(name):
    model, _ = build(name)
    for way in ("greedy", "sampling", "beam"):
        found, wanted, _ = run(model, way)
        assert torch.equal(found, wanted), way


def test_log_probs_of_what_was_generated_are_those_that_were_sampled_from():
    model, _ = build("qwen3")
    model.eval()
    with patched(model, fused="torch"), torch.no_grad():
        made = generate(model, "sampling", output_scores=True, return_dict_in_generate=True)
        out = model(input_ids=made.sequences, temperature=0.8)
    for step, scores in enumerate(made.scores):
        token = made.sequences[:, 5 + step, None]
        kept = scores > float("-inf")  # top_k cuts the rest, and renormalises
        full = torch.where(kept, scores, torch.tensor(float("-inf"))).log_softmax(-1).gather(-1, token)[:, 0]
        # the same order, and a difference that is only the mass that was cut
        assert (out.log_probs[:, 4 + step] <= full + 1e-4).all()


def test_a_generate_that_raises_leaves_the_scope_working():
    model, _ = build("llama")
    with patched(model, fused="torch"):
        with pytest.raises(Exception, match="max_new_tokens"):
            model.generate(IDS, max_new_tokens=-1)
        assert model(input_ids=IDS).log_probs is not None


def test_generate_inside_two_scopes_on_one_model():
    model, _ = build("llama")
    model.eval()
    wanted = generate(model, "greedy")
    with patched(model, fused="torch"), patched(model, fused="torch"):
        assert torch.equal(generate(model, "greedy"), wanted)
        assert model(input_ids=IDS).logits is None


def test_generate_of_the_other_model_of_the_class_is_left_alone():
    model, _ = build("llama")
    other, _ = build("llama", seed=1)
    other.eval()
    wanted = generate(other, "greedy")
    with patched(model, fused="torch"):
        assert torch.equal(generate(other, "greedy"), wanted)
        assert "generate" not in other.__dict__


def test_signature_of_generate_stays():
    import inspect

    model, _ = build("llama")
    wanted = inspect.signature(model.generate)
    with patched(model, fused="torch"):
        assert inspect.signature(model.generate) == wanted
        assert model.generate.__doc__ == type(model).generate.__doc__


def test_gradient_checkpointing_and_training_mode_do_not_matter():
    model, _ = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    wanted = generate(model, "greedy")
    with patched(model, fused="torch"):
        assert torch.equal(generate(model, "greedy"), wanted)


def test_a_model_that_computes_its_own_loss():
    """Remote code that makes its loss in the forward: log-probs and the loss are made here, from the labels as given."""
    model = of_class(OwnLossLlama)
    labels = IDS.clone()
    labels[:, :2] = -100
    loss = model(input_ids=IDS, labels=labels).loss
    wanted = unpatched(model, {"input_ids": IDS, "labels": labels})
    with patched(model, fused="torch") as scope:
        out = model(input_ids=IDS, labels=labels)
    assert_scores(out, wanted)
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-5)
    assert "computes its loss itself" in str(scope.explain())
