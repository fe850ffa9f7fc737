"""Value-head models, known by structure: plain state_dict names inside the scope, their own again after."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from scoped_patch import UnsupportedError, assert_clean, patched
from scoped_patch.patches.value_head import ValueHead
from tests.support.models import ValueHeadModel, token_ids
from tests.support.scores import assert_gradients, assert_scores, gradients, unpatched
from tests.tiny_models import build

IDS = token_ids()


@pytest.fixture
def model():
    return ValueHeadModel(build("llama")[0])


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


def names(model):
    return [*(n for n, _ in model.named_parameters()), *(n for n, _ in model.named_buffers())]


def test_names_inside_and_after(model):
    own = list(model.state_dict())
    assert "model.embed_tokens.weight" in own
    with patched(model) as scope:
        inside = model.state_dict()
        assert set(inside) == set(nn.Module.state_dict(model))
        assert set(inside) <= set(names(model))
        assert {n for n, _ in model.named_parameters()} <= set(inside)
        assert "pretrained_model.model.embed_tokens.weight" in inside
        assert "value_head" in str(scope.explain())
    assert list(model.state_dict()) == own
    assert "state_dict" not in model.__dict__


def test_round_trip(model):
    other = ValueHeadModel(build("llama", seed=1)[0])
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(model.state_dict())
    with patched(model), patched(other):
        other.load_state_dict(model.state_dict())
    for (name, ours), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_arguments_reach_it(model):
    with patched(model):
        assert all(key.startswith("x.") for key in model.state_dict(prefix="x."))
        assert all(value.requires_grad for value in model.state_dict(keep_vars=True).values())
        target = {}
        assert model.state_dict(destination=target) is target


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_under_another_wrapper(model, wrap):
    wrapper = wrap(model)
    own = list(wrapper.state_dict())
    with patched(wrapper):
        assert any("pretrained_model.model.embed_tokens.weight" in name for name in wrapper.state_dict())
    assert list(wrapper.state_dict()) == own


def test_a_wrapper_without_names_of_its_own_is_left_alone(model):
    plain = type("PlainValueHead", (ValueHeadModel,), {"state_dict": nn.Module.state_dict})(model.pretrained_model)
    assert not [e for e in patched(plain).plan().edits if "state_dict" in e.edit.slot.label]


def test_nested_and_reused(model):
    scope = patched(model)
    for _ in range(2):
        with scope, patched(model):
            assert "pretrained_model.lm_head.weight" in model.state_dict()
        assert "lm_head.weight" in model.state_dict()


def test_copies_and_files_are_unpatched(model):
    own = list(model.state_dict())
    with patched(model):
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, loaded):
        assert "state_dict" not in other.__dict__
        assert list(other.state_dict()) == own


def test_the_fused_head_is_refused_by_name_and_the_model_inside_takes_it(model):
    with pytest.raises(
        UnsupportedError, match=r"fused_head: ValueHeadModel has a value head.*patched\(model\.pretrained_model"
    ):
        patched(model, fused="torch").__enter__()
    with patched(model.pretrained_model, fused="torch"):
        assert_scores(model.pretrained_model(input_ids=IDS), unpatched(build("llama")[0], {"input_ids": IDS}))
        assert "lm_head.weight" in model.state_dict()


def test_tiled_mlp_works_through_the_value_head(model):
    def run():
        return model(input_ids=IDS, use_cache=False)[2].square().mean()

    value = run()
    wanted = gradients(model, run)
    with patched(model, tiled_mlp=3):
        torch.testing.assert_close(run(), value)
        assert_gradients(gradients(model, run), wanted, rtol=1e-5)


def test_the_patch_by_itself_names_what_it_looks_for():
    with pytest.raises(UnsupportedError, match="value_head: no value-head model: looked for the children `v_head`"):
        patched(build("llama")[0], ValueHead()).plan()
