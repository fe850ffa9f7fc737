"""D5, D7 and D20 under DDP and both kinds of FSDP, on two ranks. Log-probs and gradients are in `test_distributed.py`.

One group of ranks runs all cases; each is a test that reports its own outcome.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from scoped_patch import assert_clean
from tests.support.promises import PROMISES, Party, plain_step, seven
from tests.support.ranks import spawn
from tests.support.wrapped import VARIANTS

WORLD = 2


def party(rank: int, wrapper: nn.Module, model: nn.Module, bf16: bool, **more: Any) -> Party:
    """Each rank has tokens of its own."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
    return Party(wrapper, model, plain_step(wrapper, seven(20 + rank), bf16), optimizer, **more)


def with_ddp(rank: int, model: nn.Module, bf16: bool = False) -> Party:
    return party(rank, DistributedDataParallel(model), model, bf16)


def with_fsdp1(rank: int, model: nn.Module, bf16: bool = False) -> Party:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    made = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    # What is inside a root cannot be called by itself.
    return party(rank, made, model, bf16, call=lambda bare: made(**seven(20 + rank)), flat=True)


def with_fsdp2(rank: int, model: nn.Module, bf16: bool = False) -> Party:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.lm_head, mesh=mesh)
    return party(rank, fully_shard(model, mesh=mesh), model, bf16)


PARTIES = {"ddp": with_ddp, "fsdp1": with_fsdp1, "fsdp2": with_fsdp2}
CASES = [(p, promise, v) for p in PARTIES for promise in PROMISES if promise.startswith("D") for v in VARIANTS]


def run_all(rank: int, world: int, cases: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The cases that held on this rank. Raises at the first that did not: the other rank may be in a collective by then."""
    for case in cases:
        name, promise, variant = case
        torch.manual_seed(0)
        try:
            PROMISES[promise](lambda model, bf16=False, n=name: PARTIES[n](rank, model, bf16), VARIANTS[variant])
            assert_clean()
        except BaseException as error:
            raise AssertionError("-".join(case)) from error
        torch.distributed.barrier()
    return cases


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest) -> list[list[tuple[str, str, str]]]:
    """Runs what is selected, so that `-k` and `-m` save the rest."""
    chosen = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}
    return spawn(WORLD, run_all, [case for case in CASES if case in chosen], timeout=280)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id="-".join(case), marks=() if case[2] == "both" else pytest.mark.slow) for case in CASES],
)
def test_every_rank(held: list[list[tuple[str, str, str]]], case: tuple[str, str, str]) -> None:
    assert len(held) == WORLD
    assert all(case in cases for cases in held)
