"""verl's helpers of Ulysses sequence parallelism, on the collectives of `scoped_patch.ops.sequence_parallel`.

The group is a fact of the process, as in verl; everything takes `group=` too. Without a group they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...engine.errors import BadOptionError, ScopeStateError
from ...ops.sequence_parallel import all_gather, all_to_all, gather_sequence, scale_gradient

_group: ProcessGroup | None = None


def set_ulysses_sequence_parallel_group(group: ProcessGroup | None) -> None:
    """Set the group whose ranks share a sequence; None for no sequence parallelism."""
    global _group
    _group = group


def get_ulysses_sequence_parallel_group() -> ProcessGroup | None:
    """The group that was set, or None."""
    return _group


def get_ulysses_sequence_parallel_world_size(group: ProcessGroup | None = None) -> int:
    """How many ranks share a sequence; 1 without a group."""
    group = _group if group is None else group
    return 1 if group is None else dist.get_world_size(group)


def get_ulysses_sequence_parallel_rank(group: ProcessGroup | None = None) -> int:
    """This process's place among them; 0 without a group."""
    group = _group if group is None else group
    return 0 if group is None else dist.get_rank(group)


# ------------------------------------------------------------------------------------------------- exchanges
def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """From all heads of this rank's tokens to this rank's heads of all tokens: [B, S/n, H, ...] -> [B, S, H/n, ...].

    Args:
        seq_dim, head_dim: where tokens and heads are.
        unpadded_dim_size: the real number of tokens; where it does not divide, padding is cut off the end.
    """
    group = _group if group is None else group
    if group is None:
        return x
    out = _exchange(x, head_dim, seq_dim, group)
    if unpadded_dim_size and unpadded_dim_size % dist.get_world_size(group):
        out = out.narrow(seq_dim, 0, unpadded_dim_size)
    return out


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """From this rank's heads of all tokens to all heads of this rank's tokens: [B, S, H/n, ...] -> [B, S/n, H, ...].

    Tokens are padded with zeros where they do not divide.
    """
    group = _group if group is None else group
    if group is None:
        return x
    return _exchange(_pad(x, seq_dim, dist.get_world_size(group), 0), seq_dim, head_dim, group)


def all_to_all_tensor(
    local_input: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup | None = None, async_op: bool = False
) -> Tensor | Callable[[], Tensor]:
    """Cut a tensor in `scatter_dim`, send a part to each rank, and join what comes in `gather_dim`. No gradient.

    With `async_op` a function that gives the result is returned; the exchange has ended by then.
    """
    out = _exchange_data(local_input.detach(), scatter_dim, gather_dim, _wanted(group))
    return (lambda: out) if async_op else out


