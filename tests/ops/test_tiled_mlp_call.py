"""`tiled_call`: any token-wise function, against the untiled call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scoped_patch.ops.tiled_mlp import reached_tensors, tiled_call
from tests.benchmarks.bench_tiled_mlp import Block, LiveBytes, reference_gradients

HIDDEN, INTERMEDIATE, EXPERTS = 16, 24, 4


class Adapted(nn.Module):
    """A block with a low-rank adapter on a frozen projection, an activation with a parameter, biases and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.up.weight.requires_grad_(False)
        self.low, self.high = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, INTERMEDIATE, bias=False)
        self.slope = nn.Parameter(torch.tensor(0.3))
        self.dropout = nn.Dropout(dropout)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x) + self.high(self.low(self.dropout(x)))
        return self.down(self.dropout(torch.where(inner > 0, inner, inner * self.slope)))


class Routed(nn.Module):
    """Two outputs: [B, S, H], and router logits in whichever shape is asked for; also an integer and a None."""

    def __init__(self, flat: bool = True) -> None:
        super().__init__()
        self.flat = flat
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        logits = self.router(x)
        weights, index = logits.softmax(-1).topk(2, -1)
        mixed = torch.einsum("...h,ehk,...e->...k", x, self.experts, torch.zeros_like(logits).scatter(-1, index, weights))
        return mixed, logits.reshape(-1, EXPERTS) if self.flat else logits, None, index[..., 0]


def run(module: nn.Module, x: Tensor, tiles: int | None, **options: Any) -> Any:
    if tiles is None:
        return module(x)
    return tiled_call(module, x, lambda: reached_tensors(module), tiles, **options)


def collect(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in module.named_parameters()} | {"input": x.grad}
    module.zero_grad()
    x.grad = None
    return found


def assert_same(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None], tolerance: float = 1e-5) -> None:
    for name, wanted in theirs.items():
        got = ours[name]
        assert (got is None) == (wanted is None), name
        if got is not None and wanted is not None:
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max().clamp_min(1e-12), name


@pytest.mark.parametrize("tiles", [1, 3, 4, 100])
@pytest.mark.parametrize("lead", [(2,), (7,), (2, 9), (2, 3, 4)])
@pytest.mark.parametrize("frozen_input", [False, True])
def test_equals_the_untiled_call(lead: tuple[int, ...], tiles: int, frozen_input: bool) -> None:
    block = Adapted()
    x = torch.randn(*lead, HIDDEN).requires_grad_(not frozen_input)
    dy = torch.randn(*lead, HIDDEN)
    wanted = block(x)
    wanted.backward(dy)
    theirs = collect(block, x)
    got = run(block, x, tiles)
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    got.backward(dy)
    ours = collect(block, x)
    assert_same(ours, theirs)
    assert ours["never"] is None
    assert ours["up.weight"] is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one(tokens: int) -> None:
    block = Adapted()
    x = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    assert run(block, x, 4).shape == x.shape


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("tiles", [1, 3, 4, 18])
def test_several_outputs_keep_shape_and_order(flat: bool, tiles: int) -> None:
    block = Routed(flat)
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)

    def objective(out: tuple[Any, ...]) -> Tensor:
        return (out[0].square() * torch.arange(9)[None, :, None]).sum() + out[1].sin().square().mean()

    wanted = block(x)
    objective(wanted).backward()
    theirs = collect(block, x)
    got = run(block, x, tiles)
    assert isinstance(got, tuple)
    assert got[2] is None
    assert torch.equal(got[3], wanted[3])
    assert not got[3].requires_grad
    for ours, other in zip((got[0], got[1]), (wanted[0], wanted[1]), strict=True):
        assert ours.shape == other.shape
        assert (ours - other).abs().max() <= 1e-6 * other.abs().max()
    objective(got).backward()
    assert_same(collect(block, x), theirs)


def test_one_of_several_outputs_alone_has_a_gradient() -> None:
    block = Routed()
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    block(x)[1].square().sum().backward()
    theirs = collect(block, x)
    run(block, x, 4)[1].square().sum().backward()
    ours = collect(block, x)
    assert_same(ours, theirs)
    assert ours["experts"] is None


