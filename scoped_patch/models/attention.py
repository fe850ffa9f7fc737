"""How a decoder mixes tokens: its softmax attentions, its recurrent mixers, and transformers' registries for both.

Attention is found by what its code uses (transformers' attention interface), not by names of classes, so a new family
needs no entry here. What mixes tokens in a way that is not known is named, never guessed at.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine import MISSING
from ..engine.adhoc import signature_of
from ..engine.errors import UnsupportedError
from .modules import walk
from .sharding import SequenceShard, shard_of_config
from .spec import describe, find_decoder, text_config
from .unwrap import class_names

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"

#: calls that tell a module's code where in its input a token stands
_COUNTING = frozenset({"arange", "cumsum", "roll", "tril", "triu"})

#: kinds of layers (`config.layer_types`) whose tokens mix by softmax attention, or by a mixer that is found by structure
_KNOWN_LAYER_TYPES = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "linear_attention",
        "conv",
        "mamba",
        "hybrid",
        "hybrid_sliding",
    }
)


@dataclass(frozen=True)
class MixingLayer:
    """One layer of a decoder, and what mixes tokens in it.

    Attributes:
        layer: the module as the decoder calls it (a checkpoint wrapper included).
        index: its place in `decoder.layers`.
        attentions: softmax attentions that go through the attention interface.
        mixers: recurrences and convolutions over the sequence.
        apart: attentions that use no interface at all (remote code): the classes of a modeling file written without it.
        takes_kwargs: it hands unknown keyword arguments on.
    """

    layer: nn.Module
    index: int
    attentions: tuple[nn.Module, ...]
    mixers: tuple[nn.Module, ...]
    takes_kwargs: bool
    apart: tuple[nn.Module, ...] = ()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The layer, and all that mixes tokens in it."""
        return (self.layer, *self.attentions, *self.mixers, *self.apart)


