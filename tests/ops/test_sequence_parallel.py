"""Collectives with gradients and the layouts they move between, against what one process would have."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoped_patch.ops import sequence_parallel as sp
from scoped_patch.ops.sequence_parallel import HeadLayout, failures
from tests.support.ranks import RankError, spawn

# ---------------------------------------------------------------------------------------------------- layouts, one process


@pytest.mark.parametrize(("length", "ranks", "sizes"), [(57, 8, [8] * 7 + [1]), (7, 2, [4, 3]), (1, 2, [1, 0]), (8, 2, [4, 4])])
def test_shards_cover_the_sequence_once(length, ranks, sizes):
    bounds = [sp.shard_bounds(length, ranks, r) for r in range(ranks)]
    assert [end - start for start, end in bounds] == sizes
    assert [t for start, end in bounds for t in range(start, end)] == list(range(length))
    assert sp.shard_length(length, ranks) == max(sizes)


def test_padding_repeats_the_last_token_or_a_value():
    x = torch.tensor([[1, 2, 3]])
    assert sp.pad_sequence(x, 1, 5).tolist() == [[1, 2, 3, 3, 3]]
    assert sp.pad_sequence(x, 1, 5, 0).tolist() == [[1, 2, 3, 0, 0]]
    assert sp.pad_sequence(x, 1, 3) is x


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "kv_per_rank", "sent"),
    [
        (4, 2, 2, 1, None),  # as many KV heads as ranks
        (8, 4, 2, 2, None),  # more
        (4, 2, 4, 1, (0, 0, 1, 1)),  # fewer: interleaved, never (0, 1, 0, 1)
        (8, 1, 4, 1, (0, 0, 0, 0)),
        (6, 3, 2, 2, (0, 1, 1, 2)),  # not dividing: each rank is sent what it needs
        (9, 3, 3, 1, None),
    ],
)
def test_each_rank_is_sent_the_kv_heads_it_needs(heads, kv, ranks, kv_per_rank, sent):
    layout = HeadLayout(heads, kv, ranks)
    assert layout.kv_per_rank == kv_per_rank
    assert layout.kv_sent == sent


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 24))
def test_every_query_head_finds_its_own_kv_head(group, kv, ranks):
    heads = group * kv
    if heads % ranks:
        with pytest.raises(ValueError, match=f"{heads} attention heads cannot be shared by {ranks} ranks"):
            HeadLayout(heads, kv, ranks)
        return
    layout = HeadLayout(heads, kv, ranks)
    sent = layout.kv_sent or tuple(range(kv))
    for rank in range(ranks):
        received = sent[rank * layout.kv_per_rank : (rank + 1) * layout.kv_per_rank]
        used = layout.kv_of_heads(rank)
        for i in range(layout.per_rank):
            local = used[i] if used is not None else i // layout.groups(rank)
            assert received[local] == (rank * layout.per_rank + i) // group
    if kv % ranks == 0:
        assert layout.kv_sent is None
        assert layout.kv_per_rank == kv // ranks  # nothing is repeated


def test_heads_that_cannot_be_shared_say_what_can():
    with pytest.raises(ValueError, match=r"6 attention heads cannot be shared by 4 ranks.*1, 2, 3, 6"):
        HeadLayout(6, 2, 4)


# ---------------------------------------------------------------------------------------------------- several ranks


def _full(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def _mine(x: Tensor, dim: int, rank: int, world: int) -> Tensor:
    return x.chunk(world, dim)[rank].clone().requires_grad_()


def _exchange_there_and_back(rank: int, world: int, batch: int) -> None:
    group = dist.group.WORLD
    full = [_full(batch, world * h, world * 3, d, seed=i) for i, (h, d) in enumerate([(2, 8), (1, 8), (1, 5)])]
    local = [_mine(x, 2, rank, world) for x in full]
    with sp.count_collectives() as log:
        made = sp.heads_from_sequence(local, group)
    assert log.calls == [("all_to_all", 4 * batch * 3 * world * (2 * 8 + 8 + 5))]
    for x, y in zip(full, made, strict=True):
        assert torch.equal(y, x.chunk(world, 1)[rank])
    # Every rank has a loss of its own heads; the gradient of a token is the sum of all of them.
    weights = [_full(*x.shape, seed=10 + i) for i, x in enumerate(full)]
    with sp.count_collectives() as log:
        sum((y * w.chunk(world, 1)[rank]).sum() for y, w in zip(made, weights, strict=True)).backward()
    assert log.calls == [("all_to_all", 4 * batch * 3 * world * (2 * 8 + 8 + 5))]
    for x, w in zip(local, weights, strict=True):
        assert torch.equal(x.grad, w.chunk(world, 2)[rank])

    out = _full(batch, world * 3, world * 2, 5, seed=20)  # [B, S, H, D]
    mine = _mine(out, 2, rank, world)
    with sp.count_collectives() as log:
        back = sp.sequence_from_heads(mine, group)
        assert torch.equal(back, out.chunk(world, 1)[rank])
        weight = _full(*out.shape, seed=21)
        (back * weight.chunk(world, 1)[rank]).sum().backward()
    assert log.calls == [("all_to_all", 4 * batch * 3 * world * 2 * 5)] * 2
    assert torch.equal(mine.grad, weight.chunk(world, 2)[rank])


def _mixed_dtypes(rank: int, world: int) -> None:
    full = [_full(1, world, world * 2, 4, seed=i, dtype=t) for i, t in enumerate([torch.bfloat16, torch.float32])]
    made = sp.heads_from_sequence([_mine(x, 2, rank, world) for x in full], dist.group.WORLD)
    for x, y in zip(full, made, strict=True):
        assert y.dtype == x.dtype
        assert torch.equal(y, x.chunk(world, 1)[rank])


def _gather_and_shard(rank: int, world: int) -> None:
    group = dist.group.WORLD
    length = world * 3 - 1  # the last token of the last rank is padding
    full = _full(2, length, 4, seed=1)
    start, end = sp.shard_bounds(length, world, rank)
    for how in ("sum", "slice"):
        x = full.clone().requires_grad_()
        shard = sp.shard_sequence(x, 1, group)
        assert shard.shape == (2, 3, 4)
        assert torch.equal(shard[:, : end - start], full[:, start:end])
        gathered = sp.gather_sequence(shard, 1, group, length=length, backward=how)
        assert torch.equal(gathered, full)
        assert gathered._base is None
        weight = _full(2, length, 4, seed=2)
        ((rank + 1) * gathered * weight).sum().backward()
        factor = sum(range(1, world + 1)) if how == "sum" else rank + 1
        wanted = torch.zeros_like(full)
        wanted[:, start:end] = factor * weight[:, start:end]
        torch.testing.assert_close(x.grad, wanted)
    ids = torch.arange(length)[None]
    assert torch.equal(sp.gather_sequence(sp.shard_sequence(ids, 1, group), -1, group, length=length), ids)


def _scaled(rank: int, world: int) -> None:
    x = torch.ones(3, requires_grad=True)
    y = sp.scale_gradient(x, 0.25)
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad.tolist() == [0.25] * 3
    assert sp.scale_gradient(x, 1) is x


def _kv_layouts(rank: int, world: int) -> None:
    """Attention over exchanged heads equals attention over all heads, values and gradients."""
    group = dist.group.WORLD
    for heads, kv in ((world, 1), (2 * world, world), (3 * world, 3), (world * 4, 4), (6 * world, 2 * world)):
        layout = HeadLayout(heads, kv, world)
        q, k, v = (_full(2, h, world * 3, 8, seed=i).double() for i, h in enumerate((heads, kv, kv)))
        reference = [x.clone().requires_grad_() for x in (q, k, v)]
        whole = _attention(reference[0], *(x.repeat_interleave(heads // kv, 1) for x in reference[1:]))
        weight = _full(*whole.shape, seed=5).double()
        (whole * weight).sum().backward()

        mine = [_mine(x, 2, rank, world) for x in (q, k, v)]
        sent = [mine[0], *(x if layout.kv_sent is None else x[:, list(layout.kv_sent)] for x in mine[1:])]
        q2, k2, v2 = sp.heads_from_sequence(sent, group)
        used = layout.kv_of_heads(rank)
        if used is None:
            k2, v2 = (x.repeat_interleave(layout.groups(rank), 1) for x in (k2, v2))
        else:
            k2, v2 = k2[:, list(used)], v2[:, list(used)]
        out = sp.sequence_from_heads(_attention(q2, k2, v2), group)
        torch.testing.assert_close(out, whole.chunk(world, 1)[rank])
        (out * weight.chunk(world, 1)[rank]).sum().backward()
        for x, full in zip(mine, reference, strict=True):
            torch.testing.assert_close(x.grad, full.grad.chunk(world, 2)[rank])


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _gradients_of_a_mean(rank: int, world: int) -> dict[str, float]:
    """w * x over a sequence that two ranks share, as trainers average gradients: one process gives 3.5."""
    group = dist.group.WORLD
    x = torch.arange(8.0)
    found = {}
    for name in ("transparent", "sharded"):
        w = torch.ones(1, requires_grad=True)
        local = w * sp.shard_sequence(x, 0, group)
        if name == "transparent":
            loss = sp.gather_sequence(local, 0, group).mean()
        else:  # a share of a globally normalised sum, then averaged over ranks: that alone gives 1.75
            loss = sp.scale_gradient(local, world).sum() / 8
        loss.backward()
        found[name] = (sp.all_reduce_sum(w.grad, group) / world).item()
    return found


def _joined(rank: int, world: int) -> None:
    """Gradients go on together, in one order; what nothing flows into sends nothing."""
    group = dist.group.WORLD
    x, y = (torch.full((1, 2), float(rank + k), dtype=torch.float64, requires_grad=True) for k in (1, 2))
    gathered = [sp.gather_sequence(t, 1, group) for t in (x, y)]
    first, second = sp.join_gradients(gathered)
    assert first.grad_fn is second.grad_fn
    assert [node for node, _ in first.grad_fn.next_functions] == [t.grad_fn for t in gathered]
    assert not first._is_view()
    with sp.count_collectives() as log:
        (first**2).sum().backward(retain_graph=True)
    assert log.count("reduce_scatter") == 1
    assert y.grad is None
    with sp.count_collectives() as log:
        (first.sum() + 3 * second.sum()).backward()
    assert log.count("reduce_scatter") == 2
    assert x.grad.tolist() == [[world * (2.0 * (rank + 1) + 1)] * 2]
    assert y.grad.tolist() == [[world * 3.0] * 2]
    assert sp.join_gradients([x, y.detach()])[0] is x


def _no_second_derivative(rank: int, world: int) -> None:
    group = dist.group.WORLD
    x = torch.randn(1, world, 2, 4, requires_grad=True)
    for made in (
        sp.heads_from_sequence([x, x], group)[1],
        sp.sequence_from_heads(x.reshape(1, world, 2, 4), group),
        sp.gather_sequence(x, 1, group),
        sp.gather_sequence(x, 1, group, backward="slice"),
    ):
        (grad,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


def _bad_shapes(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"{world + 1} heads cannot be shared by {world} ranks"):
        sp.heads_from_sequence([torch.zeros(1, world + 1, 2, 4)], dist.group.WORLD)
    with pytest.raises(ValueError, match=f"{world + 1} tokens cannot be shared by {world} ranks"):
        sp.sequence_from_heads(torch.zeros(1, world + 1, 2, 4), dist.group.WORLD)


def _all(rank: int, world: int) -> dict[str, float]:
    _exchange_there_and_back(rank, world, batch=1)
    _exchange_there_and_back(rank, world, batch=3)
    for check in (_mixed_dtypes, _gather_and_shard, _scaled, _kv_layouts, _joined, _no_second_derivative, _bad_shapes):
        check(rank, world)
    return _gradients_of_a_mean(rank, world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exchanges_and_gathers_equal_one_process(world):
    for found in spawn(world, _all):
        if world != 3:  # 8 tokens on 3 ranks are padded, and this little model has no mask for that
            assert found == {"transparent": 3.5, "sharded": 3.5}


# ---------------------------------------------------------------------------------------------------- a rank that fails


def _second_fails(rank: int, world: int, then: Callable[[Any], Any] | None = None) -> tuple[str, float]:
    failures.POLL_SECONDS = 0.2
    group = dist.group.WORLD
    sp.begin_step(group)
    x = torch.ones(world, 4)
    sp.all_to_all(x, group)
    if rank == 1:
        sp.report_failure(group, MemoryError("no room for the layer"))
        time.sleep(2)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(sp.RankFailedError) as caught:
        sp.all_to_all(x, group)
    waited = time.monotonic() - started
    with pytest.raises(sp.RankFailedError, match="make a new one"):
        sp.begin_step(group)
    return str(caught.value), waited


def test_a_rank_that_fails_is_named_on_the_others_instead_of_waited_for():
    text, waited = spawn(2, _second_fails, timeout=60)[0]
    assert text == "rank 1 failed with MemoryError: no room for the layer, while rank 0 waited for it in an all-to-all"
    assert waited < 5


def _second_fails_before_each_kind(rank: int, world: int) -> list[str]:
    failures.POLL_SECONDS = 0.2
    texts = []
    for collective in (sp.all_to_all, sp.all_gather, sp.reduce_scatter_sum, sp.all_reduce_sum):
        group = dist.new_group(list(range(world)))
        sp.begin_step(group)
        if rank == 1:
            sp.report_failure(group, MemoryError("the needle"))
            time.sleep(2)
            continue
        started = time.monotonic()
        with pytest.raises(sp.RankFailedError, match="rank 1 failed with MemoryError: the needle") as caught:
            collective(torch.ones(world, 4), group)
        assert time.monotonic() - started < 5, collective.__name__
        texts.append(str(caught.value).rsplit("waited for it in ", 1)[1])
    if rank == 0:
        time.sleep(2)  # the other one's group must not see this process go
    return texts


def test_no_kind_of_collective_waits_for_a_rank_that_failed():
    found = spawn(2, _second_fails_before_each_kind, timeout=60)[0]
    assert found == ["an all-to-all", "an all-gather", "a reduce-scatter", "an all-reduce"]


def _second_stays_away(rank: int, world: int) -> tuple[str, float]:
    """Rank 1 fails where nobody is told of it, and lives on: in a backward pass outside of any scope, say."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=3))
    x = torch.ones(world, 4)
    sp.all_to_all(x, group)
    if rank == 1:
        time.sleep(8)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(sp.RankFailedError) as caught:
        sp.all_to_all(x, group)
    waited = time.monotonic() - started
    with pytest.raises(sp.RankFailedError, match=r"make a new one: .*rank 1 never came to it"):
        sp.begin_step(group)
    return str(caught.value), waited


