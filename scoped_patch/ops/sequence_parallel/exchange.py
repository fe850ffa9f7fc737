"""Collectives with gradients, on the shapes that attention has.

What each backward does to gradients is stated, since that is where sequence parallelism goes wrong: an exchange moves
them, a gather sums them over ranks or takes a slice, and `scale_gradient` multiplies. Nothing else scales anything. There
is no second derivative: using a gradient of a gradient (`create_graph=True`) raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as traceable

from . import collectives
from .layout import pad_sequence, shard_bounds, shard_length

# Renamed in torch 2.13; the old name warns there.
_traceable_gather = getattr(traceable, "all_gather_single_autograd", None) or traceable.all_gather_tensor_autograd


def heads_from_sequence(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """From all heads of this rank's tokens to this rank's heads of all tokens, in one all-to-all for all tensors.

    Args:
        tensors: query, key and value, say: [B, n * h, S/n, D] each, h and D its own. Of one dtype, or the result of each
            is cast back from the widest.
        group: n ranks.

    Returns:
        [B, h, S, D] each: views of one buffer, tokens in rank order.

    Moves `B * S/n * sum(n * h * D)` elements; the backward is the same exchange the other way.
    """
    dtypes = [x.dtype for x in tensors]
    if len(set(dtypes)) > 1:
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        made = heads_from_sequence([x.to(widest) for x in tensors], group)
        return tuple(x.to(dtype) for x, dtype in zip(made, dtypes, strict=True))
    ranks = dist.get_world_size(group)
    for x in tensors:
        if x.shape[1] % ranks:
            raise ValueError(f"heads_from_sequence: {x.shape[1]} heads cannot be shared by {ranks} ranks")
    if torch.compiler.is_compiling():
        widths = [(x.shape[1] // ranks, x.shape[3]) for x in tensors]
        buffer = torch.cat([_by_head_owner(x, ranks).flatten(-2) for x in tensors], -1)
        return tuple(_all_tokens(traceable.all_to_all_single(buffer.contiguous(), None, None, group), widths))
    return _HeadsFromSequence.apply(group, *tensors)  # type: ignore[no-untyped-call,no-any-return]


def sequence_from_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From this rank's heads of all tokens to all heads of this rank's tokens: [B, S, h, D] -> [B, S/n, n * h, D].

    Args:
        x: an attention's output; S is a multiple of the n ranks.
        group: n ranks.

    Moves `B * S * h * D` elements; the backward is the same exchange the other way.
    """
    ranks = dist.get_world_size(group)
    if x.shape[1] % ranks:
        raise ValueError(f"sequence_from_heads: {x.shape[1]} tokens cannot be shared by {ranks} ranks; pad them first")
    if torch.compiler.is_compiling():
        buffer = _by_token_owner(x, ranks).contiguous()
        return _all_heads(traceable.all_to_all_single(buffer, None, None, group))
    return _SequenceFromHeads.apply(group, x)  # type: ignore[no-untyped-call,no-any-return]


def gather_sequence(
    x: Tensor,
    dim: int,
    group: dist.ProcessGroup,
    *,
    length: int | None = None,
    backward: Literal["sum", "slice"] = "sum",
) -> Tensor:
    """Every rank's tokens, on every rank: [.., S/n, ..] -> [.., S, ..].

    Args:
        dim: the dimension of the tokens.
        length: the real length; padding behind it is cut off.
        backward: what a rank's tokens get of the gradients that all ranks have for them: their `"sum"` (one
            reduce-scatter), or this rank's own alone (`"slice"`, nothing is sent).
    """
    dim = dim % x.ndim
    ranks = dist.get_world_size(group)
    full = ranks * x.shape[dim] if length is None else length
    if torch.compiler.is_compiling() and backward == "sum":
        gathered: Tensor = _traceable_gather(x.contiguous(), dim, group)
        return gathered.narrow(dim, 0, full)
    return _GatherSequence.apply(group, x, dim, full, backward)  # type: ignore[no-untyped-call,no-any-return]


def join_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors themselves; going backward, the gradients of all of them arrive before that of any goes on.

    For what several collectives have made. Autograd has a thread for each device, so that with a loss put together on
    another device than the model's, gradients arrive in an order that differs from rank to rank, and so would the
    collectives of the backward. A tensor without a gradient stays without.
    """
    if torch.compiler.is_compiling() or sum(x.requires_grad for x in tensors) < 2:
        return tuple(tensors)
    return _JoinGradients.apply(*tensors)  # type: ignore[no-untyped-call,no-any-return]


def shard_sequence(x: Tensor, dim: int, group: dist.ProcessGroup, value: float | None = None) -> Tensor:
    """This rank's tokens of what every rank has: [.., S, ..] -> [.., ceil(S/n), ..].

    Args:
        value: what to pad with when S does not divide; by default the last token is repeated.

    The backward fills with zeros: the gradient of `x` is that of this rank's tokens alone.
    """
    length, ranks = x.shape[dim], dist.get_world_size(group)
    size = shard_length(length, ranks)
    start, end = shard_bounds(length, ranks, dist.get_rank(group))
    if start == end and value is None:
        start = end - 1
    # A copy: a view would keep the whole sequence in memory for as long as the shard lives.
    return pad_sequence(x.narrow(dim, start, end - start), dim, size, value).clone()


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` itself; its gradient is multiplied by `factor`."""
    if factor == 1 or not x.requires_grad:
        return x
    return _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call,no-any-return]


