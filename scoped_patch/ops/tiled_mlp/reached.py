"""The tensors that a function of unknown inside reaches: found, looked up again later, and checked to be all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

Parameters = Iterable[Tensor] | Callable[[], Iterable[Tensor]]


def reached_tensors(module: nn.Module) -> list[Tensor]:
    """Every tensor inside `module` that may need a gradient: its parameters, and tensors kept as plain attributes.

    The latter are how wrappers that flatten parameters (torch's first FSDP) leave views of them in the modules.
    """
    found: dict[int, Tensor] = {}
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child.__dict__.values()):
            if isinstance(tensor, Tensor):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


class Reached:
    """The reached tensors that need a gradient, as they were in the forward, and how to find them in the backward."""

    def __init__(self, parameters: Parameters) -> None:
        self._list = parameters if callable(parameters) else None
        everything = _distinct(parameters)
        self._positions = [index for index, tensor in enumerate(everything) if tensor.requires_grad]
        self._count = len(everything)
        self.tensors = [everything[index] for index in self._positions]
        self._versions = [None if tensor.is_inference() else tensor._version for tensor in self.tensors]

    def now(self) -> list[Tensor]:
        """The same tensors for a recomputation: those of the forward, or what a wrapper has put in their place.

        Raises:
            RuntimeError: if the function does not reach the same ones any more, or one was modified in place.
        """
        current = self.tensors
        if self._list is not None:
            everything = _distinct(self._list)
            if len(everything) != self._count:
                raise RuntimeError(
                    f"tiled_call: the function reached {self._count} tensors in the forward and reaches "
                    f"{len(everything)} in the backward. Something changed it in between (an adapter that was enabled, "
                    "merged or removed, say): run the backward in the state of the forward."
                )
            current = [everything[index] for index in self._positions]
        for before, after, version in zip(self.tensors, current, self._versions, strict=True):
            if before is after:
                if before.is_leaf and version is not None and before._version != version:
                    raise RuntimeError(
                        f"tiled_call: a parameter of shape {tuple(before.shape)} was modified in place between the "
                        "forward and the backward (an optimizer step?), so its gradient can't be recomputed."
                    )
            elif before.is_leaf or before.shape != after.shape:
                raise RuntimeError(
                    f"tiled_call: a parameter of shape {tuple(before.shape)} was replaced by another between the "
                    "forward and the backward: run the backward in the state of the forward."
                )
        return current


def _distinct(parameters: Parameters) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for tensor in parameters() if callable(parameters) else parameters:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"parameters: got a {type(tensor).__name__} among them, wanted tensors")
        found.setdefault(id(tensor), tensor)
    return list(found.values())


def check_all_listed(results: Iterable[Tensor], listed: Iterable[Tensor]) -> None:
    """Raises `RuntimeError` if the graph of `results` ends in a leaf outside `listed`: its gradient would be lost."""
    leaves = {id(tensor) for tensor in listed if tensor.is_leaf}
    seen = {tensor.grad_fn for tensor in listed if tensor.grad_fn is not None}
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
