"""One update at a time on one model."""

from __future__ import annotations

import threading
import weakref

import torch

from ..engine.errors import ConflictError

_lock = threading.Lock()
#: by model: who updates it, and from where it was entered
_open: dict[int, tuple[weakref.ref[object], str]] = {}


def claim(update: object, models: list[torch.nn.Module], location: str) -> None:
    """Note that `update`, entered at `location`, works on `models`.

    Raises:
        ConflictError: another update, which is still alive, works on one of them; nothing was noted.
    """
    with _lock:
        for model in models:
            holder, where = _open.get(id(model), (None, ""))
            other = None if holder is None else holder()
            if other is not None and other is not update:
                raise ConflictError(
                    f"{type(model).__name__}: the weight update entered at {where} is still open; "
                    "leave it before you enter the next one"
                )
        for model in models:
            _open[id(model)] = (weakref.ref(update), location)


def release(update: object) -> None:
    with _lock:
        for key in [key for key, (holder, _) in _open.items() if holder() is update or holder() is None]:
            del _open[key]
