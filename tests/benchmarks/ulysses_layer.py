"""One attention layer under sequence parallelism: where its time goes, with and without overlap, and over lists.

Three ways to do the same. `two`: the library's, queries, keys and values in one all-to-all, the output in another.
`overlapped`: values are sent while queries and keys are projected and packed, and half of the output is projected while
the other half is sent: four collectives. `lists`: four all-to-alls of lists with a copy around each, as trainers do that
exchange one tensor at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from scoped_patch.ops.sequence_parallel import HeadLayout, count_collectives, heads_from_sequence, sequence_from_heads
from tests.benchmarks.ulysses_ranks import Clock, Place, marked, without_communication

PARTS = ("project", "pack", "all_to_all", "attention", "unpack")


@dataclass(frozen=True)
class Shape:
    """A layer: H query heads, KV key-value heads, D wide, of a model with that hidden size. Defaults: Qwen3-8B."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096

    def bytes(self, length: int, ranks: int, size: int) -> tuple[int, int]:
        """What a rank hands to the two all-to-alls, of one row, as docs/ulysses.md has it; `size` bytes an element."""
        k = self.kv_heads // ranks if self.kv_heads % ranks == 0 else 1
        tokens = -(-length // ranks)
        return tokens * (self.heads + 2 * ranks * k) * self.head_dim * size, tokens * self.heads * self.head_dim * size


class Layer:
    """The projections and this rank's tokens of the input; the same weights on every rank."""

    def __init__(self, shape: Shape, length: int, place: Place, dtype: torch.dtype, attention: str) -> None:
        self.shape, self.place, self.ranks = shape, place, place.world
        self.layout = HeadLayout(shape.heads, shape.kv_heads, place.world)
        if length % place.world:
            raise ValueError(f"{length} tokens are no multiple of {place.world} ranks")
        self.attend = _attention(attention)
        self.listed = _takes_lists(place)
        widths = (shape.heads, shape.kv_heads, shape.kv_heads)
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int, scale: float) -> Tensor:
            return (torch.randn(size, generator=generator) * scale).to(place.device, dtype).requires_grad_()

        self.weights = [drawn(width * shape.head_dim, shape.hidden, scale=shape.hidden**-0.5) for width in widths]
        self.out = drawn(shape.hidden, shape.heads * shape.head_dim, scale=shape.hidden**-0.5)
        grouped = self.out.detach().unflatten(1, (self.ranks, self.layout.per_rank, shape.head_dim))
        self.halves = [half.flatten(1).contiguous().requires_grad_() for half in grouped.tensor_split(2, 2) if half.numel()]
        generator.manual_seed(1 + place.rank)
        self.x = drawn(1, length // place.world, shape.hidden, scale=1.0)
        self.gradient = drawn(1, length // place.world, shape.hidden, scale=1.0).detach()

    def heads_of(self, index: int) -> Tensor:
        """Queries (0), keys (1) or values (2) of this rank's tokens: [1, h, S/n, D], as many as are sent."""
        x = F.linear(self.x, self.weights[index]).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        sent = self.layout.kv_sent
        return x if index == 0 or sent is None else x[:, list(sent)]

    # ------------------------------------------------------------------------------------------------- three ways
    def two(self, clock: Clock | None = None) -> Tensor:
        mark = _marker(clock)
        q, k, v = (self.heads_of(i) for i in range(3))
        mark("project")
        _on_gradient((q, k, v), clock, "unpack")
        q, k, v = heads_from_sequence((q, k, v), dist.group.WORLD)  # type: ignore[arg-type]
        mark("unpack")
        _on_gradient((q, k, v), clock, "attention")
        out = self.attend(q, k, v)
        mark("attention")
        _on_gradient((out,), clock, "unpack")
        out = sequence_from_heads(out, dist.group.WORLD)  # type: ignore[arg-type]
        mark("unpack")
        _on_gradient((out,), clock, "project")
        y = F.linear(out.flatten(2), self.out)
        mark("project")
        return y

    def overlapped(self) -> Tensor:
        ranks = self.ranks
        value = _Pending(_by_owner([self.heads_of(2)], ranks))
        rest = [self.heads_of(0), self.heads_of(1)]
        others = _Pending(_by_owner(rest, ranks))
        (v,) = _of_all_tokens(value.wait(), [self.layout.kv_per_rank], self.shape.head_dim)
        q, k = _of_all_tokens(others.wait(), [self.layout.per_rank, self.layout.kv_per_rank], self.shape.head_dim)
        out = self.attend(q, k, v)
        sent = [
            _Pending(half.unflatten(1, (ranks, -1)).permute(1, 2, 0, 3, 4)) for half in out.tensor_split(2, 2) if half.numel()
        ]
        y = None
        for half, weight in zip(sent, self.halves, strict=True):
            part = F.linear(half.wait().permute(2, 1, 0, 3, 4).flatten(2), weight)
            y = part if y is None else y + part
        assert y is not None
        return y

    def lists(self) -> Tensor:
        q, k, v = (_Lists.apply(self.heads_of(i), 1, 2, self.listed) for i in range(3))  # type: ignore[no-untyped-call]
        out = self.attend(q, k, v)
        out = _Lists.apply(out, 1, 2, self.listed)  # type: ignore[no-untyped-call]
        return F.linear(out.flatten(2), self.out)

    # ------------------------------------------------------------------------------------------------- runs
    def step(self, way: str) -> None:
        self.clear()
        getattr(self, way)().backward(self.gradient)

    def clear(self) -> None:
        for x in (self.x, self.out, *self.weights, *self.halves):
            x.grad = None

    def split(self) -> dict[str, dict[str, float]]:
        """Milliseconds of each part of the library's way, forward and backward."""
        self.clear()
        self.place.wait()
        clock = Clock(self.place.device)
        with marked(clock):
            y = self.two(clock)
            forward = clock.parts()
            self.place.wait()
            clock.__init__(self.place.device)  # type: ignore[misc]
            y.backward(self.gradient)
            clock.mark("project")
        return {"forward": forward, "backward": clock.parts()}


def measure(layer: Layer, repeats: int) -> dict[str, Any]:
    """All numbers of one layer at one length, on this rank. Times are medians in milliseconds."""
    place = layer.place
    splits = [layer.split() for _ in range(repeats + 1)][1:]
    found: dict[str, Any] = {
        way: {part: _median([one[way].get(part, 0.0) for one in splits]) for part in PARTS} for way in ("forward", "backward")
    }
    found["forward"]["whole"] = place.timed(lambda _: layer.two(), repeats)
    found["backward"]["whole"] = place.timed(lambda y: y.backward(layer.gradient), repeats, before=layer.two)
    found["ways"] = _ways(layer, repeats)
    attention = found["forward"]["attention"] + found["backward"]["attention"]
    found["exposed_share"] = (found["forward"]["all_to_all"] + found["backward"]["all_to_all"]) / attention
    with count_collectives() as log:
        layer.step("two")
    found["collectives"] = log.count("all_to_all")
    found["bytes"] = log.bytes("all_to_all")
    layer.clear()
    with place.peak() as peak:
        layer.step("two")
    found["peak_mib"] = peak[0]
    return found


def _ways(layer: Layer, repeats: int) -> dict[str, Any]:
    """The three ways by turns, so that what else the machine does falls on all of them; each with and without sending."""
    ways = ("two", "overlapped", "lists")
    times: dict[tuple[str, bool], list[float]] = {(way, silent): [] for way in ways for silent in (False, True)}
    for _ in range(repeats + 1):
        for (way, silent), taken in times.items():
            with without_communication() if silent else contextlib.nullcontext():
                layer.place.wait()
                clock = Clock(layer.place.device)
                layer.step(way)
                clock.mark("all")
                taken.append(clock.parts()["all"])
    made: dict[str, Any] = {}
    right = _values(layer, "two")
    for way in ways:
        whole, silent = _median(times[way, False][1:]), _median(times[way, True][1:])
        made[way] = {"ms": whole, "without_communication_ms": silent, "exposed_ms": whole - silent}
        made[way]["least_ms"] = min(times[way, False][1:])
        made[way]["off"] = max(_far(a, b) for a, b in zip(_values(layer, way), right, strict=True))
    return made


def _median(values: list[float]) -> float:
    return float(torch.tensor(values).median())


def _values(layer: Layer, way: str) -> list[Tensor]:
    layer.clear()
    y = getattr(layer, way)()
    y.backward(layer.gradient)
    return [y.detach().float(), layer.x.grad.float(), layer.weights[0].grad.float(), layer.weights[2].grad.float()]  # type: ignore[union-attr]


def _far(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def _marker(clock: Clock | None) -> Callable[[str], None]:
    return clock.mark if clock is not None else lambda part: None


def _on_gradient(tensors: tuple[Tensor, ...], clock: Clock | None, part: str) -> None:
    """Going backward, the part ends when the first of the tensors has its gradient: they get theirs together."""
    if clock is None:
        return
    ended: list[bool] = []

    def first(_: Tensor) -> None:
        if not ended:
            ended.append(True)
            clock.mark(part)

    for x in tensors:
        x.register_hook(first)


def _attention(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal, from [1, h, S, D] to [1, S, h, D]."""
    if name == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
    if name == "flash_attention_4" and importlib.util.find_spec("flash_attn") is not None:
        from flash_attn.cute import flash_attn_func

        def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Any = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
            return out[0] if isinstance(out, tuple) else out

        return flash
    raise ValueError(f"--attention {name}: sdpa, or flash_attention_4 where flash-attn-4 is installed")


# ------------------------------------------------------------------------------------------------- overlap


class _Pending:
    """An all-to-all that was begun. Going backward it is begun where the forward waits, and waited for where it begins."""

    def __init__(self, send: Tensor) -> None:
        self.work: Any = None
        self.received = _Begin.apply(send.contiguous(), self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        received: Tensor = _Wait.apply(self.received, self)  # type: ignore[no-untyped-call]
        return received

    def begin(self, send: Tensor) -> Tensor:
        out = torch.empty_like(send)
        self.work = (dist.all_to_all_single(out, send, async_op=True), send)
        return out

    def end(self) -> None:
        self.work[0].wait()
        self.work = None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, send: Tensor, pending: _Pending) -> Tensor:
        ctx.pending = pending
        return pending.begin(send)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.pending.end()
        return gradients[0], None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, pending: _Pending) -> Tensor:
        ctx.pending = pending
        pending.end()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return ctx.pending.begin(gradients[0].contiguous()), None


def _by_owner(tensors: list[Tensor], ranks: int) -> Tensor:
    """[1, n * h, S/n, D] each -> [n, S/n, 1, sum(h * D)]."""
    return torch.cat([x.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4).flatten(-2) for x in tensors], -1)


def _of_all_tokens(buffer: Tensor, heads: list[int], head_dim: int) -> list[Tensor]:
    """[n, S/n, 1, sum(h * D)] -> [1, h, S, D] each."""
    parts = buffer.flatten(0, 1).split([h * head_dim for h in heads], -1)
    return [part.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3) for part in parts]


# ------------------------------------------------------------------------------------------------- lists


class _Lists(torch.autograd.Function):
    """Cut in one dimension, send each part as a tensor, and join what comes in another dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int, listed: bool) -> Tensor:
        ctx.how = (scatter, gather, listed)
        return _exchange_lists(x, scatter, gather, listed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        scatter, gather, listed = ctx.how
        return _exchange_lists(gradients[0], gather, scatter, listed), None, None, None


def _exchange_lists(x: Tensor, scatter: int, gather: int, listed: bool) -> Tensor:
    ranks = dist.get_world_size()
    sent = [part.contiguous() for part in x.chunk(ranks, scatter)]
    received = [torch.empty_like(part) for part in sent]
    if listed:
        dist.all_to_all(received, sent)
    else:
        whole = torch.empty(ranks, *sent[0].shape, device=x.device, dtype=x.dtype)
        dist.all_to_all_single(whole, torch.stack(sent))
        received = list(whole.unbind())
    return torch.cat(received, gather)


def _takes_lists(place: Place) -> bool:
    """Not every version of gloo has an all-to-all of lists; it is made of stacked ones there."""
    pieces = [torch.zeros(1, device=place.device) for _ in range(place.world)]
    with contextlib.suppress(RuntimeError):
        dist.all_to_all([torch.empty_like(piece) for piece in pieces], pieces)
        return True
    return False
