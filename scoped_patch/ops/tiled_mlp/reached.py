"""The tensors that a function of unknown inside reaches: found, looked up again later, and checked to be all."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Parameters = nn.Module | Iterable[Tensor] | Callable[[], Iterable[Tensor]]

_GONE = object()


def reached_tensors(module: nn.Module) -> list[Tensor]:
    """Every tensor inside `module` that may need a gradient: parameters, buffers, and tensors kept as plain attributes.

    The latter are how wrappers that flatten parameters (torch's first FSDP) leave views of them in the modules.
    """
    found: dict[int, Tensor] = {}
    for child in module.modules():
        for storage in _storages(child):
            for tensor in storage.values():
                if isinstance(tensor, Tensor):
                    found.setdefault(id(tensor), tensor)
    return list(found.values())


class Reached:
    """The reached tensors as they were in the forward, and how to find them, or put them back, in the backward.

    Attributes:
        tensors: those that need a gradient.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._state = _State(parameters) if isinstance(parameters, nn.Module) else None
        self._list: Callable[[], Iterable[Tensor]] | None = None
        if isinstance(parameters, nn.Module):
            module = parameters
            self._list = lambda: reached_tensors(module)
        elif callable(parameters):
            self._list = parameters
        self._everything = _distinct(parameters if self._list is None else self._list())  # type: ignore[arg-type]
        self._versions = [_version(tensor) for tensor in self._everything]
        for tensor in self._everything if self._state is None else ():
            if tensor._backward_hooks and tensor.requires_grad:
                raise ValueError(
                    f"parameters: the tensor of shape {tuple(tensor.shape)} has a hook on its gradient, which would be given "
                    "each tile's share of it; pass the module that holds it in place of a list"
                )
        if self._state is None:
            _refuse_one_of_another([tensor for tensor in self._everything if tensor.requires_grad])
        self._frozen: list[tuple[Tensor, int]] = []
        self._positions = [index for index, tensor in enumerate(self._everything) if tensor.requires_grad]
        self.tensors = [self._everything[index] for index in self._positions]

    def forward_is_done(self) -> None:
        """Called when the forward has run: frozen parameters may be written to in a forward, and not after it."""
        frozen = [tensor for tensor in self._everything if isinstance(tensor, nn.Parameter) and not tensor.requires_grad]
        self._frozen = [(tensor, tensor._version) for tensor in frozen if not (tensor.is_inference() or tensor._is_view())]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Of a module: its tensors, training flags and plain attributes as in the forward, for the length of the block.

        A tensor with hooks on its gradient makes way for one without: they are for the sum, not for each tile's share. So
        does one that was computed from others, which are given their share of its gradient when that is whole.
        """
        with put_back(self._state):
            yield

    def now(self) -> tuple[list[Tensor], list[Tensor]]:
        """For a recomputation: those of `tensors`, or what a wrapper has put in their place; and all reached tensors.

        Raises:
            RuntimeError: if the function does not reach the same ones any more, or one was modified in place.
        """
        current = self._everything if self._list is None else _distinct(self._list())
        if len(current) != len(self._everything):
            raise RuntimeError(
                f"tiled_call: the function reached {len(self._everything)} tensors in the forward and reaches "
                f"{len(current)} in the backward. Something changed it in between (an adapter that was added, "
                "merged or removed, say): run the backward in the state of the forward."
            )
        for before, version in (*zip(self._everything, self._versions, strict=True), *self._frozen):
            if version is not None and before._version != version:
                raise RuntimeError(
                    f"tiled_call: a parameter of shape {tuple(before.shape)} was modified in place between the "
                    "forward and the backward (an optimizer step?), so gradients can't be recomputed with it."
                )
        for before, after in zip(self._everything, current, strict=True):
            if before is not after and not _is_same_memory(before, after):
                raise RuntimeError(
                    f"tiled_call: a parameter of shape {tuple(before.shape)} was replaced by another between the "
                    "forward and the backward: run the backward in the state of the forward."
                )
        return [current[index] for index in self._positions], current


@contextlib.contextmanager
def put_back(state: _State | PlainAttributes | None) -> Iterator[None]:
    """What a module was like, for the length of the block."""
    changes: list[Callable[[], object]] = []
    try:
        if state is not None:
            state.put_back(changes)
        yield
    finally:
        for undo in reversed(changes):
            undo()


class _State:
    """The tensors, training flags and plain attributes of a module and its children."""

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(child, child.training) for child in module.modules()]
        self._places = [
            (child, index, name, tensor)
            for child, _ in self._flags
            for index, storage in enumerate(_storages(child))
            for name, tensor in storage.items()
            if isinstance(tensor, Tensor)
        ]
        self._attributes = PlainAttributes(module)

    def put_back(self, undo: list[Callable[[], object]]) -> None:
        """Put back what differs, noting how to undo each step before it. As `torch.func.functional_call` does it."""
        for child, index, name, tensor in self._places:
            storages = _storages(child)
            now = next((storage[name] for storage in storages if name in storage), _GONE)
            if now is tensor or (isinstance(now, Tensor) and _is_same_memory(tensor, now)):
                continue
            storage = storages[index]
            if now is _GONE:
                undo.append(lambda storage=storage, name=name: storage.pop(name, None))  # type: ignore[misc]
            elif name in storage:
                undo.append(lambda storage=storage, name=name, now=now: storage.__setitem__(name, now))  # type: ignore[misc]
            else:
                continue  # the child is built otherwise now: `now()` says so
            storage[name] = tensor
        leaves: dict[int, Tensor] = {}
        for child, _, name, _ in self._places:
            for storage in _storages(child):
                now = storage.get(name, _GONE)
                if isinstance(now, Tensor) and now.requires_grad and (now._backward_hooks or now.grad_fn is not None):
                    bare = leaves.setdefault(id(now), _as_leaf(now))
                    undo.append(lambda storage=storage, name=name, now=now: storage.__setitem__(name, now))  # type: ignore[misc]
                    storage[name] = bare
        for child, training in self._flags:
            if child.training is not training:
                undo.append(lambda child=child, flag=child.training: child.__dict__.__setitem__("training", flag))  # type: ignore[misc]
                child.__dict__["training"] = training
        self._attributes.put_back(undo)


class PlainAttributes:
    """What the forwards of a module and its children may read besides tensors: numbers, strings, and lists of such.

    An adapter keeps in them which of its weights are in use, and how strongly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._values = [
            (child.__dict__, name, copy.copy(value))
            for child in module.modules()
            for name, value in child.__dict__.items()
            if name not in _OF_EVERY_MODULE and _is_plain(value)
        ]

    def put_back(self, undo: list[Callable[[], object]]) -> None:
        """Put back what differs, noting how to undo each step before it."""
        for attributes, name, value in self._values:
            now = attributes.get(name, _GONE)
            if now is value or (type(now) is type(value) and now == value):
                continue
            if now is not _GONE and not _is_plain(now):
                continue  # filled in meanwhile: a cache, say
            undo.append(
                functools.partial(attributes.pop, name, None)
                if now is _GONE
                else functools.partial(attributes.__setitem__, name, now)
            )
            attributes[name] = copy.copy(value)


_SIMPLE = (bool, int, float, str, type(None), torch.dtype)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return all(type(item) in _SIMPLE for item in value)
    if type(value) is dict:
        return all(type(item) in _SIMPLE for item in value.values())
    return type(value) in _SIMPLE


def _storages(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return (module._parameters, module.__dict__, module._buffers)


def _as_leaf(tensor: Tensor) -> Tensor:
    bare = tensor.detach()
    return nn.Parameter(bare) if isinstance(tensor, nn.Parameter) else bare.requires_grad_()


def _version(tensor: Tensor) -> int | None:
    """What tells a change in place, or None for tensors that others may rightly write to.

    Those are the views that the first FSDP gathers anew for the backward, and what is frozen: forwards write to buffers
    themselves, and adapters to the weights that they stand on. Of the latter, see `Reached.forward_is_done`.
    """
    return None if tensor.is_inference() or not tensor.requires_grad or tensor._is_view() else tensor._version


def _is_same_memory(before: Tensor, after: Tensor) -> bool:
    """Is this another object for the same numbers, as the first FSDP makes one each time it gathers a parameter?"""
    try:
        return (
            before.requires_grad == after.requires_grad
            and before.dtype == after.dtype
            and before.shape == after.shape
            and before.stride() == after.stride()
            and before.storage_offset() == after.storage_offset()
            and before.untyped_storage()._cdata == after.untyped_storage()._cdata
        )
    except (RuntimeError, NotImplementedError):
        return False  # a kind of tensor without a storage of its own


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"parameters: got a {type(tensor).__name__} among them, wanted tensors")
        found.setdefault(id(tensor), tensor)
    return list(found.values())


def _refuse_one_of_another(listed: Sequence[Tensor]) -> None:
    """A gradient of the one would go on to the other in each tile, and once more when it is handed to autograd."""
    for tensor in listed:
        if tensor.grad_fn is None:
            continue
        ends = {id(other) for other in listed if other.grad_fn is None}
        nodes = {other.grad_fn for other in listed if other.grad_fn is not None and other.grad_fn is not tensor.grad_fn}
        stack, seen = [tensor.grad_fn], set[Any]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in nodes or (type(node).__name__ == "AccumulateGrad" and id(node.variable) in ends):  # type: ignore[attr-defined]
                raise ValueError(
                    f"parameters: the tensor of shape {tuple(tensor.shape)} was computed from another one that is listed, "
                    "which would be given its gradient twice; list one of the two, or pass the module that holds them"
                )
            stack.extend(following for following, _ in node.next_functions if following is not None)


def check_all_listed(results: Sequence[Tensor], listed: Iterable[Tensor]) -> None:
    """Raises `RuntimeError` if the graph of `results` ends in a leaf outside `listed`: its gradient would be lost."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    for tensor in listed:
        if tensor.grad_fn is None:
            leaves.add(id(tensor))
        else:
            seen.add(tensor.grad_fn)
    stack = [result.grad_fn for result in results if result.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            if id(leaf) not in leaves:
                raise RuntimeError(
                    f"tiled_call: the function computes with a tensor of shape {tuple(leaf.shape)} that needs a "
                    "gradient and is not among `parameters`; list it there."
                )
        stack.extend(following for following, _ in node.next_functions if following is not None)
