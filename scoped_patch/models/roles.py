"""What the children of a feed-forward block do, proved by running the block.

A block is taken for "down(activation(gate(x)) * up(x))" only when its own forward, run on a miniature of itself in
float64, gives just that; so a block with a norm, a clamp or a scale of its own inside is never mistaken for one without.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modules import defined_forward, is_plain_linear


@dataclass(frozen=True, eq=False)
class Roles:
    """The children of a block that is two or three projections and an activation.

    Attributes:
        gate: name of the projection whose result goes through the activation, or None: then `up`'s does, or, if `up` gives
            twice what `down` takes, the first half of `up`'s.
        up, down: names of the other projections.
        activation: what the block calls between them.
        activation_child: its name, where it is a child module.
        dropouts: names of children that are dropout layers; they must be inactive for this description to hold.
        forward: the class's forward that was proved to do this.
        activation_forward: the same of the activation's class, where it is a child module.
        attributes: the block's own numbers, strings and functions, which its forward may read.
    """

    gate: str | None
    up: str
    down: str
    activation: Callable[[Tensor], Tensor]
    activation_child: str | None
    dropouts: tuple[str, ...]
    forward: Callable[..., Any]
    activation_forward: Callable[..., Any] | None
    attributes: tuple[tuple[str, Any], ...]

    @property
    def projections(self) -> tuple[str, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    def hold_for(self, block: nn.Module) -> bool:
        """Is this block still the one that was found, with nobody looking on or working inside? Cheap: asked at every call."""
        own, children = block.__dict__, block._modules
        if type(block).forward is not self.forward or not all(own.get(name, _GONE) is value for name, value in self.attributes):
            return False
        for name in self.projections:
            child = children.get(name)
            if not is_plain_linear(child) or is_watched(child):
                return False
        if self.activation_child is not None:
            child = children.get(self.activation_child)
            if child is not self.activation or type(child).forward is not self.activation_forward or is_watched(child):
                return False
        for name in self.dropouts:
            child = children.get(name)
            if not _is_dropout(child) or is_watched(child) or (child.p and child.training):  # type: ignore[union-attr]
                return False
        # What the operation computes with, called by these names in forwards. Somebody may have put others there.
        return F.linear is _LINEAR and F.silu is _SILU and F.gelu is _GELU and F.relu is _RELU


_LINEAR, _SILU, _GELU, _RELU = F.linear, F.silu, F.gelu, F.relu

#: activations that a forward may name itself, without a child module for them
_INLINE: tuple[Callable[[Tensor], Tensor], ...] = (_SILU, _GELU, functools.partial(_GELU, approximate="tanh"), _RELU)

_DROPOUT_FORWARD = defined_forward(nn.Dropout)
_GONE = object()
#: entries of every module's `__dict__`, and of a patched or hooked one's, that say nothing of what it computes
_NO_ATTRIBUTES = frozenset((*nn.Module().__dict__, "forward", "_old_forward", "_hf_hook"))
_HIDDEN, _INTERMEDIATE = 6, 10


def find_roles(block: nn.Module) -> Roles | None:
    """What each child of a block does, if the block is projections and an activation and nothing else; None otherwise.

    Costs well under a millisecond and touches no weight, so it works on the meta device and on sharded models.
    """
    linears: dict[str, nn.Linear] = {}
    dropouts: list[str] = []
    others: dict[str, nn.Module] = {}
    for name, child in block._modules.items():
        if child is None:
            continue
        if is_plain_linear(child):
            linears[name] = cast("nn.Linear", child)
        elif _is_dropout(child):
            dropouts.append(name)
        elif not child._modules:
            others[name] = child
        else:
            return None
    forward = defined_forward(type(block))
    if forward is None or len(linears) not in (2, 3) or len(others) > 1 or _own_tensors(block):
        return None
    for *gates, up, down in itertools.permutations(linears):
        gate = gates[0] if gates else None
        if not _fit(linears, gate, up, down):
            continue
        for activation, child_name in _activations(block, others):
            if _proved(block, linears, dropouts, gate, up, down, activation, child_name):
                own = None if child_name is None else getattr(type(activation), "forward", None)
                return Roles(gate, up, down, activation, child_name, tuple(dropouts), forward, own, _attributes(block))
    return None


def is_watched(module: Any) -> bool:
    """Would a call of this module do more than its class's forward?"""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _is_dropout(module: Any) -> bool:
    return isinstance(module, nn.Dropout) and _DROPOUT_FORWARD is not None and type(module).forward is _DROPOUT_FORWARD


