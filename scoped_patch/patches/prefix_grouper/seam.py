"""The model's forward in a scope: pack, run once per shared prefix, give back in the caller's layout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...engine import Counter
from ...engine.adhoc import signature_of
from ...engine.errors import BadOptionError, UnsupportedError
from ...models.attention import MixingLayer, bind_positional
from ...models.modules import forwards_below
from ...models.packing import CU_SEQLENS, IGNORE_INDEX
from ...models.placement import Placement
from ...models.spec import describe, text_config
from .. import fused_head
from ..ulysses import seam as ulysses_seam
from . import scoring
from .attention import CALL_KEYWORD, PrefixCall, RoutedConfigs, attend, check_reached, no_mask, opaque
from .batch import CACHES, KNOWN, PER_TOKEN, Batch, pack
from .packing import Packing, scatter

if TYPE_CHECKING:
    from .patch import PrefixGrouper

logger = logging.getLogger("scoped_patch")


@dataclass(frozen=True, eq=False)
class Prepared:
    """One grouped call.

    Attributes:
        inner: the arguments of the model's own forward on the packed row.
        call: what its attention is given.
        keep: the caller's `logits_to_keep`.
        scored: with a fused head, the rows to score.
        rows, of_cell: without one, the packed tokens whose logits are wanted, and which of them each cell shows.
        counted: without one and with labels, (packed token, target) of every scored cell.
    """

    inner: dict[str, Any]
    call: PrefixCall
    packing: Packing
    keep: Any
    scored: scoring.ScoredRows | None
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    of_cell: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    counted: tuple[Tensor, Tensor] | None = None


class Seam:
    """The functions of one plan."""

    def __init__(self, patch: PrefixGrouper, model: nn.Module, layers: tuple[MixingLayer, ...], own_loss: bool) -> None:
        self.patch = patch
        self.what = describe(model)
        self.layers = layers
        self.own_loss = own_loss
        self.configs = RoutedConfigs()
        self.grouped = Counter()
        self.generating = 0
        self.positional = bind_positional(type(model).forward)
        self.placement = Placement(patch.name, model, (module for layer in layers for module in layer.attentions))
        # Index arithmetic on values has no place in a graph, and attention would be compiled anew for every layout.
        self.pack, self.prepare, self.finish = opaque(self._pack), opaque(self._prepare), opaque(self._finish)
        self.attend = opaque(attend)

    def model_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.generating:
            return prior(*args, **kwargs)
        self.placement.check()
        if len(args) > len(self.positional):
            raise TypeError(f"{self.what} takes at most {len(self.positional)} positional arguments, got {len(args)}")
        kwargs.update(zip(self.positional, args, strict=False))
        group_ids, grouper = kwargs.pop("group_ids", None), kwargs.pop("prefix_grouper", None)
        if group_ids is None and grouper is None and not self._worth_a_look(kwargs):
            return prior(**kwargs)
        batch = self.pack(module, kwargs, group_ids, grouper)
        if batch is None:
            return prior(**kwargs)
        prepared = self.prepare(fused_below(prior), kwargs, batch)
        return self.finish(module, prior(**prepared.inner), kwargs, prepared)

    def generate(self, prior: Callable[..., Any]) -> Callable[..., Any]:
        def prefix_generate(*args: Any, **kwargs: Any) -> Any:
            self.generating += 1
            try:
                return prior(*args, **kwargs)
            finally:
                self.generating -= 1

        prefix_generate.__doc__ = prior.__doc__
        signature = signature_of(prior)
        if signature is not None:
            prefix_generate.__signature__ = signature  # type: ignore[attr-defined]
        return prefix_generate

    def _worth_a_look(self, kwargs: dict[str, Any]) -> bool:
        """May rows of this call share a prefix that nobody has named?"""
        input_ids = kwargs.get("input_ids")
        return (
            self.patch.find
            and isinstance(input_ids, Tensor)
            and input_ids.ndim == 2
            and input_ids.shape[0] > 1
            and not any(kwargs.get(name) is not None for name in (*CACHES, *CU_SEQLENS))
            and not kwargs.get("use_cache")
        )

    # ------------------------------------------------------------------------------------------------- running
    def _pack(self, module: nn.Module, kwargs: dict[str, Any], group_ids: Any, grouper: Any) -> Batch | None:
        try:
            batch = pack(module, kwargs, group_ids, grouper, self.what)
        except BaseException:
            self.grouped.calls += 1  # an answer too: the audit must not add that nothing came of the call
            raise
        if batch is not None:
            self.grouped.calls += 1
        return batch

    def _prepare(self, fused: fused_head.Seam | None, kwargs: dict[str, Any], batch: Batch) -> Prepared:
        """The inner call's arguments, and what its results have to go through."""
        packing = batch.packing
        input_ids: Tensor = kwargs["input_ids"]
        ignore_index = kwargs.get("ignore_index", IGNORE_INDEX)
        targets = scoring.targets_of(packing, kwargs, batch.real, ignore_index)
        keep = kwargs.get("logits_to_keep", 0)
        self.configs.refresh()
        call = PrefixCall(packing.layout, self.patch.backend, self.attend)
        inner = {name: value for name, value in kwargs.items() if name not in KNOWN}
        inner |= {name: packing.pack(kwargs[name]) for name in PER_TOKEN if kwargs.get(name) is not None}
        inner |= batch.media
        inner |= {
            "input_ids": packing.pack(input_ids),
            "position_ids": batch.position_ids,
            "attention_mask": no_mask(packing.layout.tokens, input_ids.device),
            "use_cache": False,
            "return_dict": True,
            CALL_KEYWORD: call,
        }
        wants_loss = kwargs.get("labels") is not None
        if (
            fused is not None
            and fused.trl is not None
            and not kwargs.get("fused_lm_head")
            and kwargs.get("temperature") is None
        ):
            fused = None  # on a model with TRL's head, a call without its flag wants logits
        if fused is None:
            if kwargs.get("fused_lm_head"):
                raise UnsupportedError(
                    f"prefix_grouper: TRL's fused head on {self.what} reads the head's weight and knows one target per token, "
                    f"and the last token of a prefix has one per response: add fused= to the scope, which scores in its terms"
                )
            if kwargs.get("temperature") is not None:
                raise BadOptionError(
                    "prefix_grouper: temperature= needs fused=, which divides the logits; here they are returned"
                )
            rows, of_cell = scoring.needed_rows(packing, keep)
            if len(rows) < packing.layout.tokens:
                inner["logits_to_keep"] = rows
            counted = scoring.every_scored_cell(packing, targets, keep, ignore_index) if wants_loss else None
            return Prepared(inner, call, packing, keep, None, rows, of_cell, counted)
        temperature = kwargs.get("temperature")
        if temperature is None:
            temperature = fused.patch.temperature
        # A loss from log-probs that are not given out is the fused head's own, which counts the rows it sees.
        inside = wants_loss and "log_probs" not in fused.patch.outputs
        scored = scoring.scored_rows(packing, targets, temperature, keep, ignore_index, share=not inside)
        inner |= {"logits_to_keep": scored.rows, "shift_labels": scored.targets[None], "temperature": scored.temperature}
        if inside:
            inner |= {"labels": scored.targets[None], "num_items_in_batch": kwargs.get("num_items_in_batch")}
        return Prepared(inner, call, packing, keep, scored)

    def _finish(self, module: nn.Module, out: Any, kwargs: dict[str, Any], prepared: Prepared) -> Any:
        """The results in the caller's layout."""
        packing, keep, scored = prepared.packing, prepared.keep, prepared.scored
        check_reached(prepared.call, self.layers, self.what)
        logger.debug("prefix_grouper: %d tokens instead of %d", packing.layout.tokens, packing.layout.repeated_tokens)
        values = {name: getattr(out, name) for name in out.__dataclass_fields__}
        if scored is not None and "label_mask" in values:
            return type(out)(**trl_fields(values, scored, kwargs))
        if scored is not None:
            if kwargs.get("labels") is not None and out.log_probs is not None:
                log_probs = scored.unpack(out.log_probs)
                values["loss"] = scoring.loss_of(log_probs, scored.of_cell >= 0, kwargs.get("num_items_in_batch"))
            for name in ("log_probs", "entropy"):
                found = values[name]
                values[name] = None if found is None else scoring.keep_columns(scored.unpack(found), keep)
        else:
            if prepared.counted is not None:
                values["loss"] = self._loss(module, out.logits, kwargs, prepared)
            values["logits"] = scoring.keep_columns(scatter(out.logits[0], prepared.of_cell, packing.shape), keep)
        if values.get("hidden_states") is not None:
            values["hidden_states"] = tuple(packing.unpack(states) for states in values["hidden_states"])
        made = type(out)(**values)
        return made.to_tuple() if kwargs.get("return_dict") is False else made

    def _loss(self, module: nn.Module, logits: Tensor, kwargs: dict[str, Any], prepared: Prepared) -> Tensor:
        """The model's own loss, of every scored cell."""
        assert prepared.counted is not None
        origin, targets = (x.to(logits.device) for x in prepared.counted)
        logits = logits[:, scoring.row_of_token(prepared.packing, prepared.rows).to(logits.device)[origin]]
        count, ignore_index = kwargs.get("num_items_in_batch"), kwargs.get("ignore_index", IGNORE_INDEX)
        if self.own_loss:
            total = torch.nn.functional.cross_entropy(logits[0].float(), targets, ignore_index=ignore_index, reduction="sum")
            own: Tensor = total / (max(1, targets.numel()) if count is None else count)
            return own
        config: Any = text_config(module)
        function: Any = module.loss_function
        loss: Tensor = function(
            logits=logits,
            labels=targets[None],
            vocab_size=config.vocab_size,
            num_items_in_batch=count,
            ignore_index=ignore_index,
            shift_labels=targets[None],
        )
        return loss


