"""Copies and pickles of an nn.Module inside a scope: unpatched from birth. The one engine test that knows torch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from scoped_patch.engine import LIVE, Edit, EditPatch, Scope, assert_clean, attribute_slot, wrap_call


class Inner(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = Inner(3, 3)
        self.last = nn.Linear(3, 3)
        self.scale = 2.0

    def forward(self, x):
        return self.last(self.inner(self.first(x))) * self.scale


class Slotted:
    __slots__ = ("__dict__", "kept")

    def method(self):
        return "plain"


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __getstate__(self):
        return {**self.__dict__, "extra": 1}

    def forward(self):
        return self.weight.sum()


@pytest.fixture(autouse=True)
def guards(monkeypatch):
    monkeypatch.setattr(LIVE, "guards_owner", lambda owner: isinstance(owner, (nn.Module, Slotted)))
    yield
    assert_clean()
    assert not LIVE._guarded


def replaced(owner, name, value):
    return EditPatch(f"replace {name}", lambda _: [Edit(attribute_slot(owner, name), lambda prior: value, "replace")])


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def scope(model):
    stand_in = nn.Identity()
    return Scope(
        model,
        (
            wrap_call(model, "forward", lambda original, x: original(x) * 0),
            wrap_call(model.first, "forward", lambda original, x: x),
            replaced(model, "inner", stand_in),
            replaced(model, "scale", 100.0),
            replaced(model.last, "bias", None),
        ),
    )


def picture(model):
    return [
        (id(module), [(k, id(v)) for k, v in module.__dict__.items()], [list(module._modules), list(module._parameters)])
        for module in (model, model.first, model.inner, model.last)
    ]


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_taken_inside_is_unpatched_from_birth(model, scope, how):
    x = torch.randn(2, 3)
    expected, before = model(x), picture(model)
    with scope:
        assert model(x).abs().sum() == 0
        clone = COPIES[how](model)
        assert model(x).abs().sum() == 0
        assert isinstance(model.inner, nn.Identity)
        if how != "copy":  # a shallow copy shares its children, and those are patched themselves
            assert torch.equal(clone(x), expected)
    assert picture(model) == before
    assert torch.equal(clone(x), expected)
    assert clone.__dict__.keys() == model.__dict__.keys()
    assert "__getstate__" not in clone.__dict__
    assert list(clone._modules) == ["first", "inner", "last"]
    assert sorted(clone.last._parameters) == ["bias", "weight"]


def test_a_deepcopy_computes_with_its_own_weights(model, scope):
    x = torch.randn(2, 3)
    with scope:
        clone = copy.deepcopy(model)
    expected = clone(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(clone(x), expected)
    with scope:
        assert torch.equal(clone(x), expected)


def test_saving_inside_saves_the_unpatched_model(model, scope, tmp_path):
    x = torch.randn(2, 3)
    expected = model(x)
    with scope:
        torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(x), expected)


def test_copies_inside_nested_scopes_and_replays(model, scope):
    x = torch.randn(2, 3)
    expected = model(x)
    inner = Scope(model, (wrap_call(model, "forward", lambda original, x: original(x) + 1),))
    with scope as session:
        with inner:
            clone = copy.deepcopy(model)
        assert torch.equal(clone(x), expected)
    with session.replay():
        clone = copy.deepcopy(model)
        assert "__getstate__" not in clone.__dict__
    assert torch.equal(clone(x), expected)
    assert "__getstate__" not in model.__dict__


def test_a_state_that_the_class_makes_itself():
    module = Stateful()
    with Scope(module, (wrap_call(module, "forward", lambda original: original() + 1),)):
        state = module.__getstate__()
        clone = copy.deepcopy(module)
    assert state["extra"] == 1
    assert "forward" not in state
    assert clone() == 2


def test_slots_of_a_guarded_owner():
    thing = Slotted()
    thing.kept, thing.other = 1, 2
    with Scope(thing, (replaced(thing, "kept", 10), wrap_call(thing, "method", lambda original: "patched"))):
        clone = copy.copy(thing)
        assert (clone.kept, clone.other, clone.method()) == (1, 2, "plain")
    del thing.kept
    with Scope(thing, (replaced(thing, "kept", 10),)):
        assert not hasattr(copy.copy(thing), "kept")


def test_a_copy_keeps_what_somebody_else_put_over_a_patch(model):
    """accelerate's hooks: the copy has the hook, and under it its own plain forward."""

    class Hook:
        def __init__(self, module):
            self.module = module

        def __call__(self, x):
            return self.module._old_forward(x) + 1

    x = torch.randn(2, 3)
    plain = model.first(x)
    with Scope(model.first, (wrap_call(model.first, "forward", lambda original, x: original(x) * 0),)):
        model.first._old_forward = model.first.forward
        model.first.forward = Hook(model.first)
        assert torch.equal(model.first(x), torch.ones(2, 3))
        clone = copy.deepcopy(model.first)
        assert clone.forward.module is clone
    assert torch.equal(model.first(x), plain + 1)
    assert torch.equal(clone(x), plain + 1)
    with torch.no_grad():
        model.first.weight.zero_()
    assert torch.equal(clone(x), plain + 1)


def test_an_instance_with_a_getstate_of_its_own_keeps_it(model):
    def mine():
        return {"mine": 1}

    model.__dict__["__getstate__"] = mine
    with Scope(model, (wrap_call(model, "forward", lambda original, x: x),)):
        assert model.__getstate__() == {"mine": 1}
    assert model.__dict__.pop("__getstate__") is mine
    with Scope(model, (wrap_call(model, "forward", lambda original, x: x),)):
        model.__dict__["__getstate__"] = mine  # somebody else's, meanwhile
    assert model.__dict__.pop("__getstate__") is mine


def test_what_the_engine_is_not_told_to_guard_is_left_as_it_is():
    class Plain:
        def method(self):
            return "plain"

    thing = Plain()
    with Scope(thing, (wrap_call(thing, "method", lambda original: "patched"),)):
        assert list(thing.__dict__) == ["method"]


def test_training_goes_on_with_the_same_parameters(model, scope):
    """Replacing and restoring children keeps the order and identity of parameters: an optimizer made before works."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [(name, id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()]
    with Scope(model, (replaced(model, "first", nn.Identity()), replaced(model, "last", model.last))):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert [(name, id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()] == before


def test_the_guards_cost_little(model):
    import time

    layers = [nn.Linear(1, 1) for _ in range(80)]
    edits = [Edit(attribute_slot(layer, name), lambda prior: 0, "replace") for layer in layers for name in "abcd"]
    scope = Scope(None, (EditPatch("many", lambda _: edits),))
    times = []
    for _ in range(30):
        start = time.thread_time()
        with scope:
            pass
        times.append(time.thread_time() - start)
    assert min(times) < 0.02  # a few milliseconds; the benchmark says how many
