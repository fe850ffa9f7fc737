"""Which calls of a loader count as the same call, and which traces are nothing but copies; no engine is needed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scoped_patch.vllm.coverage import Coverage
from scoped_patch.vllm.plans import _plan_of, key_of, run
from scoped_patch.vllm.shadow import ShadowLayer, Staged

_copy = torch.ops.aten.copy_.default


def loads(param: Any, weight: torch.Tensor, shard: Any = None) -> None:
    param.data.copy_(weight)


def other(param: Any, weight: torch.Tensor, shard: Any = None) -> None:
    param.data.copy_(weight)
    param.add_(0)


class Layer(torch.nn.Module):
    def loads(self, param: Any, weight: torch.Tensor) -> None:
        param.data.copy_(weight)


for _function in (loads, other, Layer.loads):
    _function.__module__ = "vllm.model_executor.layers.own"


def staged_at(*names: str) -> Staged:
    layer = ShadowLayer("layer", Layer(), Layer())
    faces = [torch.empty(4, 6, device="meta") for _ in names]
    return Staged([(layer, name) for name in names], faces, Coverage((4, 6)))


def marked(**marks: Any) -> torch.Tensor:
    out = torch.ones(4, 6)
    out.__dict__.update(marks)
    return out


WEIGHT = torch.ones(4, 6)


def test_calls_that_differ_in_anything_a_loader_may_ask_for_are_told_apart() -> None:
    staged = staged_at("weight")
    calls: list[tuple[Staged, Any, tuple[Any, ...]]] = [
        (staged, loads, (None, WEIGHT)),
        (staged, other, (None, WEIGHT)),
        (staged_at("scale"), loads, (None, WEIGHT)),
        (staged, loads, (None, WEIGHT.double())),
        (staged, loads, (None, torch.ones(6, 4))),
        (staged, loads, (None, torch.nn.Parameter(WEIGHT))),
        (staged, loads, (None, marked(shard_id=0))),
        (staged, loads, (None, marked(shard_id=1))),
        *((staged, loads, (None, WEIGHT, shard)) for shard in (0, 1, "q", "k", "0")),
    ]
    keys = [key_of(*call) for call in calls]
    assert None not in keys
    assert len(set(keys)) == len(calls)
    assert key_of(staged, loads, (None, torch.zeros(9, 4, 6)[3])) == keys[0]  # elsewhere in a buffer, other numbers


def in_a_closure(param: Any) -> Callable[..., None]:
    def inner(_: Any, weight: torch.Tensor) -> None:
        param.data.copy_(weight)

    inner.__module__ = loads.__module__
    return inner


@pytest.mark.parametrize(
    ("loader", "args"),
    [
        (loads, (None, torch.ones(6, 4).t())),
        (loads, (None, torch.ones(8, 6)[::2])),
        (loads, (None, WEIGHT.as_subclass(type("Own", (torch.Tensor,), {})))),
        (loads, (None, marked(scale=torch.ones(1)))),
        (loads, (None, WEIGHT, True)),
        (loads, (None, WEIGHT, (0, 1))),
        (loads, (None, WEIGHT, None)),
        (loads, (None, WEIGHT, 0, 1)),
        (loads, (None,)),
        (in_a_closure(WEIGHT), (None, WEIGHT)),
        (Layer().loads, (None, WEIGHT)),  # of another layer
        (types.FunctionType(loads.__code__, {"__name__": "own"}, "loads"), (None, WEIGHT)),
        (types.FunctionType(loads.__code__, {}, "loads"), (None, WEIGHT)),
        (len, (None, WEIGHT)),
    ],
)
def test_calls_whose_loader_is_always_run(loader: Any, args: Any) -> None:
    assert key_of(staged_at("weight"), loader, args) is None


def test_a_method_of_the_layer_itself_has_a_key_and_tied_parameters_have_none() -> None:
    staged = staged_at("weight")
    assert key_of(staged, staged.owners[0][0].shadow.loads, (None, WEIGHT)) is not None
    assert key_of(staged_at("weight", "weight"), loads, (None, WEIGHT)) is None


BUCKET = torch.arange(48.0).view(2, 4, 6)
REAL = torch.zeros(4, 6)
BOX = ((0, 4), (0, 6))


@pytest.mark.parametrize(
    ("trace", "boxes"),
    [
        ([], []),
        ([(_copy, (REAL, BUCKET[1]), None)], [BOX]),  # another weight of the bucket
        ([(_copy, (REAL[:2], BUCKET[0, 3:].expand(2, 6)), None), (_copy, (REAL[2:], BUCKET[1, :2]), None)], [BOX, BOX]),
        ([(_copy, (REAL, BUCKET[0].clone()), None)], [BOX]),  # something made of it
        ([(_copy, (torch.zeros(4, 6), BUCKET[0]), None)], [BOX]),  # to somewhere else
        ([(_copy, (REAL, BUCKET[0].view(torch.int32)), None)], [BOX]),
        ([(_copy, (REAL.view(torch.int32), BUCKET[0]), None)], [BOX]),
        ([(_copy, (REAL, BUCKET[0], True), None)], [BOX]),
        ([(_copy, (REAL, BUCKET[0]), {"non_blocking": True})], [BOX]),
        ([(_copy, (REAL, BUCKET[0]), None)], [BOX, BOX]),  # a write that is not in the trace
        ([(_copy, (REAL, BUCKET[0]), None), (_copy, (REAL, BUCKET[0]), None)], [BOX]),
        ([(_copy, (REAL[:0], BUCKET[0, :0]), None)], [BOX]),
        ([(torch.ops.aten.add_.Tensor, (REAL, BUCKET[0]), None)], [BOX]),
    ],
)
def test_traces_that_are_no_plan(trace: Any, boxes: Any) -> None:
    assert _plan_of(trace, REAL, BUCKET[0], boxes) is None


def test_a_plan_is_carried_out_where_the_next_weight_lies() -> None:
    trace: list[Any] = [(_copy, (REAL[:, 3:], BUCKET[1, :, :3]), {}), (_copy, (REAL.t()[:3], BUCKET[1].t()[3:]), {})]
    plan = _plan_of(trace, REAL, BUCKET[1], [((0, 4), (3, 6)), ((0, 4), (0, 3))])
    assert plan is not None
    for weight in (*BUCKET, torch.randn(4, 6), torch.nn.Parameter(torch.randn(3, 4, 6)[2].clone()).data):
        out = torch.zeros(4, 6)
        run(plan, out, weight)
        assert torch.equal(out, weight.roll(3, 1))