def _split(x: Tensor, dim: int, first: int) -> Tensor:
    """Split a dimension in two, the first of the given size."""
    return x.unflatten(dim, (first, x.shape[dim] // first))  # type: ignore[no-untyped-call,no-any-return]


# The two layouts of an exchange. On the token side a buffer is [owner of the heads, S/n, B, h, D], on the head side
# [owner of the tokens, S/n, B, h, D], whose first two dimensions are the whole sequence: receiving copies nothing.


def _by_head_owner(x: Tensor, ranks: int) -> Tensor:
    """[B, n * h, S/n, D] -> [n, S/n, B, h, D]."""
    return _split(x, 1, ranks).permute(1, 3, 0, 2, 4)


def _from_head_owners(buffer: Tensor) -> Tensor:
    """[n, S/n, B, h, D] -> [B, n * h, S/n, D]."""
    return buffer.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _by_token_owner(x: Tensor, ranks: int) -> Tensor:
    """[B, S, h, D] -> [n, S/n, B, h, D]."""
    return _split(x, 1, ranks).permute(1, 2, 0, 3, 4)


def _all_heads(buffer: Tensor) -> Tensor:
    """[n, S/n, B, h, D] -> [B, S/n, n * h, D]."""
    return buffer.permute(2, 1, 0, 3, 4).flatten(2, 3)


def _all_tokens(buffer: Tensor, widths: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[n, S/n, B, sum(h * D)] -> [B, h, S, D] each, as views."""
    sequence = buffer.flatten(0, 1)
    parts, at = [], 0
    for heads, dim in widths:
        parts.append(_split(sequence.narrow(-1, at, heads * dim), -1, heads).permute(1, 2, 0, 3))
        at += heads * dim
    return parts


class _HeadsFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ranks = dist.get_world_size(group)
        ctx.group, ctx.ranks = group, ranks
        ctx.widths = [(x.shape[1] // ranks, x.shape[3]) for x in tensors]
        first = tensors[0]
        buffer = first.new_empty(ranks, first.shape[2], first.shape[0], sum(h * d for h, d in ctx.widths))
        at = 0
        for x, (heads, dim) in zip(tensors, ctx.widths, strict=True):
            _split(buffer.narrow(-1, at, heads * dim), -1, heads).copy_(_by_head_owner(x, ranks))
            at += heads * dim
        return tuple(_all_tokens(collectives.all_to_all(buffer, group), ctx.widths))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ranks, widths = ctx.ranks, ctx.widths
        batch, _, length, _ = gradients[0].shape
        buffer = gradients[0].new_empty(ranks, length // ranks, batch, sum(h * d for h, d in widths))
        at = 0
        for g, (heads, dim) in zip(gradients, widths, strict=True):
            _split(buffer.narrow(-1, at, heads * dim), -1, heads).copy_(_by_token_owner(g.transpose(1, 2), ranks))
            at += heads * dim
        received = collectives.all_to_all(buffer, ctx.group)
        parts, at = [], 0
        for heads, dim in widths:
            parts.append(_from_head_owners(_split(received.narrow(-1, at, heads * dim), -1, heads)))
            at += heads * dim
        return (None, *parts)


class _SequenceFromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group, ctx.ranks = group, dist.get_world_size(group)
        return _all_heads(collectives.all_to_all(_by_token_owner(x, ctx.ranks), group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (g,) = gradients
        buffer = _split(g, 2, ctx.ranks).permute(2, 1, 0, 3, 4)
        received = collectives.all_to_all(buffer, ctx.group)
        return None, received.flatten(0, 1).permute(1, 0, 2, 3)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor, dim: int, length: int, backward: str) -> Tensor:
        ctx.group, ctx.dim, ctx.how, ctx.size = group, dim, backward, x.shape[dim]
        ctx.set_materialize_grads(False)
        gathered = collectives.all_gather(x, group).movedim(0, dim).flatten(dim, dim + 1)
        return _own(gathered.narrow(dim, 0, length))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (g,) = gradients
        if g is None:
            return None, None, None, None, None
        ranks, dim = dist.get_world_size(ctx.group), ctx.dim
        g = pad_sequence(g, dim, ranks * ctx.size, 0.0)
        if ctx.how == "slice":
            mine = g.narrow(dim, dist.get_rank(ctx.group) * ctx.size, ctx.size)
        else:
            mine = collectives.reduce_scatter_sum(_split(g, dim, ranks).movedim(dim, 0), ctx.group)
        return None, mine, None, None, None


class _JoinGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_own(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients


def _own(x: Tensor) -> Tensor:
    """The memory of a view whose base nobody else has, as a tensor that is none: FSDP2 warns of outputs that are views."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0] * ctx.factor, None
