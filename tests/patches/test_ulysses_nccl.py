"""Sequence parallelism over NCCL: equal to one process on 2 and 4 GPUs, and on one GPU whose ranks share it.

What runs over NCCL is `differences`, which a fast test runs over gloo on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import masking_utils

from scoped_patch import BadOptionError, FakeQuant, Ulysses, patched
from scoped_patch.ops import group_devices
from scoped_patch.ops.sequence_parallel import all_gather, all_reduce_sum, all_to_all, collectives, reduce_scatter_sum
from scoped_patch.patches.ulysses import batch, groups
from tests.support import ulysses_equality as equality
from tests.support.ranks import spawn
from tests.support.ulysses import group_device, run_cases
from tests.support.ulysses_cases import Case, break_the_exchange
from tests.tiny_models import build

CARDS = torch.cuda.device_count()


def cases(device: str, ranks: int) -> list[Case]:
    """What `equality.settings` has none of: padding, cut layouts, sums of gradients, recurrences, mixtures of experts."""
    return [
        Case("qwen3", "sdpa", 2, 57, "padded", "sharded_fused", ranks=ranks, device=device),
        Case("llama", "sdpa", 2, 33, "packed", "sharded", reduction="sum", ranks=ranks, device=device),
        Case("qwen3_moe", "sdpa", 2, 33, "plain", "logits", ranks=ranks, device=device),
        Case("qwen3_5_text", "sdpa", 1, 33, "packed", "fused", ranks=ranks, device=device),
    ]


def differences(rank: int, world: int, sp: int, few: bool = False) -> list[str]:
    """One line for whatever is not as in one process, on this rank; on the device that the default group is for."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = group_device()
    mesh = equality.make_mesh(sp, device)
    chosen = equality.settings(sp, device, fsdp=True)
    lines = equality.problems(mesh, device, chosen[:: 5 if few else 1])
    lines += _scales_differ(device)
    if sp == world:
        lines += run_cases(rank, world, cases(device.type, world)[: 2 if few else None])
    return lines


def _scales_differ(device: torch.device) -> list[str]:
    """Scales of inputs that are kept on the CPU, agreed over a group that may take none there."""
    model, inputs = build("llama")
    patch = FakeQuant("w4a4")
    inputs["input_ids"] = inputs["input_ids"].roll(dist.get_rank(), 1) + dist.get_rank()
    with patched(model, fake_quant=patch):
        model(**{**inputs, "labels": None})
    scales = patch.packing(model, dist.group.WORLD)["input_global_scales"]
    mine = torch.stack([scale.reshape(()) for scale in scales.values()])
    lowest, highest = mine.to(device, copy=True), mine.to(device, copy=True)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return [] if torch.equal(lowest, highest) and mine.device.type == "cpu" else ["the ranks' scales of inputs differ"]


