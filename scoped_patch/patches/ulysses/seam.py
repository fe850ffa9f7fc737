"""The functions that one plan puts into a model: around its call, its decoder, its layers, its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...engine import Counter
from ...engine.adhoc import signature_of
from ...engine.errors import BadOptionError, SeamNotReachedError
from ...models.attention import MixingLayer, bind_positional, config_with_implementation, refresh_config
from ...models.packing import CU_SEQLENS
from ...models.placement import Placement
from ...models.sharding import SequenceShard, active_shard, announce, resumed_shard, withdraw
from ...models.spec import describe, forward_names, is_multimodal
from ...ops.sequence_parallel import begin_step, report_failure
from .attention import SHARD, attend, attend_whole, mix, no_shard
from .batch import check_whole, cut_cache_position, cut_rotary, cut_targets, cut_visual_rows, learn_of_others, sequence_length
from .calls import CACHES, check_cut_call, refuse_unspreadable
from .groups import existing, resolve
from .outputs import finish, gather_outputs

_PRIOR = "_scoped_prior_config"

#: arguments of decoders that have one entry per token in dimension 1
_DECODER_PER_TOKEN = ("input_ids", "inputs_embeds", "per_layer_inputs", "visual_pos_masks")


class Seam:
    """What the edits of one plan share. `shards` are the decoder calls that run now, innermost last."""

    def __init__(self, patch: Any, model: nn.Module, decoder: nn.Module, layers: tuple[MixingLayer, ...]) -> None:
        self.patch = patch
        self.model = model
        self.decoder = decoder
        self.what = describe(model)
        self.shards: list[SequenceShard] = []
        self.pass_through = 0
        self.attention_counter = Counter()
        self.placement = Placement(patch.name, model, (decoder, *(part for layer in layers for part in layer.modules)))
        self.views: list[tuple[Any, Any, str]] = []
        self.model_positional = bind_positional(type(model).forward)
        self.decoder_positional = bind_positional(type(decoder).forward)
        self.own_loss = "loss_function" not in forward_names(model)
        #: the decoder makes masks by itself, from the length of its own input: it sees the whole sequence, its layers a part
        self.cuts_at_layers = any(layer.apart for layer in layers)
        self.whole_inputs = patch.inputs == "full" or is_multimodal(model)

    # ------------------------------------------------------------------------------------------------- the model
    def model_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.pass_through:
            return prior(*args, **kwargs)
        kwargs = self._named(self.model_positional, args, kwargs)
        refuse_unspreadable(self.decoder, kwargs)
        group = self._group()
        with _Step(group):
            self.placement.check()
            shard = self._shard(group, kwargs)
            as_tuple = kwargs.get("labels") is not None and not shard.gathers_outputs and self._wants_tuple(kwargs)
            if as_tuple:
                kwargs["return_dict"] = True  # the loss is made global under its name
            announce(shard)
            try:
                out = prior(**kwargs)
            finally:
                withdraw(shard)
            out = finish(out, shard, kwargs, self.patch.grad_reduction)
            return out.to_tuple() if as_tuple else out

    def _wants_tuple(self, kwargs: dict[str, Any]) -> bool:
        wanted = kwargs.get("return_dict")
        return (getattr(getattr(self.model, "config", None), "return_dict", True) if wanted is None else wanted) is False

    def _group(self) -> dist.ProcessGroup | None:
        if torch.compiler.is_dynamo_compiling():
            # A graph can neither make a group nor note it. One that was made before is there.
            return self.patch.in_use[0] if self.patch.in_use else existing(self.patch.group)
        group = resolve(self.patch.group)
        self.patch.in_use[:] = [group] if group is not None else []
        return group

    def _shard(self, group: dist.ProcessGroup | None, kwargs: dict[str, Any]) -> SequenceShard:
        """How this call is spread. In a cut layout, `kwargs` come to say what the other ranks have."""
        length = sequence_length(self.model, kwargs)
        ranks = 1 if group is None else dist.get_world_size(group)
        gathers = self.patch.inputs == "full"
        if self.whole_inputs:
            check_whole({k: v for k, v in kwargs.items() if gathers or k != "shift_labels"}, length, ranks)
            shard = SequenceShard(self.model, group, length, gathers_outputs=gathers)
            if not gathers:
                check_cut_call(self.model, self.what, self.own_loss, kwargs)
                cut_targets(shard, kwargs)
            return shard
        check_cut_call(self.model, self.what, self.own_loss, kwargs)
        shard = SequenceShard(self.model, group, length * ranks, cuts_inputs=False, gathers_outputs=False)
        learn_of_others(shard, kwargs)
        return shard

    def _named(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(names):
            raise TypeError(f"{self.what} takes at most {len(names)} positional arguments, got {len(args)}")
        return {**kwargs, **dict(zip(names, args, strict=False))}

    # ------------------------------------------------------------------------------------------------- the decoder
    def decoder_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.pass_through:
            return prior(*args, **kwargs)
        kwargs = self._named(self.decoder_positional, args, kwargs)
        refuse_unspreadable(self.decoder, {**kwargs, "use_cache": None} if module is not self.model else kwargs)
        shard = active_shard(self.model)
        if shard is not None:
            return self._run_decoder(prior, module, shard, kwargs)
        group = self._group()  # the decoder was called on its own
        with _Step(group):
            self.placement.check()
            shard = self._shard(group, kwargs)
            announce(shard)
            try:
                out = self._run_decoder(prior, module, shard, kwargs)
            finally:
                withdraw(shard)
            return finish(out, shard, kwargs, self.patch.grad_reduction)

    def _run_decoder(self, prior: Callable[..., Any], module: nn.Module, shard: SequenceShard, kwargs: dict[str, Any]) -> Any:
        self._prepare(module, shard, kwargs)
        as_tuple = kwargs.get("return_dict") is False
        kwargs["return_dict"] = True
        for view, config, name in self.views:
            if not torch.compiler.is_dynamo_compiling():
                refresh_config(view, config, name)
        shard.config = getattr(module, "config", None)
        self.shards.append(shard)
        try:
            out = prior(**kwargs)
        finally:
            self.shards.pop()
            shard.config = None
        gather_outputs(out, shard)
        return out.to_tuple() if as_tuple else out

    def _prepare(self, module: nn.Module, shard: SequenceShard, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("input_ids")
        first: Tensor = given if given is not None else kwargs["inputs_embeds"]
        length = first.shape[1]
        if not shard.cuts_inputs:
            if length != shard.size:
                raise BadOptionError(f"ulysses: the decoder was given {length} tokens, and this rank's part has {shard.size}")
        elif length != shard.length:
            shard.set_length(length)
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = shard.position_ids
        if positions is None:
            positions = torch.arange(shard.length, device=first.device)[None]
        shard.position_ids = kwargs["position_ids"] = positions
        shard.attention_mask = kwargs.get("attention_mask")
        shard.cu_seqlens = next((kwargs[n] for n in CU_SEQLENS if isinstance(kwargs.get(n), Tensor)), None)
        if shard.cuts_inputs and shard.group is not None and not self.cuts_at_layers:
            cut_visual_rows(shard, kwargs)
            for name in _DECODER_PER_TOKEN:
                if isinstance(kwargs.get(name), Tensor):
                    kwargs[name] = shard.cut(kwargs[name], 1, 0 if name == "visual_pos_masks" else None)
        kwargs["use_cache"] = False
        for name in CACHES:
            kwargs.pop(name, None)
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = 0  # the model cuts what comes out; it would cut this rank's part here

    # ------------------------------------------------------------------------------------------------- the layers
    def _present(self) -> SequenceShard | None:
        """The decoder call that runs, or the one of which a layer is being recomputed."""
        if self.shards:
            return self.shards[-1]
        return None if torch.compiler.is_dynamo_compiling() else resumed_shard(self.model)

    def layer_forward(self, layer: MixingLayer) -> Callable[..., Any]:
        def sharded_layer(prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            shard = self._present()
            if shard is None:
                return prior(*args, **kwargs)
            if self.cuts_at_layers:
                args, kwargs = _cut_hidden_states(shard, layer.index, args, kwargs)
            elif shard.group is not None:
                for name, value in kwargs.items():
                    if name.startswith("position_embeddings"):
                        kwargs[name] = cut_rotary(shard, value)
                if isinstance(kwargs.get("cache_position"), Tensor):
                    kwargs["cache_position"] = cut_cache_position(shard, kwargs["cache_position"])
                positions = kwargs.get("position_ids")
                if isinstance(positions, Tensor) and positions.shape[-1] == shard.length:
                    kwargs["position_ids"] = shard.cut_once(positions, positions.ndim - 1)
            if layer.takes_kwargs:
                kwargs[SHARD] = shard
            before = shard.attended
            out = prior(*args, **kwargs)
            attentions = layer.attentions or layer.apart
            if attentions and shard.attended == before:
                raise SeamNotReachedError(
                    f"ulysses: layer {layer.index} of {self.what} ran and its {type(attentions[0]).__name__} never "
                    f"looked its attention function up: the tokens of other ranks were not seen"
                )
            return out

        return sharded_layer

    def apart_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shard = kwargs.pop(SHARD, None) or self._present()
        if shard is None:
            if self.pass_through:
                return prior(*args, **kwargs)
            raise no_shard(module)
        return attend_whole(prior, shard, args, kwargs)

    def mixer_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shard = kwargs.pop(SHARD, None)
        if shard is None:
            shard = self._present()
        if shard is None:
            if self.pass_through:
                return prior(*args, **kwargs)
            raise no_shard(module)
        return mix(prior, shard, module, args, kwargs)

    def attention_view(self, name: str) -> Callable[[Any], Any]:
        """From an attention's config to the one that names our attention function; layers that share one share the other."""
        made: list[tuple[Any, Any]] = []

        def make(config: Any) -> Any:
            for known, view in made:
                if known is config:
                    return view
            view = config_with_implementation(config, name)
            view.__dict__[_PRIOR] = config
            made.append((config, view))
            self.views.append((view, config, name))
            return view

        return make

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """The entry of the attention interface under this plan's name."""
        shard = kwargs.pop(SHARD, None)
        if shard is None:
            shard = self._present()
        config = module.config.__dict__[_PRIOR]
        if shard is None:
            if not self.pass_through:
                raise no_shard(module)
            shard = SequenceShard(self.model, None, query.shape[2])
        if not torch.compiler.is_dynamo_compiling():
            self.attention_counter.calls += 1
        shard.attended += 1
        return attend(shard, module, config, query, key, value, attention_mask, kwargs)

    # ------------------------------------------------------------------------------------------------- loss, generate
    def loss_function(self, own: Any) -> Callable[..., Any]:
        """The model's own, told this rank's share: up to transformers 5.10 some vision models hand on their labels only."""

        @functools.wraps(own)
        def spread_loss_function(*args: Any, **kwargs: Any) -> Any:
            shard = active_shard(self.model)
            if shard is not None:
                kwargs = {**kwargs, **shard.loss_arguments}
            return own(*args, **kwargs)

        return spread_loss_function

    def generate(self, prior: Callable[..., Any]) -> Callable[..., Any]:
        def unsharded_generate(*args: Any, **kwargs: Any) -> Any:
            self.pass_through += 1
            try:
                return prior(*args, **kwargs)
            finally:
                self.pass_through -= 1

        unsharded_generate.__doc__ = prior.__doc__
        signature = signature_of(prior)
        if signature is not None:
            unsharded_generate.__signature__ = signature  # type: ignore[attr-defined]
        return unsharded_generate


def _cut_hidden_states(
    shard: SequenceShard, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first layer is given the whole sequence, and computes this rank's tokens of it."""
    if index == 0 and shard.cuts_inputs and shard.group is not None:
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = shard.cut(kwargs["hidden_states"], 1)
        else:
            args = (shard.cut(args[0], 1), *args[1:])
    return args, kwargs


class _Step:
    """One call on all ranks of a group; an exception that leaves it is told to the others."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = None if torch.compiler.is_dynamo_compiling() else group

    def __enter__(self) -> None:
        if self.group is not None:
            begin_step(self.group)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.group is not None and error is not None:
            report_failure(self.group, error)
