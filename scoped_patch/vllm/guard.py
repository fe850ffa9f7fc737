"""Keeps an engine from running while its weights are gone."""

from __future__ import annotations

from typing import Any

from .errors import EngineNotReady
from .target import Site


class GenerateGuard:
    """Makes `execute_model` of each runner (or `forward` of a bare model) raise until `lift()`.

    It stays on when an update fails: the weights are still gone then. The next update takes it over.
    """

    def __init__(self, found: list[Site]) -> None:
        self._places: list[tuple[Any, str]] = []
        for site in found:
            owner, name = (site.runner, "execute_model") if site.runner is not None else (site.model, "forward")
            if all(owner is not known for known, _ in self._places):
                self._places.append((owner, name))
        for owner, name in self._places:
            owner.__dict__[name] = refuse

    def lift(self) -> None:
        for owner, name in self._places:
            if owner.__dict__.get(name) is refuse:
                del owner.__dict__[name]


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise EngineNotReady(
        'this engine\'s weights were discarded (baseline="discarded") and not all new ones have arrived; '
        "complete a reload_weights update first"
    )
