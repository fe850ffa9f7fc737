"""What can go wrong with a weight update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..engine.errors import ScopedPatchError, ScopeStateError, UnsupportedError

Reason = Literal["unknown", "shape", "dtype", "duplicate", "tied", "non-finite", "source", "unlisted", "loader"]


class RejectedWeight(ScopedPatchError, ValueError):
    """A weight that arrived cannot be part of this update; nothing that serves was changed by it.

    Attributes:
        weight: its checkpoint name.
        reason: "unknown", "shape", "dtype", "duplicate", "tied", "non-finite", "source" (a buffer that was overwritten
            before it was read; a tensor without plain memory: meta, sparse, a DTensor), "unlisted" (not among `expect=`) or
            "loader" (any other failure in the model's loader).
    """

    def __init__(self, weight: str, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.weight = weight
        self.reason: Reason = reason

    def __reduce__(self) -> tuple[type[RejectedWeight], tuple[str, str, str]]:
        return type(self), (self.weight, self.reason, str(self))


class IncompleteReload(ScopedPatchError, RuntimeError):
    """The scope ended before every expected weight had arrived; the old weights still serve.

    Attributes:
        missing: per layer, what did not arrive: checkpoint names where they are known, else parameters and slices.
        committed: the layers that have new weights all the same (`atomic="layer"` and `baseline="discarded"` only).
    """

    def __init__(self, text: str, missing: Mapping[str, Sequence[str]], committed: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.missing = {layer: list(names) for layer, names in missing.items()}
        self.committed = list(committed)

    def __reduce__(self) -> tuple[type[IncompleteReload], tuple[str, dict[str, list[str]], list[str]]]:
        return type(self), (str(self), self.missing, self.committed)


class UnsupportedLayer(UnsupportedError):
    """A layer keeps state derived from its weights that this library can neither rebuild in place nor prove unchanged."""


class EngineNotReady(ScopeStateError):
    """The engine was asked to generate while its weights are discarded and not all new ones have arrived."""


class RemoteReloadError(ScopedPatchError, RuntimeError):
    """At least one rank of an engine could not take the update, so that every rank kept, or went back to, the old weights.

    Attributes:
        ranks: the failure text of each rank that failed.
    """

    def __init__(self, text: str, ranks: Mapping[int, str]) -> None:
        super().__init__(text)
        self.ranks = dict(ranks)

    def __reduce__(self) -> tuple[type[RemoteReloadError], tuple[str, dict[int, str]]]:
        return type(self), (str(self), self.ranks)
