"""What a library that holds a model must find, whichever it is: the same numbers in a scope, and everything as it was after.

A `Party` is a model as some library holds it. Each promise is one function that makes the parties it needs and checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from scoped_patch import patched
from tests.support.models import token_ids
from tests.support.scores import assert_gradients, objective, reference, shifted
from tests.support.wrapped import unchanged
from tests.tiny_models import build

#: more than any batch here has tokens
MORE_THAN_TOKENS = 256


@dataclass
class Party:
    """A model as some library holds it.

    Attributes:
        target: what is given to `patched`.
        inner: the language model in it.
        step: one forward and backward as that library does them.
        optimizer: made before any scope.
        call: one forward of the model that unwrapping gives.
        renames: its `state_dict` has names of its own outside of a scope.
        flat: parameters are flattened and cut, so that some have no part, and no gradient, on this rank.
    """

    target: nn.Module
    inner: nn.Module
    step: Callable[[], Any]
    optimizer: torch.optim.Optimizer
    call: Callable[[nn.Module], Any] | None = None
    renames: bool = False
    flat: bool = False


#: `make(model, bf16)`
Make = Callable[..., Party]


def seven(seed: int = 3) -> dict[str, Any]:
    ids = token_ids(1, 7, seed)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def plain_step(wrapper: Any, batch: dict[str, Any], bf16: bool) -> Callable[[], None]:
    """A step of a wrapper that is called as the model is."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            out = wrapper(**batch)
        if not hasattr(out, "keys"):
            out[2].square().mean().backward()
            return
        found = out if getattr(out, "log_probs", None) is not None else reference(out.logits, shifted(batch["labels"]))
        objective(found).backward()

    return step


@contextmanager
def log_probs_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """The log-probs of every forward that gradients are taken of, from the logits where the output has those."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if getattr(out, "log_probs", None) is not None:
            seen.append(out.log_probs.detach().double())
        else:
            labels = kwargs.get("labels")
            wanted = kwargs["input_ids"] if labels is None else labels
            seen.append(reference(out.logits.detach(), shifted(wanted)).log_probs)

    handle = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def record(party: Party) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs and all gradients of one step."""
    party.target.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    with log_probs_of(party.inner) as seen:
        party.step()
    found = {n: full(p.grad.detach()).clone() for n, p in party.target.named_parameters() if p.grad is not None}
    party.target.zero_grad(set_to_none=True)
    return seen, found


