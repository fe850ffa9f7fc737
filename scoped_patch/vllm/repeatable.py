"""Make a layer's `process_weights_after_loading` repeatable: the first call is vLLM's own, later ones keep its storage.

vLLM's NVFP4 processing renames, repacks and replaces parameters, and drops their loaders. Here the layer's processed state
is remembered after the first call. When checkpoint-format parameters have been put back (by `ParamMeta`, or by reload code
written elsewhere) and filled, processing runs again, what comes out is swapped into the remembered tensors, and those are
put back: same objects, same addresses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .errors import UnsupportedLayer
from .exchange import Exchange
from .graph import layout, reach, storage_key

_states: weakref.WeakKeyDictionary[torch.nn.Module, LayerState] = weakref.WeakKeyDictionary()


class LayerState:
    """A layer as processing left it, and the checkpoint-format parameters it had before.

    Attributes:
        templates: by name, a meta tensor with the class and attributes of each checkpoint-format parameter.
    """

    def __init__(self, layer: torch.nn.Module, templates: dict[str, torch.Tensor], owners: list[Any]) -> None:
        self.templates = templates
        self._parameters = dict(layer._parameters)
        self._buffers = dict(layer._buffers)
        self._own = {k: v for k, v in vars(layer).items() if k not in ("_parameters", "_buffers", "_modules")}
        # The method and scheme objects, whose attributes processing sets too (a MoE kernel and its scales).
        self._owners = [(weakref.ref(owner), dict(vars(owner))) for owner in owners]
        self._tensors = reach(layer, ()).tensors

    def live(self, name: str) -> torch.nn.Parameter | None:
        return self._parameters.get(name)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self._parameters.values() if p is not None and not p.is_meta), torch.device("cpu"))

    def pending(self, layer: torch.nn.Module) -> bool:
        """Have checkpoint-format parameters been put in place of the processed ones?"""
        return any(
            name in layer._parameters and layer._parameters[name] is not self._parameters.get(name) for name in self.templates
        )

    def isolate(self, layer: torch.nn.Module) -> None:
        """Leave only checkpoint-format parameters on the layer, as before the first processing."""
        for name in list(layer._parameters):
            if name not in self.templates and name in self._parameters:
                del layer._parameters[name]

    def adopt(self, layer: torch.nn.Module) -> None:
        """Swap the freshly processed content into the remembered tensors, and put those back."""
        fresh = reach(layer, ()).tensors
        pairs, problems = [], []
        absent = [path for path in self._tensors if path not in fresh]
        for path, tensor in self._tensors.items():
            other = fresh.get(path)
            if other is None or other is tensor or storage_key(other) == storage_key(tensor):
                continue
            if tensor.numel() == 0 == other.numel():
                continue
            if layout(other) != layout(tensor):
                problems.append(f"{path} is {layout(tensor)} in the live layer, but came out as {layout(other)}")
            else:
                pairs.append((path, tensor, other))
        moving = {storage_key(tensor) for _, tensor, _ in pairs}
        for path in absent:
            tensor = self._tensors[path]
            if storage_key(tensor) not in moving and tensor.is_floating_point() and tensor.numel():
                problems.append(f"{path} was not made anew")
        try:
            if problems:
                raise UnsupportedLayer(
                    f"{type(layer).__name__}: processing again gave another layout: {'; '.join(problems)}; "
                    "the layer keeps its old weights"
                )
            Exchange(pairs).swap()
        finally:
            self.restore(layer)

    def restore(self, layer: torch.nn.Module) -> None:
        """The processed layer as it was: parameters, attributes, kernel objects. Numbers that changed stay."""
        layer._parameters.clear()
        layer._parameters.update(self._parameters)
        layer._buffers.clear()
        layer._buffers.update(self._buffers)
        _put_back(layer, self._own)
        for reference, attributes in self._owners:
            owner = reference()
            if owner is not None:
                _put_back(owner, attributes)


def _put_back(owner: Any, attributes: dict[str, Any]) -> None:
    current = vars(owner)
    for key, value in attributes.items():
        if not isinstance(value, (bool, int, float)) and current.get(key) is not value:
            current[key] = value


def process_again(original: Callable[[Any, torch.nn.Module], None], method: Any, layer: torch.nn.Module) -> None:
    """`original(method, layer)` the first time; later, the same into the storage that the first time made.

    A layer without fresh checkpoint-format parameters is left alone: its scales would be inverted twice.

    Raises:
        UnsupportedLayer: processing gave another layout than the first time; the layer keeps its old weights.
    """
    state = _states.get(layer)
    if state is None:
        templates = {n: template_of(p, layer) for n, p in layer._parameters.items() if p is not None}
        original(method, layer)
        quant_method = getattr(layer, "quant_method", None)
        owners = [one for one in (method, quant_method) if one is not None and hasattr(one, "__dict__")]
        _states[layer] = LayerState(layer, templates, owners)
        return
    if not state.pending(layer):
        return
    try:
        state.isolate(layer)
        with torch.no_grad():
            original(method, layer)
    except BaseException:
        state.restore(layer)
        raise
    state.adopt(layer)


def template_of(parameter: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """A meta tensor that can be made into a parameter like this one; holds no reference to its layer."""
    from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs

    out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    out.__class__ = parameter.__class__
    out.__dict__ = dict(parameter.__dict__)
    return sanitize_layer_refs(out, layer)  # type: ignore[no-any-return]


def layer_state(layer: torch.nn.Module) -> LayerState | None:
    return _states.get(layer)
