"""Watches every write that a loader or a processing step makes: where it went, and that none reached the live model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from .errors import UnsupportedLayer
from .graph import storage_key
from .plans import VIEWS

_aten = torch.ops.aten
_COPIES = frozenset({_aten.copy_.default})
_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_written: dict[Any, tuple[int | str, ...]] = {}


def _written_arguments(func: Any) -> tuple[int | str, ...]:
    """Positions (or names) of the arguments that an operator writes to, from its schema."""
    _written[func] = tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    return _written[func]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to live tensors, and tells `on_write` about writes to staged ones.

    Args:
        live: label by storage, of every tensor that serves.
        on_write: called with (storage key, written view, is a plain fill) after a copy or fill.
        redirect: the real tensor to use for a placeholder's storage, or None when the storage is no placeholder's.
    """

    def __init__(
        self,
        live: Mapping[int, str],
        on_write: Callable[[int, torch.Tensor, bool], None],
        redirect: Callable[[int, torch.Tensor], torch.Tensor | None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live
        self._on_write = on_write
        self._redirect = redirect
        self._guarding = False
        self.met_live = False  # whether an operator was given a live tensor, to read even, since `guard` was entered
        self.trace: list[tuple[Any, Any, Any]] | None = None  # (operator, arguments) of all but views, if anyone asks

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Refuse writes to live tensors, and no more: a layer is being processed."""
        outer, self._guarding = self._guarding, True
        self.met_live = False
        try:
            with contextlib.nullcontext() if self.watching else self:
                yield
        finally:
            self._guarding = outer

    def _meet(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.met_live |= value.untyped_storage()._cdata in self._live and value.numel() > 0
            elif isinstance(value, (list, tuple)):
                self._meet(value)

    @property
    def watching(self) -> bool:
        """Whether operators come here first."""
        return _get_current_dispatch_mode() is self

    def away(self, run: Callable[[], None]) -> None:
        """Call `run` with operators unseen, which come here first now: what is processed is known to meet nothing live."""
        try:
            _pop_mode()
            run()
        finally:
            if not self.watching:  # an interrupt may have come before that step
                _push_mode(self)

    def leave(self) -> None:
        """Be gone from where operators come: an interrupt may have kept Python from leaving the `with` block of it."""
        if self.watching:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not by torch's wrapper around every operator: there is nothing to compile, and it takes as long as the look here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = _written.get(func)
        if places is None:
            places = _written_arguments(func)
        if self.trace is not None and func not in VIEWS:
            self.trace.append((func, args, kwargs))
        if self._guarding and not self.met_live:
            self._meet((*args, *kwargs.values()) if kwargs else args)
        if not places:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        for place in places:
            target = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in target if isinstance(target, (list, tuple)) else (target,):
                if isinstance(tensor, torch.Tensor):
                    label = self._live.get(storage_key(tensor))
                    if label is not None and tensor.numel():
                        raise UnsupportedLayer(
                            f"{label}: {func} would have written to this live tensor while new weights are being staged; "
                            "the update was stopped before it did"
                        )
        if self._guarding or (func not in _COPIES and func not in _FILLS):
            return func(*args, **kwargs)
        target = args[0]
        key = storage_key(target)
        if target.is_meta:
            real = self._redirect(key, target)
            if real is not None:
                func(real.as_strided(target.shape, target.stride(), target.storage_offset()), *args[1:], **kwargs)
                self._on_write(storage_key(real), target, func in _FILLS)
                return target
        out = func(*args, **kwargs)
        self._on_write(key, target, func in _FILLS)
        return out
