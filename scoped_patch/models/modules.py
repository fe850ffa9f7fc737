"""Edits of `nn.Module`s: where a forward really lives, and a forward edit that compilers and copies can live with."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..engine import (
    LIVE,
    Counter,
    Edit,
    Patch,
    Session,
    Slot,
    attribute_slot,
    is_live,
    register_storage_finder,
    set_tracing,
)
from ..engine.adhoc import signature_of
from ..engine.errors import UnsupportedError
from ..engine.slots import DictSlot

#: `forward(prior, module, *args, **kwargs)`: `prior` is the bound forward that would have run.
Forward = Callable[..., Any]


def _module_storage(owner: Any, name: str) -> MutableMapping[str, Any] | None:
    if isinstance(owner, nn.Module):
        for storage in (owner._parameters, owner._buffers, owner._modules):
            if name in storage:
                return storage
    return None


def register_with_engine() -> None:
    """Teach the engine what an `nn.Module` is; called once, on import of the package."""
    register_storage_finder(_module_storage)
    LIVE.guards_owner = lambda owner: isinstance(owner, nn.Module)
    set_tracing(torch.compiler.is_dynamo_compiling)


class ForwardSlot(DictSlot):
    """A forward in an instance's `__dict__`.

    accelerate's `unwrap_model(keep_fp32_wrapper=False)` binds the bound method that it finds once more. That is still the
    method it found.
    """

    __slots__ = ()

    def read(self) -> Any:
        raw = super().read()
        inner = getattr(raw, "__func__", None)
        if isinstance(inner, types.MethodType) and inner.__self__ is self.owner and raw.__self__ is self.owner:
            return inner
        return raw


def forward_slot(module: nn.Module, label: str) -> Slot:
    """The slot of the forward that really computes.

    accelerate's hooks keep it in `_old_forward` and call it from their own `forward`, which moves weights and casts:
    that stays outermost.
    """
    name = "_old_forward" if "_old_forward" in module.__dict__ and hasattr(module, "_hf_hook") else "forward"
    return ForwardSlot(module.__dict__, name, f"{label}.{name}", module)


def forward_edit(
    module: nn.Module,
    label: str,
    forward: Forward,
    *,
    name: str,
    rank: int,
    reason: str,
    to: str,
    token: Hashable = None,
    exclusive: str | None = None,
    check: Callable[[Any], None] | None = None,
) -> Edit:
    """An edit that runs `forward(prior, module, *args, **kwargs)` in place of this instance's forward.

    The new forward is a bound method of the instance (compiled code guards on it, siblings are untouched), shows the
    signature and docs of the one it stands for, and has a name of its own, so that no pickle by name finds it.

    Args:
        module: the instance.
        label: its dotted path, for people.
        forward: what runs. Must be traceable where the model is compiled.
        name: the function's own name.
        rank, reason, to, token, exclusive: as in `Edit`. Shipped edits commute.
        check: called with the prior forward when entering; raises where that one must not be built upon.
    """
    counter = Counter()
    slot = forward_slot(module, label)

    def make(prior: Any) -> Any:
        if check is not None:
            check(prior)
        return bound_forward(module, prior, forward, counter, name)

    return Edit(slot, make, "wrap", reason, rank, commutes=True, token=token, exclusive=exclusive, counter=counter, to=to)


def counting_edit(module: nn.Module, label: str, forward: Forward, **common: Any) -> Edit:
    """A hidden edit that changes nothing and counts how often the module ran; arguments as for `forward_edit`."""
    return replace(forward_edit(module, label, forward, to="counts calls", **common), hidden=True)


def runs_past(session: Session, patch: Patch) -> int:
    """How often a module with a `counting_edit` of this patch ran, if no other place of the patch was ever called; or 0."""
    records = [record for record in session.records if record.planned.patch is patch]
    if any(record.calls for record in records if not record.edit.hidden):
        return 0
    return sum(record.calls or 0 for record in records if record.edit.hidden)


def refuse_replaced_forward(module: nn.Module, what: str, otherwise: str, prior: Any) -> None:
    """For an edit that stands in for a module's forward and never calls it: that must be the one that is known.

    Raises:
        UnsupportedError: somebody put another forward on this instance.
    """
    if not is_class_forward(module, prior):
        kind = getattr(prior, "__qualname__", type(prior).__name__)
        raise UnsupportedError(
            f"{what} was replaced on this instance by {kind}, which would never run. Take that off, or {otherwise}"
        )


def bound_forward(module: nn.Module, prior: Any, forward: Forward, counter: Counter, name: str) -> types.MethodType:
    is_tracing = torch.compiler.is_dynamo_compiling

    def patched_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            counter.traced = True  # only ever written, so that no graph guards on it
        else:
            counter.calls += 1
        if args and args[0] is self:
            args = args[1:]  # bound twice, see ForwardSlot
        return forward(prior, self, *args, **kwargs)

    # Not __wrapped__, which unwrapping tools would follow: a patch above may ask which patches are below it.
    patched_forward.scoped_forward, patched_forward.scoped_prior = forward, prior  # type: ignore[attr-defined]
    patched_forward.__name__ = name
    patched_forward.__qualname__ = name
    patched_forward.__doc__ = getattr(prior, "__doc__", None)
    signature = signature_of(prior)
    if signature is not None:
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [p for p in signature.parameters.values() if p.name != "self"]
        with contextlib.suppress(ValueError):  # a signature that cannot take one more parameter shows args and kwargs
            patched_forward.__signature__ = signature.replace(parameters=[self_parameter, *parameters])  # type: ignore[attr-defined]
    return types.MethodType(patched_forward, module)


def forwards_below(prior: Any) -> Iterator[Forward]:
    """The functions given to `forward_edit` that a forward is built of, from the outside in."""
    while True:
        function = getattr(prior, "__func__", None)
        forward = getattr(function, "scoped_forward", None)
        if forward is None:
            return
        yield forward
        prior = function.scoped_prior  # type: ignore[union-attr]


def walk(root: nn.Module) -> Iterator[nn.Module]:
    """Every module under `root`, itself included, each once. Several times faster than `modules()`."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        stack.extend(child for child in module._modules.values() if child is not None)


