"""Patches as switches in a test suite: every test below runs with each stack of them on, and off again afterwards.

Run it with `pytest examples/test_my_model.py`; add `--patch-leaks` to fail any test that leaves a patch behind. Put your
model in the place of the tiny one.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from scoped_patch import FusedHead, active, patched, wrap_call

STACKS = {
    "nothing": {},
    "fused": {"fused": "torch"},
    "tiled": {"tiled_mlp": 4},
    "fused+tiled": {"fused": "torch", "tiled_mlp": 4},
}


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> dict:
    return STACKS[request.param]


def gradient_of(model: Qwen2ForCausalLM, loss: torch.Tensor) -> torch.Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def test_loss_and_gradients_do_not_change(model, batch, stack):
    wanted = model(**batch).loss
    right = gradient_of(model, wanted)
    with patched(model, **stack):
        loss = model(**batch).loss
    # backward may come after the block
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient_of(model, loss), right, rtol=1e-4, atol=1e-5)


def test_generation_does_not_change(model, batch, stack):
    wanted = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    with patched(model, **stack):
        assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), wanted)


def test_a_training_step_lowers_the_loss(model, batch, stack):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        with patched(model, **stack):
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.load_state_dict(state)
    assert losses[-1] < losses[0]


def test_verify_says_which_layer_is_wrong(model, batch):
    """The question "does this patch hold on my model?", asked with your own data, and a wrong patch to see it answered."""
    with patched(model, fused=FusedHead("torch", temperature=0.7), tiled_mlp=4) as scope:
        assert scope.verify(batch).ok
    wrong = wrap_call(model.model.layers[1].mlp, "forward", lambda original, hidden: original(hidden) * 1.01)
    with patched(model, wrong) as scope:
        report = scope.verify(batch)
    assert not report.ok
    assert report.first_difference.what == "output of model.layers.1"


def test_a_scope_for_one_test(model, batch, patched_scope):
    """The fixture of the pytest plugin: entered here, left when the test ends, however it ends."""
    scope = patched_scope(model, fused="torch")
    assert model(**batch).log_probs.shape == (2, 12)
    assert active() == [scope]


def test_nothing_is_left_of_it(model, batch):
    assert not active()
    assert model(**batch).logits is not None
