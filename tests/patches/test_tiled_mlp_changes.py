"""Tiled blocks whose surroundings change: weights lent for a call, classes changed, results and weights written to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scoped_patch import UnsupportedError, assert_clean, patched, wrap_call
from scoped_patch.models.feed_forward import find_feed_forwards
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, take_gradients
from tests.tiny_models import build

IDS = token_ids(2, 11)
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert_clean()


def drawn(family: str = "llama", inside: bool = False) -> nn.Module:
    """A model in float64; `inside`: with a hook in each block, so that blocks run their own forward tile by tile."""
    model = build(family, initializer_range=0.3)[0].double()
    if family != "llama":
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    if inside:
        for layer in model.model.layers:
            next(layer.mlp.children()).register_forward_hook(lambda *_: None)
    return model


def step(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    model(**BATCH, **more).loss.backward()
    return take_gradients(model)


def check(model: nn.Module, run: Callable[[], dict[str, Tensor]] | None = None, **options: Any) -> None:
    run = run or (lambda: step(model))
    right = run()
    with patched(model, tiled_mlp=4, **options):
        assert_gradients(run(), right, 1e-9)


def check_around(model: nn.Module, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """With the blocks inside others, which are put around them when the scope is live already."""

    def wrap() -> None:
        for layer in model.model.layers:
            layer.mlp = wrapper(layer.mlp)

    wrap()
    right = step(model)
    for layer in model.model.layers:
        layer.mlp = layer.mlp.inner
    with patched(model, tiled_mlp=4):
        wrap()
        assert_gradients(step(model), right, 1e-9)


FORMS = [("llama", False), ("llama", True), ("qwen3_moe", False)]


# ------------------------------------------------------------------------------------------------- weights for a call
@pytest.mark.parametrize("kind", ["computed", "computed and frozen", "leaves", "views"])
@pytest.mark.parametrize(("family", "inside"), FORMS)
def test_weights_lent_for_a_call_are_those_of_the_backward(family: str, inside: bool, kind: str) -> None:
    """Adapter weights merged on the fly: in the backward the module holds its own parameters again."""
    model = drawn(family, inside)
    generator = torch.Generator().manual_seed(4)
    deltas = {n: 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def run() -> dict[str, Tensor]:
        weights = {name: parameter + scale * deltas[name] for name, parameter in model.named_parameters()}
        if kind == "computed and frozen":
            weights = {name: weight.detach() if "layers.0" in name else weight for name, weight in weights.items()}
        elif kind == "leaves":
            weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        elif kind == "views":
            weights = {name: parameter.view_as(parameter) for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, weights, (), BATCH).loss.backward()
        found = take_gradients(model)
        if kind.startswith("computed"):
            found["scale"], scale.grad = scale.grad, None
        elif kind == "leaves":
            found = {name: weight.grad for name, weight in weights.items()}
        return found

    own = [(name, id(p)) for name, p in model.named_parameters()]
    check(model, run)
    assert [(name, id(p)) for name, p in model.named_parameters()] == own


@pytest.mark.parametrize(("family", "inside"), FORMS)
def test_a_weight_frozen_or_freed_or_a_mode_switched_before_the_backward(family: str, inside: bool) -> None:
    model = drawn(family, inside)
    mlp = model.model.layers[1].mlp
    weight = mlp._modules.get("experts", mlp).down_proj
    weight = weight if isinstance(weight, nn.Parameter) else weight.weight

    def run(before: bool, after: bool) -> dict[str, Tensor]:
        weight.requires_grad_(before)
        loss = model(**BATCH).loss
        weight.requires_grad_(after)
        loss.backward()
        weight.requires_grad_(True)
        return take_gradients(model)

    for before in (False, True):
        check(model, lambda before=before: run(before, not before))


def test_dropout_that_is_switched_off_before_the_backward_was_on_in_it() -> None:
    model = drawn()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))

    def run(switched: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        loss = model.train()(**BATCH).loss
        model.train(not switched)
        loss.backward()
        return take_gradients(model)

    with patched(model, tiled_mlp=4):
        assert_gradients(run(switched=True), run(switched=False), 1e-12)


@pytest.mark.parametrize(("family", "inside"), FORMS)
def test_a_weight_that_was_changed_or_exchanged_before_the_backward_is_noticed(family: str, inside: bool) -> None:
    """As torch does it: in place it is an error. Another parameter in its place is no matter of a forward that ran before."""
    model = drawn(family, inside)
    mlp = model.model.layers[0].mlp
    owner, name = (mlp.experts, "down_proj") if "experts" in mlp._modules else (mlp.down_proj, "weight")
    right = step(model)
    with patched(model, tiled_mlp=4):
        loss = model(**BATCH).loss
        with torch.no_grad():
            owner._parameters[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
        with torch.no_grad():
            owner._parameters[name].mul_(0.5)
        model.zero_grad()
        loss = model(**BATCH).loss
        kept = owner._parameters[name]
        setattr(owner, name, nn.Parameter(torch.zeros_like(kept)))
        loss.backward()
        assert owner._parameters[name].grad is None
        setattr(owner, name, kept)
        assert_gradients(take_gradients(model), right, 1e-9)


@pytest.mark.parametrize(("family", "inside"), FORMS)
def test_hooks_on_the_gradient_of_a_weight_run_once_on_all_of_it(family: str, inside: bool) -> None:
    model = drawn(family, inside)
    calls: list[str] = []

    def doubling(name: str) -> Callable[[Tensor], Tensor]:
        return lambda gradient: (calls.append(name), gradient * 2)[1]

    for name, parameter in model.named_parameters():
        parameter.register_hook(doubling(name))
    places = [list(module._parameters.items()) for module in model.modules()]
    right = step(model)
    calls.clear()
    with patched(model, tiled_mlp=4):
        assert_gradients(step(model), right, 1e-9)
    assert sorted(calls) == sorted(right)
    assert [list(module._parameters.items()) for module in model.modules()] == places


# ------------------------------------------------------------------------------------------------- weights of all kinds
class Rounding(nn.Linear):
    """A product of its own, as quantised layers have."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight * 8).round() / 8, self.bias)


