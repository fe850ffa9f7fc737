"""What an update did, and what it lacked."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .errors import IncompleteReload
from .source import Source

_versions: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ReloadReport:
    """What an update did.

    Attributes:
        layers: layers with new weights.
        tensors: named tensors that arrived.
        received_bytes: their size.
        committed_bytes: live memory that got new content.
        seconds: from entering the scope to the end of the commit.
        moved: tensors reachable from an updated layer whose address changed; 0 always, or the update is refused.
        ignored: names that the model's own loader made nothing of.
        version: how many updates this process has committed to the (first) model.
        digest: of what arrived, with `digest=True`; compare with `weights_digest` at the sender.
    """

    layers: int
    tensors: int
    received_bytes: int
    committed_bytes: int
    seconds: float
    moved: int
    ignored: tuple[str, ...]
    version: int
    digest: str | None = None


def weights_version(model: torch.nn.Module) -> int:
    """How many updates this process has committed to `model`; 0 for the weights it was built with."""
    return _versions.get(model, 0)


def count_version(model: torch.nn.Module, step: int) -> None:
    _versions[model] = weights_version(model) + step


def incomplete(
    location: str, missing: Mapping[str, Sequence[str]], source: Source, committed: list[str], discarded: bool
) -> IncompleteReload:
    """The error of an update that ended too soon: what is missing, per layer, and what serves now."""
    lines = [f"  {layer}: {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}" for layer, names in missing.items()]
    shown = "\n".join(lines[:20]) + (f"\n  ... and {len(lines) - 20} more layers" if len(lines) > 20 else "")
    ignored = sorted(source.seen - source.used)
    hint = (
        f"\nThe model's own loader made nothing of {len(ignored)} names that did arrive, such as {ignored[0]}."
        if ignored
        else ""
    )
    if discarded:
        state = "the engine refuses to run until a later update completes"
    elif committed:
        state = f"{len(committed)} complete layers have new weights, the others keep the old ones"
    else:
        state = "the old weights serve on"
    return IncompleteReload(
        f"the weight update entered at {location} ended with {len(missing)} layers incomplete; {state}. Missing:\n"
        f'{shown}{hint}\nSend them too, or say what to expect: expect="partial" or expect=[names].',
        missing,
        committed,
    )
