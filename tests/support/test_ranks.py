"""The group of ranks that other tests stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, spawn


def _sum_of_ranks(rank: int, world: int, start: int) -> tuple[int, float]:
    total = torch.tensor([float(rank + start)])
    dist.all_reduce(total)
    return rank, total.item()


def _second_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the needle")
    dist.barrier()


def _hangs(rank: int, world: int) -> None:
    time.sleep(60)


def _dies(rank: int, world: int) -> None:
    os._exit(3)


def test_ranks_form_a_group_and_return_by_rank():
    assert spawn(2, _sum_of_ranks, 10) == [(0, 21.0), (1, 21.0)]


def test_the_traceback_of_a_rank_that_raises_comes_back_and_nobody_waits():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 raised(.|\n)*_second_raises(.|\n)*KeyError: 'the needle'"):
        spawn(2, _second_raises, timeout=120)
    assert time.monotonic() - start < 60


def test_a_rank_that_hangs_is_ended():
    with pytest.raises(RankError, match="rank 0 was ended: it took too long"):
        spawn(1, _hangs, timeout=5)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match=r"rank 0 died \(exit code 3\)"):
        spawn(1, _dies)