def module_paths(root: nn.Module) -> dict[int, str]:
    """id -> dotted path of every module under `root` (the first path where a module is shared)."""
    return {id(module): path for path, module in root.named_modules()}


def defined_forward(kind: type) -> Any:
    """The forward that a class brings itself (or inherits), or None where somebody has put another function over it.

    A function that was written elsewhere than its class, or that wraps another one, does something besides what the class
    says: count, record, cast. Whoever takes a module apart instead of calling it would leave that out.
    """
    for cls in kind.__mro__:
        forward = cls.__dict__.get("forward")
        if forward is not None:
            is_own = isinstance(forward, types.FunctionType) and forward.__globals__.get("__name__") == cls.__module__
            return forward if is_own and not hasattr(forward, "__wrapped__") else None
    return None


#: what `nn.Linear` computes with; None if that was changed before this was imported
LINEAR_FORWARD: Any = defined_forward(nn.Linear)


def is_plain_linear(module: Any) -> bool:
    """A linear layer whose product is `F.linear(x, weight, bias)`: `nn.Linear` or a subclass that does not change it.

    Not while somebody has changed the forward of that class, and never DeepSpeed's or quantised subclasses, which bring
    a forward of their own.
    """
    return isinstance(module, nn.Linear) and LINEAR_FORWARD is not None and type(module).forward is LINEAR_FORWARD


def changed_linear(module: nn.Module) -> str | None:
    """Why a layer with the forward of `nn.Linear` is not a plain one: somebody has changed that class; None otherwise."""
    if is_plain_linear(module) or not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return None
    changed = getattr(nn.Linear.forward, "__qualname__", type(nn.Linear.forward).__name__)
    return f"the forward of the class nn.Linear was changed, to {changed}, which would never run"


def is_class_forward(module: nn.Module, forward: Any) -> bool:
    """Is this bound forward the one that the module's class gives it, put in place by nobody?"""
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward


def foreign_forward(module: nn.Module) -> str | None:
    """The name of a forward that somebody else put on this instance, or None."""
    own = module.__dict__.get("forward")
    if own is None or is_live(attribute_slot(module, "forward")):
        return None
    if "_old_forward" in module.__dict__ and hasattr(module, "_hf_hook"):
        return f"{type(module).__name__}.forward (an accelerate hook, {type(module._hf_hook).__name__})"
    return f"{type(module).__name__}.forward ({getattr(own, '__qualname__', type(own).__name__)})"
