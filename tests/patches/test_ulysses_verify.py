"""`scope.verify()` of a model that is spread over ranks: values, loss and gradients of all ranks against one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scoped_patch import Ulysses, UnsupportedError, patched, wrap_call
from tests.support.checks import run_checks
from tests.support.ulysses import snapshot
from tests.tiny_models import build

IDS = torch.randint(3, 100, (2, 11), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(11) < 4, -100, IDS)


def _verify(model: nn.Module, batch: dict[str, Any], sp: Any, **others: Any) -> Any:
    with patched(model, sp=sp, **others) as scope:
        return scope.verify({"use_cache": False, **batch})


def check_every_layout_and_reduction_is_equal(rank: int, world: int) -> None:
    model, _ = build("qwen2")
    before = snapshot(model)
    batches: list[dict[str, Any]] = [{"input_ids": IDS}, {"input_ids": IDS, "labels": LABELS}]
    for inputs, how, fused, batch in itertools.product(("full", "sharded"), ("mean", "sum"), (None, "torch"), batches):
        report = _verify(model, batch, Ulysses(world, inputs=inputs, grad_reduction=how), fused=fused)
        what = f"{inputs} {how} {fused} {sorted(batch)}: {report}"
        assert report.ok, what
        assert not report.missing, what
        assert report.worst_gradient is not None, what
        assert report.first_difference is None, what
        found = {one.what for one in report.comparisons}
        assert found >= {"log_probs", "entropy", *(["loss"] if "labels" in batch else []), *([] if fused else ["logits"])}, what
    assert snapshot(model) == before
    assert all(p.grad is None for p in model.parameters())


def check_packed_rows_and_a_temperature_per_token(rank: int, world: int) -> None:
    model, _ = build("llama")
    positions = torch.cat([torch.arange(4), torch.arange(7)]).expand(2, -1)
    heat = torch.rand(2, 11, generator=torch.Generator().manual_seed(3)) + 0.5
    for inputs, fused in itertools.product(("full", "sharded"), (None, "torch")):
        batch = {"input_ids": IDS, "position_ids": positions, "temperature": heat}
        report = _verify(model, batch, Ulysses(world, inputs=inputs), fused=fused)
        assert report.ok, f"{inputs} {fused}: {report}"
        assert report.worst_gradient is not None


def check_a_parameter_that_one_rank_alone_uses(rank: int, world: int) -> None:
    """Experts that only some ranks' tokens go to: their gradient is there once, and compared."""
    model, _ = build("qwen3_moe")
    report = _verify(model, {"input_ids": IDS[:1, :3]}, world, fused="torch")
    assert report.ok, str(report)


def check_faults_on_one_rank_are_seen_on_every_rank(rank: int, world: int) -> None:
    model, _ = build("llama")
    wrong = wrap_call(
        model.model.layers[1].mlp, "forward", lambda original, hidden: original(hidden) * (1.01 if rank == 1 else 1)
    )
    with patched(model, wrong, sp=world, fused="torch") as scope:
        report = scope.verify({"input_ids": IDS, "use_cache": False})
    assert not report.ok
    assert report.first_difference.what == "output of model.layers.1"


def check_a_gradient_of_the_wrong_size_is_seen(rank: int, world: int) -> None:
    """What averaging over sequence ranks gives where gradients were meant to be summed."""
    model, _ = build("llama")
    with patched(model, sp=Ulysses(world, grad_reduction="sum"), fused="torch") as scope:
        (patch,) = (one for one in scope.plan.patches if isinstance(one, Ulysses))
        object.__setattr__(patch, "grad_reduction", "mean")
        made = patch.spread_check(model, {"input_ids": IDS})
        object.__setattr__(patch, "grad_reduction", "sum")
        assert made.mean
        object.__setattr__(patch, "spread_check", lambda *_: made)
        report = scope.verify({"input_ids": IDS, "use_cache": False})
    assert not report.ok
    assert abs(report.worst_gradient.patched / report.worst_gradient.unpatched - 1 / world) < 1e-3
    assert all(one.relative < 1e-4 for one in report.comparisons if not one.what.startswith("gradient"))


def check_after_the_scope_was_left(rank: int, world: int) -> None:
    model, _ = build("mistral")
    with patched(model, sp=world, fused="torch") as scope:
        pass
    assert scope.verify({"input_ids": IDS, "labels": LABELS, "use_cache": False}).ok


def check_wrapped_models_reduce_by_themselves(rank: int, world: int) -> None:
    batch = {"input_ids": IDS, "labels": LABELS}
    for inputs in ("full", "sharded"):
        model, _ = build("llama")
        wrapped = DistributedDataParallel(model)
        report = _verify(wrapped, batch, Ulysses(world, inputs=inputs), fused="torch")
        assert report.ok, f"ddp {inputs}: {report}"
        model, _ = build("llama")
        mesh = init_device_mesh("cpu", (world,))
        for module in (*model.model.layers, model.lm_head, model):
            fully_shard(module, mesh=mesh)
        report = _verify(model, batch, Ulysses(world, inputs=inputs), fused="torch")
        assert report.ok, f"fsdp {inputs}: {report}"
        assert report.worst_gradient is not None


def check_multimodal_models(rank: int, world: int) -> None:
    model, batch = build("qwen2_vl")
    report = _verify(model, batch, world, fused="torch")
    assert report.ok, str(report)
    with pytest.raises(UnsupportedError, match=r"verify\(\) of Qwen2VL.*use a scope with inputs='full'"):
        _verify(model, batch, Ulysses(world, inputs="sharded"))


CHECKS = [name for name in dir() if name.startswith("check_")]


def test_verify_on_two_ranks():
    run_checks(__name__, CHECKS, 2)


def test_outputs_of_layers_that_run_on_other_rows_are_not_compared():
    model, _ = build("llama")
    ids = IDS[:1].repeat(2, 1)
    ids[1, -3:] = 5
    with patched(model, fused="torch", prefix_grouper=True) as scope:
        report = scope.verify({"input_ids": ids, "use_cache": False})
    assert report.ok, str(report)
    assert report.first_difference is None
