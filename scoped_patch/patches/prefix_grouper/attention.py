"""Leading a decoder's softmax attention to the shared-prefix operation.

Each attention module of one model gets a copy of its config that names an attention function of ours; the decoder's own
config is untouched, so everything else the model decides by that name stays as it is. Calls that belong to no grouped
forward go to the function that the module's own config names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...engine.errors import SeamNotReachedError, UnsupportedError
from ...models.attention import MixingLayer, ModuleView, attention_function, config_with_implementation, refresh_config
from ...models.spec import describe, text_config
from ...ops.prefix_attention import PrefixLayout, prefix_attention

F = TypeVar("F", bound=Callable[..., Any])

#: our entry in transformers' table of attention functions, there while a scope is live
ENTRY_NAME = "scoped_patch_prefix"
#: the keyword argument in which a grouped forward reaches its attention, in the first run and in recomputation
CALL_KEYWORD = "scoped_prefix_call"
_PRIOR = "_scoped_prefix_prior_config"


@dataclass(eq=False)
class PrefixCall:
    """One grouped forward, as its attention sees it.

    Attributes:
        layout: the packed row.
        backend: of the operation.
        attend: `attend` of this file, kept out of compiled graphs.
        reached: ids of the attention modules that came by.
    """

    layout: PrefixLayout
    backend: str
    attend: Callable[..., tuple[Tensor, None]]
    reached: set[int] = field(default_factory=set)


def attention_problem(model: nn.Module, layers: Iterable[MixingLayer]) -> str | None:
    """Why not every layer's mixing of tokens can be led to the operation, or None."""
    what = describe(model)
    config = text_config(model)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return f"{what} has layers that attend within chunks, whose borders a shared prefix does not keep"
    if getattr(config, "use_bidirectional_attention", None) or "token_type_ids" in _parameters(type(model)):
        return f"{what} lets image tokens see ahead, which a causal shared prefix does not have"
    for layer in layers:
        if layer.mixers:
            return (
                f"layer {layer.index} of {what} mixes tokens with a {type(layer.mixers[0]).__name__}, whose state runs from "
                f"one response into the next; only softmax attention can share a prefix"
            )
    return None


def _parameters(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]


class RoutedConfigs:
    """Copies of configs that name our attention function: one per config, the same one at every entry of a plan."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, Any]] = []

    def __call__(self, prior: Any) -> Any:
        for config, routed in self._known:
            if config is prior:
                return routed
        routed = config_with_implementation(prior, ENTRY_NAME)
        routed.__dict__[_PRIOR] = prior
        self._known.append((prior, routed))
        return routed

    def refresh(self) -> None:
        """Somebody may have set an option of a config since."""
        for config, routed in self._known:
            refresh_config(routed, config, ENTRY_NAME)
            routed.__dict__[_PRIOR] = config


def attention_entry(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Our entry of the table: query [1, H, N, D] -> ([1, N, H, Dv], None)."""
    call: PrefixCall | None = kwargs.pop(CALL_KEYWORD, None)
    if call is None:
        config: Any = module.config.__dict__[_PRIOR]
        function = attention_function(module, config._attn_implementation)
        made: tuple[Tensor, Tensor | None] = function(
            ModuleView(module, config=config), query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return made
    return call.attend(call, module, query, key, value, attention_mask, scaling, dropout, kwargs)


def attend(
    call: PrefixCall,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """One layer's attention of a grouped call."""
    if dropout:
        raise UnsupportedError(
            f"prefix_grouper: {type(module).__name__} drops attention out (p={dropout}), which would be one draw for all rows "
            f"of a group; set attention_dropout to 0 or call model.eval()"
        )
    if kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        raise UnsupportedError(
            f"prefix_grouper: {type(module).__name__} asks for attention that is not plainly causal (a position bias, or "
            f"is_causal=False), which a shared prefix does not have"
        )
    # Sequence parallelism shows us a view of the module.
    if not (
        isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool and attention_mask.shape[:3] == (0, 1, 1)
    ):
        raise UnsupportedError(
            f"prefix_grouper: {type(module).__name__} makes a mask of its own for its attention, which would be lost in a "
            f"packed row; this model cannot share prefixes"
        )
    call.reached.add(id(module.__dict__.get("_viewed_module", module)))
    sinks = kwargs.get("s_aux")
    out = prefix_attention(
        query,
        key,
        value,
        call.layout,
        scale=scaling,
        window=_window(module, kwargs),
        softcap=kwargs.get("softcap"),
        sinks=sinks if sinks is not None else _sinks(module),
        backend=call.backend,  # type: ignore[arg-type]
    )
    return out.transpose(1, 2).contiguous(), None


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Some families hand the window to their attention, some have it in the mask only, which a grouped call has not."""
    given: int | None = kwargs.get("sliding_window")
    if given is not None:
        return given
    config: Any = module.config
    window: int | None = getattr(config, "sliding_window", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None:
        return window if kinds[index] == "sliding_attention" else None
    return None if "sliding_window" in kwargs else window or None


def _sinks(module: nn.Module) -> Tensor | None:
    """Some eager functions read the sinks from the module instead of their arguments."""
    sinks = getattr(module, "sinks", None)
    return sinks if isinstance(sinks, Tensor) else None


def opaque(function: F) -> F:
    """Keep a compiler out of a function. (Where none is loaded there is nothing to keep out, and loading it takes seconds.)"""
    dynamo: Any = sys.modules.get("torch._dynamo")
    kept_out: F = function if dynamo is None else dynamo.disable(function)
    return kept_out


def check_reached(call: PrefixCall, layers: Iterable[MixingLayer], what: str) -> None:
    """Every attention module must have come by, or its layer ran on something else.

    Raises:
        SeamNotReachedError: one did not.
    """
    for layer in layers:
        missed = [module for module in layer.attentions if id(module) not in call.reached]
        if missed:
            raise SeamNotReachedError(
                f"prefix_grouper: layer {layer.index} of {what} ran and its {type(missed[0]).__name__} never came past the "
                f"shared-prefix attention: something has replaced its forward, or drops keyword arguments"
            )


def no_mask(tokens: int, device: torch.device) -> Tensor:
    """A mask that mask builders pass on as it is (4-D), and that attention outside our entry fails on: it has no rows.

    Not a float: casts of inputs make new tensors of those.
    """
    return torch.empty(0, 1, 1, tokens, dtype=torch.bool, device=device)
