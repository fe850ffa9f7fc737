"""The fused head as a scope: whom it touches, how scopes nest and are used again, what copies and files hold."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from scoped_patch import (
    BadOptionError,
    ConflictError,
    ForeignOverwriteError,
    FusedHead,
    active,
    assert_clean,
    patched,
    replace_attribute,
    wrap_call,
)
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, assert_scores, gradients, objective, unpatched
from tests.tiny_models import build

IDS = token_ids()
BATCH = {"input_ids": IDS}


@pytest.fixture
def model():
    return build("qwen3")[0]


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


# ------------------------------------------------------------------------------------------------- whom it touches
def test_the_other_model_of_the_class_is_bit_equal(model):
    other = build("qwen3", seed=2)[0]
    wanted = other(**BATCH).logits
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls is not object}
    before = {cls: dict(vars(cls)) for cls in classes}
    own = [dict(module.__dict__) for module in other.modules()]
    with patched(model, fused="torch"):
        model(**BATCH).log_probs.sum().backward()
        assert torch.equal(other(**BATCH).logits, wanted)
        for cls, names in before.items():
            now = vars(cls)
            assert now.keys() == names.keys()
            assert all(now[name] is value for name, value in names.items())
        assert [dict(module.__dict__) for module in other.modules()] == own


def test_two_models_of_a_class_patched_at_once(model):
    other = build("qwen3", seed=2)[0]
    wanted, theirs = unpatched(model, BATCH), unpatched(other, BATCH, 0.5)
    with patched(model, fused="torch"), patched(other, fused=FusedHead("torch", temperature=0.5)):
        assert_scores(model(**BATCH), wanted)
        assert_scores(other(**BATCH), theirs)
        assert_scores(model(**BATCH), wanted)


def test_a_model_that_calls_another_patched_one(model):
    """Frames belong to one model: a teacher that is called in the middle of a student's forward is its own."""
    other = build("qwen3", seed=2)[0]
    wanted, theirs = unpatched(model, BATCH), unpatched(other, BATCH)
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(other(**BATCH)) and None)
    with patched(model, fused="torch"), patched(other, fused="torch"):
        out = model(**BATCH)
    handle.remove()
    assert_scores(out, wanted)
    assert_scores(seen[0], theirs)


def test_shared_modules_of_two_models(model):
    """Two models around one decoder and one head: only the one named scores."""
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    logits = twin(**BATCH).logits
    with patched(model, fused="torch"):
        assert model(**BATCH).logits is None
        assert torch.equal(twin(**BATCH).logits, logits)


# ------------------------------------------------------------------------------------------------- copies and files
def test_a_deepcopy_inside_is_unpatched_and_has_its_own_weights(model):
    plain = model(**BATCH).logits
    with patched(model, fused="torch"):
        copied = copy.deepcopy(model)
        assert model(**BATCH).logits is None
        assert torch.equal(copied(**BATCH).logits, plain)
        with torch.no_grad():
            copied.lm_head.weight.zero_()
        assert not copied(**BATCH).logits.any()
        assert_scores(model(**BATCH), unpatched(build("qwen3")[0], BATCH))
        for module in copied.modules():
            assert not {"forward", "generate", "_loss_function", "__getstate__"} & module.__dict__.keys()
    assert torch.equal(model(**BATCH).logits, plain)


def test_the_copy_can_be_patched_too(model):
    with patched(model, fused="torch"):
        copied = copy.deepcopy(model)
        with patched(copied, fused="torch"):
            assert torch.equal(copied(**BATCH).log_probs, model(**BATCH).log_probs)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "save_pretrained"])
def test_files_written_inside_hold_the_unpatched_model(model, how, tmp_path):
    plain = model(**BATCH).logits
    with patched(model, fused="torch"):
        if how == "pickle":
            data = pickle.dumps(model)
        elif how == "torch.save":
            torch.save(model, tmp_path / "model.pt")
        else:
            model.save_pretrained(tmp_path)
        assert model(**BATCH).logits is None
    if how == "pickle":
        loaded = pickle.loads(data)
    elif how == "torch.save":
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        loaded = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(loaded(**BATCH).logits, plain)