def _attributes(block: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in block.__dict__.items()
        if name not in _NO_ATTRIBUTES and (value is None or callable(value) or isinstance(value, (int, float, str, tuple)))
    )


def _fit(linears: dict[str, nn.Linear], gate: str | None, up: str, down: str) -> bool:
    first, last = linears[up], linears[down]
    if gate is not None:
        other = linears[gate]
        return other.in_features == first.in_features and other.out_features == first.out_features == last.in_features
    return first.out_features in (last.in_features, 2 * last.in_features)


def _activations(block: nn.Module, others: dict[str, nn.Module]) -> Iterator[tuple[Callable[[Tensor], Tensor], str | None]]:
    if others:
        ((name, child),) = others.items()
        yield child, name
        return
    for value in block.__dict__.values():
        if callable(value) and not isinstance(value, type) and not inspect.ismethod(value):
            yield value, None
    for function in _INLINE:
        yield function, None


def _proved(
    block: nn.Module,
    linears: dict[str, nn.Linear],
    dropouts: list[str],
    gate: str | None,
    up: str,
    down: str,
    activation: Callable[[Tensor], Tensor],
    activation_child: str | None,
) -> bool:
    """Does the block's own forward, on a miniature of it, compute what these roles say?"""
    fused = gate is None and linears[up].out_features == 2 * linears[down].in_features
    children: dict[str, nn.Module] = {
        up: _tiny_linear(1, _HIDDEN, _INTERMEDIATE * (2 if fused else 1), linears[up].bias is not None),
        down: _tiny_linear(2, _INTERMEDIATE, _HIDDEN, linears[down].bias is not None),
    }
    if gate is not None:
        children[gate] = _tiny_linear(3, _HIDDEN, _INTERMEDIATE, linears[gate].bias is not None)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            stand_in = _stand_in(activation, training=True)
            x = _tiny_tensor(0, 2, 3, _HIDDEN)
            if not torch.equal(stand_in(x.clone()), _stand_in(activation, training=False)(x.clone())):
                return False  # it is another function in training, or draws random numbers
            if activation_child is not None:
                children[activation_child] = cast("nn.Module", stand_in)
            children |= {name: nn.Identity() for name in dropouts}
            miniature = _shallow(block, {**block._modules, **children})
            got = type(block).forward(miniature, x.clone())
            projected = children[up](x)
            if gate is not None:
                inner = stand_in(children[gate](x)) * projected
            elif fused:
                first, second = projected.chunk(2, -1)
                inner = stand_in(first) * second
            else:
                inner = stand_in(projected)
            wanted = children[down](inner)
            return isinstance(got, Tensor) and got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-9)
    except Exception:
        # Whatever a foreign forward does not like about its miniature: then nothing is known of it.
        return False


@functools.cache
def _tiny_tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@functools.cache
def _tiny_linear(seed: int, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias, device="meta")
    for offset, (name, tensor) in enumerate(list(linear._parameters.items())):
        if tensor is not None:
            linear._parameters[name] = nn.Parameter(_tiny_tensor(seed + 10 * offset, *tensor.shape), requires_grad=False)
    return linear


def _stand_in(activation: Callable[[Tensor], Tensor], training: bool) -> Callable[[Tensor], Tensor]:
    """An activation with float64 numbers on the CPU in place of its tensors, wherever these are and whether or not the
    memory of a sharded one is there.
    """
    if not isinstance(activation, nn.Module):
        return activation
    copy = _shallow(activation, activation._modules, training)
    tensors = _own_tensors(activation)
    if tensors:
        copy.__dict__.update(_parameters={}, _buffers={})
        for seed, (name, tensor) in enumerate(sorted(tensors.items()), start=100):
            copy.__dict__[name] = _tiny_tensor(seed, *tensor.shape).abs() + 0.1
    return copy


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module itself: parameters, buffers, and the plain attributes that the first FSDP makes of them."""
    everything = {**module.__dict__, **module._parameters, **module._buffers}
    return {name: value for name, value in everything.items() if isinstance(value, Tensor)}


def _shallow(module: nn.Module, children: dict[str, Any], training: bool = True) -> nn.Module:
    """Another instance of the same class with the same attributes, other children, no hooks and no forward of its own."""
    cls = type(module)
    copy: nn.Module = cls.__new__(cls)
    own = {key: value for key, value in module.__dict__.items() if key not in ("forward", "_old_forward")}
    own |= {key: type(value)() for key, value in own.items() if key.endswith("_hooks")}
    copy.__dict__.update(own, _modules=dict(children), training=training)
    return copy
