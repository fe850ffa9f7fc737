"""The tiny models run, learn, and are sharp enough to show a fault in attention or in a bias."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import BUILDERS, TEXT, VLMS, build


@pytest.mark.parametrize("name", BUILDERS)
def test_model_trains(name):
    model, inputs = build(name)
    loss = model(**inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", TEXT)
def test_first_token_reaches_the_last_one(name):
    """Attention is far from uniform: another first token moves the last logits more than std 0.02 lets it."""
    model, inputs = build(name)
    ids = inputs["input_ids"][:, :8]
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 100
    moved = (model(input_ids=ids).logits[0, -1] - model(input_ids=other).logits[0, -1]).abs().max()
    assert moved > 0.5


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    (a, _), (b, _), (c, _) = build("qwen2", seed=3), build("qwen2", seed=3), build("qwen2", seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert a.model.layers[0].self_attn.q_proj.bias.std() > 0.1


def test_lists_name_real_builders():
    assert set(TEXT) | set(VLMS) == set(BUILDERS)
