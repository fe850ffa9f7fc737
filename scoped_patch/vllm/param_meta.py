"""Parameters by checkpoint name, the ones that processing deleted included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..engine.errors import ScopeStateError, TargetError
from .repeatable import layer_state
from .shadow import dress


class ParamMeta(Mapping[str, torch.nn.Parameter]):
    """`dict(model.named_parameters())` as it was before the weights were processed.

    Looking a parameter up that processing has deleted or replaced rebuilds it, empty, with the class and the loader it had,
    and registers it on its layer: what reload code written for a freshly built model expects to find. Once a layer's
    parameters are filled, `process_weights_after_loading` (under the QAT target patches) puts the live ones back.

    Args:
        model: a model whose layers were processed under the target patches (`with patched(qat="nvfp4"):`).

    Raises:
        ScopeStateError: no layer of the model was.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._layers = {n: m for n, m in model.named_modules() if layer_state(m) is not None}
        if not self._layers:
            raise ScopeStateError(
                f"{type(model).__name__}: none of its layers was processed under the QAT target patches; enter "
                'patched(qat="nvfp4") before vLLM loads the first weights'
            )
        self._names = [
            *(
                f"{name}.{key}"
                for name, module in model.named_modules()
                if name not in self._layers
                for key, value in module._parameters.items()
                if value is not None
            ),
            *(f"{name}.{key}" for name, layer in self._layers.items() for key in self._templates(layer)),
        ]

    @staticmethod
    def _templates(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        state = layer_state(layer)
        assert state is not None
        return state.templates

    def __getitem__(self, name: str) -> torch.nn.Parameter:
        path, _, key = name.rpartition(".")
        layer = self._layers.get(path)
        if layer is None:
            return self._model.get_parameter(name)
        templates = self._templates(layer)
        if key not in templates:
            raise KeyError(name)
        state = layer_state(layer)
        assert state is not None
        current: torch.nn.Parameter | None = layer._parameters.get(key)
        if current is not None and current is not state.live(key):
            return current
        return self._rebuild(layer, key, templates[key])

    def _rebuild(self, layer: torch.nn.Module, key: str, template: torch.Tensor) -> torch.nn.Parameter:
        state = layer_state(layer)
        assert state is not None
        out = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device=state.device)
        dress(out, template, layer)
        if not isinstance(out, torch.nn.Parameter):
            raise TargetError(f"{key}: was no parameter when its layer was processed")
        layer._parameters[key] = out
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def prepare(self) -> None:
        """Rebuild every checkpoint-format parameter, so that the model's own `load_weights` finds them."""
        for name in self._names:
            self[name]
