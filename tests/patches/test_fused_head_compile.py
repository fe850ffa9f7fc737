"""`torch.compile(fullgraph=True)` around and inside the scope: right on every enter and exit, two graphs in all."""

from __future__ import annotations

import pytest
import torch

from scoped_patch import FusedHead, assert_clean, patched, wrap_call
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, assert_scores, gradients, objective, take_gradients, unpatched
from tests.tiny_models import build

IDS = token_ids()
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}


class Backend:
    """Counts the graphs that are compiled, and runs them with `aot_eager` (backward traced too) or as they are."""

    def __init__(self, inner: str = "eager") -> None:
        from torch._dynamo import lookup_backend

        self.graphs = 0
        self.inner = lookup_backend(inner)

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.inner(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    assert_clean()


@pytest.fixture
def model():
    return build("llama", num_hidden_layers=1)[0]


def compiled(model, backend, in_place=False):
    if in_place:
        model.compile(backend=backend, fullgraph=True, dynamic=False)
        return model
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "model.compile"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_compiled_outside(model, inner, in_place):
    """Three times in and out, forward and backward: exact each time, and two graphs in all."""
    plain = build("llama", num_hidden_layers=1)[0]
    logits = plain(**BATCH).logits.detach()
    plain_gradients = gradients(plain, lambda: plain(**BATCH).loss)
    wanted = unpatched(plain, BATCH)
    right = gradients(plain, lambda: objective(wanted))
    backend = Backend(inner)
    fast = compiled(model, backend, in_place)
    step = patched(fast, fused="torch")
    for _ in range(3):
        out = fast(**BATCH)
        torch.testing.assert_close(out.logits, logits)
        assert_gradients(gradients(model, lambda out=out: out.loss), plain_gradients)
        with step:
            out = fast(**BATCH)
            assert out.logits is None
            assert_scores(out, wanted)
            assert_gradients(gradients(model, lambda out=out: objective(out)), right)
    assert backend.graphs == 2


@pytest.mark.parametrize("target", ["model", "wrapper"])
def test_new_scope_objects_each_time(model, target):
    """`with patched(model, ...)` written out in the loop reuses the two graphs too."""
    wanted = unpatched(model, BATCH)
    backend = Backend()
    fast = compiled(model, backend)
    for _ in range(4):
        assert fast(**BATCH).logits is not None
        with patched(model if target == "model" else fast, fused="torch"):
            assert_scores(fast(**BATCH), wanted)
    assert backend.graphs == 2


def test_compiled_inside(model):
    wanted = unpatched(model, BATCH)
    logits = model(**BATCH).logits
    backend = Backend()
    with patched(model, fused="torch"):
        fast = compiled(model, backend)
        assert_scores(fast(**BATCH), wanted)
    assert backend.graphs == 1
    for _ in range(2):
        torch.testing.assert_close(fast(**BATCH).logits, logits)
        with patched(model, fused="torch"):
            out = fast(**BATCH)
            assert_scores(out, wanted)
            objective(out).backward()
    take_gradients(model)
    assert backend.graphs == 2


def test_backward_after_leaving(model):
    wanted = unpatched(model, BATCH)
    right = gradients(model, lambda: objective(wanted))
    fast = compiled(model, Backend("aot_eager"))
    with patched(model, fused="torch"):
        out = fast(**BATCH)
    assert_gradients(gradients(model, lambda: objective(out)), right)


def test_only_the_decoder_is_compiled(model):
    """A common layout: the decoder compiled in place, the head eager."""
    wanted = unpatched(model, BATCH)
    backend = Backend()
    model.model.compile(backend=backend, fullgraph=True, dynamic=False)
    for _ in range(3):
        assert model(**BATCH).logits is not None
        with patched(model, fused="torch"):
            assert_scores(model(**BATCH), wanted)
    assert backend.graphs == 1


def test_temperature(model):
    """A number and a tensor; another value of the tensor is no other graph."""
    backend = Backend()
    fast = compiled(model, backend)
    rows = torch.tensor([0.7, 1.3])
    with patched(model, fused="torch"):
        assert_scores(fast(**BATCH, temperature=0.7), unpatched(build("llama", num_hidden_layers=1)[0], BATCH, 0.7))
        for factor in (1.0, 2.0, 3.0):
            out = fast(**BATCH, temperature=rows * factor)
            assert_scores(out, unpatched(build("llama", num_hidden_layers=1)[0], BATCH, rows * factor))
    assert backend.graphs == 2


def test_softcap_and_options(model):
    capped, _ = build("gemma3_text", num_hidden_layers=1, layer_types=["full_attention"], final_logit_softcapping=3.0)
    wanted = unpatched(capped, BATCH)
    backend = Backend()
    fast = compiled(capped, backend)
    with patched(capped, fused=FusedHead("torch", entropy_grad=False)):
        assert_scores(fast(**BATCH), wanted)
    assert backend.graphs == 1


def test_a_wrapped_layer_of_the_user(model):
    """Ad-hoc patches of instances are seen by compiled code on every enter and exit, too."""
    mine = wrap_call(model.model.layers[0].mlp, "forward", lambda original, hidden: original(hidden * 2))
    with patched(model, mine):
        wanted = unpatched(model, BATCH)
    logits = model(**BATCH).logits
    backend = Backend()
    fast = compiled(model, backend)
    step = patched(model, mine, fused="torch")
    for _ in range(3):
        torch.testing.assert_close(fast(**BATCH).logits, logits)
        with step:
            assert_scores(fast(**BATCH), wanted)
    assert backend.graphs == 2


def test_no_recompile_between_eager_uses(model):
    """Eager calls in and outside the scope, and reports, are no reason to compile again."""
    backend = Backend()
    fast = compiled(model, backend)
    step = patched(model, fused="torch")
    for _ in range(3):
        with step as scope:
            model(**BATCH)
            fast(**BATCH)
            str(scope.explain())
        model(**BATCH)
        fast(**BATCH)
    assert backend.graphs == 2


def test_verify_of_a_compiled_model(model):
    fast = compiled(model, Backend("aot_eager"))
    with patched(fast, fused="torch") as scope:
        report = scope.verify(BATCH)
    assert report.ok, str(report)


def test_training_steps(model):
    """An optimizer step between the calls changes weights, not code."""
    backend = Backend()
    fast = compiled(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    step = patched(model, fused="torch")
    for _ in range(3):
        with step:
            loss = fast(**BATCH).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert backend.graphs == 1
    torch.testing.assert_close(fast(**BATCH).loss, build_after(model)(**BATCH).loss)


def build_after(model):
    twin, _ = build("llama", num_hidden_layers=1)
    twin.load_state_dict(model.state_dict())
    return twin