def test_a_rank_that_stays_away_is_named_when_the_group_runs_out_of_time():
    results = spawn(3, _second_stays_away, timeout=60)
    for rank in (0, 2):
        text, waited = results[rank]
        assert f"an all-to-all that rank {rank} waited in ended badly: rank 1 never came to it" in text
        assert 2 < waited < 8


def _second_dies(rank: int, world: int) -> None:
    sp.all_to_all(torch.ones(world, 4), dist.group.WORLD)
    if rank == 1:
        os._exit(9)
    sp.all_gather(torch.ones(4), dist.group.WORLD)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match=r"RankFailedError: an all-gather that rank 0 waited in ended badly: rank 1 never came"):
        spawn(2, _second_dies, timeout=60)


def _all_fail_alike(rank: int, world: int) -> None:
    failures.POLL_SECONDS = 0.1
    group = dist.group.WORLD
    sp.begin_step(group)
    sp.report_failure(group, ValueError("the same on every rank, before any collective"))
    sp.begin_step(group)
    if rank == 0:
        time.sleep(0.5)  # the other one waits, looks, and must not find the note of the step before
    assert torch.equal(sp.all_to_all(torch.full((world, 1), rank), group)[:, 0], torch.arange(world))


def test_a_failure_that_all_ranks_share_breaks_nothing():
    spawn(2, _all_fail_alike, timeout=60)
