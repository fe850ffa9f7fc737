"""Finding once what is the same in each call of a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MISSING: Any = object()


class Remembered(Generic[T]):
    """What was found for each kind of calls, by all that decides it; for up to `most` kinds, then from the start again."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._found: dict[tuple[Any, ...], T] = {}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, kind: tuple[Any, ...], find: Callable[[], T]) -> T:
        """What `find` gives or gave. A kind that has no hash, as with symbolic sizes, is not remembered; nor what raises."""
        try:
            found: T = self._found.get(kind, _MISSING)
        except TypeError:
            return find()
        if found is _MISSING:
            found = find()
            if len(self._found) >= self._most:
                self._found.clear()
            self._found[kind] = found
        return found