def all_gather_tensor(local_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> Tensor:
    """Every rank's tensor, joined in dimension 0. No gradient. The collective has ended, `async_op` or not."""
    return all_gather(local_tensor.detach(), _wanted(group)).flatten(0, 1)


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Every rank's tokens, on every rank, without the padding at the end.

    A rank's tokens get the gradient that this rank alone has for them, times the number of ranks with `grad_scaler`: right
    where all ranks compute the same loss from what was gathered, and gradients are averaged over all ranks afterwards.
    """
    group = _group if group is None else group
    if group is None:
        return x
    scaled = scale_gradient(x, float(dist.get_world_size(group))) if grad_scaler else x
    out = gather_sequence(scaled, gather_dim, group, backward="slice")
    if unpad_dim is None or padding_size == 0:
        return out
    if isinstance(padding_size, bool) or not isinstance(padding_size, int) or padding_size < 0:
        raise BadOptionError(f"padding_size must be an int >= 0, got {padding_size!r}")
    return out.narrow(unpad_dim, 0, out.shape[unpad_dim] - padding_size)


def _wanted(group: ProcessGroup | None) -> ProcessGroup:
    group = _group if group is None else group
    if group is None:
        raise ScopeStateError(
            "there is no Ulysses group: pass group=, or set one with set_ulysses_sequence_parallel_group(...)"
        )
    return group


def _exchange(x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup) -> Tensor:
    return _Exchange.apply(x, scatter_dim, gather_dim, group)  # type: ignore[no-untyped-call,no-any-return]


def _exchange_data(x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    scatter_dim, gather_dim = scatter_dim % x.ndim, gather_dim % x.ndim
    if x.shape[scatter_dim] % ranks:
        raise BadOptionError(
            f"dimension {scatter_dim} of {list(x.shape)} cannot be shared by {ranks} ranks: it is no multiple of {ranks}"
        )
    parts = x.unflatten(scatter_dim, (ranks, -1)).movedim(scatter_dim, 0)  # type: ignore[no-untyped-call]
    return all_to_all(parts, group).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup) -> Tensor:
        ctx.how = (scatter_dim, gather_dim, group)
        return _exchange_data(x, scatter_dim, gather_dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        scatter_dim, gather_dim, group = ctx.how
        return _exchange_data(gradients[0], gather_dim, scatter_dim, group), None, None, None


# ------------------------------------------------------------------------------------------------- padding, cutting
def _pad(x: Tensor, dim: int, multiple: int, value: float) -> Tensor:
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, value)], dim)


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: ProcessGroup | None = None) -> Tensor:
    """This rank's equal part of a tensor, padded with zeros first where it does not divide and `padding` is asked for.

    Raises:
        BadOptionError: it does not divide, and no padding is asked for: the last elements would be nobody's.
    """
    ranks, rank = get_ulysses_sequence_parallel_world_size(group), get_ulysses_sequence_parallel_rank(group)
    if padding:
        x = _pad(x, dim, ranks, 0)
    if x.shape[dim] % ranks:
        raise BadOptionError(
            f"dimension {dim} of {list(x.shape)} cannot be shared by {ranks} ranks: pad it first (`ulysses_pad` with "
            f"sp_size={ranks}), or pass padding=True"
        )
    size = x.shape[dim] // ranks
    return x.narrow(dim, rank * size, size).contiguous()


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: float = 0
) -> tuple[Tensor, Tensor | None, int]:
    """Pad a packed row to a multiple of `sp_size`; the padding is a sample of its own, with positions 0, 1, ...

    Args:
        input_ids_rmpad: [1, N].
        position_ids_rmpad: [1, N], or [axes, 1, N].

    Returns:
        The padded ids and positions, and how many tokens were added.

    Raises:
        BadOptionError: this is no row, or the positions are of more than one row, or of another number of tokens.
    """
    if input_ids_rmpad.ndim < 2:
        raise BadOptionError(f"input_ids {list(input_ids_rmpad.shape)} are no packed row: wanted [1, N]")
    if position_ids_rmpad is not None and (
        position_ids_rmpad.ndim < 2
        or position_ids_rmpad.shape[-2] != 1
        or position_ids_rmpad.shape[-1] != input_ids_rmpad.shape[-1]
    ):
        raise BadOptionError(
            f"position_ids {list(position_ids_rmpad.shape)} do not belong to one packed row of {input_ids_rmpad.shape[-1]} "
            f"tokens: wanted [1, N] or [axes, 1, N]"
        )
    missing = -input_ids_rmpad.shape[1] % max(sp_size, 1)
    if not missing:
        return input_ids_rmpad, position_ids_rmpad, 0
    ids = torch.nn.functional.pad(input_ids_rmpad, (0, missing), value=pad_value)
    if position_ids_rmpad is not None:
        more = torch.arange(missing, device=position_ids_rmpad.device, dtype=position_ids_rmpad.dtype)
        more = more.expand(*position_ids_rmpad.shape[:-1], missing)
        position_ids_rmpad = torch.cat([position_ids_rmpad, more], -1)
    return ids, position_ids_rmpad, missing


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: float = 0,
) -> tuple[Tensor, Tensor | None, int]:
    """Pad a packed row [1, N] and take this rank's part; positions are left whole with `skip_position_ids_rmpad`.

    Returns:
        The ids and positions, and how many tokens were added to all ranks' parts together.
    """
    ids, positions, added = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size, pad_value)
    ids = slice_input_tensor(ids, 1, padding=False)
    if positions is not None and not skip_position_ids_rmpad:
        positions = slice_input_tensor(positions, -1, padding=False)
    return ids, positions, added


def validate_ulysses_config(num_heads: int, ulysses_sequence_size: int) -> None:
    """Raises BadOptionError when the query heads cannot be shared evenly by that many ranks."""
    if ulysses_sequence_size > 1 and num_heads % ulysses_sequence_size:
        raise BadOptionError(f"{num_heads} heads cannot be shared by {ulysses_sequence_size} ranks: no multiple")


class FSDPUlyssesShardingManager:
    """Sets the group of a mesh's dimension "sp" for the length of a block. A mesh of None does nothing."""

    def __init__(self, device_mesh: DeviceMesh | None) -> None:
        self.device_mesh = device_mesh
        self._before: list[ProcessGroup | None] = []

    def __enter__(self) -> None:
        if self.device_mesh is not None:
            self._before.append(get_ulysses_sequence_parallel_group())
            set_ulysses_sequence_parallel_group(self.device_mesh["sp"].get_group())

    def __exit__(self, *error: object) -> None:
        if self.device_mesh is not None:
            set_ulysses_sequence_parallel_group(self._before.pop())