def test_state_dict_inside_is_the_same_and_loads(model):
    wanted = model.state_dict()
    with patched(model, fused="torch"):
        inside = model.state_dict()
        assert list(inside) == list(wanted)
        assert all(inside[name].data_ptr() == wanted[name].data_ptr() for name in wanted)
        buffer = io.BytesIO()
        torch.save(inside, buffer)
        buffer.seek(0)
        model.load_state_dict(torch.load(buffer))
    assert torch.equal(model(**BATCH).logits, build("qwen3")[0](**BATCH).logits)


def test_outputs_can_be_pickled_and_copied(model):
    with patched(model, fused="torch"), torch.no_grad():
        out = model(**BATCH)
    for again in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert type(again) is type(out)
        assert torch.equal(again.log_probs, out.log_probs)


# ------------------------------------------------------------------------------------------------- again and nested
def test_one_scope_used_three_times(model):
    plain = model(**BATCH).logits
    step = patched(model, fused="torch")
    seen, plans = [], []
    for _ in range(3):
        with step as scope:
            seen.append(model(**BATCH).log_probs)
            plans.append(scope.plan)
        assert torch.equal(model(**BATCH).logits, plain)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert plans[0] is plans[1] is plans[2]


def test_one_scope_entered_while_it_is_live(model):
    step = patched(model, fused="torch")
    with step, step:
        assert model(**BATCH).logits is None
    assert model(**BATCH).logits is not None


def test_nested_identical_scopes_share(model):
    wanted = unpatched(model, BATCH)
    with patched(model, fused="torch") as outer:
        forward = model.forward
        with patched(model, fused="torch") as inner:
            assert model.forward == forward
            assert_scores(model(**BATCH), wanted)
        assert_scores(model(**BATCH), wanted)
        assert inner.state == "closed"
        assert outer.state == "live"
    assert model(**BATCH).logits is not None


def test_nested_identical_scopes_left_in_the_other_order(model):
    outer = patched(model, fused="torch").apply()
    inner = patched(model, fused="torch").apply()
    outer.restore()
    assert model(**BATCH).logits is None
    inner.restore()
    assert model(**BATCH).logits is not None


@pytest.mark.parametrize(
    "other", [FusedHead("torch", temperature=0.5), FusedHead("auto"), FusedHead("torch", outputs="entropy")]
)
def test_nested_with_other_options_is_refused(model, other):
    with patched(model, fused="torch"):
        before = active()
        with pytest.raises(
            ConflictError, match=r"'fused_head' is already on this model with other options.*test_fused_head_scope"
        ):
            patched(model, fused=other).__enter__()
        assert active() == before
        assert model(**BATCH).logits is None
    assert "forward" not in model.__dict__


def test_given_twice_in_one_call(model):
    """The keyword and a patch object of one kind: the same options are one, others are refused."""
    with patched(model, FusedHead("torch"), fused="torch"):
        assert model(**BATCH).logits is None
    with pytest.raises(ConflictError, match="given twice with other options"):
        patched(model, FusedHead("torch", temperature=0.5), fused="torch")


def test_patches_of_the_user_beside(model):
    """A replaced MLP and a wrapped layer: their gradients and values are those of the model they make."""
    mlp = model.model.layers[0].mlp
    mine = (
        replace_attribute(mlp, "act_fn", nn.GELU()),
        wrap_call(model.model.layers[1], "forward", lambda original, hidden, *a, **k: original(hidden * 1.5, *a, **k)),
    )
    with patched(model, *mine):
        wanted = unpatched(model, BATCH)
        right = gradients(model, lambda: objective(wanted))
    with patched(model, *mine, fused="torch") as scope:
        out = model(**BATCH)
        assert_scores(out, wanted)
        assert_gradients(gradients(model, lambda: objective(out)), right)
    with patched(model, *mine), patched(model, fused="torch"):
        assert_scores(model(**BATCH), wanted)
    with patched(model, fused="torch"), patched(model, *mine):
        assert_scores(model(**BATCH), wanted)
    assert "act_fn" in str(scope.explain())
    assert "SiLU" in type(mlp.act_fn).__name__


