"""`tiled_mlp` against the plain computation: values, gradients, what it keeps, what it computes, what it refuses."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scoped_patch.ops.tiled_mlp import ACTIVATIONS, identify_activation, tiled_mlp
from scoped_patch.ops.tiled_mlp.tiles import tile_slices
from tests.benchmarks.bench_tiled_mlp import Block, LiveBytes, reference_gradients

HIDDEN, INTERMEDIATE = 32, 48
PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}
NAMES = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def plain(tensors: list[Tensor | None], activation: Any) -> Tensor:
    """The block without tiling, by torch's own operations."""
    x, gate, up, down, gate_bias, up_bias, down_bias = tensors
    inner = F.linear(x, up, up_bias)
    if gate is not None:
        inner = activation(F.linear(x, gate, gate_bias)) * inner
    elif up.shape[0] == 2 * down.shape[1]:
        argument, factor = inner.chunk(2, -1)
        inner = activation(argument) * factor
    else:
        inner = activation(inner)
    return F.linear(inner, down, down_bias)


def make(
    layout: str = "gated", *, lead: tuple[int, ...] = (2, 17), bias: bool = False, dtype: Any = torch.float32
) -> list[Any]:
    rows = 2 * INTERMEDIATE if layout == "fused" else INTERMEDIATE
    shapes = {"x": (*lead, HIDDEN), "up": (rows, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    if layout == "gated":
        shapes["gate"] = (INTERMEDIATE, HIDDEN)
    if bias:
        shapes |= {"up_bias": (rows,), "down_bias": (HIDDEN,)}
        if layout == "gated":
            shapes["gate_bias"] = (INTERMEDIATE,)
    return [(torch.randn(shapes[name]) * 0.3).to(dtype).requires_grad_() if name in shapes else None for name in NAMES]


def gradients(output: Tensor, tensors: list[Tensor | None], dy: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(output, [t for t in tensors if t is not None and t.requires_grad], dy, **options))


def relative(got: Tensor, wanted: Tensor) -> float:
    return float(
        (got.detach().double() - wanted.detach().double()).abs().max() / wanted.detach().double().abs().max().clamp_min(1e-30)
    )


class Counter(TorchDispatchMode):
    """The floating point operations of all matrix products, in units of one [tokens, hidden] x [hidden, intermediate]."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.products = 0.0
        self._unit = tokens * HIDDEN * INTERMEDIATE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.products += left.shape[0] * left.shape[1] * right.shape[1] / self._unit
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tiles", [1, 3, 4, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["gated", "plain", "fused"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
def test_equals_the_untiled_block(activation: str, layout: str, bias: bool, tiles: int) -> None:
    tensors = make(layout, bias=bias)
    wanted = plain(tensors, PLAIN[activation])
    given = activation if activation in ACTIVATIONS else PLAIN[activation]
    got = tiled_mlp(*tensors, activation=given, tiles=tiles)
    assert relative(got, wanted) < 1e-6
    dy = torch.randn_like(wanted)
    for ours, theirs in zip(gradients(got, tensors, dy), gradients(wanted, tensors, dy), strict=True):
        assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize("lead", [(1,), (7,), (1, 5), (3, 0), (2, 3, 4), ()])
def test_any_leading_shape(lead: tuple[int, ...]) -> None:
    tensors = make(lead=lead, bias=True)
    wanted, got = plain(tensors, F.silu), tiled_mlp(*tensors, tiles=4)
    assert got.shape == wanted.shape
    dy = torch.randn_like(wanted)
    for ours, theirs in zip(gradients(got, tensors, dy), gradients(wanted, tensors, dy), strict=True):
        assert ours.shape == theirs.shape
        assert ours.numel() == 0 or relative(ours, theirs) < 1e-5


def test_strided_input_and_expanded_gradient() -> None:
    tensors = make()
    base = torch.randn(17, 2, 2 * HIDDEN, requires_grad=True)
    x = base.transpose(0, 1)[..., ::2]
    wanted = torch.autograd.grad(plain([x, *tensors[1:]], F.silu).sum(), base)[0]
    assert relative(torch.autograd.grad(tiled_mlp(x, *tensors[1:], tiles=4).sum(), base)[0], wanted) < 1e-5


@pytest.mark.parametrize("layout", ["gated", "plain", "fused"])
def test_every_choice_of_frozen_tensors(layout: str) -> None:
    everything = make(layout, bias=True, lead=(9,))
    present = [index for index, tensor in enumerate(everything) if tensor is not None]
    dy = torch.randn(9, HIDDEN)
    for choice in itertools.product([False, True], repeat=len(present)):
        trainable = {index for index, wanted in zip(present, choice, strict=True) if wanted}
        tensors = [t if t is None else t.detach().requires_grad_(i in trainable) for i, t in enumerate(everything)]
        output = tiled_mlp(*tensors, tiles=4)
        assert output.requires_grad == bool(trainable)
        if trainable:
            wanted = gradients(plain(tensors, F.silu), tensors, dy)
            for ours, theirs in zip(gradients(output, tensors, dy), wanted, strict=True):
                assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("trainable", "forward", "backward"),
    [
        (("x", "gate", "up", "down"), 3, 8),  # gate and up again, d_product, three weights, twice the input: no down
        (("x",), 3, 5),
        (("gate", "up", "down"), 3, 6),
        (("down",), 3, 3),
        (("x", "up"), 3, 6),
        (("down_bias",), 3, 0),
        (("gate_bias",), 3, 3),
        ((), 3, 0),
    ],
)
def test_only_the_needed_products_are_computed(trainable: tuple[str, ...], forward: int, backward: int) -> None:
    tensors = make(lead=(16,), bias=True)
    for name, tensor in zip(NAMES, tensors, strict=True):
        tensor.requires_grad_(name in trainable)
    with Counter(16) as counter:
        output = tiled_mlp(*tensors, tiles=4)
    assert counter.products == forward
    if trainable:
        with Counter(16) as counter:
            output.sum().backward()
        assert counter.products == backward


def test_the_activations_of_one_tile_at_a_time() -> None:
    block = Block(64, 512)
    x = torch.randn(1, 256, 64, requires_grad=True)
    peaks, kept = {}, {}
    for tiles in (0, 1, 4, 16):
        saved = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel() * tensor.element_size())
            return tensor

        with LiveBytes() as live, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = tiled_mlp(x, *block.parameters(), tiles=tiles) if tiles else block(x)
            output.sum().backward()
        peaks[tiles], kept[tiles] = live.peak, max(saved)
        block.zero_grad()
        x.grad = None
    tile = 256 * 512 * 4
    assert kept[0] == tile
    assert kept[1] == kept[4] == kept[16] == 64 * 512 * 4, "nothing of the intermediate size is kept, only the weights"
    assert peaks[0] > peaks[1] > peaks[4] > peaks[16]
    # From 4 to 16 tiles, at least the three tensors of the intermediate size that a tile needs shrink.
    assert peaks[4] - peaks[16] >= 3 * tile * (1 / 4 - 1 / 16)


@pytest.mark.parametrize("tiles", [1, 4, 16, 64])
def test_bfloat16_weight_gradients_are_no_worse_than_untiled(tiles: int) -> None:
    block = Block(HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
    x = torch.randn(1, 4096, HIDDEN).to(torch.bfloat16)
    dy = torch.randn(1, 4096, HIDDEN).to(torch.bfloat16)
    truth = reference_gradients(block, x, dy)
    weights = list(block.parameters())
    untiled = torch.autograd.grad(block(x), weights, dy)
    tiled = torch.autograd.grad(tiled_mlp(x, *weights, tiles=tiles), weights, dy)
    for ours, theirs, true in zip(tiled, untiled, truth, strict=True):
        assert ours.dtype == torch.bfloat16
        # The rounding of the inputs of the products is the same and dominates; 1 % is for its last digits.
        assert (ours - true).norm() <= 1.01 * (theirs - true).norm()


def test_hooks_fire_once_and_two_backwards_give_exactly_double() -> None:
    tensors = make(bias=True)
    fired = []
    for name, tensor in zip(NAMES, tensors, strict=True):
        tensor.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    output = tiled_mlp(*tensors, tiles=4)
    dy = torch.randn_like(output)
    output.backward(dy, retain_graph=True)
    assert sorted(fired) == sorted(NAMES)
    once = [tensor.grad.clone() for tensor in tensors]
    output.backward(dy)
    assert sorted(fired) == sorted(2 * NAMES)
    for tensor, single in zip(tensors, once, strict=True):
        assert torch.equal(tensor.grad, 2 * single)


def test_gradients_accumulate_over_short_sequences() -> None:
    tensors = make(lead=(1, 3))
    ours, theirs = ([t if t is None else t.detach().clone().requires_grad_() for t in tensors] for _ in range(2))
    for length in (3, 5, 9):
        x = torch.randn(1, length, HIDDEN)
        tiled_mlp(x, *ours[1:], tiles=4).square().sum().backward()
        plain([x, *theirs[1:]], F.silu).square().sum().backward()
    for index in (1, 2, 3):
        assert relative(ours[index].grad, theirs[index].grad) < 1e-5


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("layout", ["gated", "plain", "fused"])
def test_autocast(layout: str, backward_inside: bool) -> None:
    tensors = make(layout, bias=True, lead=(4, 64))
    dy = torch.randn(4, 64, HIDDEN).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = plain(tensors, F.silu), tiled_mlp(*tensors, tiles=4)
        if backward_inside:
            ours = gradients(got, tensors, dy)
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert relative(got, wanted) < 2**-7
    if not backward_inside:
        ours = gradients(got, tensors, dy)
    doubles = [t if t is None else t.detach().double().requires_grad_() for t in tensors]
    truth = gradients(plain(doubles, F.silu), doubles, dy.double())
    theirs = gradients(wanted, tensors, dy)
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - true).norm() <= 1.05 * (other - true).norm()


def test_autocast_reaches_a_foreign_activation() -> None:
    seen = []

    def activation(x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), x.dtype))
        return F.softplus(x)

    tensors = make()
    with torch.autocast("cpu", torch.bfloat16):
        output = tiled_mlp(*tensors, activation=activation, tiles=2)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert seen == [(True, torch.bfloat16)] * 4


@pytest.mark.parametrize("layout", ["gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_with_parameters(layout: str, dtype: torch.dtype) -> None:
    scale = torch.tensor([0.7], dtype=dtype, requires_grad=True)
    frozen = torch.tensor([0.1], dtype=dtype)

    def activation(x: Tensor) -> Tensor:
        return torch.where(x > 0, scale * x * x, frozen * x)

    tensors = make(layout, dtype=dtype)
    got = tiled_mlp(*tensors, activation=activation, activation_parameters=[frozen, scale], tiles=4)
    wanted = plain(tensors, activation)
    dy = torch.randn_like(wanted)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for ours, theirs in zip(gradients(got, [*tensors, scale], dy), gradients(wanted, [*tensors, scale], dy), strict=True):
        assert ours.dtype == dtype
        assert relative(ours, theirs) < tolerance


class Swish(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.tensor(0.7))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x) * self.scale


def test_an_activation_that_is_changed_before_the_backward() -> None:
    """Its weights must not be; its numbers were those of the forward."""
    swish, tensors = Swish(), make()
    arguments = {"activation": swish, "activation_parameters": [swish.beta], "tiles": 4}
    wanted = plain(tensors, swish)
    got = tiled_mlp(*tensors, **arguments)
    dy = torch.randn_like(wanted)
    wanted_gradients = gradients(wanted, [*tensors, swish.beta], dy)
    swish.scale = 3.0
    for ours, theirs in zip(gradients(got, [*tensors, swish.beta], dy), wanted_gradients, strict=True):
        assert relative(ours, theirs) < 1e-5
    assert swish.scale == 3.0
    got = tiled_mlp(*tensors, **arguments)
    with torch.no_grad():
        swish.beta.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.sum().backward()


def test_without_gradients_nothing_is_kept() -> None:
    tensors = make()
    wanted = plain(tensors, F.silu)
    with torch.no_grad():
        assert not (got := tiled_mlp(*tensors, tiles=4)).requires_grad
    assert relative(got, wanted) < 1e-6
    with torch.inference_mode():
        assert relative(tiled_mlp(*tensors, tiles=4), wanted) < 1e-6


def test_saved_tensors_go_through_hooks() -> None:
    tensors = make(bias=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        output = tiled_mlp(*tensors, tiles=4)
    assert sorted(packed) == sorted(t.shape for t in tensors[:6])
    dy = torch.randn_like(output)
    for ours, theirs in zip(gradients(output, tensors, dy), gradients(plain(tensors, F.silu), tensors, dy), strict=True):
        assert relative(ours, theirs) < 1e-5


def test_a_weight_changed_before_the_backward_is_noticed() -> None:
    tensors = make()
    output = tiled_mlp(*tensors, tiles=4)
    with torch.no_grad():
        tensors[3].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_second_derivatives_are_refused() -> None:
    tensors = make()
    output = tiled_mlp(*tensors, tiles=4)
    first = torch.autograd.grad(output.sum(), tensors[0], create_graph=True)[0]
    wanted = torch.autograd.grad(plain(tensors, F.silu).sum(), tensors[0])[0]
    assert relative(first, wanted) < 1e-5
    with pytest.raises(RuntimeError, match=r"tiled_mlp has no second derivative.*without tiling"):
        first.square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    tensors = make(bias=True)

    def function(x: Tensor) -> Tensor:
        return tiled_mlp(x.sin(), *tensors[1:], tiles=4).cos()

    dy = torch.randn(2, 17, HIDDEN)
    wanted = gradients(plain([tensors[0].sin(), *tensors[1:]], F.silu).cos(), tensors, dy)
    checkpoint(function, tensors[0], use_reentrant=reentrant).backward(dy)
    for tensor, theirs in zip(tensors, wanted, strict=True):
        assert relative(tensor.grad, theirs) < 1e-5


@pytest.mark.parametrize("activation", ["silu", PLAIN["relu_squared"]])
def test_compiles(activation: Any) -> None:
    tensors = make(bias=True)

    def function(*tensors: Tensor) -> Tensor:
        return tiled_mlp(*tensors, activation=activation, tiles=4).sin()

    torch._dynamo.reset()
    # In one graph if the activation is known by name; autograd inside a backward, for others, breaks the graph.
    got = torch.compile(function, fullgraph=isinstance(activation, str), backend="aot_eager")(*tensors)
    wanted = function(*tensors)
    dy = torch.randn_like(wanted)
    for ours, theirs in zip(gradients(got, tensors, dy), gradients(wanted, tensors, dy), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tiles": 0}, ValueError, "tiles: got 0, wanted at least 1"),
        ({"tiles": True}, TypeError, "tiles: got True of type bool"),
        ({"tiles": 2.0}, TypeError, "tiles: got 2.0 of type float"),
        ({"activation": "swish"}, ValueError, "activation: got 'swish', wanted one of gelu, gelu_tanh, relu, silu"),
        ({"activation": 3}, TypeError, "activation: got int"),
        ({"x": torch.randn(2, 31)}, ValueError, r"hidden_states: got shape \(2, 31\), wanted \[..., 32\]"),
        ({"up": torch.randn(47, 32)}, ValueError, r"up_weight: got shape \(47, 32\), wanted \[48, hidden\]"),
        ({"up": torch.randn(48)}, ValueError, r"up_weight: got shape \(48,\), wanted two dimensions"),
        ({"gate": torch.randn(48, 16)}, ValueError, r"gate_weight: got shape \(48, 16\), wanted up_weight's"),
        ({"gate": None, "gate_bias": torch.randn(48)}, ValueError, "gate_bias: got a tensor without a gate_weight"),
        ({"down_bias": torch.randn(3)}, ValueError, r"down_bias: got shape \(3,\), wanted \(32,\)"),
        ({"down": torch.randn(32, 48, dtype=torch.float64)}, ValueError, "got dtypes torch.float32, torch.float64"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = dict(zip(NAMES, make(), strict=True)) | {"tiles": 4} | change
    options = {key: arguments.pop(key) for key in ("tiles", "activation") if key in arguments}
    with pytest.raises(error, match=message):
        tiled_mlp(*arguments.values(), **options)


def test_tiles_cover_all_tokens_once() -> None:
    for tokens in range(1, 40):
        for tiles in range(1, 45):
            slices = list(tile_slices(tokens, tiles))
            assert [i for s in slices for i in range(s.start, s.stop)] == list(range(tokens))
            assert len(slices) <= tiles
            assert all(s.stop > s.start for s in slices)


def test_activations_are_known_by_what_they_compute() -> None:
    for name in ACTIVATIONS:
        assert identify_activation(PLAIN[name]) == name
    assert identify_activation(torch.nn.SiLU()) == "silu"
    assert identify_activation(PLAIN["relu_squared"]) is None
    assert identify_activation(lambda x: x * torch.sigmoid(1.702 * x)) is None
    assert identify_activation(lambda x: F.silu(x).sum()) is None
    assert identify_activation(lambda x: 1 / 0) is None
