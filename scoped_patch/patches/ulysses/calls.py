"""What a call may not ask of a model whose sequences are spread over ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...engine.errors import BadOptionError, UnsupportedError
from ...models.spec import CAUSAL_LOSSES

#: the argument that brings a key-value cache, by its names
CACHES = ("cache", "past_key_values")


def refuse_unspreadable(decoder: nn.Module, kwargs: dict[str, Any]) -> None:
    """In either layout: caches, and attention weights.

    Raises:
        UnsupportedError: names the argument.
    """
    for name in CACHES:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"ulysses: {name} was passed, and a key-value cache is not spread over ranks; use generate()"
            )
    if kwargs.get("use_cache") is True:
        raise UnsupportedError(
            "ulysses: use_cache=True was passed, and a key-value cache is not spread over ranks. Score and train with "
            "use_cache=False; generate() works and computes as outside the scope"
        )
    config = getattr(decoder, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise UnsupportedError("ulysses: output_attentions is not supported: attention weights stay on the rank of their head")


def check_cut_call(model: nn.Module, what: str, own_loss: bool, kwargs: dict[str, Any]) -> None:
    """With `inputs="sharded"`: what needs the end of the sequence, or a loss that is not put together over the ranks.

    Args:
        what: the model, for people.
        own_loss: the model computes its loss itself, by no loss function that could be told of other ranks.

    Raises:
        BadOptionError, UnsupportedError: names the argument, and says what to do.
    """
    keep = kwargs.get("logits_to_keep", 0)
    if keep is not None and not (isinstance(keep, int) and keep == 0):
        raise BadOptionError("ulysses: logits_to_keep is not supported with inputs='sharded': cut the outputs instead")
    given = next((name for name in ("labels", "start_positions", "end_positions") if kwargs.get(name) is not None), None)
    kind = getattr(model, "loss_type", None)
    if given is not None and (kind not in CAUSAL_LOSSES or given != "labels"):
        raise UnsupportedError(
            f"ulysses: {what} was given {given} for a loss of kind {kind!r}, and with inputs='sharded' only a loss of "
            f"next tokens is put together over the ranks. Leave them out and compute the loss from the outputs, or use "
            f"inputs='full'"
        )
    if own_loss and kwargs.get("labels") is not None:
        raise UnsupportedError(
            f"ulysses: {what} computes its loss itself, from labels that it shifts within this rank's part, which "
            f"is wrong at the part's end. With inputs='sharded' leave labels out and compute the loss from the outputs"
        )
