"""Every pair and triple of shipped patches: in one call, and nested, entered and left in every order."""

from __future__ import annotations

import itertools

import pytest
import torch

from scoped_patch import patched
from tests.support.checks import run_checks
from tests.support.groups import text_groups
from tests.support.stacks import Subject, options, orders

NAMES = tuple(options())
PAIRS = list(itertools.combinations(NAMES, 2))
TRIPLES = list(itertools.combinations(NAMES, 3))


@pytest.fixture(scope="module")
def subject():
    return Subject(text_groups(prefixes=(6, 4), responses=((3, 4), (2, 3))))


def joined(names):
    return "+".join(names)


@pytest.mark.parametrize("names", [*PAIRS, *TRIPLES, NAMES], ids=joined)
def test_in_one_call(subject, names):
    together = {keyword: value for name in names for keyword, value in options()[name].items()}
    scope = patched(subject.model, **together)
    for _ in range(2):
        with scope:
            subject.check(names)
        subject.check_untouched()
        subject.check((), backward=False)


def nest(subject, entering, leaving, every_step):
    """Enter and leave; the model is right after every step, in value, and in gradient when all are on."""
    live = {}
    for name in entering:
        live[name] = patched(subject.model, **options()[name]).apply()
        if every_step:
            subject.check(live, backward=len(live) == len(entering))
    if not every_step:
        subject.check(live)
    for name in leaving:
        live.pop(name).restore()
        if live:
            subject.check(live, backward=False)
    subject.check_untouched()


@pytest.mark.parametrize("names", PAIRS, ids=joined)
def test_pairs_in_every_order(subject, names):
    for entering, leaving in orders(names):
        nest(subject, entering, leaving, every_step=True)
    subject.check((), backward=False)


def cover(names):
    """Every order of entering and every order of leaving, once each, and no order left as it was entered but one."""
    entering = list(itertools.permutations(names))
    leaving = [*entering[3:], *entering[:3]]
    return zip(entering, leaving, strict=True)


@pytest.mark.parametrize("names", TRIPLES, ids=joined)
def test_triples_in_a_cover_of_orders(subject, names):
    for entering, leaving in cover(names):
        nest(subject, entering, leaving, every_step=False)
    subject.check((), backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("names", TRIPLES, ids=joined)
def test_triples_in_every_order(subject, names):
    for entering, leaving in orders(names):
        nest(subject, entering, leaving, every_step=True)
    subject.check((), backward=False)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_all_of_them_on_other_families(family):
    other = Subject(text_groups(prefixes=(6,), responses=((3, 4),)), family)
    nest(other, NAMES, NAMES[::-1], every_step=False)
    nest(other, NAMES[::-1], NAMES[::-1], every_step=False)


@pytest.mark.parametrize("entering", list(itertools.permutations(("fused", "tiled", "fake"))), ids=joined)
def test_backward_after_all_have_left(subject, entering):
    """Without recomputation a graph holds what it needs, in whatever order the scopes are left before it is used."""
    live = [patched(subject.model, **options()[name]).apply() for name in entering]
    found = subject.scores(subject.call(entering))
    for session in live:
        session.restore()
    subject.check_untouched()
    subject.model.zero_grad()
    subject.objective(found).backward()
    _, right = subject.right(entering)
    for name, parameter in subject.model.named_parameters():
        scale = max(right[name].abs().max().item(), 1e-3)
        assert (parameter.grad - right[name]).abs().max().item() <= 1e-4 * scale, name
    subject.model.zero_grad(set_to_none=True)


def test_the_test_can_tell(subject):
    """A patch that is not on, or one too many, is seen by the checks above."""
    with patched(subject.model, fake_quant="w4a16"), pytest.raises(AssertionError, match="log-probs are off"):
        subject.check(())
    with patched(subject.model, fused="torch"), pytest.raises(AssertionError, match="under"):
        subject.check(("tiled",))
    session = patched(subject.model, tiled_mlp=2).apply()
    with pytest.raises(AssertionError):
        subject.check_untouched()
    session.restore()
    subject.check_untouched()
    assert not torch.equal(subject.right(("fake",))[0], subject.right(())[0])


def test_two_ranks():
    """Pairs and triples with the sequence spread over two ranks."""
    run_checks("tests.support.stack_ranks", ["pairs", "triples"], world=2)


@pytest.mark.slow
def test_two_ranks_in_every_order():
    run_checks("tests.support.stack_ranks", ["triples_in_every_order"], world=2, timeout=900.0)
