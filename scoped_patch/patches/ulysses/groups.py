"""From `sp=` to a process group. Groups of consecutive ranks are made once per list of ranks and kept."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...engine.errors import BadOptionError, ScopeStateError
from ...ops.sequence_parallel import failures

GroupLike = int | dist.ProcessGroup | DeviceMesh

_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def check_option(group: Any) -> None:
    """Refuse what names no group.

    Raises:
        BadOptionError: not a positive int, a ProcessGroup or a one-dimensional DeviceMesh.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise BadOptionError(
                f"sp: a DeviceMesh must have one dimension, got {group.ndim} ({group.mesh_dim_names}); pass one of them, as "
                f"in sp=mesh['sp']"
            )
        return
    if isinstance(group, dist.ProcessGroup):
        return
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise BadOptionError(
            f"sp must be a number of ranks (int >= 1), a ProcessGroup, a DeviceMesh dimension or a Ulysses, got {group!r}"
        )


def degree(group: GroupLike) -> int:
    """How many ranks share a sequence. Known without a group where a number was given."""
    if isinstance(group, int):
        return group
    return group.size()


def problem(group: GroupLike) -> str | None:
    """Why the group cannot be had in this process now, or None. Creates nothing."""
    if not isinstance(group, int):
        if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0:
            return "this rank is not in the process group that was passed"
        return None
    if group == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        return f"sp={group} needs torch.distributed to be initialised (init_process_group), with a multiple of {group} ranks"
    world = dist.get_world_size()
    if world % group:
        return f"sp={group} does not divide the {world} ranks of the default process group"
    return None


def key(group: GroupLike) -> tuple[str, int]:
    """What makes two options the same group."""
    return ("ranks", group) if isinstance(group, int) else ("group", id(group))


def resolve(group: GroupLike) -> dist.ProcessGroup | None:
    """The process group, made when it is first wanted; None for one rank.

    The ranks of an `int` are consecutive: [0, n), [n, 2n), ... Making one involves those ranks only. A group whose
    collectives went out of step, since a rank failed inside one, is replaced.
    """
    if degree(group) == 1:
        return None
    if not isinstance(group, int):
        return _given(group)
    world = dist.group.WORLD
    assert world is not None
    if group == dist.get_world_size() and failures.settle(world):
        return world
    first = dist.get_rank() // group * group
    ranks = tuple(range(first, first + group))
    known = _made.setdefault(world, {})
    found = known.get(ranks)
    if found is None or not failures.settle(found):
        found = known[ranks] = _make(world, ranks)
    return found


def _make(world: Any, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that the given ranks alone make.

    Where the default group was told its device (`init_process_group(device_id=)`), torch makes NCCL groups by splitting
    its communicator, which waits for all of its ranks: for ever, if only some of them use this model, or make a broken group
    anew. Not told, it makes a communicator of these ranks at the first collective.
    """
    bound = world.bound_device_id
    try:
        world.bound_device_id = None
        made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
    return made


def _given(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def existing(group: GroupLike) -> dist.ProcessGroup | None:
    """The process group, where none has to be made: for traced code, which can make none.

    Raises:
        ScopeStateError: it would have to be made.
    """
    if degree(group) == 1:
        return None
    if not isinstance(group, int):
        return _given(group)
    if group == dist.get_world_size():
        return dist.group.WORLD
    raise ScopeStateError(
        f"ulysses: compiled code cannot make the process group of sp={group}: call the model once before compiling it, or pass "
        f"a ProcessGroup or a DeviceMesh dimension"
    )
