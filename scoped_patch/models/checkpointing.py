"""Activation checkpointing: a forward recorded inside a scope is recomputed as it ran, whenever backward comes.

Without this, leaving the scope before `backward()` recomputes with the unpatched forward and gives wrong gradients with
no error. Covered: transformers' `_gradient_checkpointing_func` and torch's `CheckpointWrapper`. A call of
`torch.utils.checkpoint` hidden in a model's own code is not seen; nor is a forward that ran while no scope was live, so going
backward from it inside a scope recomputes it patched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..engine import LIVE, Edit, Patch, PlannedEdit, Snapshot, attribute_slot
from ..engine.adhoc import signature_of
from ..engine.live import LiveStack
from .modules import module_paths, walk
from .sharding import announced, resumed
from .unwrap import class_names, unwrap

#: the method of a transformers model that `gradient_checkpointing_enable` and `_disable` come down to
_SWITCH = "_set_gradient_checkpointing"


class RecomputeAsRun(Patch):
    """Added by `patched(...)` to every scope on a model. Nested scopes on one model share its edits."""

    name = "checkpoint_replay"

    def fingerprint(self, target: Any) -> Hashable:
        return tuple((id(module), key) for module, key in _checkpointing(unwrap(target).outer))

    def plan(self, target: Any) -> Iterable[Edit]:
        root = unwrap(target).model
        yield from self.checkpointing_edits(target)
        if hasattr(root, _SWITCH):
            yield Edit(
                attribute_slot(root, _SWITCH, f"{type(root).__name__}.{_SWITCH}"),
                lambda prior: switching(prior, root),
                "wrap",
                "cover checkpointing that is switched on later",
                commutes=True,
                token=(self.name, id(root)),
                to="switches, and is covered again",
                hidden=True,
            )

    def checkpointing_edits(self, target: Any) -> Iterable[Edit]:
        """One edit for each module that checkpoints now."""
        unwrapped = unwrap(target)
        found = list(_checkpointing(unwrapped.outer))
        paths = module_paths(unwrapped.outer) if found else {}
        root = unwrapped.model
        for module, key in found:
            yield Edit(
                attribute_slot(module, key, f"{paths.get(id(module), '?')}.{key}"),
                lambda prior: recomputing_as_run(prior, root),
                "wrap",
                "recompute in backward what ran in forward",
                commutes=True,
                token=(self.name, id(module)),
                to="recomputes under replay()",
                hidden=True,
            )


def switching(prior: Callable[..., Any], root: object) -> Callable[..., Any]:
    """transformers' switch, for a model that is patched: it writes over the functions that a live scope has wrapped."""

    def switch_checkpointing(*args: Any, **kwargs: Any) -> Any:
        with LIVE.lock:
            sessions = [session for session in LIVE.sessions if session.root is root]
            for session in reversed(sessions):
                ours = [r for r in session.records if r.patch == RecomputeAsRun.name and r.slot.key != _SWITCH]
                for record in ours:
                    LIVE.remove(record.edit, session, "restore")
                session.records[:] = [record for record in session.records if all(record is not one for one in ours)]
            try:
                return prior(*args, **kwargs)
            finally:
                LIVE.changed()
                for session in sessions:
                    for patch in session.plan.patches:
                        if isinstance(patch, RecomputeAsRun):
                            for edit in patch.checkpointing_edits(session.target):
                                session.apply_late(PlannedEdit(patch, edit))

    signature = signature_of(prior)
    if signature is not None:
        switch_checkpointing.__signature__ = signature  # type: ignore[attr-defined]
    return switch_checkpointing


def _checkpointing(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in walk(root):
        own = module.__dict__
        if "_gradient_checkpointing_func" in own and getattr(module, "gradient_checkpointing", False):
            yield module, "_gradient_checkpointing_func"
        elif "checkpoint_fn" in own and "CheckpointWrapper" in class_names(module):
            yield module, "checkpoint_fn"


def recomputing_as_run(checkpoint: Callable[..., Any], root: object) -> Callable[..., Any]:
    """Wrap a checkpoint function so that what it recomputes runs under the edits that were live at the forward."""

    def checkpoint_under_replay(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return checkpoint(function, *args, **kwargs)  # the traced graph holds the patched code already
        snapshot, shards = snapshot_of(LIVE, root), announced()

        def run(*inner: Any, **named: Any) -> Any:
            with LIVE.replay(snapshot), resumed(shards):
                return function(*inner, **named)

        return checkpoint(run, *args, **kwargs)

    return checkpoint_under_replay


#: of the latest model. Weak: what has to be recomputed holds it, and a model that is let go must not stay for a cache's sake.
_latest: dict[int, tuple[int, weakref.ref[Snapshot]]] = {}


def snapshot_of(live: LiveStack, root: object) -> Snapshot:
    """The present edits of all scopes on one model; made once per change of the live stack."""
    version, known = _latest.get(id(root), (None, None))
    snapshot = known() if known is not None and version == live.version else None
    if snapshot is None:
        sessions = [session for session in live.sessions if session.root is root]
        version, snapshot = live.version, live.freeze(sessions, root)
        _latest.clear()
        _latest[id(root)] = (version, weakref.ref(snapshot))
    return snapshot
