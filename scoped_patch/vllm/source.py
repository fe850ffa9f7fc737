"""The stream of named tensors on its way into a model's loader: who is it, was it read in time, whose failure is it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..engine.errors import ScopedPatchError
from .digest import Digest
from .errors import RejectedWeight


class Source:
    """Names across all buckets of one update.

    Attributes:
        current: the name that the loader asked for last.
        seen: every name that arrived.
        used: names of which the loader made something.
    """

    def __init__(self, expected: frozenset[str] | None, digest: Digest | None = None) -> None:
        self.expected = expected
        self.digest = digest
        self.scales = Digest()
        self.current: str | None = None
        self.seen: set[str] = set()
        self.used: set[str] = set()
        self.nbytes = 0
        self.failure: BaseException | None = None  # of the caller's own iterable
        self.refused: TypeError | None = None  # what it gave is no pair
        self.on_device: set[torch.device] = set()
        self._latest: torch.Tensor | None = None  # what goes by `current`; most loaders get that very object
        # By storage: the spans of memory handed to the loader, each while the loader may still hold it.
        self._handed: dict[int, list[tuple[int, int, str, weakref.ref[torch.Tensor]]]] = {}

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand the pairs on, one at a time, checked."""
        self._handed.clear()
        iterator = iter(weights)
        while True:
            try:
                pair = next(iterator)
            except StopIteration:
                self.current = self._latest = None
                return
            except BaseException as error:
                self.failure = error
                raise
            name, tensor = self._checked(pair)
            self.current = name
            self.seen.add(name)
            self.nbytes += tensor.nbytes
            if self.digest is not None:
                self.digest.add(name, tensor)
                if name.endswith("global_scale"):
                    self.scales.add(name, tensor)
            if tensor.device.type != "cpu":  # GPU only
                self.on_device.add(tensor.device)
            start = tensor.data_ptr()
            spans = self._handed.setdefault(tensor.untyped_storage().data_ptr(), [])
            if len(spans) & (len(spans) - 1) == 0:  # now and then: a bucket may be one storage with thousands of tensors
                spans[:] = [span for span in spans if span[3]() is not None]
            spans.append((start, start + tensor.nbytes, name, weakref.ref(tensor)))
            self._latest = tensor
            yield name, tensor

    def _checked(self, pair: Any) -> tuple[str, torch.Tensor]:
        found = pair if isinstance(pair, (tuple, list)) else (pair,)
        if len(found) != 2 or not isinstance(found[0], str) or not isinstance(found[1], torch.Tensor):
            kinds = ", ".join(type(x).__name__ for x in found)
            self.refused = TypeError(
                f"update.load() wants (name, tensor) pairs, got {f'({kinds})' if found is pair else kinds}; "
                "pass `state_dict.items()` rather than the dict itself"
            )
            raise self.refused
        name, tensor = found
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            what = type(tensor).__name__ if tensor.layout is torch.strided else f"tensor of layout {tensor.layout}"
            raise RejectedWeight(
                name,
                "source",
                f"{name}: a {what} has no memory that a loader could read; send a plain one (a DTensor's "
                "`full_tensor()`, a sparse one's `to_dense()`)",
            )
        if tensor.is_meta:
            raise RejectedWeight(name, "source", f"{name}: a meta tensor carries no weights")
        if name in self.seen:
            raise RejectedWeight(
                name, "duplicate", f"{name}: arrived twice in one update; which of the two is meant cannot be known"
            )
        if self.expected is not None and name not in self.expected:
            raise RejectedWeight(name, "unlisted", f"{name}: arrived, but is not among the names that `expect=` lists")
        return name, tensor

    def name_of(self, tensor: torch.Tensor | None) -> str:
        """The name a loader's argument came under: by its memory, since some loaders collect tensors before use.

        Raises:
            RejectedWeight: its memory was handed out again, under a later name, before the loader read it.
        """
        if tensor is not None and tensor is not self._latest and not tensor.is_meta:
            at = tensor.data_ptr()
            spans = self._handed.get(tensor.untyped_storage().data_ptr(), [])
            names = [name for start, stop, name, held in spans if start <= at < stop and held() is not None]
            if len(names) > 1 and names[-1] != self.current:
                raise RejectedWeight(
                    names[0],
                    "source",
                    f"{names[0]}: its buffer was reused for {names[-1]} before the model's loader, which collects several "
                    "tensors first, had read it. Give the tensors of one bucket memory of their own.",
                )
            if names:
                return names[-1]
        return self.current or "?"

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Turn a failure of the model's own loader into one that names the weight it failed on."""
        try:
            yield
        except Exception as error:
            if error in (self.failure, self.refused) or isinstance(error, ScopedPatchError):
                raise
            name, text = self.current or "?", str(error)
            if isinstance(error, AssertionError) or "size" in text or "shape" in text:
                reason, what = "shape", "did not load"
            elif name not in self.used:
                reason, what = "unknown", "the model has no place for it"
            else:
                reason, what = "loader", "did not load"
            text = text if len(text) < 300 else f"{text[:300]} ..."
            raise RejectedWeight(name, reason, f"{name}: {what}: {type(error).__name__}: {text}") from error  # type: ignore[arg-type]
