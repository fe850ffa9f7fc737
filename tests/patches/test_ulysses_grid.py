"""Sequence parallelism equals one process: families, attention implementations, lengths, rows, layouts, other patches.

The pairwise cover runs always: every two values of any two axes meet in some case. The product is for `make test-full`.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.ranks import spawn
from tests.support.ulysses import run_cases
from tests.support.ulysses_cases import FAMILIES, NO_SDPA, RECURRENT, Case, break_the_exchange, pairwise, possible
from tests.support.versions import present

AXES = {
    "ranks": (2, 4),
    "family": FAMILIES + RECURRENT,
    "attention": ("sdpa", "eager", "flash"),
    "batch": (1, 2),
    "length": (32, 33, 57, 3),
    "rows": ("plain", "padded", "packed", "masked"),
    "call": ("logits", "fused", "tiled", "sharded", "sharded_fused"),
    "reduction": ("mean", "sum"),
    "checkpoint": (None, "reentrant", "nonreentrant"),
    "nesting": ("one", "sp_outer", "sp_inner"),
}


def _failures(ranks: int, cases: list[Case], timeout: float) -> list[str]:
    return [line for lines in spawn(ranks, run_cases, cases, timeout=timeout) for line in lines]


@pytest.mark.parametrize("ranks", AXES["ranks"])
def test_every_pair_of_settings_equals_one_process(ranks):
    axes = {**AXES, "family": present(FAMILIES + RECURRENT)}
    cases = [case for case in pairwise(axes, Case("llama")) if case.ranks == ranks]
    assert len(cases) > 20
    failures = _failures(ranks, cases, timeout=280)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_without_the_exchange_is_caught(ranks):
    """The comparison itself: heads that see their own tokens only must fail, on every rank."""
    cases = [Case("llama", call="fused"), Case("qwen3_5_text", rows="packed")]
    own = [[line for line in lines if "failed elsewhere" not in line] for lines in spawn(ranks, _without_exchange, cases)]
    found = [len(lines) for lines in own]
    assert found == [len(cases)] * ranks


def _without_exchange(rank: int, world: int, cases: list[Case]) -> list[str]:
    break_the_exchange(world)
    return run_cases(rank, world, cases)


def _product(family: str, ranks: int) -> list[Case]:
    """All lengths and calls in plain rows, and all kinds of rows at one odd length."""
    own = {"family": [family], "ranks": [ranks], "attention": AXES["attention"]}
    plain = {**own, "batch": AXES["batch"], "length": AXES["length"], "call": AXES["call"]}
    rows = {**own, "batch": [2], "length": [33], "rows": AXES["rows"][1:], "call": ["logits", "fused", "sharded_fused"]}
    orders = {**own, "length": [57], "call": ["fused", "tiled"], "nesting": AXES["nesting"][1:], "reduction": ["sum"]}
    redone = {**own, "length": [33], "call": ["fused", "sharded_fused"], "checkpoint": AXES["checkpoint"][1:]}
    packed = {**own, "batch": [1], "length": [57], "rows": ["packed"], "call": ["logits", "fused", "sharded_fused"]}
    made = []
    for axes in (plain, rows, orders, redone, packed):
        made += [Case(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return [case for case in made if possible(case)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES + RECURRENT)
def test_the_product_of_settings_equals_one_process(family, ranks):
    cases = _product(family, ranks)
    assert len(cases) > (20 if family in NO_SDPA else 60)
    failures = _failures(ranks, cases, timeout=1400)
    assert not failures, "\n".join(failures)


def _flex(rank: int, world: int) -> list[str]:
    import torch

    from scoped_patch import patched
    from tests.tiny_models import build

    wrong = []
    for family in ("llama", "mistral"):
        model, _ = build(family, attn="flex_attention", train=False)
        ids = torch.randint(3, 100, (2, 33), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits
            with patched(model, sp=world):
                found = model(input_ids=ids).logits
        if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4):
            wrong.append(f"{family} on rank {rank}")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flex_attention_forward():
    """On the CPU flex attention has no backward; each call is compiled, which takes most of a minute."""
    assert spawn(2, _flex, timeout=850) == [[], []]
