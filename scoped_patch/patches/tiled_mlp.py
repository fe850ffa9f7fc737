"""Tiled MLP: the feed-forward blocks of the text decoder, a tile of tokens at a time.

One edit per block. A block that is projections and an activation becomes one operation that recomputes no more than its
gradients need. Of a mixture of experts the experts are tiled and the router is left alone, so that its logits are
recorded once. Any other block is tiled by recomputing its whole forward, and `explain()` says so.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..engine import LIVE, Edit, Patch, Session, Support
from ..engine.errors import BadOptionError, ScopedPatchError, SeamNotReachedError, UnsupportedError
from ..models.checkpointing import snapshot_of
from ..models.feed_forward import FeedForward, Found, find_feed_forwards, layer_blocks
from ..models.modules import counting_edit, foreign_forward, forward_edit, runs_past
from ..models.placement import Placement
from ..models.roles import Roles
from ..models.spec import describe, find_decoder
from ..models.unwrap import class_names, unwrap
from ..ops.tiled_mlp import identify_activation, reached_tensors, tiled_call, tiled_mlp

RANK = 15

# Without gradients, so few tokens (a step of generation, say) are computed at once: there is nothing to save.
_FEW_TOKENS = 1024

_DONE_TO = {
    "dense": "{tiles} tiles, one operation",
    "experts": "{tiles} tiles of the experts, router untouched",
    "whole": "{tiles} tiles, whole forward recomputed",
}


@dataclass(frozen=True, eq=False)
class TiledMLP(Patch):
    """`tiled_mlp=`: feed-forward blocks in tiles of tokens, to keep the activations of one tile instead of all.

    Outputs and gradients are those of the untiled model; weight gradients are summed in float32. The price is that the
    backward computes the activations again. The blocks of the text decoder are tiled, wherever the model is wrapped, and
    children and parameters are looked up at every call, so `.to()`, PEFT, FSDP and optimizers may come before or after.

    Args:
        tiles: into how many tiles the tokens of a call are cut (at most; at least 1).
        vision: the blocks of a vision-language model's tower too, whose tokens are the patches of all images of a call.

    Raises (when entering):
        UnsupportedError: no feed-forward block was found, or none that computes token by token; says what was looked for.
    """

    tiles: int = 8
    vision: bool = False
    name: str = field(default="tiled_mlp", init=False, repr=False)
    _found: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.tiles, bool) or not isinstance(self.tiles, int) or self.tiles < 1:
            raise BadOptionError(f"tiled_mlp: the number of tiles must be an int of at least 1, got {self.tiles!r}")

    @property
    def options(self) -> Hashable:
        return (self.tiles, self.vision)

    def supports(self, target: Any) -> Support:
        model = unwrap(target).model
        try:
            found = find_feed_forwards(model, self.vision)
        except ScopedPatchError as error:
            return Support(False, str(error))
        for place in found.places:
            unit = _unit_inside(place.module)
            if unit is not None:
                return Support(False, f"{place.path} of {describe(model)} {unit}")
        self._found[:] = (model, found)  # `plan` is asked next, about the same model, and takes this away
        if not found.places:
            return Support(False, f"no feed-forward block of {describe(model)} can be tiled: {'; '.join(found.skipped)}")
        notes = [
            f"found a forward put on the instance by somebody else and tiled it: {kind}"
            for place in found.places
            if (kind := foreign_forward(place.module))
        ]
        return Support(True, skipped=found.skipped, notes=tuple(dict.fromkeys(notes)))

    def fingerprint(self, target: Any) -> Hashable:
        try:
            blocks = list(layer_blocks(unwrap(target).model, self.vision))
        except ScopedPatchError:
            return None  # `supports` says what is missing
        return tuple((id(block), *map(id, block._modules.values()), "_old_forward" in block.__dict__) for block in blocks)

    def plan(self, target: Any) -> Iterable[Edit]:
        model = unwrap(target).model
        known, self._found[:] = list(self._found), ()
        found: Found = known[1] if known and known[0] is model else find_feed_forwards(model, self.vision)
        for place in found.places:
            yield forward_edit(
                place.module,
                place.path,
                _Tiled(place, self.tiles, model).forward,
                name="tiled_mlp_forward",
                rank=RANK,
                reason="keep one tile's activations",
                to=_DONE_TO[place.kind].format(tiles=self.tiles),
                token=(self.name, self.tiles, id(place.module)),
                exclusive=self.name,
            )
        decoder = find_decoder(model)
        placement = Placement(self.name, model, [decoder, *(place.module for place in found.places)])
        if decoder is not model:
            yield placement.edit()
        yield counting_edit(
            decoder,
            "decoder",
            placement.forward,
            name="tiled_mlp_decoder_forward",
            rank=RANK,
            reason="see whether the decoder ran",
            token=(self.name, self.tiles, id(decoder)),
            exclusive=self.name,
        )

    def audit(self, session: Session) -> None:
        runs = runs_past(session, self)
        if runs:
            blocks = sum(record.planned.patch is self and not record.edit.hidden for record in session.records)
            raise SeamNotReachedError(
                f"{self.name}: the decoder ran {runs} times in the scope entered at {session.location}, and none of its "
                f"{blocks} feed-forward blocks was called: something computes them another way, so nothing was tiled"
            )


class _Tiled:
    """What stands in for the forward of one place."""

    def __init__(self, place: FeedForward, tiles: int, model: nn.Module) -> None:
        self.place = place
        self.tiles = tiles
        self.model = model
        self.proved: set[bool] = set()
        self.class_forward = type(place.module).forward
        self.activation: Any = None
        if place.roles is not None:
            function = place.roles.activation
            has_tensors = isinstance(function, nn.Module) and bool(reached_tensors(function))
            self.activation = function if has_tensors else identify_activation(function) or function

    def forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors:
            return prior(*args, **kwargs)
        now = type(module).forward
        if now is not self.class_forward and getattr(prior, "__func__", None) is self.class_forward and _inherits(module):
            prior = types.MethodType(now, module)  # somebody has changed the class since, which this instance would show
        hidden_states = tensors[0]
        tokens = hidden_states.numel() // max(hidden_states.shape[-1], 1)
        if tokens <= 1 or (tokens < _FEW_TOKENS and not torch.is_grad_enabled()):
            return prior(*args, **kwargs)
        roles = self.place.roles
        if roles is not None and len(args) + len(kwargs) == 1 and _is_as_described(roles, prior, module):
            # Read once, as the block's own forward does: a parametrized weight is computed each time it is read.
            weights = [tensor for name in roles.projections for tensor in _weight_and_bias(module._modules[name])]
            if all(tensor is None or type(tensor) in (nn.Parameter, Tensor) for tensor in weights):
                return self.dense(weights, hidden_states)
        if torch.compiler.is_dynamo_compiling():
            # A recomputation in the backward with random states and replays in it is nothing that could be traced.
            from ..ops.tiled_mlp.uncompiled import uncompiled

            return uncompiled(self.general, prior, module, args, kwargs)
        return self.general(prior, module, args, kwargs)

    def dense(self, weights: Sequence[Tensor | None], hidden_states: Tensor) -> Tensor:
        """`weights`: weight and bias of each projection, the gate's first if there is one."""
        gate, gate_bias, up, up_bias, down, down_bias = (None, None, *weights) if len(weights) == 4 else weights
        activation = self.activation
        return tiled_mlp(
            hidden_states,
            gate,
            up,  # type: ignore[arg-type]
            down,  # type: ignore[arg-type]
            gate_bias,
            up_bias,
            down_bias,
            activation=activation,
            activation_parameters=reached_tensors(activation) if isinstance(activation, nn.Module) else (),
            tiles=self.tiles,
        )

    def general(self, prior: Callable[..., Any], module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        positions = [index for index, value in enumerate(args) if isinstance(value, Tensor)]
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        tensors = [*(args[index] for index in positions), *(kwargs[name] for name in names)]

        def function(*pieces: Tensor) -> Any:
            cut = list(args)
            for index, piece in zip(positions, pieces, strict=False):
                cut[index] = piece
            return prior(*cut, **{**kwargs, **dict(zip(names, pieces[len(positions) :], strict=True))})

        unit = _unit_inside(module)
        if unit is not None:
            raise UnsupportedError(f"tiled_mlp: {self.place.path} of {describe(self.model)} {unit}")
        lead = tensors[0].shape[:-1]
        if any(tensor.shape[: len(lead)] != lead for tensor in tensors):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise UnsupportedError(
                f"tiled_mlp: {self.place.path} ({type(module).__name__}) of {describe(self.model)} is called with tensors of "
                f"shapes {shapes}, which do not agree in their tokens; leave out `tiled_mlp`"
            )
        self._prove(function, tensors, module)
        return tiled_call(
            function,
            tensors,
            module,
            self.tiles,
            recompute_context=_as_it_runs_now(self.model),
        )

    def _prove(self, function: Callable[..., Any], tensors: Sequence[Tensor], module: nn.Module) -> None:
        """Once in training and once in eval mode, by value: tokens come out the same alone as together.

        A block that draws random numbers has no such values; it is believed.
        """
        if module.training in self.proved or tensors[0].is_meta:
            return
        dims = tensors[0].ndim - 1
        flat = [tensor.detach().flatten(0, dims - 1) for tensor in tensors]
        tokens = len(flat[0])
        if tokens < 3:
            return

        def rows(*indices: int) -> list[Tensor]:
            out = function(*(row[list(indices)].reshape(*(1,) * (dims - 1), -1, *row.shape[1:]) for row in flat))
            out = out if isinstance(out, Tensor) else next(item for item in out if isinstance(item, Tensor))
            return list(out.reshape(len(indices), -1).float()) if out.numel() % len(indices) == 0 else []

        middle, last = tokens // 2, tokens - 1
        with torch.no_grad(), _random_state_of(tensors[0].device) as is_drawn_from:
            together = rows(0, middle, last)
            alone = [] if is_drawn_from() else [*rows(middle), *rows(last)]
        scale = max((float(row.abs().max()) for row in together), default=0.0)
        close = [torch.allclose(*pair, rtol=0.05, atol=0.05 * scale) for pair in zip(together[1:], alone, strict=False)]
        # One of two is enough: a router inside may choose differently for a token when the last bit differs.
        if close and not any(close):
            raise UnsupportedError(
                f"tiled_mlp: {self.place.path} ({type(module).__name__}) of {describe(self.model)} does not compute token by "
                f"token: a token's output changes with the tokens beside it. Leave out `tiled_mlp` for this model"
            )
        self.proved.add(module.training)


@contextmanager
def _random_state_of(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leaves the random state as it was; gives how to ask whether random numbers have been drawn meanwhile."""
    on_gpu = device.type == "cuda"

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if on_gpu else [])]

    with torch.random.fork_rng([device] if on_gpu else []):
        before = state()
        yield lambda: not all(map(torch.equal, before, state()))


def _is_as_described(roles: Roles, prior: Callable[..., Any], module: nn.Module) -> bool:
    """Is this block still what it was found to be, with nobody looking on or working inside?"""
    return getattr(prior, "__func__", None) is roles.forward and roles.hold_for(module) and not _any_global_hook()


def _weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _inherits(module: nn.Module) -> bool:
    """Is ours the only forward that was put on this instance?"""
    return "_old_forward" not in module.__dict__


def _any_global_hook() -> bool:
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def _unit_inside(module: nn.Module) -> str | None:
    """What is wrong if a part of the block is sharded by itself: its gradient goes through hooks of its own."""
    for child in module.modules():
        if any(hasattr(parameter, "ds_id") for parameter in child._parameters.values()):
            return (
                f"has weights ({type(child).__name__}) that DeepSpeed's ZeRO-3 has partitioned and gathers for each submodule, "
                f"and their gradients cannot be summed over tiles: use ZeRO-2 or FSDP, or leave out `tiled_mlp`"
            )
        if child is not module and not class_names(child).isdisjoint(("FSDPModule", "FullyShardedDataParallel")):
            return (
                f"has a part ({type(child).__name__}) that is an FSDP unit of its own, and its gradients cannot be summed over "
                f"tiles: shard the whole block or layer as one unit, or leave out `tiled_mlp`"
            )
    return None


def _as_it_runs_now(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """How to recompute inside this model what runs inside it now, after scopes on it may have been left."""
    snapshot = snapshot_of(LIVE, model)
    return lambda: LIVE.replay(snapshot)