def test_several_inputs_are_cut_together() -> None:
    """As experts are called: hidden states, chosen experts, their weights."""
    experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def function(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("th,tkhg,tk->tg", x, experts[index], weights)

    x, weights = torch.randn(11, HIDDEN, requires_grad=True), torch.rand(11, 2, requires_grad=True)
    index = torch.randint(EXPERTS, (11, 2))
    inputs = (x, weights, experts)
    wanted = torch.autograd.grad(function(x, index, weights).sin().sum(), inputs)
    got = torch.autograd.grad(tiled_call(function, (x, index, weights), [experts], 4).sin().sum(), inputs)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_dropout_drops_the_same_elements_in_the_backward() -> None:
    block = Adapted(dropout=0.5)
    x = torch.randn(1, 12, HIDDEN, requires_grad=True)
    dy = torch.randn(1, 12, HIDDEN)
    torch.manual_seed(5)
    wanted = torch.cat([block(piece) for piece in x.split(3, 1)], 1)
    after = torch.get_rng_state()
    wanted.backward(dy)
    theirs = collect(block, x)
    torch.manual_seed(5)
    got = run(block, x, 4)
    assert torch.equal(torch.get_rng_state(), after)
    torch.rand(7)
    before = torch.get_rng_state()
    got.backward(dy)
    assert torch.equal(torch.get_rng_state(), before), "the backward leaves the random state alone"
    assert torch.equal(got, wanted)
    assert_same(collect(block, x), theirs)
    run(block, x, 4, preserve_rng_state=False).backward(dy)
    with pytest.raises(AssertionError):
        assert_same(collect(block, x), theirs)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_recomputes_under_the_autocast_of_the_forward(backward_inside: bool) -> None:
    block = Adapted()
    seen: list[torch.dtype] = []
    block.down.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = block(x)
        wanted.float().square().sum().backward()
        theirs = collect(block, x)
        seen.clear()
        got = run(block, x, 4)
        # A use of a weight after the tiled forward, in the same region, still finds its way to the weight.
        assert torch.autograd.grad(block.down(torch.ones(1, INTERMEDIATE)).sum(), block.down.weight)[0].any()
        loss = got.float().square().sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    assert got.dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 4 + 1 + 4
    assert_same(collect(block, x), theirs, tolerance=0.02)


def test_backward_on_another_thread() -> None:
    block = Adapted(dropout=0.5)
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    torch.manual_seed(3)
    run(block, x, 4).sum().backward()
    theirs = collect(block, x)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        loss = run(block, x, 4).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same(collect(block, x), theirs, tolerance=0.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    block = Adapted(dropout=0.5)
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    torch.manual_seed(3)
    run(block, x.sin(), 4).square().sum().backward()
    theirs = collect(block, x)
    torch.manual_seed(3)
    out = checkpoint(lambda x: run(block, x.sin(), 4), x, use_reentrant=reentrant)
    out.square().sum().backward()
    assert_same(collect(block, x), theirs, tolerance=1e-6)


def test_around_a_checkpoint() -> None:
    block = Adapted()
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    block(x).square().sum().backward()
    theirs = collect(block, x)

    def function(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    tiled_call(function, x, lambda: reached_tensors(block), 4).square().sum().backward()
    assert_same(collect(block, x), theirs)


def test_hooks_fire_once_and_two_backwards_give_exactly_double() -> None:
    block = Adapted()
    fired = []
    for name, parameter in block.named_parameters():
        # `never` is listed and not used: autograd calls its hook too, with no gradient.
        if parameter.requires_grad and name != "never":
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    loss = run(block, x, 4).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    assert sorted(fired) == sorted(once)
    loss.backward()
    assert sorted(fired) == sorted(2 * list(once))
    for name, parameter in block.named_parameters():
        if name in once:
            assert torch.equal(parameter.grad, 2 * once[name])


def test_gradients_accumulate_over_short_sequences() -> None:
    ours, theirs = Adapted(), Adapted()
    theirs.load_state_dict(ours.state_dict())
    for length in (3, 5, 9):
        x = torch.randn(1, length, HIDDEN)
        run(ours, x, 4).square().sum().backward()
        theirs(x).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert (mine.grad - other.grad).abs().max() <= 1e-5 * other.grad.abs().max()


def test_only_the_inputs_are_saved() -> None:
    block = Adapted()
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        out = run(block, x, 4)
    assert packed == [x.shape]
    out.sum().backward()
    ours = collect(block, x)
    block(x).sum().backward()
    assert_same(ours, collect(block, x))


def test_the_activations_of_one_tile_at_a_time() -> None:
    block = Block(64, 512)
    x = torch.randn(1, 256, 64, requires_grad=True)
    peaks = {}
    for tiles in (1, 4, 16):
        with LiveBytes() as live:
            run(block, x, tiles).sum().backward()
        peaks[tiles] = live.peak
        collect(block, x)
    tile = 256 * 512 * 4
    assert peaks[1] - peaks[4] >= 3 * tile * (1 - 1 / 4)
    assert peaks[4] - peaks[16] >= 3 * tile * (1 / 4 - 1 / 16)


@pytest.mark.parametrize("tiles", [4, 64])
def test_bfloat16_weight_gradients_are_summed_in_float32(tiles: int) -> None:
    block = Block(32, 48, dtype=torch.bfloat16)
    x, dy = (torch.randn(1, 4096, 32).to(torch.bfloat16) for _ in range(2))
    truth = reference_gradients(block, x, dy)
    weights = list(block.parameters())
    untiled = torch.autograd.grad(block(x), weights, dy)
    tiled = torch.autograd.grad(run(block, x, tiles), weights, dy)
    in_bfloat16 = [torch.zeros_like(weight) for weight in weights]
    for piece, d_piece in zip(x.chunk(tiles, 1), dy.chunk(tiles, 1), strict=True):
        for total, part in zip(in_bfloat16, torch.autograd.grad(block(piece), weights, d_piece), strict=True):
            total += part
    for ours, theirs, naive, true in zip(tiled, untiled, in_bfloat16, truth, strict=True):
        assert (ours - true).norm() <= 1.01 * (theirs - true).norm()
        if tiles == 64:
            assert (ours - true).norm() <= 0.5 * (naive - true).norm()


def test_without_gradients() -> None:
    block = Routed()
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    wanted = block(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = run(block, x, 4)
        assert not got[0].requires_grad
        assert torch.allclose(got[0], wanted[0], atol=1e-5)
        assert torch.equal(got[3], wanted[3])


def test_tensors_kept_as_plain_attributes_are_found() -> None:
    block = Adapted()
    flat = torch.randn(HIDDEN * INTERMEDIATE, requires_grad=True)
    del block.low.weight, block.down.weight
    block.low.weight = torch.randn(2, HIDDEN)
    block.down.weight = flat.view(HIDDEN, INTERMEDIATE)
    x = torch.randn(2, 9, HIDDEN)
    assert any(tensor is block.down.weight for tensor in reached_tensors(block))
    wanted = torch.autograd.grad(block(x).square().sum(), flat)[0]
    got = torch.autograd.grad(run(block, x, 4).square().sum(), flat)[0]
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_an_unlisted_tensor_is_an_error_not_a_lost_gradient() -> None:
    block, other = Adapted(), nn.Linear(HIDDEN, HIDDEN)
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    out = tiled_call(lambda x: other(block(x)), x, lambda: reached_tensors(block), 4)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(16, 16\) that needs a gradient and is not among `par|\(16,\)"):
        out.sum().backward()
    # With nothing listed at all, autograd itself keeps the gradient.
    x = x.detach()
    tiled_call(other, x, [], 4).sum().backward()
    got = other.weight.grad.clone()
    other.zero_grad()
    other(x).sum().backward()
    assert torch.allclose(got, other.weight.grad, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda block: setattr(block, "never", None), "reached 8 tensors in the forward and reaches 7 in the backward"),
        (lambda block: setattr(block, "slope", nn.Parameter(torch.tensor(0.5))), r"shape \(\) was replaced by another"),
        (lambda block: block.down.bias.data.add_(1), None),
        (lambda block: nn.init.zeros_(block.down.bias), r"shape \(16,\) was modified in place .* \(an optimizer step"),
    ],
)
def test_a_block_that_changed_in_between_is_an_error(change: Any, message: str | None) -> None:
    block = Adapted()
    out = run(block, torch.randn(2, 9, HIDDEN), 4)
    change(block)
    if message is None:
        out.sum().backward()  # `.data` is torch's own way round this check
        return
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


def test_a_hook_on_a_listed_gradient_is_refused_and_on_a_modules_runs_once() -> None:
    block = Adapted()
    seen: list[Tensor] = []
    block.slope.register_hook(seen.append)
    x = torch.randn(2, 9, HIDDEN)
    with pytest.raises(ValueError, match=r"shape \(\) has a hook on its gradient"):
        tiled_call(block, x, list(block.parameters()), 4)
    tiled_call(block, x, block, 4).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], block.slope.grad)


def test_second_derivatives_are_refused() -> None:
    block = Adapted()
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    first = torch.autograd.grad(run(block, x, 4).sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="tiled_call has no second derivative"):
        first.square().sum().backward()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: x.mean(), ValueError, r"returned a tensor of shape \(\) for a tile of 5 tokens"),
        (lambda x: (x, x.sum(-2)), ValueError, r"returned a tensor of shape \(1, 16\) for a tile of 5 tokens"),
        (lambda x: {"out": x}, TypeError, "returned a dict, wanted a tensor or a tuple or list"),
        (lambda x: (x, 1.0), TypeError, "returned a float among its outputs"),
    ],
)
def test_functions_that_are_not_token_wise(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiled_call(function, torch.randn(2, 9, HIDDEN), [], 4)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        ((), {}, TypeError, "tensors: got nothing"),
        ((torch.ones(3, 2), None), {}, TypeError, "tensors: got Tensor, NoneType"),
        (torch.ones(3), {}, ValueError, r"tensors: got a first one of shape \(3,\)"),
        ((torch.ones(3, 2), torch.ones(4, 2)), {}, ValueError, r"tensors\[1\]: got shape \(4, 2\), wanted the token"),
        (torch.ones(3, 2), {"tiles": 0}, ValueError, "tiles: got 0"),
        (torch.ones(3, 2), {"parameters": [1]}, TypeError, "parameters: got a int among them"),
    ],
)
def test_wrong_arguments(tensors: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiled_call(F.relu, tensors, **{"parameters": [], "tiles": 4} | options)


def test_compiled_code_around_it_is_right() -> None:
    block = Adapted()
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    run(block, x.sin(), 4).cos().sum().backward()
    theirs = collect(block, x)
    torch._dynamo.reset()
    torch.compile(lambda x: run(block, x.sin(), 4).cos(), backend="aot_eager")(x).sum().backward()
    assert_same(collect(block, x), theirs, tolerance=1e-6)


# ------------------------------------------------------------------------------------------------- gradients inside a block
class Doubled(Tensor):
    """A weight that is twice what it holds to `F.linear`, as quantised ones have a scale."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        x, weight, *bias = (x.as_subclass(Tensor) if isinstance(x, Doubled) else x for x in args)
        return F.linear(2 * x, weight, *bias)


class Damped(torch.autograd.Function):
    """Makes a graph of the weight itself, and gives it a tenth of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.weight, ctx.result = weight, F.silu(F.linear(ctx.inner, weight))
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dx, dw = torch.autograd.grad(ctx.result, (ctx.inner, ctx.weight), gradient)
        return dx, dw * 0.1


class Odd(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=draw) * 0.3)
        self.bias = nn.Parameter(torch.randn(HIDDEN, generator=draw))
        self.shift = nn.Parameter(torch.randn(1, generator=draw))
        self.register_buffer("frozen", torch.randn(HIDDEN, HIDDEN, generator=draw) * 0.3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _learns_inside(block: Odd, x: Tensor) -> Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(F.linear(inner, block.weight).pow(2).sum(), inner)
    return F.linear(x, block.weight) + first


def _halved(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * 0.5)
    return tensor


def _hooked_late(block: Odd, x: Tensor) -> Tensor:
    weight = block.weight.t()
    out = x @ weight
    _halved(weight)
    return out


def _hooked_node(block: Odd, x: Tensor) -> Tensor:
    weight = block.weight.t()
    if torch.is_grad_enabled():
        weight.grad_fn.register_prehook(lambda gradients: (gradients[0] * 0.5,))
    return x @ weight


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, HIDDEN)


ODD = {
    "takes gradients itself": _learns_inside,
    "a function that takes gradients in its backward": lambda m, x: Damped.apply(x, m.weight),
    "a frozen weight of a class of its own": lambda m, x: F.linear(x, m.frozen.as_subclass(Doubled), m.bias).as_subclass(
        Tensor
    ),
    "an input of a class of its own": lambda m, x: F.linear(x.as_subclass(Doubled), m.weight, m.bias) * 1,
    "a hook on a view": lambda m, x: F.linear(x, _halved(m.weight.view(-1)).view(HIDDEN, HIDDEN)),
    "a hook on a view, after its use": _hooked_late,
    "a hook on a node": _hooked_node,
    "a checkpoint": lambda m, x: checkpoint(lambda y: F.linear(y, m.weight, m.bias).sin(), x, use_reentrant=False),
    "a bias that is computed": lambda m, x: F.linear(x, m.weight, m.bias * 2),
    "a weight that is computed": lambda m, x: F.linear(x, m.weight * 2, m.bias),
    "keywords": lambda m, x: torch.mm(_rows(x), mat2=m.weight.t()).view_as(x),
    "a bias for all": lambda m, x: F.linear(x, m.weight, m.shift) + torch.addmm(m.shift, _rows(x), m.weight).view_as(x),
    "vmap": lambda m, x: torch.vmap(lambda row: F.linear(row, m.weight))(_rows(x)[:, None]).view_as(x),
    "jvp": lambda m, x: torch.func.jvp(lambda y: F.linear(y, m.weight).sin(), (x,), (x,))[1],
    "a function's gradient": lambda m, x: torch.func.grad(lambda y: F.linear(y, m.weight).sin().sum())(x),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ODD)
def test_what_a_block_does_with_gradients(case: str, dtype: torch.dtype, autocast: bool) -> None:
    """Sums of 16-bit weight gradients must not go past any of it: factors of 2 and 10 in what follows."""
    block = Odd(ODD[case])
    x = torch.randn(2, 9, HIDDEN).to(dtype)
    if autocast and case in ("a bias for all", "keywords"):
        rounding = 2e-2  # other products than those that F.linear makes
    else:
        rounding = 1e-5 if dtype == torch.float32 and not autocast else 4e-3

    def gradients(tiles: int, exact: bool = False) -> list[Tensor]:
        used = block.double() if exact else block.to(dtype)
        used.zero_grad()
        leaf = (x.double() if exact else x.clone()).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and not exact):
            out = tiled_call(used, leaf, used, tiles) if tiles > 1 else used(leaf)
        out.sum().backward()
        return [leaf.grad.double().clone()] + [p.grad.double().clone() for p in used.parameters() if p.grad is not None]

    wanted = gradients(1, exact=True)
    plain, tiled = gradients(1), gradients(4)
    for right, untiled, found in zip(wanted, plain, tiled, strict=True):
        error, allowed = (found - right).abs().max(), (untiled - right).abs().max()
        assert error <= 2 * allowed + rounding * right.abs().max()


#: what a block may hold besides its weight, made before the call and without the block's knowing of it
HELD = {
    "a view": lambda weight: weight.view(-1).view(HIDDEN, HIDDEN),
    "a view behind a hook": lambda weight: _halved(weight.view(-1)).view(HIDDEN, HIDDEN),
    "computed": lambda weight: weight.sin() * 2,
}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", HELD)
def test_a_tensor_made_of_another_one_before_the_call(what: str, dtype: torch.dtype, both: bool) -> None:
    """The gradient of the one is part of the other's, once."""
    block = Odd(lambda m, x: F.linear(x, m.part) + (x @ m.weight if both else 0)).to(dtype)
    x = torch.randn(2, 9, HIDDEN, dtype=dtype)
    found = []
    for tiles in (1, 4):
        block.part = HELD[what](block.weight)
        (tiled_call(block, x, block, tiles) if tiles > 1 else block(x)).square().sum().backward()
        found.append(block.weight.grad.double().clone())
        block.zero_grad()
    assert (found[1] - found[0]).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-2) * found[0].abs().max()
    listed = [block.weight, HELD[what](block.weight)]
    with pytest.raises(ValueError, match="was computed from another one that is listed"):
        tiled_call(block, x, listed, 4)


@pytest.mark.parametrize("hooked", ["part", "middle"])
def test_a_hook_between_a_listed_weight_and_a_view_that_was_there_before(hooked: str) -> None:
    weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16))
    middle = weight.view(-1)
    part = middle.view(HIDDEN, HIDDEN)
    _halved(part if hooked == "part" else middle)
    x = torch.randn(2, 9, HIDDEN, dtype=torch.bfloat16)
    (wanted,) = torch.autograd.grad(F.linear(x, part).square().sum(), weight)
    (got,) = torch.autograd.grad(tiled_call(lambda rows: F.linear(rows, part), x, [weight], 4).square().sum(), weight)
    assert (got - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_under_autocast_weights_still_get_gradients_from_what_follows() -> None:
    block = Odd(lambda m, x: F.linear(x, m.weight))
    x = torch.randn(2, 9, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        tiled_call(block, x, block, 4)
        block(x).sum().backward()
    assert block.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_that_was_compiled_whole(dtype: torch.dtype) -> None:
    compiled = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    part = Odd(lambda m, x: F.linear(x, m.weight, m.bias).sin())
    block = nn.Sequential(part, nn.Linear(HIDDEN, HIDDEN)).to(dtype)
    x = torch.randn(2, 9, HIDDEN, dtype=dtype, requires_grad=True)
    run(block, x, 4).sum().backward()
    theirs = collect(block, x)
    part.compile(backend=backend, fullgraph=True)
    for _ in range(3):
        run(block, x, 4).sum().backward()
        assert_same(collect(block, x), theirs, tolerance=1e-6 if dtype == torch.float32 else 1e-2)
    assert 0 < len(compiled) <= 4  # with a graph and without, full tiles and a smaller one; never again


class Chosen(nn.Module):
    """Computes with one of two weights, by a plain attribute or by the sign of each token's first number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.active: list[str] = ["first"]
        self.scales = {"first": 1.0, "second": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for name in self.active:
            out = out + torch.tanh(getattr(self, name)(x)) * self.scales[name]
        return out


def _switch(block: Chosen) -> None:
    block.active = ["second"]


@pytest.mark.parametrize(
    "change",
    [_switch, lambda block: block.active.append("second"), lambda block: block.scales.update(first=3.0)],
    ids=["another", "one more", "scale"],
)
def test_plain_attributes_are_those_of_the_forward(change: Any) -> None:
    def gradients(tiles: int | None) -> dict[str, Tensor | None]:
        x = torch.ones(2, 9, HIDDEN).cumsum(1).div_(9).requires_grad_()
        block.active, block.scales = ["first"], {"first": 1.0, "second": 0.5}
        out = block(x) if tiles is None else tiled_call(block, x, block, tiles)
        change(block)
        seen = (block.active, block.scales, list(block.active), dict(block.scales))
        out.square().sum().backward()
        assert (block.active, block.scales) == seen[2:]
        assert block.active is seen[0]
        assert block.scales is seen[1]
        return collect(block, x)

    block = Chosen()
    assert_same(gradients(4), gradients(None))


def test_an_unlisted_tensor_is_an_error_also_where_only_later_tokens_meet_it() -> None:
    block, other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    x = torch.cat([torch.ones(4, HIDDEN), -torch.ones(4, HIDDEN)])

    def function(rows: Tensor) -> Tensor:
        return block(rows) if bool((rows > 0).all()) else other(block(rows))

    with pytest.raises(RuntimeError, match="needs a gradient and is not among `parameters`"):
        tiled_call(function, x, list(block.parameters()), 4).sum().backward()


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_function_that_changes_its_input_is_refused(contiguous: bool, gradients: bool) -> None:
    """A recomputation would change it once more, and what is not contiguous is cut into copies that the caller never sees."""
    block = nn.Linear(HIDDEN, HIDDEN)
    x = torch.randn(2, 8, HIDDEN)
    with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=r"changes its input of shape \(1, 4, 16\)"):
        tiled_call(lambda rows: block(rows.mul_(0.5)), x if contiguous else x.transpose(0, 1), block, 4)


def test_a_frozen_weight_may_be_written_to_in_a_forward_and_not_after_it() -> None:
    class Normalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
            return super().forward(x)

    block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Normalised(HIDDEN, HIDDEN))
    block[1].weight.requires_grad_(False)
    x = torch.randn(2, 9, HIDDEN)
    tiled_call(block, x, block, 4).sum().backward()
    out = tiled_call(block, x, block, 4)
    with torch.no_grad():
        block[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(16, 16\) was modified in place"):
        out.sum().backward()


def test_bfloat16_gradients_of_what_is_no_product_are_summed_in_float32() -> None:
    """The sum stands still at 256 in bfloat16: 257 is no number of it."""
    scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))
    x = torch.ones(512, HIDDEN, dtype=torch.bfloat16)
    tiled_call(lambda rows: rows * scale, x, [scale], 512).sum().backward()
    assert torch.equal(scale.grad, torch.full_like(scale, 512))