def test_as_decorator_and_applied(model):
    @patched(model, fused="torch")
    def step():
        return model(**BATCH)

    assert step().logits is None
    assert model(**BATCH).logits is not None
    session = patched(model, fused="torch").apply()
    del step
    assert model(**BATCH).logits is None
    session.restore()
    assert model(**BATCH).logits is not None


# ------------------------------------------------------------------------------------------------- what may happen inside
def test_an_exception_inside_the_model_leaves_a_working_scope(model):
    wanted = unpatched(model, BATCH)
    with patched(model, fused="torch"):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[500]]))
        assert_scores(model(**BATCH), wanted)


def test_a_failure_before_the_head_that_the_body_survives_is_no_error_on_leaving(model):
    with patched(model, fused="torch"):
        with pytest.raises(BadOptionError):
            model(**BATCH, temperature=-1)


def test_an_exception_in_the_body_passes_through_and_everything_is_back(model):
    def step():
        with patched(model, fused="torch"):
            model(**BATCH)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step()
    assert model(**BATCH).logits is not None


@pytest.mark.parametrize("on_foreign", ["error", "keep", "restore"])
def test_a_forward_put_there_meanwhile(model, on_foreign):
    mine = lambda **kwargs: "mine"  # noqa: E731
    scope = patched(model, fused="torch", on_foreign=on_foreign)
    if on_foreign == "error":
        with pytest.raises(ForeignOverwriteError, match=r"Qwen3ForCausalLM\.forward was changed by somebody else"), scope:
            model.forward = mine
    else:
        with scope:
            model.forward = mine
    assert ("forward" in model.__dict__) == (on_foreign != "restore")
    model.__dict__.pop("forward", None)
    assert model(**BATCH).logits is not None


def test_moves_and_casts_inside(model):
    with patched(model, fused="torch"):
        model.to(torch.float64)
        out = model(**BATCH)
        assert out.log_probs.dtype == torch.float64
        model.to(torch.float32)
        model.train()
        model.eval()
        assert_scores(model(**BATCH), unpatched(build("qwen3")[0], BATCH))


def test_two_threads_in_one_model_are_refused_not_mixed_up(model):
    inside, go = threading.Event(), threading.Event()

    def pause(*_):
        inside.set()
        assert go.wait(30)

    handle = model.model.layers[0].register_forward_hook(pause)
    with patched(model, fused="torch"):
        results = []
        thread = threading.Thread(target=lambda: results.append(model(**BATCH)))
        thread.start()
        assert inside.wait(30)
        handle.remove()
        try:
            with pytest.raises(RuntimeError, match=r"two threads run Qwen3ForCausalLM.* at once"):
                model(**BATCH)
        finally:
            go.set()
            thread.join()
    assert_scores(results[0], unpatched(model, BATCH))


def test_another_thread_may_run_the_model(model):
    with patched(model, fused="torch"):
        results = []
        thread = threading.Thread(target=lambda: results.append(model(**BATCH)))
        thread.start()
        thread.join()
    assert_scores(results[0], unpatched(model, BATCH))


def test_explain_says_what_was_done(model):
    with patched(model, fused="torch") as scope:
        model(**BATCH)
        model(**BATCH)
        rows = {row["where"]: row for row in scope.diff()}
        text = str(scope.explain())
    assert rows["lm_head.forward"]["calls"] == 2
    assert rows["Qwen3ForCausalLM.forward"]["calls"] == 2
    for word in ("fused_head", "lm_head.forward", "linear cross entropy (torch)"):
        assert word in text
    assert inspect.ismethod(model.forward)


def test_the_plan_is_the_same_table_before(model):
    before = [dict(module.__dict__) for module in model.modules()]
    plan = patched(model, fused="torch").plan()
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert {one.edit.slot.label for one in plan.edits if not one.edit.hidden} == {
        "lm_head.forward",
        "Qwen3ForCausalLM.forward",
        "Qwen3ForCausalLM._loss_function",
        "Qwen3ForCausalLM.generate",
    }
    assert "lm_head.forward" in str(plan)


def test_planning_works_on_meta_tensors():
    config = build("qwen3")[0].config
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    assert len(patched(model, fused="torch").plan()) >= 4
