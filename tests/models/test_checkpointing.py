"""Activation checkpointing under a scope: what is recomputed is what ran, whenever and wherever backward comes."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from scoped_patch import assert_clean, patched, wrap_call
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, gradients, take_gradients, worst_difference
from tests.tiny_models import build

IDS = token_ids()
BATCH = {"input_ids": IDS, "labels": IDS}
KINDS = ("reentrant", "non-reentrant", "wrapper reentrant", "wrapper")


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


def checkpointed(kind, seed=0):
    model, _ = build("llama", seed=seed)
    if kind.startswith("wrapper"):
        impl = CheckpointImpl.REENTRANT if kind.endswith("reentrant") else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
        )
        assert isinstance(model.model.layers[0], CheckpointWrapper)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        if kind == "reentrant":
            model.enable_input_require_grads()
    return model


class Calls:
    """Counts the layers' MLP calls, with and without gradients."""

    def __init__(self):
        self.forwards = 0

    def stronger(self, original, hidden):
        self.forwards += 1
        return original(hidden * 2)


def stronger_mlps(model, calls=None, factor=None):
    """A patch of the user that changes values: every MLP's input, doubled."""
    calls = calls or Calls()
    wrapper = calls.stronger if factor is None else (lambda original, hidden: original(hidden * factor))
    inner = [getattr(layer, "_checkpoint_wrapped_module", layer) for layer in model.model.layers]
    return tuple(wrap_call(layer.mlp, "forward", wrapper) for layer in inner)


def always_patched(seed=0, batch=BATCH):
    """The right gradients: the same model without checkpointing, the scope around everything."""
    model, _ = build("llama", seed=seed)
    with patched(model, *stronger_mlps(model), fused="torch"):
        found = gradients(model, lambda: model(**batch).log_probs.mean())
    return found


def plain_names(found):
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


