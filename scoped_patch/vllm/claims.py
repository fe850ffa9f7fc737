"""One update at a time on one model."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from ..engine.errors import ConflictError


class Update(Protocol):
    @property
    def state(self) -> str: ...


_lock = threading.Lock()
#: by model: who updates it, and from where it was entered
_open: dict[int, tuple[weakref.ref[Update], str]] = {}


def claim(update: Update, models: list[torch.nn.Module], location: str) -> None:
    """Note that `update`, entered at `location`, works on `models`.

    Raises:
        ConflictError: another update, which is still alive, works on one of them; nothing was noted.
    """
    with _lock:
        for model in models:
            holder, where = _open.get(id(model), (None, ""))
            other = None if holder is None else holder()
            # An interrupt may have come between an update's end and its release.
            if other is not None and other is not update and other.state != "closed":
                raise ConflictError(
                    f"{type(model).__name__}: the weight update entered at {where} is still open; "
                    "leave it, or call its rollback(), before you enter the next one"
                )
        for model in models:
            _open[id(model)] = (weakref.ref(update), location)


def release(update: Update) -> None:
    with _lock:
        for key in [key for key, (holder, _) in _open.items() if holder() is update or holder() is None]:
            del _open[key]