def assert_same(ours: Any, theirs: Any, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    assert len(ours[0]) == len(theirs[0]) > 0
    for found, wanted in zip(ours[0], theirs[0], strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= atol
    # A gradient may be split over ranks and empty here.
    assert ours[1].keys() == theirs[1].keys() != set()
    found, wanted = ({n: g for n, g in one[1].items() if g.numel()} for one in (ours, theirs))
    assert_gradients(found, wanted, rtol)


# ------------------------------------------------------------------------------------------------- the promises
def log_probs_and_gradients(make: Make, options: dict[str, Any]) -> None:
    party = make(build("llama")[0])
    wanted = record(party)
    scope = patched(party.target, **options)
    for _ in range(2):
        with scope:
            assert_same(record(party), wanted)
    assert_same(record(party), wanted)


def signatures_and_unwrapping(make: Make, options: dict[str, Any]) -> None:
    """D5: forwards show what they take, and what accelerate's unwrapping gives is still patched."""
    party = make(build("llama")[0])

    def signatures() -> list[Any]:
        modules = [party.target, *party.inner.modules()]
        return [(type(module).__name__, inspect.signature(module.forward)) for module in modules]

    before = signatures()
    for keep in (True, False):
        with patched(party.target, **options) as scope:
            assert signatures() == before
            bare = extract_model_from_parallel(party.target, keep_fp32_wrapper=keep)
            if party.call is not None:
                party.call(bare)
            else:
                bare(**seven())
            calls = [row["calls"] for row in scope.diff() if row["calls"] is not None]
            assert calls
            assert all(calls)
            assert signatures() == before
        assert signatures() == before


def weights_optimizer_and_state(make: Make, options: dict[str, Any]) -> None:
    """D7: no weight moves, no attribute stays, the optimizer made before goes on, and a state goes out and in again."""
    party, twin = make(build("llama")[0]), make(build("llama")[0])
    modules = [party.target, *party.inner.modules()]
    first, _ = record(party)
    attributes = [set(module.__dict__) for module in modules]
    names = list(party.target.state_dict())
    torch.manual_seed(11)
    twin.step()
    twin.optimizer.step()
    with unchanged(party.target) if not party.renames else nullcontext():
        with patched(party.target, **options):
            before = {name: value.detach().clone() for name, value in party.target.state_dict().items()}
            assert party.renames or list(before) == names
            torch.manual_seed(11)
            party.step()
            party.optimizer.step()
            party.target.zero_grad(set_to_none=True)
    assert [set(module.__dict__) - _COME_AND_GO for module in modules] == [one - _COME_AND_GO for one in attributes]
    for (name, ours), (_, theirs) in zip(party.target.named_parameters(), twin.target.named_parameters(), strict=True):
        torch.testing.assert_close(full(ours), full(theirs), rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
    trained, _ = record(party)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(trained, first, strict=True)) > 1e-3
    assert list(party.target.state_dict()) == names
    if party.renames:
        with patched(party.target):  # the names of then
            party.target.load_state_dict(before)
    else:
        party.target.load_state_dict(before)
    again, _ = record(party)
    for ours, theirs in zip(again, first, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6


#: what wrappers put on modules and take off in any forward
_COME_AND_GO = {"_is_root", "__getstate__", "_original_forward"}


class Pair(nn.Module):
    """A block that returns (out, router logits), as mixtures of experts did."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.router = inner, nn.Linear(64, 4)
        torch.nn.init.normal_(self.router.weight, 0, 0.3, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.router(x).reshape(-1, 4)


class TakingPairs(LlamaDecoderLayer):
    """A decoder layer whose block returns a pair, both of which enter the result."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        mixed, router = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + mixed * router.sigmoid().mean(-1).view(*mixed.shape[:-1], 1)


class Dropping(nn.Module):
    """A block with dropout inside."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down_proj(self.dropout(self.act_fn(self.gate_proj(x))) * self.up_proj(x)))


def special_blocks(make: Make, options: dict[str, Any]) -> None:
    """D20: more shards than tokens and a block that returns a pair; dropout; the dtype of the recomputation."""
    many = {**options, "tiled_mlp": MORE_THAN_TOKENS}
    model = build("llama")[0]
    layer = model.model.layers[0]
    layer.__class__ = TakingPairs
    layer.mlp = Pair(layer.mlp)
    party = make(model)
    wanted = record(party)
    assert party.flat or any("router" in name or "lora" in name for name in wanted[1])
    with patched(party.target, **many):
        assert_same(record(party), wanted)

    model = build("llama")[0]
    for layer in model.model.layers:
        layer.mlp = Dropping(layer.mlp)
    party = make(model)
    wanted = record(party)
    with patched(party.target, **{**options, "tiled_mlp": 1}):
        found = record(party)
        assert_same(found, wanted)
    with patched(party.target, **many):
        assert any(not torch.equal(one, other) for one, other in zip(record(party)[0], wanted[0], strict=True))

    party = make(build("llama", initializer_range=0.1)[0], bf16=True)
    seen: list[torch.dtype] = []
    party.inner.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    wanted = record(party)
    plain_calls = len(seen)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    with patched(party.target, **many):
        found = record(party)
    assert set(seen) == {torch.bfloat16}
    assert len(seen) > 2 * plain_calls
    assert all(gradient.dtype == torch.float32 for gradient in found[1].values())
    assert_same(found, wanted, atol=0.1, rtol=0.2)


PROMISES: dict[str, Callable[[Make, dict[str, Any]], None]] = {
    "log-probs and gradients": log_probs_and_gradients,
    "D5 signatures and unwrapping": signatures_and_unwrapping,
    "D7 weights, optimizer and state": weights_optimizer_and_state,
    "D20 special blocks": special_blocks,
}
