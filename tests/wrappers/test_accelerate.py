"""accelerate: prepare, hooks put on and taken off anywhere, unwrapping both ways, fp32 outputs."""

from __future__ import annotations

import inspect

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel

from scoped_patch import assert_clean, patched
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, gradients, objective, reference, shifted, unpatched
from tests.support.wrapped import VARIANTS, assert_close_scores, scores_of, unchanged
from tests.tiny_models import build

IDS = token_ids()
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}
#: bf16 against fp32 log-probs (of up to 30); both of one kind agree far better
BF16 = 0.3


@pytest.fixture(autouse=True)
def _clean():
    AcceleratorState._reset_state(reset_partial_state=True)  # it is one per process
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_clean()


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def right():
    model, _ = build("llama")
    scores = unpatched(model, BATCH)
    return scores, gradients(model, lambda: objective(scores))


class Counting(ModelHook):
    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def check(model, right, variant, inside=True):
    scores, wanted = right
    found = scores_of(model(**BATCH), BATCH)
    assert (hasattr(found, "logits") and found.logits is None) == (inside and "fused" in variant)
    assert_close_scores(found, scores)
    assert_gradients(gradients(model, lambda: objective(found)), wanted)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_before(right, variant, precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, _ = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = scores_of(model(**BATCH), BATCH)
    with unchanged(model):
        with patched(model, **variant):
            if precision == "no":
                check(model, right, variant)
            else:
                out = model(**BATCH)
                found = scores_of(out, BATCH)
                assert_close_scores(found, plain, atol=BF16)
                assert out.logits is None or out.logits.dtype == torch.float32
                accelerator.backward(objective(found))
                optimizer.step()
                optimizer.zero_grad()
    assert model(**BATCH).logits.dtype == torch.float32


def test_fp32_conversion_keeps_log_probs_and_their_values():
    """`convert_to_fp32` rebuilds outputs from their declared fields: a field that was only set would vanish."""
    model, _ = build("llama", dtype=torch.bfloat16)
    hidden = model.model(input_ids=IDS)[0]
    wanted = reference(hidden.double() @ model.lm_head.weight.double().T, shifted(IDS))
    model.forward = convert_outputs_to_fp32(model.forward)
    with patched(model, fused="torch"):
        out = model(input_ids=IDS, output_hidden_states=True)
    assert out.hidden_states[-1].dtype == torch.float32
    assert_close_scores(out, wanted, atol=5e-5)
    again = convert_outputs_to_fp32(lambda: out)()
    assert type(again) is type(out)
    assert torch.equal(again.log_probs, out.log_probs)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_inside(right, variant, precision):
    """The wrapper that `prepare` makes goes on calling the patched forward: after the scope that one does nothing."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, _ = build("llama")
    with patched(model, **variant):
        model = accelerator.prepare(model)
        inside = scores_of(model(**BATCH), BATCH)
    after = model(**BATCH)
    assert after.logits is not None
    atol = 1e-5 if precision == "no" else BF16
    assert_close_scores(inside, right[0], atol)
    assert_close_scores(scores_of(after, BATCH), right[0], atol)
    for _ in range(2):
        with patched(model, **variant):
            again = scores_of(model(**BATCH), BATCH)
        assert_close_scores(again, inside, atol=1e-4)
    assert_close_scores(scores_of(accelerator.unwrap_model(model)(**BATCH), BATCH), right[0], atol)


def test_prepared_inside_a_scope_that_is_used_again():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, _ = build("llama")
    step = patched(model, fused="torch")
    seen = []
    with step:
        model = accelerator.prepare(model)
        seen.append(model(**BATCH).log_probs)
    for _ in range(2):
        assert model(**BATCH).logits is not None
        with step:
            seen.append(model(**BATCH).log_probs)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("prepared", ["before", "inside"])
def test_unwrapped_inside(right, variant, keep, prepared):
    """D5: what comes out of unwrapping is still patched, and right; after the scope it is the plain model."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, _ = build("llama")
    if prepared == "before":
        model = accelerator.prepare(model)
    with patched(model, **variant) as scope:
        if prepared == "inside":
            model = accelerator.prepare(model)
        inner = accelerator.unwrap_model(model, keep_fp32_wrapper=keep)
        found = scores_of(inner(**BATCH), BATCH)
        assert (hasattr(found, "logits") and found.logits is None) == ("fused" in variant)
        assert_close_scores(found, right[0], atol=BF16)
        calls = [row["calls"] for row in scope.diff() if row["calls"] is not None]
        assert calls
        assert all(calls)
    assert inner(**BATCH).logits is not None
    assert_close_scores(scores_of(inner(**BATCH), BATCH), right[0], atol=BF16)


def test_unwrapped_after(right, variant):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, _ = build("llama")
    model = accelerator.prepare(model)
    with patched(model, **variant):
        model(**BATCH)
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert_close_scores(scores_of(inner(**BATCH), BATCH), right[0])


def test_signature_through_the_wrapper(variant):
    model, _ = build("llama")
    wanted = list(inspect.signature(model.forward).parameters)
    with patched(model, **variant):
        assert list(inspect.signature(model.forward).parameters) == wanted
        assert list(inspect.signature(model.model.layers[0].mlp.forward).parameters) == ["x"]


# ------------------------------------------------------------------------------------------------- hooks
def hooked(model):
    """Hooks on the model, its head, and a feed-forward block; how often each ran."""
    hooks = [Counting() for _ in range(3)]
    for module, hook in zip((model, model.lm_head, model.model.layers[0].mlp), hooks, strict=True):
        add_hook_to_module(module, hook)
    return hooks


def unhook(model):
    for module in (model, model.lm_head, model.model.layers[0].mlp):
        remove_hook_from_module(module)


def calls(hooks):
    return [hook.calls for hook in hooks]


def test_hooks_before(right, variant):
    model, _ = build("llama")
    hooks = hooked(model)
    with unchanged(model), patched(model, **variant):
        check(model, right, variant)
    assert calls(hooks) == [1, 1, 1]
    check(model, right, variant, inside=False)
    assert calls(hooks) == [2, 2, 2]
    unhook(model)
    check(model, right, variant, inside=False)


def test_hooks_added_inside(right, variant):
    model, _ = build("llama")
    with patched(model, **variant):
        hooks = hooked(model)
        check(model, right, variant)
        assert calls(hooks) == [1, 1, 1]
    check(model, right, variant, inside=False)
    assert calls(hooks) == [2, 2, 2]
    with patched(model, **variant):
        check(model, right, variant)
    unhook(model)
    check(model, right, variant, inside=False)
    with patched(model, **variant):
        check(model, right, variant)


def test_hooks_removed_inside(right, variant):
    model, _ = build("llama")
    hooks = hooked(model)
    with patched(model, **variant):
        unhook(model)
        check(model, right, variant)
        assert calls(hooks) == [0, 0, 0]
    check(model, right, variant, inside=False)


def test_hooks_added_and_removed_inside(right, variant):
    model, _ = build("llama")
    with patched(model, **variant):
        hooks = hooked(model)
        check(model, right, variant)
        unhook(model)
        check(model, right, variant)
        assert calls(hooks) == [1, 1, 1]
    check(model, right, variant, inside=False)
    assert not any("_hf_hook" in module.__dict__ for module in model.modules())


def test_hooks_replaced_inside(right, variant):
    """Taken off and put on again while patched, as offloading does."""
    model, _ = build("llama")
    hooked(model)
    with patched(model, **variant):
        unhook(model)
        hooks = hooked(model)
        check(model, right, variant)
        assert calls(hooks) == [1, 1, 1]
    check(model, right, variant, inside=False)
    assert calls(hooks) == [2, 2, 2]


def test_offloaded_weights(right):
    """Weights that live on the meta device until a hook brings them, at the time of the call."""
    model, _ = build("llama")
    weights = {"weight": model.lm_head.weight.detach().clone()}
    hook = AlignDevicesHook(execution_device="cpu", offload=True, weights_map=weights)
    add_hook_to_module(model.lm_head, hook)
    assert model.lm_head.weight.is_meta
    with torch.no_grad(), patched(model, fused="torch"):
        out = model(**BATCH)
    assert_close_scores(out, right[0])
    assert model.lm_head.weight.is_meta