def _rounding(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Rounding
        layer.mlp.up_proj.weight.requires_grad_(False)


def _each(change: Callable[[nn.Linear], object]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for layer in model.model.layers:
            change(layer.mlp.up_proj)

    return apply


def _tied(model: nn.Module) -> None:
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight, second.gate_proj.weight = first.up_proj.weight, second.up_proj.weight


def _one_block_twice(model: nn.Module) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


WEIGHTS: dict[str, Callable[[nn.Module], None]] = {
    "quantised": _rounding,
    "weight norm": _each(nn.utils.parametrizations.weight_norm),
    "weight norm of old": _each(nn.utils.weight_norm),
    "tied": _tied,
    "one block twice": _one_block_twice,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_computed_or_shared(kind: str) -> None:
    model = drawn()
    WEIGHTS[kind](model)
    check(model)


def test_a_weight_with_a_state_is_computed_once_per_call() -> None:
    """Spectral norm moves its vectors each time the weight is read."""
    model = drawn()
    _each(nn.utils.parametrizations.spectral_norm)(model)
    state = copy.deepcopy(model.state_dict())

    def run() -> dict[str, Tensor]:
        model.load_state_dict(state)
        return step(model) | {name: value.clone() for name, value in model.named_buffers() if "_u" in name}

    check(model, run)


def test_experts_that_are_shared_between_layers() -> None:
    model = build("qwen3_moe", initializer_range=0.3, mlp_only_layers=[])[0].double()
    model.set_experts_implementation("eager")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj = first.gate_up_proj
    check(model)


def test_inputs_that_are_not_contiguous() -> None:
    class Turned(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1)).transpose(0, 1) + self.inner(x[:1].expand_as(x))

    model = drawn()
    check_around(model, Turned)


def test_weights_that_zero3_has_partitioned_are_refused_by_name() -> None:
    model = drawn()
    model.model.layers[1].mlp.up_proj.weight.ds_id = 7
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp of LlamaForCausalLM .* ZeRO-3 has partitioned"):
        patched(model, tiled_mlp=4).plan()


# ------------------------------------------------------------------------------------------------- classes
def doubled(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * 2


CLASSES: dict[str, Callable[[nn.Module], type]] = {
    "linear": lambda model: nn.Linear,
    "block": lambda model: type(model.model.layers[0].mlp),
    "activation": lambda model: type(model.model.layers[0].mlp.act_fn),
}


@pytest.mark.parametrize("order", ["before", "after", "composed first", "composed last"])
@pytest.mark.parametrize("what", CLASSES)
def test_a_change_of_a_class_is_seen(what: str, order: str) -> None:
    model = drawn()
    change = wrap_call(CLASSES[what](model), "forward", doubled)
    plain = step(model)
    with patched(change):
        right = step(model)
    assert (right["lm_head.weight"] - plain["lm_head.weight"]).abs().max() > 1e-3
    tiled = patched(model, tiled_mlp=4)
    tiled.plan()  # found while nobody had changed the class
    if order == "before":
        with patched(change), tiled:
            assert_gradients(step(model), right, 1e-9)
    elif order == "after":
        with tiled, patched(change):
            assert_gradients(step(model), right, 1e-9)
    else:
        first, last = ((change,), ()) if order == "composed first" else ((), (change,))
        with patched(model, *first, *last, tiled_mlp=4):
            assert_gradients(step(model), right, 1e-9)
    with tiled:
        assert_gradients(step(model), plain, 1e-9)


def test_a_class_that_is_changed_when_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by somebody who does not ask us, and in a way that changes no value: the calls are theirs to count."""
    model = drawn()
    calls: list[str] = []
    for kind in (nn.Linear, type(model.model.layers[0].mlp)):
        original = kind.forward

        def counting(self: nn.Module, x: Tensor, original: Any = original, name: str = kind.__name__) -> Tensor:
            calls.append(name)
            return original(self, x)

        monkeypatch.setattr(kind, "forward", counting)
        right = step(model)
        calls.clear()
        with patched(model, tiled_mlp=1):
            assert_gradients(step(model), right, 1e-9)
        assert calls.count(kind.__name__) > 2
        monkeypatch.setattr(kind, "forward", original)
        assert {place.kind for place in find_feed_forwards(model).places} == {"dense"}


def test_a_class_that_somebody_changes_inside_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn()
    kind = type(model.model.layers[0].mlp)
    original = kind.forward
    with patched(model, tiled_mlp=4):
        monkeypatch.setattr(kind, "forward", lambda self, x: original(self, x) * 2)
        found = step(model)
    assert_gradients(found, step(model), 1e-9)


def test_functions_of_torch_that_are_changed_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn()
    calls: list[int] = []
    original = F.silu

    def counting(x: Tensor, inplace: bool = False) -> Tensor:
        calls.append(1)
        return original(x, inplace)

    with patched(model, tiled_mlp=4):
        step(model)
        monkeypatch.setattr(F, "silu", counting)
        found = step(model)
    assert len(calls) > 8
    assert_gradients(found, step(model), 1e-9)


def test_the_fused_head_refuses_a_changed_linear_class_by_name() -> None:
    model = drawn()
    with patched(wrap_call(nn.Linear, "forward", doubled)):
        with pytest.raises(UnsupportedError, match=r"the forward of the class nn\.Linear was changed, to patched_Linear"):
            patched(model, fused="torch").plan()
    with patched(model, fused="torch"), patched(wrap_call(nn.Linear, "forward", doubled)):
        with pytest.raises(UnsupportedError, match=r"the forward of the class nn\.Linear was changed"):
            model(**BATCH)


# ------------------------------------------------------------------------------------------------- attributes
class Owning(nn.Module):
    """A block with an activation and a number as plain attributes."""

    def __init__(self, mlp: nn.Module, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.activation, self.scale = activation, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x)) * self.scale


def with_blocks(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = drawn()
    for layer in model.model.layers:
        layer.mlp = make(layer.mlp)
    return model


@pytest.mark.parametrize(("name", "value"), [("activation", torch.tanh), ("scale", 0.5)])
def test_plain_attributes_of_a_block_are_read_at_every_call(name: str, value: Any) -> None:
    model = with_blocks(Owning)
    assert {place.kind for place in find_feed_forwards(model).places} == {"dense"}
    with patched(model, tiled_mlp=4):
        before = step(model)
        for layer in model.model.layers:
            setattr(layer.mlp, name, value)
        found = step(model)
    right = step(model)
    assert (right["lm_head.weight"] - before["lm_head.weight"]).abs().max() > 1e-3
    assert_gradients(found, right, 1e-9)


# ------------------------------------------------------------------------------------------------- written to
@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.ReLU6(inplace=True),
        nn.Hardswish(inplace=True),
        nn.CELU(inplace=True),
        lambda x: x.clamp_(-1, 1),
    ],
    ids=["ReLU", "LeakyReLU", "ReLU6", "Hardswish", "CELU", "clamp_"],
)
def test_activations_that_write_to_their_argument(activation: Callable[[Tensor], Tensor]) -> None:
    model = with_blocks(lambda mlp: Owning(mlp, copy.deepcopy(activation)))
    assert {place.kind for place in find_feed_forwards(model).places} == {"dense"}
    check(model)


class Adding(nn.Module):
    """A block that adds to what another one returns, as llama4's mixture does to its shared expert's."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).add_(x.sin()).mul_(1.5)


@pytest.mark.parametrize(("family", "inside"), FORMS)
def test_what_a_block_returns_may_be_changed_in_place(family: str, inside: bool) -> None:
    model = drawn(family, inside)
    check_around(model, Adding)


# ------------------------------------------------------------------------------------------------- random numbers
class Dropping(Owning):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


@pytest.mark.parametrize("make", [Dropping, lambda mlp: Owning(mlp, nn.RReLU(0.1, 0.9))], ids=["dropout", "RReLU"])
def test_blocks_that_draw_random_numbers(make: Callable[[nn.Module], nn.Module]) -> None:
    """One tile draws what the untiled block draws; four draw others, the same again in the backward."""
    model = with_blocks(make)
    for training in (False, True):
        model.train(training)
        torch.manual_seed(5)
        right = step(model)
        after = torch.get_rng_state()
        for tiles in (1, 4):
            with patched(model, tiled_mlp=tiles):
                torch.manual_seed(5)
                found = step(model)
                assert torch.equal(torch.get_rng_state(), after) or tiles > 1
                if tiles == 1 or not training:
                    assert_gradients(found, right, 1e-9)
                else:
                    torch.manual_seed(5)
                    assert_gradients(step(model), found, 1e-12)


def test_planning_and_proving_draw_nothing_from_the_callers_random_numbers() -> None:
    """An activation that is random in training was found to be a plain one in eval mode."""
    model = with_blocks(lambda mlp: Owning(mlp, nn.RReLU(0.1, 0.9)))
    model.model.layers[0].mlp = Dropping(model.model.layers[0].mlp)
    model.eval()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with patched(model, tiled_mlp=4):
        step(model)
        assert torch.equal(torch.get_rng_state(), before)
        assert {place.kind for place in find_feed_forwards(model).places} == {"whole"}
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------- compiled
def test_a_compiled_mixture_of_experts_settles() -> None:
    """One break of the graph per block, and nothing is compiled again once the first steps are done."""
    model = build("qwen3_moe", initializer_range=0.3, mlp_only_layers=[], num_hidden_layers=1)[0]
    block = model.model.layers[0].mlp

    def run(block: Callable[..., Any], seed: int) -> dict[str, Tensor]:
        x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(seed))
        out = block(x)
        (out if isinstance(out, Tensor) else out[0]).square().sum().backward()
        return take_gradients(model)

    right = [run(block, seed) for seed in range(4)]
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(block, backend="eager")
    graphs = []
    with patched(model, tiled_mlp=4):
        for seed in range(4):
            assert_gradients(run(compiled, seed), right[seed], 1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[-1] == graphs[0] > 0
        assert [reason for reason in counters["graph_break"] if "tiled_mlp recomputes this block" in reason]
        assert not any("recompile_limit" in key for key in counters)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph"):
            run(torch.compile(block, backend="eager", fullgraph=True), 0)
