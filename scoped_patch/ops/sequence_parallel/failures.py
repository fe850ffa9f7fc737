"""When one rank fails, the others learn of it instead of waiting for it.

A rank that raises between two collectives leaves its peers inside one that will never end. So it writes a note into the
group's store, and a rank that has waited for a while looks for such a note. Steps are counted, so that a note of an
earlier step, which every rank survived, is not read again.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ...engine.errors import ScopedPatchError

logger = logging.getLogger("scoped_patch")

#: seconds between two looks for a note; nothing is read while collectives end sooner than that
POLL_SECONDS = 1.0


class RankFailedError(ScopedPatchError, RuntimeError):
    """Another rank of the group failed, so this collective will never end; the message names the rank and its error."""


@dataclass
class _Group:
    step: int = 0
    broken: str = ""
    told: set[int] = field(default_factory=set)


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
    state = _state(group)
    state.step += 1
    if state.broken:
        report_failure(group, RankFailedError(state.broken))
        raise RankFailedError(f"this group cannot be used any more, make a new one: {state.broken}")


def report_failure(group: dist.ProcessGroup, error: BaseException) -> None:
    """Tell the other ranks of `group` that this rank leaves the present step with `error`. Never raises."""
    state = _state(group)
    if isinstance(error, RankFailedError) and not state.broken:
        return  # it was told to us
    if state.step in state.told:
        return
    state.told.add(state.step)
    store = _store(group)
    if store is None:
        return
    text = f"rank {dist.get_rank()} failed with {type(error).__name__}: {str(error)[:500]}"
    try:
        store.set(_key(state.step), text)
    except Exception as problem:  # the store's host may be gone; the error itself matters more
        logger.debug("could not tell the other ranks: %s", problem)


def check(group: dist.ProcessGroup, what: str) -> None:
    """Look for a note of another rank.

    Raises:
        RankFailedError: there is one for the present step.
    """
    store = _store(group)
    if store is None:
        return
    state = _state(group)
    try:
        if not store.check([_key(state.step)]):
            return
        note = store.get(_key(state.step)).decode(errors="replace")
    except Exception as problem:
        logger.debug("could not look for notes of other ranks: %s", problem)
        return
    state.broken = f"{note}, while rank {dist.get_rank()} waited for it in {what}"
    raise RankFailedError(state.broken)


def is_broken(group: dist.ProcessGroup) -> bool:
    """Has a collective of this group been given up?"""
    state = _groups.get(group)
    return state is not None and bool(state.broken)


def _key(step: int) -> str:
    return f"scoped_patch/failed/{step}"


def _store(group: dist.ProcessGroup) -> Any:
    known = dist.distributed_c10d._world.pg_map.get(group)
    return known[1] if known else None