def partial_group(rank: int, world: int) -> list[float]:
    """Ranks 0 and 1 alone use a model, where the default group was told its device; the others make no group."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", int(torch.initial_seed() % 1000) + 29600, world, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=device)
    made = []
    if rank < 2:
        group = groups.resolve(2)
        assert group is not None
        made = all_reduce_sum(torch.ones(2, device=device) + rank, group).tolist()
    dist.barrier(device_ids=[device.index])
    return made


def assert_equal(ranks: int, sp: int, backend: str, few: bool = False, timeout: float = 800) -> None:
    start = "spawn" if backend == "nccl" else "forkserver"
    found = spawn(ranks, differences, sp, few, timeout=timeout, start=start, backend=backend)
    assert not [line for lines in found for line in lines], "\n".join(line for lines in found for line in lines)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "sp"), [(2, 2), (4, 4), (4, 2)])
def test_a_gpu_for_each_rank_equals_one_process(ranks, sp):
    if ranks > CARDS:
        pytest.skip(f"needs {ranks} CUDA devices, and there are {CARDS}")
    assert_equal(ranks, sp, "nccl")


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(CARDS < 1, reason="needs a CUDA device")
@pytest.mark.parametrize(("ranks", "sp"), [(2, 2), (4, 4), (4, 2)])
def test_ranks_that_share_a_gpu_equal_one_process(ranks, sp):
    """NCCL all the same, through sockets."""
    if ranks <= CARDS:
        pytest.skip(f"{CARDS} CUDA devices are enough for {ranks} ranks: the other test runs")
    assert_equal(ranks, sp, "nccl")


@pytest.mark.gpu
@pytest.mark.skipif(CARDS < 1, reason="needs a CUDA device")
def test_a_group_of_some_ranks_waits_for_nobody_else_over_nccl():
    assert spawn(4, partial_group, timeout=120, start="spawn", backend="nccl") == [[3.0, 3.0]] * 2 + [[]] * 2


# ---------------------------------------------------------------------------------------------------- without a GPU


def test_the_same_over_gloo():
    assert_equal(2, 2, "gloo", few=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sp"), [(2, 2), (4, 4), (4, 2)])
def test_all_of_it_over_gloo(ranks, sp):
    assert_equal(ranks, sp, "gloo", timeout=240)


def _broken(rank: int, world: int) -> list[str]:
    break_the_exchange(world)
    device = group_device()
    return equality.problems(equality.make_mesh(world, device), device, equality.settings(world, device)[:2])


def test_a_broken_exchange_is_seen():
    for lines in spawn(2, _broken):
        assert any("float32: log_probs is off by" in line for line in lines)
        assert any("bfloat16: log_probs is off by" in line for line in lines)


@pytest.fixture
def group_for_cuda():
    """As with NCCL: a group without a backend for the CPU."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_tensors_that_the_group_takes_none_of_are_refused_by_name(group_for_cuda):
    x = torch.ones(1, 3)
    for collective, what in (
        (all_to_all, "an all-to-all"),
        (all_gather, "an all-gather"),
        (reduce_scatter_sum, "a reduce-scatter"),
        (all_reduce_sum, "an all-reduce"),
    ):
        with pytest.raises(BadOptionError, match=rf"{what} of a tensor on cpu, \[1, 3\] torch.float32: .* for cuda only"):
            collective(x, group_for_cuda)
    assert group_devices.device_for(group_for_cuda, x) == torch.device("cuda")
    assert group_devices.device_for(object(), x) == x.device  # a group that does not say


def test_nothing_of_a_call_is_exchanged_from_the_cpu(monkeypatch):
    """A model that is elsewhere, labels that are not: no collective is given a tensor of the CPU, which NCCL would refuse."""
    kinds = []

    def refuse(group: Any) -> list[torch.device]:
        return [torch.device("meta")]

    def done(kind: str) -> Any:
        return lambda *args, **kwargs: kinds.append(kind)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)  # it looks at values
    monkeypatch.setattr(group_devices, "devices_of", refuse)
    monkeypatch.setattr(dist, "all_to_all_single", done("all_to_all"))
    monkeypatch.setattr(dist, "all_reduce", done("all_reduce"))
    monkeypatch.setattr(collectives, "_all_gather", done("all_gather"))
    monkeypatch.setattr(collectives, "_reduce_scatter", done("reduce_scatter"))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, inputs = build("qwen3")
        model.to("meta")
        ids, labels = inputs["input_ids"].to("meta"), inputs["labels"]
        for layout in ("full", "sharded"):
            with patched(model, sp=Ulysses(2, inputs=layout)) as scope:
                positions = {"position_ids": torch.arange(ids.shape[1])[None]} if layout == "sharded" else {}
                out = model(input_ids=ids, labels=labels, **positions)
                (out.logits.sum() + out.loss).backward()
                assert scope.gather(out.logits).is_meta
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    assert {"all_to_all", "all_gather", "all_reduce"} <= set(kinds)


def test_targets_of_the_cpu_are_counted_where_the_group_counts(monkeypatch):
    """A multimodal model in a cut layout, given this rank's `shift_labels` on the CPU."""
    counted = []
    monkeypatch.setattr(group_devices, "devices_of", lambda group: [torch.device("meta")])
    monkeypatch.setattr(batch, "all_reduce_sum", lambda x, group: counted.append(x) or x)
    shard: Any = SimpleNamespace(size=4, length=8, group=object())
    labels = torch.tensor([[5, -100, 6, 7]])
    kwargs = {"shift_labels": labels, "labels": labels}
    batch.cut_targets(shard, kwargs)
    assert [x.device.type for x in counted] == ["meta"]
    assert shard.targets is labels


def test_a_group_is_made_without_the_default_groups_device(monkeypatch):
    """Told the device, torch would split its communicator, and wait for ranks that make no group."""
    seen = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        world.bound_device_id = torch.device("cuda", 0)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
        monkeypatch.setattr(dist, "new_group", lambda ranks, **how: seen.append((ranks, world.bound_device_id)) or world)
        assert groups.resolve(2) is world
        assert seen == [([0, 1], None)]
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
