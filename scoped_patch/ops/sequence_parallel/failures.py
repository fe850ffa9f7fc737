"""When one rank fails, the others learn of it instead of waiting for it.

A rank that raises between two collectives leaves its peers inside one that will never end. So it leaves a note in the
group's store, and a rank that has waited for a while looks for such notes; one that gives up says so too. Steps (calls of
the model) are counted, so that a note of an earlier step is not taken for the present one. Before its next step, a rank
that failed finds out whether anybody was left behind: if not, the group goes on; if so, it is out of step for good, and
every rank knows. A rank that waits long leaves a note of that too, so that when a collective ends badly (the group's
timeout, or a process that died), the error says which ranks never came to it. Nothing is written or read as long as
collectives end in time.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...engine.errors import ScopedPatchError

logger = logging.getLogger("scoped_patch")

#: seconds between two looks for a note; nothing is read while collectives end sooner than that
POLL_SECONDS = 1.0

#: how long a rank whose collective ended badly waits to hear which others were in it
WORD_SECONDS = 1.5

#: how long a rank that failed waits to hear how the others left that step
SETTLE_SECONDS = 30.0


class RankFailedError(ScopedPatchError, RuntimeError):
    """Another rank of the group failed or stayed away, so this collective cannot end; the message names the rank."""


@dataclass
class _Group:
    step: int = 0
    #: collectives so far
    collectives: int = 0
    #: why no collective of this group can be trusted any more
    broken: str = ""
    #: this rank left the present step with an error
    failed: bool = False


_groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()


def _state(group: dist.ProcessGroup) -> _Group:
    state = _groups.get(group)
    if state is None:
        state = _groups[group] = _Group()
    return state


def begin_step(group: dist.ProcessGroup) -> None:
    """Count one step (a forward, say). Every rank of the group begins the same steps.

    Raises:
        RankFailedError: a collective of an earlier step never ended, so this group is out of step for good.
    """
    if not settle(group):
        raise RankFailedError(f"this process group cannot be used any more, make a new one: {_state(group).broken}")
    _state(group).step += 1


def report_failure(group: dist.ProcessGroup, error: BaseException) -> None:
    """Tell the other ranks of `group` that this rank leaves the present step with `error`. Never raises."""
    state = _state(group)
    if state.failed or state.broken:
        return
    state.failed = True
    _write(group, "failed", state.step, f"rank {dist.get_rank()} failed with {type(error).__name__}: {str(error)[:500]}")


def settle(group: dist.ProcessGroup) -> bool:
    """Can another step begin? After a failure of this rank: waits until the others have said how they left that step."""
    state = _state(group)
    if state.failed and not state.broken:
        state.broken = _left_behind(group, state.step)
        state.failed = False
    return not state.broken


def _left_behind(group: dist.ProcessGroup, step: int) -> str:
    """Why the group is out of step after this rank failed, or nothing."""
    others = set(range(dist.get_world_size(group))) - {dist.get_rank(group)}
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        for rank in list(others):
            note = _read(group, "gave_up", step, rank)
            if note is not None:
                return note
            if _read(group, "failed", step, rank) is not None:
                others.discard(rank)  # on its own, in none of our collectives
            elif _read(group, "waits", step + 1, rank) is not None:
                return ""  # it came through that step
        if not others:
            return ""
        if time.monotonic() > deadline:
            return f"rank {dist.get_rank()} failed, and did not hear from the others within {SETTLE_SECONDS:g} seconds"
        time.sleep(0.02)


def begin_collective(group: dist.ProcessGroup) -> None:
    """Count one collective. Every rank of the group begins the same ones."""
    _state(group).collectives += 1


def check(group: dist.ProcessGroup, what: str) -> None:
    """Called while waiting: look for notes of other ranks.

    Raises:
        RankFailedError: there is one for the present step.
    """
    state = _state(group)
    me = dist.get_rank(group)
    for rank in range(dist.get_world_size(group)):
        if rank == me:
            continue
        note = _read(group, "failed", state.step, rank)
        if note is not None:
            state.broken = f"{note}, while rank {dist.get_rank()} waited for it in {what}"
            _write(group, "gave_up", state.step, state.broken)
            raise RankFailedError(state.broken)
    _write(group, "waits", state.step, str(state.collectives))


def ended_badly(group: dist.ProcessGroup, what: str, error: BaseException) -> RankFailedError:
    """The error for a collective that the backend gave up: names the ranks that were not in it, as far as can be known."""
    state = _state(group)
    me = dist.get_rank(group)
    _write(group, "waits", state.step, str(state.collectives))
    silent = set(range(dist.get_world_size(group))) - {me}
    deadline = time.monotonic() + WORD_SECONDS
    while True:
        silent = {rank for rank in silent if _read(group, "waits", state.step, rank) != str(state.collectives)}
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    names = [str(dist.get_global_rank(group, rank)) for rank in sorted(silent)]
    who = (
        f"rank{'s' if len(names) > 1 else ''} {', '.join(names)} never came to it, or died" if names else "all ranks were in it"
    )
    state.broken = f"{what} that rank {dist.get_rank()} waited in ended badly: {who} ({str(error)[:300]})"
    return RankFailedError(state.broken)


def _key(kind: str, step: int, rank: int) -> str:
    return f"scoped_patch/{kind}/{step}/{rank}"


def _write(group: dist.ProcessGroup, kind: str, step: int, text: str) -> None:
    store = _store(group)
    if store is None:
        return
    try:
        store.set(_key(kind, step, dist.get_rank(group)), text)
    except Exception as problem:  # the store's host may be gone; what is being said matters less than what happened
        logger.debug("could not tell the other ranks: %s", problem)


def _read(group: dist.ProcessGroup, kind: str, step: int, rank: int) -> str | None:
    store = _store(group)
    if store is None:
        return None
    try:
        key = _key(kind, step, rank)
        return store.get(key).decode(errors="replace") if store.check([key]) else None
    except Exception as problem:
        logger.debug("could not look for notes of other ranks: %s", problem)
        return None


def _store(group: dist.ProcessGroup) -> Any:
    known = dist.distributed_c10d._world.pg_map.get(group)
    return known[1] if known else None
