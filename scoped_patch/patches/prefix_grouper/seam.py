"""The model's forward in a scope: pack, run once per shared prefix, give back in the caller's layout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...engine import Counter
from ...engine.adhoc import signature_of
from ...engine.errors import BadOptionError, UnsupportedError
from ...models.attention import MixingLayer, bind_positional
from ...models.modules import forwards_below, walk
from ...models.packing import CU_SEQLENS, IGNORE_INDEX
from ...models.spec import describe, text_config
from .. import fused_head
from . import formats, grouping, positions, scoring
from .attention import CALL_KEYWORD, PrefixCall, RoutedConfigs, check_reached, no_mask
from .images import KINDS, cut_at_media, find_media
from .packing import Packing, RealTokens, pack_rows, scatter

if TYPE_CHECKING:
    from .patch import PrefixGrouper

logger = logging.getLogger("scoped_patch")

#: tensors of the call that have a value per token and go with the tokens
_PER_TOKEN = ("mm_token_type_ids",)
#: what is taken care of by name; any other tensor argument is refused
_KNOWN = frozenset(
    (
        "input_ids",
        "attention_mask",
        "position_ids",
        "labels",
        "shift_labels",
        "num_items_in_batch",
        "second_per_grid_ts",
        "logits_to_keep",
        *_PER_TOKEN,
        *(name for kind in KINDS for name in kind[:2]),
    )
)
_CACHES = ("cache", "past_key_values")


@dataclass(frozen=True, eq=False)
class Batch:
    """What is known of a call when it is packed."""

    packing: Packing
    real: Tensor
    position_ids: Tensor
    media: dict[str, Tensor]


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

    def model_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.generating:
            return prior(*args, **kwargs)
        if len(args) > len(self.positional):
            raise TypeError(f"{self.what} takes at most {len(self.positional)} positional arguments, got {len(args)}")
        kwargs.update(zip(self.positional, args, strict=False))
        group_ids, grouper = kwargs.pop("group_ids", None), kwargs.pop("prefix_grouper", None)
        if group_ids is None and grouper is None and not self._worth_a_look(kwargs):
            return prior(**kwargs)
        batch = self._pack(module, kwargs, group_ids, grouper)
        if batch is None:
            return prior(**kwargs)
        self.grouped.calls += 1
        return self._run(prior, module, kwargs, batch)

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

    # ------------------------------------------------------------------------------------------------- packing
    def _worth_a_look(self, kwargs: dict[str, Any]) -> bool:
        """May rows of this call share a prefix that nobody has named?"""
        input_ids = kwargs.get("input_ids")
        return (
            self.patch.find
            and isinstance(input_ids, Tensor)
            and input_ids.ndim == 2
            and input_ids.shape[0] > 1
            and not any(kwargs.get(name) is not None for name in (*_CACHES, *CU_SEQLENS))
            and not kwargs.get("use_cache")
        )

    def _pack(self, module: nn.Module, kwargs: dict[str, Any], group_ids: Any, grouper: Any) -> Batch | None:
        """The batch packed; None when nobody named groups and no two rows share a token."""
        self._refuse(module, kwargs)
        input_ids: Tensor = kwargs["input_ids"]
        cu_seqlens = next((kwargs.pop(name) for name in CU_SEQLENS if kwargs.get(name) is not None), None)
        if grouper is not None and (group_ids is not None or cu_seqlens is not None):
            raise BadOptionError("prefix_grouper: a call has either prefix_grouper= or group_ids=, not both")
        shape = (input_ids.shape[0], input_ids.shape[1])
        position_ids = kwargs.get("position_ids")
        if position_ids is not None:
            position_ids = positions.check_positions(position_ids, shape)
        if grouper is None and cu_seqlens is None:
            return self._pack_rows(module, kwargs, group_ids, position_ids)
        packing = (
            formats.from_object(input_ids, grouper)
            if grouper is not None
            else formats.from_segments(input_ids, cu_seqlens, group_ids)
        )
        real = (packing.source >= 0).view(shape)
        media = find_media(module, kwargs, real)
        if media and position_ids is None:
            raise BadOptionError(
                "prefix_grouper: packed rows with images need position_ids, as the model makes them for the rows apart"
            )
        chosen = {name: value for one in media for name, value in one.chosen(packing.cells).items()}
        return Batch(packing, real, positions.packed_positions(packing, position_ids, None, None), chosen)

    def _pack_rows(
        self, module: nn.Module, kwargs: dict[str, Any], group_ids: Any, position_ids: Tensor | None
    ) -> Batch | None:
        input_ids: Tensor = kwargs["input_ids"]
        tokens = RealTokens.of(input_ids, kwargs.get("attention_mask"))
        media = find_media(module, kwargs, tokens.real)
        channels = [input_ids, *(one.keys() for one in media)]
        if position_ids is None and media:
            position_ids = positions.own_positions(module, kwargs)
        if position_ids is None and tokens.holes:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        relative = None
        if position_ids is not None:
            relative = positions.relative_positions(position_ids, tokens)
            # Tokens at different positions are not the same token.
            channels += [relative] if relative.ndim == 2 else list(relative)
        keys = _one_key(channels, tokens.real)
        if group_ids is None:
            groups = grouping.find_groups(keys, tokens)
        else:
            groups = grouping.read_group_ids(group_ids, input_ids.shape[0])
        prefixes = grouping.shared_lengths(keys, tokens, groups)
        if group_ids is None and not any(prefixes):
            return None
        if media:
            first = tokens.first.tolist()
            prefixes = [cut_at_media(p, media, g[0], first[g[0]]) for p, g in zip(prefixes, groups, strict=True)]
        packing = pack_rows(tokens, groups, prefixes)
        chosen = {name: value for one in media for name, value in one.chosen(packing.cells).items()}
        return Batch(packing, tokens.real, positions.packed_positions(packing, position_ids, relative, tokens), chosen)

    def _refuse(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        if not isinstance(kwargs.get("input_ids"), Tensor) or kwargs["input_ids"].ndim != 2:
            raise BadOptionError("prefix_grouper: rows are compared by their tokens, so input_ids [B, S] are needed")
        for name in _CACHES:
            if kwargs.get(name) is not None:
                raise BadOptionError(f"prefix_grouper: a grouped call cannot have a {name}")
        if kwargs.get("use_cache"):
            raise BadOptionError("prefix_grouper: a grouped call cannot fill a cache: leave out use_cache=True")
        config = getattr(module, "config", None)
        for name, why in (
            ("output_attentions", "no attention weights exist"),
            (
                "output_router_logits",
                "the auxiliary loss counts every token of the repeated rows, and here each prefix token once",
            ),
        ):
            given = kwargs.get(name)
            if given if given is not None else _from_config(config, name):
                raise UnsupportedError(f"prefix_grouper: {name}=True cannot be had for grouped rows of {self.what}: {why}")
        for name, value in kwargs.items():
            if (
                isinstance(value, Tensor)
                and value.ndim
                and name not in _KNOWN
                and name != "temperature"
                and name not in CU_SEQLENS
            ):
                raise UnsupportedError(
                    f"prefix_grouper: {self.what} was called with a tensor {name} {list(value.shape)}, and how it belongs to "
                    f"the tokens is not known here"
                )
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise BadOptionError(
                "prefix_grouper: attention_mask must be [B, S]: which tokens see which is what this patch makes"
            )
        if module.training:
            active = next(
                (m for m in walk(module) if isinstance(m, nn.modules.dropout._DropoutNd) and m.p and m.training), None
            )
            if active is not None:
                raise UnsupportedError(
                    f"prefix_grouper: {self.what} has active dropout ({active}), which would be one draw for all rows of a "
                    f"group; set it to 0 or call model.eval()"
                )

    # ------------------------------------------------------------------------------------------------- running
    def _run(self, prior: Callable[..., Any], module: nn.Module, kwargs: dict[str, Any], batch: Batch) -> Any:
        packing = batch.packing
        input_ids: Tensor = kwargs["input_ids"]
        as_tuple = kwargs.pop("return_dict", None) is False
        keep = kwargs.pop("logits_to_keep", 0)
        ignore_index = kwargs.get("ignore_index", IGNORE_INDEX)
        targets = scoring.targets_of(packing, kwargs, batch.real, ignore_index)
        labels = kwargs.pop("labels", None)
        kwargs.pop("shift_labels", None)
        fused = fused_below(prior)
        self.configs.refresh()
        call = PrefixCall(packing.layout, self.patch.backend)
        inner = {name: value for name, value in kwargs.items() if name not in _KNOWN and name != "temperature"}
        inner |= {name: packing.pack(kwargs[name]) for name in _PER_TOKEN if kwargs.get(name) is not None}
        inner |= batch.media
        inner |= {
            "input_ids": packing.pack(input_ids),
            "position_ids": batch.position_ids,
            "attention_mask": no_mask(packing.layout.tokens, input_ids.device),
            "use_cache": False,
            "return_dict": True,
            CALL_KEYWORD: call,
        }
        if fused is None:
            out, changed = self._run_plain(prior, module, kwargs, inner, packing, keep, labels, targets)
        else:
            out, changed = self._run_fused(prior, fused, kwargs, inner, packing, keep, labels, targets)
        check_reached(call, self.layers, self.what)
        logger.debug("prefix_grouper: %d tokens instead of %d", packing.layout.tokens, packing.layout.repeated_tokens)
        if getattr(out, "hidden_states", None) is not None:
            changed["hidden_states"] = tuple(packing.unpack(states) for states in out.hidden_states)
        values = {name: getattr(out, name) for name in out.__dataclass_fields__} | changed
        made = type(out)(**values)
        return made.to_tuple() if as_tuple else made

    def _run_fused(
        self,
        prior: Callable[..., Any],
        fused: fused_head.Seam,
        kwargs: dict[str, Any],
        inner: dict[str, Any],
        packing: Packing,
        keep: Any,
        labels: Any,
        targets: Tensor,
    ) -> tuple[Any, dict[str, Any]]:
        temperature = kwargs.get("temperature")
        if temperature is None:
            temperature = fused.patch.temperature
        scored = scoring.scored_rows(packing, targets, temperature, keep, kwargs.get("ignore_index", IGNORE_INDEX))
        per_row = isinstance(scored.temperature, Tensor) and scored.temperature.ndim == 1
        inner |= {
            "logits_to_keep": scored.rows,
            "shift_labels": scored.targets[None],
            "temperature": scored.temperature[None] if per_row else scored.temperature,  # type: ignore[index]
        }
        out = prior(**inner)
        changed: dict[str, Any] = {}
        if labels is not None and out.log_probs is not None:
            changed["loss"] = scoring.loss_of(
                scored.unpack(out.log_probs), scored.of_cell >= 0, kwargs.get("num_items_in_batch")
            )
        for name in ("log_probs", "entropy"):
            values = getattr(out, name)
            changed[name] = None if values is None else scoring.keep_columns(scored.unpack(values), keep)
        return out, changed

    def _run_plain(
        self,
        prior: Callable[..., Any],
        module: nn.Module,
        kwargs: dict[str, Any],
        inner: dict[str, Any],
        packing: Packing,
        keep: Any,
        labels: Any,
        targets: Tensor,
    ) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("temperature") is not None:
            raise BadOptionError("prefix_grouper: temperature= needs fused=, which divides the logits; here they are returned")
        rows, of_cell = scoring.needed_rows(packing, keep)
        if len(rows) < packing.layout.tokens:
            inner["logits_to_keep"] = rows
        out = prior(**inner)
        changed: dict[str, Any] = {}
        if labels is not None:
            ignore_index = kwargs.get("ignore_index", IGNORE_INDEX)
            origin, wanted = scoring.every_scored_cell(packing, targets, keep, ignore_index)
            logits = out.logits[:, scoring.row_of_token(packing, rows)[origin].to(out.logits.device)]
            changed["loss"] = self._loss(module, logits, wanted[None].to(logits.device), kwargs, ignore_index)
        changed["logits"] = scoring.keep_columns(scatter(out.logits[0], of_cell, packing.shape), keep)
        return out, changed

    def _loss(self, module: nn.Module, logits: Tensor, targets: Tensor, kwargs: dict[str, Any], ignore_index: int) -> Tensor:
        """The model's own loss, of the rows that are scored."""
        count = kwargs.get("num_items_in_batch")
        if self.own_loss:
            total = torch.nn.functional.cross_entropy(logits[0].float(), targets[0], ignore_index=ignore_index, reduction="sum")
            own: Tensor = total / (max(1, targets.numel()) if count is None else count)
            return own
        config: Any = text_config(module)
        function: Any = module.loss_function
        loss: Tensor = function(
            logits=logits,
            labels=targets,
            vocab_size=config.vocab_size,
            num_items_in_batch=count,
            ignore_index=ignore_index,
            shift_labels=targets,
        )
        return loss


def fused_below(prior: Callable[..., Any]) -> fused_head.Seam | None:
    """The fused head under a forward, if there is one."""
    owners = (getattr(forward, "__self__", None) for forward in forwards_below(prior))
    return next((owner for owner in owners if isinstance(owner, fused_head.Seam)), None)


def _one_key(channels: list[Tensor], real: Tensor) -> Tensor:
    """int64 [B, S], equal where all channels are equal."""
    if len(channels) == 1:
        return channels[0]
    stacked = torch.stack([one.to(real.device).masked_fill(~real, 0) for one in channels], -1)
    numbers: Tensor = torch.unique(stacked.flatten(0, 1), dim=0, return_inverse=True)[1]
    return numbers.view(real.shape)


def _from_config(config: Any, name: str) -> Any:
    """A default that transformers reads from the model's config or its text part's."""
    parts = (config, config.get_text_config() if hasattr(config, "get_text_config") else None)
    return any(getattr(part, name, None) for part in parts)
