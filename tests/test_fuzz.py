"""Whatever is passed to `patched(...)`: it works, or it is one of our errors that says which argument and what would do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from scoped_patch import (
    FakeQuant,
    FusedHead,
    Patch,
    PatchErrorGroup,
    PrefixGrouper,
    ScopedPatchError,
    TiledMLP,
    Ulysses,
    active,
    assert_clean,
    patched,
)
from tests.support.stacks import picture
from tests.tiny_models import build

MODEL, _ = build("llama")
BEFORE = picture(MODEL)
EXAMPLES = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)


class Hostile:
    """Says yes to nothing: no truth value, no equality, no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __repr__(self) -> str:
        return "<hostile>"


class NoName(Patch):
    def plan(self, target: Any) -> list[Any]:
        return []


class WrongPlan(Patch):
    name = "wrong_plan"

    def plan(self, target: Any) -> list[Any]:
        return [1, None]  # type: ignore[list-item]


OBJECTS = [
    Hostile(),
    object(),
    int,
    FusedHead,
    lambda: None,
    nn.Linear(2, 2),
    torch.tensor(2),
    torch.tensor([1.0, 2.0]),
    torch.tensor(float("nan")),
    np.float64(0.5),
    np.int64(2),
    np.array([1, 2]),
    np.array([1.0, 2.0]),
    torch.float32,
    torch.device("meta"),
    1j,
    Ellipsis,
    NotImplemented,
    range(3),
]
WORDS = ["torch", "triton", "auto", "w4a16", "w4a4", "full", "sharded", "mean", "error", "low", "log_probs", "", "re:(", "*"]
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, 2**70, -(2**70)]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=4),
    st.binary(max_size=3),
    st.sampled_from(OBJECTS),
)
anything = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 3)), inner, max_size=2),
        st.sets(st.integers(0, 3), max_size=2),
    ),
    max_leaves=4,
)


def attempt(make: Any, *names: str) -> None:
    """Call; what it raises is ours, names one of these, and is a sentence with a remedy. Nothing is live afterwards."""
    try:
        make()
    except ScopedPatchError as error:
        for one in error.exceptions if isinstance(error, PatchErrorGroup) else (error,):
            text = str(one)
            assert any(name in text for name in names), f"names none of {names}: {text}"
            assert len(text) > 30, f"no hint: {text}"
    assert not active()


def planned(*args: Any, **kwargs: Any) -> Any:
    return lambda: patched(*args, **kwargs).plan()


@EXAMPLES
@given(value=anything)
@pytest.mark.parametrize("keyword", ["sp", "fused", "tiled_mlp", "prefix_grouper", "fake_quant"])
def test_each_patch_keyword(keyword, value):
    attempt(planned(MODEL, **{keyword: value}), keyword, "fused_head", "ulysses")


@EXAMPLES
@given(value=anything)
@pytest.mark.parametrize("keyword", ["on_foreign", "on_compiled"])
def test_each_mode(keyword, value):
    attempt(planned(MODEL, **{keyword: value}), keyword)


@EXAMPLES
@given(
    target=anything,
    keywords=st.dictionaries(st.sampled_from(["fused", "tiled_mlp", "prefix_grouper"]), st.just(True), max_size=2),
)
def test_targets(target, keywords):
    values = {"fused": "torch", "tiled_mlp": 2, "prefix_grouper": True}
    chosen = {name: values[name] for name in keywords}
    attempt(planned(target, **chosen), "model", "target", "patch")


@EXAMPLES
@given(patches=st.lists(st.one_of(anything, st.sampled_from([NoName(), WrongPlan(), NoName, FusedHead("torch")])), max_size=3))
def test_patches_of_ones_own(patches):
    attempt(planned(MODEL, *patches), "patch", "name", "wrong_plan", "fused_head")


@EXAMPLES
@given(
    backend=st.one_of(st.sampled_from(["torch", "auto"]), anything),
    memory=st.one_of(st.just("auto"), anything),
    outputs=st.one_of(st.just(("log_probs",)), anything),
    temperature=st.one_of(st.just(1.0), anything),
    entropy_grad=st.one_of(st.booleans(), anything),
)
def test_fused_head(backend, memory, outputs, temperature, entropy_grad):
    def make():
        patched(MODEL, fused=FusedHead(backend, memory, outputs, temperature, entropy_grad)).plan()

    attempt(make, "fused", "temperature")


@EXAMPLES
@given(tiles=anything)
def test_tiled_mlp(tiles):
    attempt(lambda: patched(MODEL, tiled_mlp=TiledMLP(tiles)).plan(), "tiled_mlp")


@EXAMPLES
@given(value=anything)
def test_prefix_grouper(value):
    attempt(lambda: patched(MODEL, prefix_grouper=PrefixGrouper(value)).plan(), "prefix_grouper")


@EXAMPLES
@given(
    group=st.one_of(st.just(1), anything),
    inputs=st.one_of(st.just("full"), anything),
    reduction=st.one_of(st.just("mean"), anything),
)
def test_ulysses(group, inputs, reduction):
    attempt(lambda: patched(MODEL, sp=Ulysses(group, inputs, reduction)).plan(), "sp", "ulysses")


@EXAMPLES
@given(
    scheme=st.one_of(st.sampled_from(["w4a16", "w4a4"]), anything),
    ignore=st.one_of(st.just(["*lm_head"]), anything),
    scales=st.one_of(st.none(), st.just(3.0), anything),
)
def test_fake_quant(scheme, ignore, scales):
    attempt(lambda: patched(MODEL, fake_quant=FakeQuant(scheme, ignore, scales)).plan(), "fake_quant", "input_global_scale")


@EXAMPLES
@given(
    temperature=st.one_of(st.none(), anything),
    shift_labels=st.one_of(st.none(), st.integers(0, 5).map(lambda n: torch.zeros(1, n, dtype=torch.int64))),
)
def test_arguments_of_the_call(temperature, shift_labels):
    def make():
        with patched(MODEL, fused="torch"):
            MODEL(input_ids=torch.arange(4)[None] + 3, temperature=temperature, shift_labels=shift_labels)

    attempt(make, "temperature", "fused_head", "labels")


def test_nothing_was_left_behind():
    assert_clean()
    assert picture(MODEL) == BEFORE
