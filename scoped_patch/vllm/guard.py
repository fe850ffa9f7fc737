"""Keeps an engine from running while its weights are gone."""

from __future__ import annotations

from typing import Any

from .errors import EngineNotReady
from .target import Site


class GenerateGuard:
    """Makes an engine refuse to run until `lift()`.

    An in-process `LLM` refuses new requests. Below that, `execute_model` of a runner, or `forward` of a bare model, raises:
    that ends an engine rather than let it serve garbage, so it is only the last line. The guard stays on when an update
    fails, since the weights are still gone then; the next update of all weights takes it over.

    Args:
        refuse: whether to refuse from now on; else only what an earlier update left refusing is taken over.
    """

    def __init__(self, found: list[Site], refuse: bool) -> None:
        places: list[tuple[Any, str]] = []
        for site in found:
            if site.engine is not None:
                places.append((site.engine.llm_engine, "add_request"))
            places.append((site.runner, "execute_model") if site.runner is not None else (site.model, "forward"))
        self._places = {(id(owner), name): (owner, name) for owner, name in places}
        for key, (owner, name) in self._places.items() if refuse else ():
            prior = vars(owner).get(name)
            if not isinstance(prior, _Refusal):
                _prior[key] = prior
                owner.__dict__[name] = _Refusal()

    def lift(self) -> None:
        for key, (owner, name) in self._places.items():
            if isinstance(vars(owner).get(name), _Refusal):
                prior = _prior.pop(key, None)
                if prior is None:
                    del owner.__dict__[name]
                else:
                    owner.__dict__[name] = prior


#: What an instance had in place of the refusal; almost always nothing.
_prior: dict[tuple[int, str], Any] = {}


class _Refusal:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise EngineNotReady(
            'this engine\'s weights were discarded (baseline="discarded") and not all new ones have arrived; '
            "complete a reload_weights update first"
        )
