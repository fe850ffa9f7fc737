"""Vision-language models under sequence parallelism equal one process: families, contents, padding, positions, layouts.

The pairwise cover runs always: every two values of any two axes meet in some case. The product is for `make test-full`.
"""

from __future__ import annotations

import pytest

from tests.support.ranks import spawn
from tests.support.ulysses_cases import break_the_exchange, pairwise
from tests.support.versions import failures_of, present
from tests.support.vlm import CONTENTS, FAMILIES, Case, possible, product, run_cases

AXES = {
    "ranks": (2, 4),
    "family": FAMILIES,
    "attention": ("sdpa", "eager"),
    "batch": (1, 2),
    "contents": ("text", "images", "some", "video", "both"),
    "padding": (None, "left", "right"),
    "positions": ("own", "axes3", "axes4"),
    "call": ("logits", "fused", "sharded", "sharded_fused"),
    "reduction": ("mean", "sum"),
    "checkpoint": (None, "reentrant", "nonreentrant"),
}


def _failures(ranks: int, cases: list[Case], timeout: float) -> list[str]:
    return failures_of(line for lines in spawn(ranks, run_cases, cases, timeout=timeout) for line in lines)


@pytest.mark.parametrize("ranks", AXES["ranks"])
def test_every_pair_of_settings_equals_one_process(ranks):
    axes = {**AXES, "family": present(FAMILIES)}
    cases = [case for case in pairwise(axes, Case("qwen2_vl"), possible) if case.ranks == ranks]
    assert len(cases) > 20
    failures = _failures(ranks, cases, timeout=280)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_without_the_exchange_is_caught(ranks):
    """The comparison itself: heads that see their own tokens only must fail, on every rank."""
    cases = [Case("qwen3_vl", contents="images", call="fused"), Case("glm4v", contents="some", batch=2)]
    found = [len(lines) for lines in spawn(ranks, _without_exchange, cases, timeout=120)]
    assert found == [len(cases)] * ranks


def _without_exchange(rank: int, world: int, cases: list[Case]) -> list[str]:
    break_the_exchange(world)
    return run_cases(rank, world, cases)


def _product(family: str, ranks: int) -> list[Case]:
    """Every batch there is; every way to give positions, call and option, on the batches with most in them."""
    own = {"family": [family], "ranks": [ranks]}
    batches = {**own, "batch": [1, 2], "contents": list(CONTENTS), "padding": AXES["padding"], "call": ["fused"]}
    positions = {**own, "batch": [2], "contents": list(CONTENTS), "padding": ["left"], "positions": ["axes3", "axes4"]}
    layouts = {**own, "batch": [1, 2], "contents": list(CONTENTS), "padding": ["right"], "call": ["sharded_fused"]}
    calls = {
        **own,
        "batch": [2],
        "contents": ["text", "some", "long_video", "both"],
        "attention": AXES["attention"],
        "call": ["logits", "tiled", "sharded"],
        "reduction": AXES["reduction"],
    }
    redone = {
        **own,
        "batch": [2],
        "contents": ["images", "both"],
        "padding": ["left"],
        "call": ["logits", "sharded_fused"],
        "checkpoint": ["reentrant", "nonreentrant"],
    }
    return [case for axes in (batches, positions, layouts, calls, redone) for case in product(axes)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_product_of_settings_equals_one_process(family, ranks):
    cases = _product(family, ranks)
    assert len(cases) > 50
    failures = _failures(ranks, cases, timeout=1400)
    assert not failures, "\n".join(failures)