def trl_fields(values: dict[str, Any], scored: scoring.ScoredRows, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The fields of TRL's fused output in the caller's layout: [B, S-1], or [B, S] for labels that are shifted already."""
    if values.get("aux_loss") is not None:
        raise UnsupportedError(
            "prefix_grouper: this trainer asks for the auxiliary loss of a mixture of experts, which counts every token of "
            "every row, and shared prefixes are computed once: leave out `prefix_grouper`, or the auxiliary loss"
        )
    columns = slice(None) if kwargs.get("shift_labels") is not None else slice(None, -1)
    made = dict(values)
    for name, found in values.items():
        if isinstance(found, Tensor) and found.ndim == 2 and name != "label_mask":
            made[name] = scored.unpack(found.float())[:, columns].to(found.dtype)
    made["label_mask"] = (scored.of_cell >= 0).view(scored.shape)[:, columns]
    made["loss"] = scoring.loss_of(made["log_probs"], made["label_mask"], kwargs.get("num_items_in_batch"))
    return made


def fused_below(prior: Callable[..., Any]) -> fused_head.Seam | None:
    """The fused head under a forward, if there is one.

    Raises:
        UnsupportedError: sequence parallelism lies between, in a way that has no answer here.
    """
    owners = [getattr(forward, "__self__", None) for forward in forwards_below(prior)]
    fused = next((owner for owner in owners if isinstance(owner, fused_head.Seam)), None)
    sharded = next((owner for owner in owners if isinstance(owner, ulysses_seam.Seam)), None)
    if sharded is not None and sharded.patch.inputs != "full":
        raise UnsupportedError(
            f"prefix_grouper: sp=Ulysses(inputs={sharded.patch.inputs!r}) gives every rank a part of each row, and "
            f"prefixes are found in whole rows; use inputs='full'"
        )
    return fused
