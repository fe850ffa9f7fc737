"""One call of the model: what it wants scored, what the head found, and how rows are kept and summed."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.errors import BadOptionError
from ...models.sharding import KeptRows, SequenceShard
from ..trl_head import TrlHead


class Frame:
    """What one call of the model wants scored, and what the head found."""

    __slots__ = (
        "entropy",
        "ignore_index",
        "keep",
        "labels",
        "log_probs",
        "packed",
        "ran",
        "rows",
        "scored",
        "shard",
        "targets",
        "temperature",
        "thread",
        "trl",
    )

    def __init__(
        self, targets: Tensor | None, labels: Any, temperature: float | Tensor, ignore_index: int, thread: int
    ) -> None:
        self.targets = targets
        self.labels = labels
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.thread = thread
        self.ran = False
        self.packed: Tensor | None = None
        self.log_probs: Tensor | None = None
        self.entropy: Tensor | None = None
        self.scored: Tensor | None = None
        self.trl: TrlHead | None = None
        #: how the call's sequence is spread over ranks, and the rows that the caller wants of the whole
        self.shard: SequenceShard | None = None
        self.rows: KeptRows | None = None
        self.keep: Any = 0


#: The calls that are under way, by model.
frames_of: weakref.WeakKeyDictionary[nn.Module, list[Frame]] = weakref.WeakKeyDictionary()


def token_loss(frame: Frame, num_items: Any) -> Tensor:
    """Mean negative log-prob of the labels, or their sum over `num_items`; 0 where there are none."""
    total = -frame.log_probs.sum()  # type: ignore[union-attr]  # ignored rows are 0
    if num_items is None:
        num_items = (frame.scored != frame.ignore_index).sum().clamp(min=1)  # type: ignore[union-attr]
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    loss: Tensor = total / num_items
    return loss


def kept_already(kwargs: dict[str, Any], keep: Any) -> bool:
    """As transformers' losses have it: `shift_labels` as long as a list of rows to keep belong to those rows."""
    given = kwargs.get("shift_labels")
    return given is not None and is_list_of_rows(keep) and given.shape[1:] == keep.shape


def is_list_of_rows(keep: Any) -> bool:
    return isinstance(keep, Tensor) and keep.dtype == torch.int64 and keep.ndim == 1


def kept_rows(values: Tensor, keep: Any) -> Tensor:
    """Cut [B, S] values as the model cuts its hidden states for `logits_to_keep`."""
    if isinstance(keep, int):
        return values[:, -keep:] if keep else values
    return values if keep is None else values[:, keep]


def kept_temperature(temperature: float | Tensor, keep: Any, targets: Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor) and temperature.ndim == 2 and temperature.shape[1] == targets.shape[1]:
        return kept_rows(temperature, keep)
    return temperature


def check_temperature(temperature: Any) -> None:
    """Refuse what cannot divide logits.

    Raises:
        BadOptionError: not a number > 0, or a tensor of integers or of less than fp32.
    """
    if isinstance(temperature, Tensor):
        if temperature.dtype not in (torch.float32, torch.float64):
            raise BadOptionError(
                f"temperature: got a {temperature.dtype} tensor, wanted float32. Mixed precision (FSDP's cast_forward_inputs "
                f"for one) casts float tensors among the arguments of a call: pass a float, or set the tensor on the scope "
                f"with fused=FusedHead(temperature=...), which no cast reaches"
            )
        if temperature.ndim > 2:
            raise BadOptionError(f"temperature: got shape {list(temperature.shape)}, wanted [], [B] or [B, S]")
        # On an accelerator a look at the values would wait for it; there a bad one shows as NaN.
        looked = temperature.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
        if looked and not bool((temperature > 0).all()):
            raise BadOptionError(f"temperature: every value must be > 0, the least is {temperature.min().item():g}")
    elif isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
        raise BadOptionError(f"temperature: got {temperature!r}, wanted a number > 0 or a float32 tensor [B] or [B, S]")
