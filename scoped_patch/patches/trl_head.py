"""TRL's own fused head (`trl.trainer.utils.add_fused_lm_head`), answered in its terms.

TRL's trainers put a forward on their model that, when called with `fused_lm_head=True`, reads the head's weight instead of
calling the head, and returns log-probs [B, S-1] with fields of its own. A fused head of ours would never be reached. So
such calls are sent on without the flag, scored by ours, and handed back as TRL's output; calls without the flag mean
logits, as they do in TRL.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.errors import BadOptionError, UnsupportedError
from ..models.head import HeadTerms
from ..models.packing import IGNORE_INDEX
from ..models.spec import LogitsTransform
from ..ops.linear_cross_entropy import LinearCrossEntropyOutput, linear_cross_entropy

#: TRL's name of an output -> ours; `mean_logits` is made here
_OP_NAMES = {"log_probs": "log_probs", "entropy": "entropy", "log_sum_sq_probs": "sum_sq_probs", "is_top1": "is_top1"}
_EXTRA = ("log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass(frozen=True)
class TrlHead:
    """What one `add_fused_lm_head` was asked for.

    Attributes:
        outputs: TRL's names of the per-token fields.
        temperature: what it divides logits by.
        cast_to_fp32: it projects in fp32, outside autocast.
        output_class: TRL's `FusedCausalLMOutput`.
    """

    outputs: tuple[str, ...]
    temperature: float
    cast_to_fp32: bool
    output_class: type

    @property
    def op_outputs(self) -> tuple[str, ...]:
        """Those that the linear cross entropy computes."""
        return tuple(_OP_NAMES[name] for name in ("log_probs", *self.outputs) if name in _OP_NAMES)

    def prepare(self, kwargs: dict[str, Any], temperature: float | Tensor) -> float | Tensor:
        """Bring the arguments of a call with the flag into the form that the model's own forward takes.

        Args:
            temperature: the scope's or the call's.

        Returns:
            The temperature to use: TRL's, unless another one was asked for.

        Raises:
            BadOptionError: no labels, or two different temperatures.
        """
        if kwargs.get("labels") is None:
            # the model makes a loss where there are labels; which ones it is made of says `shift_labels`
            kwargs["labels"] = kwargs.get("shift_labels")
        if kwargs["labels"] is None:
            raise BadOptionError("fused_head: a call with fused_lm_head=True needs labels or shift_labels")
        kwargs["use_cache"] = False
        if isinstance(temperature, Tensor) or temperature not in (1.0, self.temperature):
            raise BadOptionError(
                f"fused_head: the scope or the call has the temperature {temperature!r}, and the trainer's own fused head "
                f"{self.temperature!r}: set it in the trainer's config only"
            )
        return self.temperature

    def cast(self, hidden: Tensor, terms: HeadTerms) -> tuple[Tensor, HeadTerms]:
        return (hidden.float(), terms.float()) if self.cast_to_fp32 else (hidden, terms)

    def score(self, hidden: Tensor, *args: Any, **kwargs: Any) -> LinearCrossEntropyOutput:
        """`linear_cross_entropy`, outside autocast where TRL's projection is."""
        if not self.cast_to_fp32:
            return linear_cross_entropy(hidden, *args, **kwargs)
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy(hidden, *args, **kwargs)

    def columns(
        self, result: LinearCrossEntropyOutput, hidden: Tensor, terms: HeadTerms, transform: LogitsTransform, temperature: Any
    ) -> list[Tensor]:
        """The extra per-token fields, without gradient, in the order of `_EXTRA`; only those asked for."""
        made: list[Tensor] = []
        with torch.no_grad():
            if "log_sum_sq_probs" in self.outputs:
                made.append(result.sum_sq_probs.detach().log())  # type: ignore[union-attr]
            if "mean_logits" in self.outputs:
                made.append(_mean_logits(hidden, terms, transform, temperature))
            if "is_top1" in self.outputs:
                made.append(result.is_top1.float())  # type: ignore[union-attr]
        return made

    def output(self, out: Any, packed: Tensor, targets: Tensor, shifted: bool) -> Any:
        """TRL's output from the model's.

        Args:
            out: the model's own output with its loss (and aux loss) in it.
            packed: [B, S, 2 + extras], what the head made.
            targets: [B, S], aligned.
            shifted: the caller gave `shift_labels`, so that the fields are [B, S]; otherwise [B, S-1].
        """
        rows = slice(None) if shifted else slice(None, -1)
        targets = targets.to(packed.device)[:, rows]
        mask = targets != IGNORE_INDEX
        names = ("log_probs", "entropy", *(name for name in _EXTRA if name in self.outputs))
        values = {name: packed[:, rows, i] for i, name in enumerate(names) if name in ("log_probs", *self.outputs)}
        for name in _EXTRA:
            if name in values:
                values[name] = values[name].detach().masked_fill(~mask, 0)
        if "is_top1" in values:
            values["is_top1"] = values["is_top1"].bool()
        return self.output_class(loss=out.loss, label_mask=mask, aux_loss=getattr(out, "aux_loss", None), **values)


def find_trl_head(forward: Any) -> TrlHead | None:
    """The TRL head in a forward, or under what else was wrapped around it.

    Raises:
        UnsupportedError: it computes something that is not known here.
    """
    function = _find(forward, 8)
    if function is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
    cls = function.__globals__.get("FusedCausalLMOutput")
    settings = [cells.get(name) for name in ("outputs", "temperature", "cast_lm_head_to_fp32")]
    outputs = tuple(settings[0] or ())
    unknown = sorted(set(outputs) - {*_OP_NAMES, "mean_logits"})
    if cls is None or unknown or None in settings:
        trl = sys.modules.get("trl")
        version = getattr(trl, "__version__", "of unknown version")
        what = f"computes {', '.join(unknown)}" if unknown else "keeps its settings where they were not found"
        raise UnsupportedError(
            f"the fused head of TRL {version} on this model {what}, which is not known here: leave out `fused`"
        )
    return TrlHead(outputs, float(settings[1]), bool(settings[2]), cls)  # type: ignore[arg-type]


def _find(forward: Any, depth: int) -> types.FunctionType | None:
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, types.FunctionType) or not depth:
        return None
    if function.__code__.co_name == "_fused_forward" and function.__globals__.get("__name__", "").startswith("trl."):
        return function
    inner = [c.cell_contents for c in function.__closure__ or () if _is_filled(c)]
    inner += [getattr(value, "model_forward", None) for value in inner]  # accelerate's conversion of outputs
    for value in (*inner, getattr(function, "__wrapped__", None)):
        if callable(value):
            found = _find(value, depth - 1)
            if found is not None:
                return found
    return None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _mean_logits(hidden: Tensor, terms: HeadTerms, transform: LogitsTransform, temperature: Any) -> Tensor:
    """The mean of a row's logits over the vocabulary: linear in the head, so no logits are made."""
    if transform.softcap is not None:
        raise UnsupportedError(
            "fused_head: this trainer asks for the mean of the logits, which a softcap makes as costly as the logits "
            "themselves: leave out `fused`"
        )
    mean = hidden.float() @ terms.weight.float().mean(0)
    if terms.bias is not None:
        mean = mean + terms.bias.float().mean()
    if terms.extra_hidden_states is not None and terms.extra_weight is not None:
        mean = mean + terms.extra_hidden_states.float() @ terms.extra_weight.float().mean(0)
    scaled: Tensor = mean * (1.0 if transform.scale is None else transform.scale) / temperature
    return scaled
