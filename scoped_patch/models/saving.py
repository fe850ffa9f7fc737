"""`save_pretrained` inside a scope writes the unpatched model: weights, child modules and config as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..engine import LIVE, Edit, Patch, attribute_slot
from ..engine.adhoc import signature_of
from .unwrap import unwrap


class SavesUnpatched(Patch):
    """Added by `patched(...)` to every scope on a model that can save itself. Nested scopes on one model share its edit."""

    name = "saves_unpatched"

    def plan(self, target: Any) -> Iterable[Edit]:
        model = unwrap(target).model
        if callable(getattr(model, "save_pretrained", None)):
            yield Edit(
                attribute_slot(model, "save_pretrained", f"{type(model).__name__}.save_pretrained"),
                lambda prior: saving_unpatched(prior, model),
                "wrap",
                "files hold the unpatched model",
                commutes=True,
                token=(self.name, id(model)),
                to="saves under the unpatched state",
                hidden=True,
            )


def saving_unpatched(save: Callable[..., Any], root: object) -> Callable[..., Any]:
    def save_pretrained_unpatched(*args: Any, **kwargs: Any) -> Any:
        with LIVE.replay(LIVE.freeze_original(root)):
            return save(*args, **kwargs)

    save_pretrained_unpatched.__doc__ = save.__doc__
    signature = signature_of(save)
    if signature is not None:
        save_pretrained_unpatched.__signature__ = signature  # type: ignore[attr-defined]
    return save_pretrained_unpatched
