"""`scope.verify(batch)`: both runs side by side, a wrong patch caught and its layer named, nothing left changed."""

from __future__ import annotations

import pytest
import torch

from scoped_patch import BadTargetError, FusedHead, assert_clean, patched, replace_attribute, wrap_call
from tests.support.models import token_ids
from tests.tiny_models import build

IDS = token_ids()
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture
def model():
    return build("llama")[0]


def test_equal_while_live_and_after(model):
    with patched(model, fused="torch") as scope:
        live = scope.verify(BATCH)
    closed = scope.verify(BATCH)
    for report in (live, closed):
        assert report.ok, str(report)
        assert {"loss", "log_probs", "entropy"} <= {one.what for one in report.comparisons}
        assert report.worst_gradient.relative < 1e-4
        assert report.first_difference is None
        assert not report.missing
        assert "equal at a relative tolerance of 0.0001" in str(report)
    assert model(**BATCH).logits is not None
    assert_clean()


@pytest.mark.parametrize("when", ["live", "closed"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_planted_fault_is_caught_and_the_first_layer_named(model, when, layer):
    wrong = wrap_call(model.model.layers[layer].mlp, "forward", lambda original, hidden: original(hidden) * 1.01)
    with patched(model, wrong, fused="torch") as scope:
        if when == "live":
            report = scope.verify(BATCH)
    if when == "closed":
        report = scope.verify(BATCH)
    assert not report.ok
    assert report.first_difference.what == f"output of model.layers.{layer}"
    assert "DIFFERENT" in str(report)
    assert f"first layer that differs: output of model.layers.{layer}" in str(report)
    assert next(one for one in report.comparisons if one.what == "log_probs").relative > 1e-4


def test_a_fault_in_the_head_shows_in_the_outputs_only(model):
    model.lm_head.weight.requires_grad_(False)
    twin, _ = build("llama")
    wrong = replace_attribute(model.lm_head, "weight", torch.nn.Parameter(twin.lm_head.weight * 1.05, requires_grad=False))
    with patched(model, wrong, fused="torch") as scope:
        report = scope.verify(BATCH)
    assert not report.ok
    assert report.first_difference is None


def test_a_fault_in_backward_only(model):
    """Values agree; a gradient that is lost is missing, one that is scaled is the worst."""

    def detached(original, hidden):
        out = original(hidden)
        return hidden * 0 + out.detach()

    with patched(model, wrap_call(model.model.layers[1].mlp, "forward", detached)) as scope:
        report = scope.verify(BATCH)
    assert not report.ok
    assert any("layers.1.mlp" in name for name in report.missing)
    assert "gradient in one run only" in str(report)

    def scaled(original, hidden):
        out = original(hidden)
        return out * 2 - out.detach()

    with patched(model, wrap_call(model.model.layers[1].mlp, "forward", scaled)) as scope:
        report = scope.verify(BATCH)
    assert not report.ok
    assert report.first_difference is None
    assert report.worst_gradient.relative > 0.1
    assert next(one for one in report.comparisons if one.what == "loss").relative == 0


def test_only_this_scope_is_taken_off(model):
    """What other scopes do is on both sides."""
    with patched(model, wrap_call(model.model.layers[0].mlp, "forward", lambda original, hidden: original(hidden) * 3)):
        with patched(model, fused="torch") as scope:
            assert scope.verify(BATCH).ok
    wrong = wrap_call(model.model.layers[0].mlp, "forward", lambda original, hidden: original(hidden) * 3)
    with patched(model, fused="torch"), patched(model, wrong) as scope:
        report = scope.verify(BATCH)
        assert report.first_difference.what == "output of model.layers.0"


def test_everything_is_as_before_afterwards(model):
    model.train()
    model.model.layers[0].eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index)
    grads = [p.grad for p in model.parameters()]
    flags = [m.training for m in model.modules()]
    keys = [m.__dict__.keys() for m in model.modules()]
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    with patched(model, fused="torch") as scope:
        scope.verify(BATCH)
        assert model(**BATCH).logits is None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert [m.__dict__.keys() for m in model.modules()] == keys
    assert not any(m._forward_hooks for m in model.modules())


def test_dropout_is_off():
    model, _ = build("llama", attention_dropout=0.5)
    with patched(model, fused="torch") as scope:
        assert scope.verify(BATCH).ok


def test_random_numbers_of_other_cards_are_left_alone(model, monkeypatch):
    """Eight ranks of a host that each asked for the state of all its cards would take memory on every one."""

    def touched(*args):
        raise AssertionError("a card that the model is not on was asked for")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    with patched(model, fused="torch") as scope:
        before = torch.get_rng_state()
        assert scope.verify(BATCH).ok
    assert torch.equal(torch.get_rng_state(), before)


def test_without_gradients_and_without_labels(model):
    with patched(model, fused="torch") as scope:
        report = scope.verify({"input_ids": IDS}, gradients=False)
    assert report.ok
    assert report.worst_gradient is None
    assert {one.what for one in report.comparisons} == {"log_probs", "entropy"}


@pytest.mark.parametrize(
    "temperature", [0.7, torch.tensor([0.6, 1.4]), torch.rand(2, 10) + 0.5], ids=["number", "row", "token"]
)
def test_temperature(model, temperature):
    """That of the scope, of the batch, or given: both sides use the same."""
    with patched(model, fused=FusedHead("torch", temperature=temperature)) as scope:
        on_scope = scope.verify(BATCH)
        other = scope.verify(BATCH, temperature=2.0)
    with patched(model, fused="torch") as scope:
        in_batch = scope.verify({**BATCH, "temperature": temperature})
        given = scope.verify(BATCH, temperature=temperature)
        plain = scope.verify(BATCH)
    for report in (on_scope, in_batch, given, other, plain):
        assert report.ok, str(report)

    def entropy(report):
        return next(one.patched for one in report.comparisons if one.what == "entropy")

    assert entropy(on_scope) == entropy(in_batch) == entropy(given)
    assert len({entropy(on_scope), entropy(other), entropy(plain)}) == 3


def test_bf16_has_a_wider_tolerance():
    model, _ = build("llama", dtype=torch.bfloat16)
    with patched(model, fused="torch") as scope:
        report = scope.verify(BATCH)
    assert report.tolerance == 5e-2
    assert report.ok, str(report)


def test_a_checkpointed_model(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with patched(model, fused="torch") as scope:
        assert scope.verify(BATCH).ok


def test_renders_as_table_and_as_html(model):
    from rich.console import Console

    with patched(model, fused="torch") as scope:
        report = scope.verify(BATCH)
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report)
    text = console.export_text()
    assert "log_probs" in text
    assert "max abs diff" in text
    assert "<table>" in report._repr_html_()


def test_bad_arguments(model):
    with patched(model, fused="torch") as scope:
        with pytest.raises(BadTargetError, match="as a dict, got Tensor"):
            scope.verify(IDS)
        with pytest.raises(BadTargetError, match="nothing to compare"):
            with patched(model.model) as inner:
                inner.verify({"input_ids": IDS}, gradients=False)
    with patched(replace_attribute(torch.nn.functional, "relu", torch.relu)) as scope:
        with pytest.raises(BadTargetError, match="needs a scope on a model"):
            scope.verify(BATCH)
