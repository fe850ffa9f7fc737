"""The feed-forward blocks of a decoder, and of a vision tower: where they are. Found by names of children, not of classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..engine.errors import UnsupportedError
from .modules import module_paths, walk
from .roles import Roles, find_roles
from .spec import decoder_layers, describe, find_decoder, head_leaves
from .unwrap import unwrap
from .vision import find_vision

#: what families call the feed-forward children of a decoder layer
FEED_FORWARD_NAMES = (
    "mlp",
    "feed_forward",
    "block_sparse_moe",
    "ffn",
    "moe",
    "shared_mlp",
    "residual_mlp",
    "mlp_block",
    "experts",
)

Kind = Literal["dense", "experts", "whole"]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """One place where a decoder computes token by token.

    Attributes:
        module: what is called.
        path: its dotted path, for people.
        kind: `"dense"`: as `roles` says. `"experts"`: the experts of a block whose router stands apart, called with hidden
            states, chosen experts and their weights. `"whole"`: of unknown inside.
        roles: for `"dense"`.
    """

    module: nn.Module
    path: str
    kind: Kind
    roles: Roles | None = None


@dataclass(frozen=True)
class Found:
    """What `find_feed_forwards` saw.

    Attributes:
        places: what can be computed token by token.
        skipped: blocks that cannot, with the reason of each.
    """

    places: tuple[FeedForward, ...]
    skipped: tuple[str, ...]


def layer_blocks(model: nn.Module, vision: bool = False) -> Iterator[nn.Module]:
    """The feed-forward children of all decoder layers, as they are registered (wrappers included). Cheap.

    With `vision`, those of all lists of layers in the vision tower follow.
    """
    yield from _blocks_of(decoder_layers(find_decoder(model)))
    if vision:
        for module in walk(find_vision(model).tower):
            if isinstance(module, nn.ModuleList):
                yield from _blocks_of(module)


def _blocks_of(layers: nn.ModuleList) -> Iterator[nn.Module]:
    for layer in layers:
        found = [child for name in FEED_FORWARD_NAMES if (child := layer._modules.get(name)) is not None]
        if not found:
            inside = unwrap(layer).model._modules
            found = [child for name in FEED_FORWARD_NAMES if (child := inside.get(name)) is not None]
        yield from found


def find_feed_forwards(model: nn.Module, vision: bool = False) -> Found:
    """All feed-forward places of a model's text decoder, and with `vision` of its vision tower.

    Raises:
        UnsupportedError: no text decoder (or tower), or not one layer of it with a child of a known name.
    """
    decoder = find_decoder(model)
    paths = module_paths(model)
    recorded = _recorded_classes(decoder)
    places: list[FeedForward] = []
    skipped: list[str] = []
    seen: set[int] = set()
    text_blocks = list(layer_blocks(model))
    blocks = list(layer_blocks(model, vision))
    if vision and len(blocks) == len(text_blocks):
        raise UnsupportedError(
            f"{describe(model)}: no layer of its vision tower {find_vision(model).spec.tower} has a feed-forward child of its "
            f"own; looked for {', '.join(FEED_FORWARD_NAMES)}. Leave out vision=True"
        )
    if not text_blocks:
        raise UnsupportedError(
            f"{describe(model)}: no decoder layer has a feed-forward child of its own; looked for "
            f"{', '.join(FEED_FORWARD_NAMES)} in {paths.get(id(decoder), 'the decoder')}"
        )
    for block in blocks:
        for place in _places_in(block, paths, recorded):
            if isinstance(place, str):
                skipped.append(place)
            elif id(place.module) not in seen:
                seen.add(id(place.module))
                places.append(place)
    return Found(tuple(places), tuple(skipped))


def _places_in(block: nn.Module, paths: dict[int, str], recorded: tuple[type[nn.Module], ...]) -> Iterator[FeedForward | str]:
    for module in head_leaves(unwrap(block).model):
        path = paths.get(id(module), "?")
        experts = module._modules.get("experts")
        if experts is not None:
            # The router stays as it is, so whoever records its logits sees one call over all tokens.
            yield from _places_in_experts(experts, paths, recorded)
            for name, child in module._modules.items():
                if child is None or name == "experts" or isinstance(child, nn.Linear):
                    continue
                roles = find_roles(child)
                if roles is not None or "shared" in name:
                    yield FeedForward(child, paths.get(id(child), name), "whole" if roles is None else "dense", roles)
            continue
        roles = find_roles(module)
        if roles is not None:
            yield FeedForward(module, path, "dense", roles)
            continue
        if _are_experts(module):
            yield from _places_in_experts(module, paths, recorded)
            continue
        router = next((child for child in module.modules() if child is not module and isinstance(child, recorded)), None)
        if router is not None:
            yield (
                f"{path}: a {type(module).__name__} of unknown inside that holds {type(router).__name__}, whose outputs are "
                f"recorded once per call"
            )
        else:
            yield FeedForward(module, path, "whole")


def _places_in_experts(
    experts: nn.Module, paths: dict[int, str], recorded: tuple[type[nn.Module], ...]
) -> Iterator[FeedForward | str]:
    if isinstance(experts, nn.ModuleList):
        for expert in experts:
            yield from _places_in(expert, paths, recorded)
    elif _are_experts(experts):
        yield FeedForward(experts, paths.get(id(experts), "experts"), "experts")
    else:
        yield (
            f"{paths.get(id(experts), 'experts')}: {type(experts).__name__}.forward takes hidden states alone, so which expert "
            f"a row goes to is in its position"
        )


def _are_experts(module: nn.Module) -> bool:
    """Does its forward take hidden states, the experts chosen for them, and more?"""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        inner = module._modules.get("base_layer")  # an adapter around them
        return inner is not None and _are_experts(inner)
    return (
        len(parameters) >= 2
        and not isinstance(module, nn.ModuleList)
        and any(word in p.name for p in parameters[1:] for word in ("ind", "expert", "rout", "mask"))
    )


def _recorded_classes(decoder: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes whose outputs transformers records through hooks, layers and attention aside."""
    found: list[type[nn.Module]] = []
    recorders = getattr(type(decoder), "_can_record_outputs", None) or {}
    for key, value in recorders.items():
        if key in ("hidden_states", "attentions", "cross_attentions"):
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            target = getattr(one, "target_class", one)
            if isinstance(target, type):
                found.append(target)
    return tuple(found)
