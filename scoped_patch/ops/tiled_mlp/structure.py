"""The shapes of a tiled call: which dimensions are tokens, in what goes in and in what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def leading_shape(inputs: tuple[Tensor, ...], token_dims: int | None) -> torch.Size:
    """The token dimensions that all of `inputs` begin with."""
    if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        kinds = ", ".join(type(tensor).__name__ for tensor in inputs) or "nothing"
        raise TypeError(f"tensors: got {kinds}, wanted a tensor or a sequence of at least one")
    first = inputs[0]
    dims = first.ndim - 1 if token_dims is None else token_dims
    if not 1 <= dims <= first.ndim:
        raise ValueError(
            f"tensors: got a first one of shape {tuple(first.shape)} and token_dims={token_dims}, wanted at least one "
            "token dimension, as in [tokens, hidden] or [batch, sequence, hidden]"
        )
    lead = first.shape[:dims]
    for index, tensor in enumerate(inputs):
        if tensor.shape[:dims] != lead:
            raise ValueError(
                f"tensors[{index}]: got shape {tuple(tensor.shape)}, wanted the token dimensions {tuple(lead)} first, "
                "as in tensors[0]"
            )
    return lead


class Structure:
    """How the outputs of tiles become the untiled output: which are there, and whether their tokens are flattened."""

    def __init__(self, lead: torch.Size) -> None:
        self._lead = lead
        self._kind: type[Any] | None = None
        self._flat: list[bool | None] = []

    def flatten(self, result: Any, tokens: int) -> list[Tensor]:
        """The tensors of one tile's result, each as [tokens, ...]."""
        kind = None if isinstance(result, Tensor) else type(result)
        if kind not in (None, tuple, list):
            raise TypeError(f"function: returned a {type(result).__name__}, wanted a tensor or a tuple or list of tensors")
        items = (result,) if kind is None else result
        flat = [None if item is None else self._is_flat(item, tokens) for item in items]
        if not self._flat:
            self._kind, self._flat = kind, flat
        elif [entry is None for entry in flat] != [entry is None for entry in self._flat]:
            raise ValueError("function: returned a tensor for one tile where it returned None for another")
        return [
            item if entry else item.reshape(tokens, *item.shape[len(self._lead) :])
            for item, entry in zip(items, flat, strict=True)
            if item is not None
        ]

    def _is_flat(self, item: Any, tokens: int) -> bool:
        if not isinstance(item, Tensor):
            raise TypeError(f"function: returned a {type(item).__name__} among its outputs, wanted tensors or None")
        dims = len(self._lead)
        if tuple(item.shape[:dims]) == (1,) * (dims - 1) + (tokens,):
            return False
        if item.ndim and item.shape[0] == tokens:
            return True
        raise ValueError(
            f"function: returned a tensor of shape {tuple(item.shape)} for a tile of {tokens} tokens, wanted these "
            "tokens in its leading dimensions. A function that is not token-wise can't be tiled."
        )

    def restore(self, tensors: Sequence[Tensor]) -> Any:
        """The untiled result, from whole tensors of [all tokens, ...]."""
        whole = iter(tensors)
        items: list[Tensor | None] = []
        for flat in self._flat:
            if flat is None:
                items.append(None)
            else:
                tensor = next(whole)
                items.append(tensor if flat else tensor.reshape(*self._lead, *tensor.shape[1:]))
        return items[0] if self._kind is None else self._kind(items)