def mixing_layers(model: nn.Module) -> tuple[nn.Module, tuple[MixingLayer, ...]]:
    """The text decoder of a model and its layers.

    Raises:
        UnsupportedError: no decoder, or a layer mixes tokens in a way that is not known; names the layer and the class.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{describe(model)} is an encoder-decoder; only decoders of one sequence are supported")
    decoder = model if isinstance(model._modules.get("layers"), nn.ModuleList) else find_decoder(model)
    for name, child in decoder._modules.items():
        if isinstance(child, nn.Embedding) and ("pos" in name or name == "wpe"):
            raise UnsupportedError(
                f"{describe(model)} adds learned positions to its embeddings ({type(decoder).__name__}.{name}); only rotary "
                f"or no positions are supported"
            )
    layers: nn.ModuleList = decoder._modules["layers"]  # type: ignore[assignment]
    kinds = getattr(text_config(model), "layer_types", None) or ()
    unknown = sorted({str(kind) for kind in kinds} - _KNOWN_LAYER_TYPES)
    if unknown:
        raise UnsupportedError(
            f"{describe(model)} has layers of kind {', '.join(unknown)}, which choose among all tokens in a way that is not "
            f"known here (known: {', '.join(sorted(_KNOWN_LAYER_TYPES))})"
        )
    return decoder, tuple(_mixing(model, layer, index) for index, layer in enumerate(layers))


def _mixing(model: nn.Module, layer: nn.Module, index: int) -> MixingLayer:
    attentions: list[nn.Module] = []
    mixers: list[nn.Module] = []
    for module in walk(layer):
        names = class_names(module)
        if any("Indexer" in name for name in names):
            raise UnsupportedError(
                f"{describe(model)}: layer {index} selects tokens with a {type(module).__name__}, which is not known here"
            )
        if uses_attention_interface(type(module)):
            attentions.append(module)
        if any(isinstance(child, nn.Conv1d) for child in module._modules.values()):
            mixers.append(module)
    both = [m for m in mixers if m in attentions]
    if both:
        raise UnsupportedError(
            f"{describe(model)}: layer {index} has a convolution over the sequence inside its attention, a "
            f"{type(both[0]).__name__}, which is not known here"
        )
    inner = layer._modules.get("_checkpoint_wrapped_module") or layer
    apart = () if attentions or mixers else _attentions_apart(inner)
    if not attentions and not mixers and not apart:
        children = ", ".join(f"{name}: {type(child).__name__}" for name, child in layer._modules.items())
        raise UnsupportedError(
            f"{describe(model)}: layer {index}, a {type(layer).__name__}, mixes tokens neither by an attention that uses "
            f"transformers' attention interface nor by a recurrence with a convolution; its children are {children}"
        )
    for module in (inner, *attentions):
        counting = _counts_tokens(module)
        if counting is not None:
            raise UnsupportedError(
                f"{describe(model)}: layer {index} has a {type(module).__name__} that looks at where tokens stand in its own "
                f"input ({counting}), which is a part of the sequence here"
            )
    signature = signature_of(type(inner).forward)
    kinds = {p.kind for p in signature.parameters.values()} if signature is not None else set()
    return MixingLayer(layer, index, tuple(attentions), tuple(mixers), inspect.Parameter.VAR_KEYWORD in kinds, apart)


#: what an attention may be called with for its whole result to be known from the whole sequence
_ATTENTION_ARGUMENTS = frozenset(
    {
        "hidden_states",
        "attention_mask",
        "position_ids",
        "position_embeddings",
        "past_key_value",
        "past_key_values",
        "cache",
        "cache_position",
        "use_cache",
        "output_attentions",
    }
)


def _attentions_apart(layer: nn.Module) -> tuple[nn.Module, ...]:
    """A layer's attention, where its modeling file knows no attention interface and it is called as attentions are."""
    for name in ("self_attn", "attention", "attn"):
        module = layer._modules.get(name)
        if module is None or not any("Attention" in one for one in class_names(module)):
            continue
        if any(_INTERFACE in names for names in _globals_of(module)):
            continue
        signature = signature_of(type(module).forward)
        parameters = list(signature.parameters.values())[1:] if signature is not None else []
        named = {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
        if "hidden_states" in named and named <= _ATTENTION_ARGUMENTS:
            return (module,)
    return ()


def uses_attention_interface(cls: type) -> bool:
    """Does a class's own code look its attention function up in transformers' attention interface?"""
    return _uses_interface(cls)


def _uses_interface(cls: Hashable) -> bool:
    return _INTERFACE in _names_in_code(cls)


@functools.cache
def _names_in_code(cls: Hashable) -> frozenset[str]:
    """The global and attribute names that the methods of a class use, torch's own base classes left out."""
    assert isinstance(cls, type)
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for value in base.__dict__.values():
            function = inspect.unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if code is not None:
                names.update(code.co_names)
    return frozenset(names)


def _counts_tokens(module: nn.Module) -> str | None:
    """The call by which a module's code looks at where in its own input a token stands, or None."""
    cls: type = type(module)
    found = sorted(_COUNTING.intersection(_names_in_code(cls)))
    if not found:
        return None
    # Llama 4 scales queries by position, where it has no rotary embedding and the option is on.
    if getattr(module, "use_rope", False) or not getattr(module, "attn_temperature_tuning", True):
        return None
    return found[0]


def _globals_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    for cls in type(module).__mro__:
        namespace = sys.modules.get(cls.__module__)
        if namespace is not None:
            yield namespace.__dict__


def attention_registry(module: nn.Module) -> Any:
    """The attention interface that a module's code looks into (a modeling file may have one of its own).

    Raises:
        UnsupportedError: there is none.
    """
    for names in _globals_of(module):
        if _INTERFACE in names:
            return names[_INTERFACE]
    raise UnsupportedError(f"{type(module).__module__} has no {_INTERFACE}, which its {type(module).__name__} should use")


def attention_function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function of that name, as the module's own code would find it."""
    eager = next((n["eager_attention_forward"] for n in _globals_of(module) if "eager_attention_forward" in n), None)
    found: Any = attention_registry(module).get_interface(implementation, eager)
    if found is None:
        raise UnsupportedError(f"{type(module).__module__} has no eager_attention_forward for its {type(module).__name__}")
    return found  # type: ignore[no-any-return]


def local_mapping(registry: Any) -> MutableMapping[str, Any]:
    """The registry's own overrides: what is put there exactly is taken away exactly."""
    return registry._local_mapping  # type: ignore[no-any-return]


def mask_registry() -> Any:
    """transformers' mask interface."""
    from transformers import masking_utils

    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS


def mask_of_whole_sequence(name: str, prior: Any) -> Callable[..., Any]:
    """The mask function of an implementation, told the length of the whole sequence where a decoder runs on a part.

    The decoder builds its mask from whole position ids and a whole padding mask, but takes the lengths from its own
    hidden states. Calls of any other model go to the prior function untouched.
    """

    def whole_sequence_mask(*args: Any, **kwargs: Any) -> Any:
        # Looked up at the call: somebody may register another one while this is on.
        function = prior if prior is not MISSING else mask_registry()._global_mapping[name]
        shard = shard_of_config(kwargs.get("config"))
        if shard is not None and shard.ranks > 1:
            _say_whole_length(shard, kwargs)
        return function(*args, **kwargs)

    return whole_sequence_mask


def _say_whole_length(shard: SequenceShard, kwargs: dict[str, Any]) -> None:
    positions = kwargs.get("cache_position")
    if positions is None:
        if kwargs.get("q_length") == shard.size:
            kwargs["q_length"] = kwargs["kv_length"] = shard.length
        return
    # Before transformers 5.4 a mask function is given where the queries stand [S / ranks] and not how many there are.
    if len(positions) == shard.size:
        kwargs["cache_position"] = positions = torch.arange(shard.length, device=positions.device)
    if len(positions) == shard.length:
        kwargs["kv_length"] = shard.length


class ModuleView:
    """An attention module as an attention function must see it: its own config, the head counts of this rank.

    Everything else is read from the module itself.
    """

    def __init__(self, module: nn.Module, **overrides: Any) -> None:
        self.__dict__["_viewed_module"] = module
        self.__dict__.update(overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed_module"], name)


def config_with_implementation(config: Any, name: str) -> Any:
    """A copy of a config that names another attention implementation."""
    view = object.__new__(type(config))
    refresh_config(view, config, name)
    return view


def refresh_config(view: Any, config: Any, name: str) -> None:
    """Bring such a copy up to date: somebody may set an option between two calls."""
    view.__dict__.update(config.__dict__)
    view.__dict__["_attn_implementation_internal"] = name


def bind_positional(function: types.FunctionType | Any) -> tuple[str, ...]:
    """The names of a forward's positional parameters, `self` left out."""
    signature = signature_of(function)
    parameters = list(signature.parameters.values())[1:] if signature is not None else []
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
