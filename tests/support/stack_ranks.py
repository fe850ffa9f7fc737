"""Checks for ranks: stacks of patches that hold `sp=2`. Gradients are averaged over the ranks, as DDP does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from scoped_patch import patched
from tests.support.groups import text_groups
from tests.support.scores import gradients
from tests.support.stacks import Subject, options, orders

OTHERS = ("fused", "tiled", "prefix", "fake")


def subject() -> Subject:
    return Subject(text_groups(prefixes=(6, 4), responses=((3, 4), (2, 3))))


def check(on: Subject, live: Iterable[str], backward: bool) -> None:
    live = list(live)
    if not backward or "sp" not in live:
        on.check(live, backward)
        return
    wanted, right = on.right(live)
    found = on.scores(on.call(live))
    worst = (found.detach() - wanted).abs().max().item()
    assert worst <= 2e-5 * wanted.abs().max().item(), f"under {live} log-probs are off by {worst:.2e}"
    for name, g in gradients(on.model, lambda: on.objective(found)).items():
        mean: Tensor = g.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        scale = max(right[name].abs().max().item(), 1e-3)
        off = (mean - right[name]).abs().max().item() / scale
        assert off <= 1e-4, f"under {live} the gradient of {name} is off by {off:.2e}"


def nest(on: Subject, entering: Iterable[str], leaving: Iterable[str], world: int) -> None:
    live = {}
    for name in entering:
        live[name] = patched(on.model, **options(world)[name]).apply()
    check(on, live, True)
    for name in leaving:
        live.pop(name).restore()
        if live:
            check(on, live, False)
    on.check_untouched()


def together(on: Subject, names: Iterable[str], world: int) -> None:
    keywords = {keyword: value for name in names for keyword, value in options(world)[name].items()}
    with patched(on.model, **keywords):
        check(on, names, True)
    on.check_untouched()


def pairs(rank: int, world: int) -> None:
    torch.manual_seed(0)
    on = subject()
    for other in OTHERS:
        together(on, ("sp", other), world)
        for entering, leaving in orders(("sp", other)):
            nest(on, entering, leaving, world)


def triples(rank: int, world: int) -> None:
    """Every triple in one call, and nested in as many orders as show each of the three first, in the middle and last."""
    on = subject()
    for two in itertools.combinations(OTHERS, 2):
        names = ("sp", *two)
        together(on, names, world)
        for shift in range(3):
            entering = names[shift:] + names[:shift]
            nest(on, entering, entering, world)
            nest(on, entering, entering[::-1], world)


def triples_in_every_order(rank: int, world: int) -> None:
    on = subject()
    for two in itertools.combinations(OTHERS, 2):
        for entering, leaving in orders(("sp", *two)):
            nest(on, entering, leaving, world)