@pytest.mark.parametrize("when", ["inside", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_gives_the_gradients_of_an_always_patched_run(kind, when):
    model = checkpointed(kind)
    calls = Calls()
    layers = [dict(module.__dict__) for module in model.modules()]
    with patched(model, *stronger_mlps(model, calls), fused="torch"):
        loss = model(**BATCH, use_cache=False).log_probs.mean()
        assert calls.forwards == 2
        if when == "inside":
            loss.backward()
    if when == "after":
        loss.backward()
    assert calls.forwards == 4, "nothing was recomputed: checkpointing was lost"
    assert_gradients(plain_names(take_gradients(model)), always_patched(), rtol=1e-5)
    assert [module.__dict__.keys() for module in model.modules()] == [own.keys() for own in layers]


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_without_the_cure_the_gradients_are_wrong(kind, monkeypatch):
    """The fault this is about, so that the tests above are known to see it."""
    monkeypatch.setattr("scoped_patch.models.checkpointing._checkpointing", lambda root: iter(()))
    model = checkpointed(kind)
    with patched(model, *stronger_mlps(model), fused="torch"):
        loss = model(**BATCH, use_cache=False).log_probs.mean()
    loss.backward()
    assert worst_difference(take_gradients(model), always_patched()) > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_head_alone(kind):
    model = checkpointed(kind)
    wanted = gradients(model, lambda: model(**BATCH, use_cache=False).loss)
    with patched(model, fused="torch"):
        out = model(**BATCH, use_cache=False)
    assert_gradients(gradients(model, lambda: out.loss), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_two_forwards_before_one_backward(kind):
    """One in a scope, one outside, one in another scope: each is recomputed as it ran."""
    model = checkpointed(kind)
    plain, _ = build("llama")
    other = {"input_ids": token_ids(seed=8), "labels": token_ids(seed=8), "use_cache": False}

    def three(target):
        with patched(target, *stronger_mlps(target), fused="torch"):
            first = target(**BATCH, use_cache=False).loss
        second = target(**other).loss
        with patched(target, *stronger_mlps(target, factor=3.0)):
            third = target(**BATCH, use_cache=False).loss
        return first + second + third

    wanted = gradients(plain, lambda: three(plain))
    assert_gradients(plain_names(gradients(model, lambda: three(model))), wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_another_scope_is_live_during_backward(kind):
    model = checkpointed(kind)
    with patched(model, *stronger_mlps(model), fused="torch"):
        loss = model(**BATCH, use_cache=False).log_probs.mean()
    with patched(model, *stronger_mlps(model, factor=5.0)) as scope:
        loss.backward()
        forward = model.model.layers[0].mlp.forward if kind[0] != "w" else None
        assert scope.state == "live"
        assert forward is None or "patched" in forward.__qualname__
        after = model(**BATCH, use_cache=False).loss
    assert_gradients(plain_names(take_gradients(model)), always_patched(), rtol=1e-5)
    plain, _ = build("llama")
    with patched(plain, *stronger_mlps(plain, factor=5.0)):
        torch.testing.assert_close(after, plain(**BATCH, use_cache=False).loss)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scope_that_is_live_during_backward_patches_what_was_not(kind):
    """What it has patched is hidden from the recomputation, and there again after it."""
    model = checkpointed(kind)
    plain, _ = build("llama")
    wanted = gradients(plain, lambda: plain(**BATCH, use_cache=False).loss)
    with patched(model, fused="torch"):
        loss = model(**BATCH, use_cache=False).loss
        calls = Calls()
        with patched(model, *stronger_mlps(model, calls)):
            loss.backward()
            assert calls.forwards == 0
            model(**BATCH, use_cache=False)
            assert calls.forwards == 2
    assert_gradients(plain_names(take_gradients(model)), wanted, rtol=1e-5)


@pytest.mark.xfail(reason="known limit: a graph made outside any scope does not know that one will be entered")
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_outside_is_recomputed_outside_although_a_scope_is_live(kind):
    """The other way round: recorded unpatched, backward inside a scope that was entered later."""
    model = checkpointed(kind)
    plain, _ = build("llama")
    wanted = gradients(plain, lambda: plain(**BATCH, use_cache=False).loss)
    loss = model(**BATCH, use_cache=False).loss
    with patched(model, *stronger_mlps(model), fused="torch"):
        loss.backward()
    assert_gradients(plain_names(take_gradients(model)), wanted, rtol=1e-5)


@pytest.mark.parametrize("leave", ["both", "inner"])
@pytest.mark.parametrize("kind", KINDS)
def test_nested_scopes(kind, leave):
    """Recorded under two scopes, recomputed under two, whichever are still open."""
    model = checkpointed(kind)
    with contextlib.ExitStack() as outer:
        outer.enter_context(patched(model, fused="torch"))
        with patched(model, *stronger_mlps(model)):
            loss = model(**BATCH, use_cache=False).log_probs.mean()
        if leave == "both":
            outer.close()
        loss.backward()
    assert_gradients(plain_names(take_gradients(model)), always_patched(), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scope_entered_again(kind):
    model = checkpointed(kind)
    step = patched(model, *stronger_mlps(model), fused="torch")
    losses = []
    for _ in range(3):
        with step:
            losses.append(model(**BATCH, use_cache=False).log_probs.mean())
    wanted = always_patched()
    for loss in losses:
        assert_gradients(plain_names(gradients(model, lambda loss=loss: loss)), wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["inside", "after", "inside another"])
def test_backward_on_another_thread(kind, when):
    model = checkpointed(kind)
    errors = []

    def backward():
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    def on_a_thread():
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    with patched(model, *stronger_mlps(model), fused="torch"):
        loss = model(**BATCH, use_cache=False).log_probs.mean()
        if when == "inside":
            on_a_thread()
    if when == "inside another":
        with patched(model, *stronger_mlps(model, factor=7.0)):
            on_a_thread()
    elif when == "after":
        on_a_thread()
    assert not errors, errors
    assert_gradients(plain_names(take_gradients(model)), always_patched(), rtol=1e-5)


def test_two_models_backward_at_once_on_two_threads():
    """Recomputations of different scopes wait for each other, and each sees its own."""
    models = [checkpointed("non-reentrant", seed=seed) for seed in (0, 1)]
    losses = []
    for model in models:
        with patched(model, *stronger_mlps(model), fused="torch"):
            losses.append(model(**BATCH, use_cache=False).log_probs.mean())
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for seed, model in enumerate(models):
        assert_gradients(take_gradients(model), always_patched(seed), rtol=1e-5)


def test_switched_on_between_two_entries():
    """Checkpointing that is switched on after planning is covered at the next entry; switched off, it is left alone."""
    model, _ = build("llama")
    step = patched(model, *stronger_mlps(model), fused="torch")
    with step:
        model(**BATCH, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with step:
        loss = model(**BATCH, use_cache=False).log_probs.mean()
    assert_gradients(gradients(model, lambda: loss), always_patched(), rtol=1e-5)
    model.gradient_checkpointing_disable()
    with step:
        loss = model(**BATCH, use_cache=False).log_probs.mean()
    loss.backward()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["was off", "was on"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_switched_on_inside(before, reentrant, nested):
    """As a trainer does that is started inside the scope: covered from then on, and the setting stays."""
    model, _ = build("llama")
    if before:
        model.gradient_checkpointing_enable({"use_reentrant": not reentrant})
    model.enable_input_require_grads()
    calls = Calls()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(model, *stronger_mlps(model, calls), fused="torch"))
        if nested:
            stack.enter_context(patched(model, fused="torch"))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss = model(**BATCH, use_cache=False).log_probs.mean()
    assert calls.forwards == 2
    loss.backward()
    assert calls.forwards == 4
    assert_gradients(take_gradients(model), always_patched(), rtol=1e-5)
    left = model.model.layers[0]._gradient_checkpointing_func
    assert left.keywords == {"use_reentrant": reentrant}


def test_switched_off_inside():
    model = checkpointed("non-reentrant")
    with patched(model, *stronger_mlps(model), fused="torch"):
        model.gradient_checkpointing_disable()
        loss = model(**BATCH, use_cache=False).log_probs.mean()
    assert_gradients(gradients(model, lambda: loss), always_patched(), rtol=1e-5)
    assert not model.is_gradient_checkpointing


def test_an_exception_in_the_recomputation_leaves_nothing():
    model = checkpointed("non-reentrant")
    broken = []

    def maybe(original, hidden):
        if broken:
            raise ValueError("in the recomputation")
        return original(hidden * 2)

    with patched(model, wrap_call(model.model.layers[0].mlp, "forward", maybe), fused="torch"):
        loss = model(**BATCH, use_cache=False).log_probs.mean()
    broken.append(True)
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(ValueError, match="in the recomputation"):
        loss.backward()
    assert [module.__dict__.keys() for module in model.modules()] == [own.keys() for own in before]
    assert model(**BATCH, use_cache=False).logits is not None


def test_dropout_draws_the_same_numbers_in_the_recomputation():
    model, _ = build("llama", attention_dropout=0.3)
    plain, _ = build("llama", attention_dropout=0.3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with patched(plain, fused="torch"):
        torch.manual_seed(3)
        wanted = gradients(plain, lambda: plain(**BATCH, use_cache=False).loss)
    with patched(model, fused="torch"):
        torch.manual_seed(3)
        loss = model(**BATCH, use_cache=False).loss
    assert_gradients(gradients(model, lambda: loss), wanted, rtol=1e-5)


@pytest.mark.parametrize("options", [{"fused": "torch"}, {"tiled_mlp": 2, "fake_quant": "w4a16"}], ids=lambda o: "+".join(o))
def test_a_model_that_is_let_go_is_held_by_nobody(options):
    """What was recorded for recomputation goes with the graph that needs it."""
    model, _ = build("llama")
    if "fused" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with patched(model, **options):
        model(**BATCH, use_cache=False).loss.backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
