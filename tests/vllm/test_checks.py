"""What is checked of a layer's scales, what is known of its coverage, and how little is read and done for it; no engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from scoped_patch.vllm import RejectedWeight, UnsupportedLayer
from scoped_patch.vllm.checks import check_values
from scoped_patch.vllm.coverage import Coverage, whole
from scoped_patch.vllm.process import processed_state
from scoped_patch.vllm.shadow import ShadowLayer, Staged, containers
from scoped_patch.vllm.source import Source

FP8 = torch.float8_e4m3fn


class Reads(TorchFunctionMode):
    """Counts the calls that wait for a device."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("tolist", "item", "__bool__", "__int__", "__float__"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def layer_with(**values: torch.Tensor) -> ShadowLayer:
    """A layer whose parameters each came as two shards, "first" and "second", or as one."""
    layer = ShadowLayer("layer", torch.nn.Module(), torch.nn.Module())
    for name, value in values.items():
        staged = Staged([(layer, name)], [torch.empty_like(value, device="meta")], Coverage(tuple(value.shape)))
        staged.real = value
        box = whole(tuple(value.shape))
        if box and len(value) > 1:
            half = len(value) // 2
            staged.sources = {f"first.{name}": [((0, half), *box[1:])], f"second.{name}": [((half, len(value)), *box[1:])]}
        else:
            staged.sources = {name: [box]}
        layer.params[name] = staged
    return layer


def scales(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": torch.zeros(4, 8, dtype=torch.uint8),
        "weight_scale": torch.ones(8, 32).to(FP8),
        "weight_global_scale": torch.tensor([20.0, 20.0]),
        "input_global_scale": torch.tensor(3.0),
        "w2_scale": torch.ones(4, 40, dtype=torch.bfloat16),
    } | changes


def test_good_scales_of_a_layer_are_read_at_once() -> None:
    with Reads() as reads:
        check_values(layer_with(**scales()))
    assert reads.count == 1
    with Reads() as reads:
        check_values(layer_with(weight=torch.ones(4)))
    assert reads.count == 0


def with_value(name: str, at: Any, value: float) -> dict[str, torch.Tensor]:
    changed = scales()[name].clone()
    if changed.dtype == FP8:
        changed.view(torch.uint8)[at] = int(value)
    else:
        changed[at] = value
    return {name: changed}


@pytest.mark.parametrize(
    ("name", "at", "value", "bad"),
    [
        ("weight_scale", (7, 31), 0x7F, "second.weight_scale"),
        ("weight_scale", (0, 0), 0xFF, "first.weight_scale"),
        ("weight_scale", (0, 0), 0xFE, None),  # negative, but finite
        ("weight_scale", (0, 0), 0, None),
        ("weight_global_scale", 1, float("nan"), "second.weight_global_scale"),
        ("weight_global_scale", 0, float("inf"), "first.weight_global_scale"),
        ("weight_global_scale", 1, 0.0, "second.weight_global_scale"),
        ("input_global_scale", (), float("-inf"), "input_global_scale"),
        ("input_global_scale", (), 0.0, "input_global_scale"),
        ("w2_scale", (3, 39), float("nan"), "second.w2_scale"),
        ("w2_scale", (3, 39), 0.0, None),
    ],
)
def test_a_bad_scale_is_named_whatever_it_is_read_with(name: str, at: Any, value: float, bad: str | None) -> None:
    layer = layer_with(**scales(**with_value(name, at, value)))
    if bad is None:
        check_values(layer)
        return
    with pytest.raises(RejectedWeight, match="NaN, infinity or a zero") as caught:
        check_values(layer)
    assert (caught.value.weight, caught.value.reason) == (bad, "non-finite")


def test_many_global_scales_may_not_be_zero_either() -> None:
    many = torch.ones(40, 2)
    check_values(layer_with(w13_weight_global_scale=many))
    many[30, 1] = 0
    with pytest.raises(RejectedWeight, match="zero") as caught:
        check_values(layer_with(w13_weight_global_scale=many))
    assert caught.value.weight == "second.w13_weight_global_scale"


def processed(live: Any, new: Any) -> Any:
    layer = ShadowLayer("layer", torch.nn.Module(), torch.nn.Module())
    layer.live.held, layer.shadow.held = live, new
    return processed_state(layer, ())


def test_numbers_that_changed_are_exchanged_where_they_are_held() -> None:
    live = {"a": 1.0, "b": [2, float("nan")], "only here": 5}
    new = {"a": 1.5, "b": [3, 7.0], "only there": 6}
    found = {(key, old, value) for _, key, old, value in processed(live, new).scalars}
    assert found == {("a", 1.0, 1.5), (0, 2, 3)}
    assert {id(holder) for holder, *_ in processed(live, new).scalars} == {id(live), id(live["b"])}
    assert processed(live, dict(live)).scalars == []


@pytest.mark.parametrize(
    ("live", "new"),
    [((1, 2.0), (1, 2.5)), (functools.partial(max, 3), functools.partial(max, 4)), ({"in": (1,)}, {"in": (2,)})],
)
def test_a_number_that_cannot_be_set_is_refused_before_anything_is_changed(live: Any, new: Any) -> None:
    with pytest.raises(UnsupportedLayer, match=r"held.* is .* now, and nothing can put that in place of"):
        processed(live, new)
    assert processed(live, live).scalars == []


@pytest.mark.parametrize(
    ("boxes", "complete"),
    [
        ([((0, 2), (0, 4)), ((2, 6), (0, 4))], True),
        ([((4, 6), (0, 4)), ((0, 4), (0, 4))], True),
        ([((0, 3), (0, 4)), ((2, 5), (0, 4))], False),  # as many elements as there are, but two rows twice
        ([((0, 6), (0, 2)), ((0, 6), (2, 4))], True),  # side by side in the other dimension
        ([((0, 2), (0, 4)), ((2, 5), (0, 4))], False),
        ([((0, 4), (0, 4)), ((2, 6), (0, 4))], True),
        ([((0, 3), (0, 4)), ((3, 6), (0, 2)), ((0, 3), (0, 2))], False),
    ],
)
def test_what_is_complete(boxes: list[Any], complete: bool) -> None:
    coverage = Coverage((6, 4))
    for box in boxes:
        coverage.add(box)
    assert coverage.complete() is complete is (not coverage.missing())


def test_shards_in_a_row_are_complete_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coverage, "missing", None)
    coverage = Coverage((6, 4))
    for box in (((4, 6), (0, 4)), ((0, 1), (0, 4)), ((1, 4), (0, 4))):
        coverage.add(box)
    assert coverage.complete()


def test_the_modules_around_a_module() -> None:
    assert list(containers("model.layers.0.attn")) == ["model.layers.0", "model.layers", "model", ""]
    assert list(containers("")) == []


def test_memory_that_is_let_go_is_forgotten_and_what_is_held_is_known() -> None:
    source = Source(None)
    buffer = torch.zeros(4096)
    held, known = [], 0
    for at, (name, tensor) in enumerate(source.stream((f"w{i}", buffer[i : i + 1]) for i in range(1000))):
        if at % 100 == 0:
            held.append((name, tensor))
        known = max(known, sum(map(len, source._handed.values())))
        assert source.name_of(tensor) == name
    assert known < 40  # of a thousand, of which ten are held
    for name, tensor in held:
        assert source.name_of(tensor) == name
        assert source.name_of(tensor[:]) == name
