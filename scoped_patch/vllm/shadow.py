"""A second tree of module objects over the same configuration, with empty checkpoint-format parameters of its own.

vLLM records every layer's parameters (as meta tensors, with their loaders) when a model is built, before loading changes
them. The shadow is what the model was at that point: the model's own `load_weights`, the parameters' own loaders and the
quantisation methods' own processing run on it unchanged, while the live model goes on serving.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.errors import UnsupportedError
from .coverage import Box, Coverage
from .graph import holds_tensors, storage_key
from .kinds import KINDS, is_attention, is_method, is_plain, kind_of, why_optional

_PLAIN = frozenset({str, bytes, int, float, bool, type(None), torch.dtype, torch.device})
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
SMALL = 1 << 20  # bytes; larger plain tensors (KV caches above all) are never copied


@dataclass(eq=False)
class Staged:
    """One checkpoint-format parameter of the shadow, shared by all layers that are tied to it.

    Attributes:
        owners: (layer, attribute name) of every layer that has it.
        faces: per owner, the meta tensor that stands for it until its first shard arrives. Tied layers get one each, as before
            they were tied: a loader that sees the tie would pass one of two names over, unread.
        coverage: what has been written.
        sources: which checkpoint name wrote which boxes.
        optional: why it need not arrive, or None.
        carried: the live parameter still has the checkpoint's format, so that an unwritten part can be taken from it.
    """

    owners: list[tuple[ShadowLayer, str]]
    faces: list[torch.Tensor]
    coverage: Coverage
    sources: dict[str, list[Box]] = field(default_factory=dict)
    optional: str | None = None
    carried: torch.Tensor | None = None
    real: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # Asked for at every write; vLLM's parameter classes answer in Python, slowly.
        face = self.faces[0]
        self.shape, self.stride, self.dtype = tuple(face.shape), face.stride(), face.dtype
        self.is_floating_point, self.numel = face.is_floating_point(), face.numel()

    @property
    def tied(self) -> bool:
        return len(self.owners) > 1

    @property
    def processed(self) -> bool:
        first = self.owners[0][0].processed
        return first if len(self.owners) == 1 else any(layer.processed for layer, _ in self.owners)

    @property
    def lenient(self) -> bool:
        """May come when its layer is complete: what need not come at all, and shape notes, sent once per fused shard."""
        return self.optional is not None or (self.numel <= 8 and not self.is_floating_point)

    def face(self, layer: ShadowLayer, name: str) -> torch.Tensor:
        return self.faces[self.owners.index((layer, name))]

    @property
    def label(self) -> str:
        layer, name = self.owners[0]
        return f"{layer.name}.{name}" if layer.name else name


@dataclass(eq=False)
class ShadowLayer:
    """One module of the model, its shadow, and the staged parameters by name."""

    name: str
    live: torch.nn.Module
    shadow: torch.nn.Module
    params: dict[str, Staged] = field(default_factory=dict)
    processed: bool = False

    @property
    def touched(self) -> bool:
        return any(p.real is not None or p.sources for p in self.params.values())

    @property
    def required(self) -> bool:
        return any(p.optional is None for p in self.params.values())

    @property
    def method(self) -> Any:
        return getattr(self.live, "quant_method", None)


class Shadow:
    """The shadow of one model.

    Attributes:
        root: the shadow of the model itself: call its `load_weights`.
        layers: one per module, in the model's order.
        tree: ids of every live and every shadow module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = list(model.named_modules())
        self._memo: dict[int, Any] = {}
        self._keep: list[Any] = []  # what `_memo` knows by id must stay alive
        for _, live in named:
            self._memo[id(live)] = object.__new__(type(live))
        self.root: torch.nn.Module = self._memo[id(model)]
        self.layers = [ShadowLayer(name, live, self._memo[id(live)]) for name, live in named]
        self.tree = {id(m) for layer in self.layers for m in (layer.live, layer.shadow)}
        tied: dict[tuple[int, int, torch.Size], Staged] = {}
        for layer in self.layers:
            self._fill(layer, tied)
        if not any(layer.params for layer in self.layers):
            raise UnsupportedError(
                f"{type(model).__name__}: vLLM recorded no checkpoint-format parameters for this model "
                "(`record_metadata_for_reloading`, vLLM 0.18 and later, called by `initialize_model`), so there is nothing "
                "to stage new weights into. Build the model through vLLM's own loader."
            )

    def _fill(self, layer: ShadowLayer, tied: dict[tuple[int, int, torch.Size], Staged]) -> None:
        live, shadow = layer.live, layer.shadow
        recorded_params, recorded_buffers, skipped = _recorded(live)
        state = dict(live.__dict__)
        state["_parameters"], state["_buffers"] = {}, {}
        state["_modules"] = {k: None if m is None else self._memo[id(m)] for k, m in live._modules.items()}
        state["_non_persistent_buffers_set"] = set(live._non_persistent_buffers_set)
        rebuilt = is_method(layer.method) and not is_attention(live)
        for key, value in live.__dict__.items():
            kind = KINDS.get(type(value)) or kind_of(type(value))
            if kind == "shared" or key in _TABLES:
                continue
            if rebuilt and (kind == "tensor" or holds_tensors(value)):
                del state[key]  # derived by processing: must be made anew, never shared with the live layer
            elif kind == "tensor":
                state[key] = value.clone() if value.nbytes <= SMALL and not value.is_meta else value
            else:
                state[key] = self._clone(value)
        state.pop("_already_called_process_weights_after_loading", None)
        shadow.__dict__.update(state)

        templates = dict(recorded_params)
        for name, value in live._parameters.items():
            if value is None:
                shadow._parameters[name] = None
            elif name in skipped and name not in templates:
                templates[name] = _template_of_live(live, name, value)
        order = [n for n in live._parameters if n in templates] + [n for n in templates if n not in live._parameters]
        for name in order:
            staged = self._stage(layer, name, templates[name], tied)
            layer.params[name] = staged
            shadow._parameters[name] = staged.face(layer, name)  # type: ignore[assignment]
        for name, buffer in live._buffers.items():
            if buffer is None or name in skipped or name in recorded_buffers:
                small = buffer is not None and buffer.nbytes <= SMALL and name not in skipped
                shadow._buffers[name] = buffer.clone() if small and buffer is not None else buffer

    def _stage(
        self,
        layer: ShadowLayer,
        name: str,
        template: torch.Tensor,
        tied: dict[tuple[int, int, torch.Size], Staged],
    ) -> Staged:
        face = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device="meta")
        dress(face, template, layer.shadow)
        live = layer.live._parameters.get(name)
        same = live is not None and live.shape == template.shape and live.dtype == template.dtype and live.numel() > 0
        key = None
        if same and live is not None:
            key = (storage_key(live), int(live.storage_offset()), live.shape)
            if key in tied:
                tied[key].owners.append((layer, name))
                tied[key].faces.append(face)
                return tied[key]
        staged = Staged([(layer, name)], [face], Coverage(tuple(template.shape)))
        staged.optional = why_optional(layer.live, name)
        if same and is_plain(layer.method):
            staged.carried = live
        if key is not None:
            tied[key] = staged
        return staged

    def _clone(self, value: Any, depth: int = 0) -> Any:
        """Copies of vLLM's own objects (methods, schemes, kernels), with references to modules turned to their shadows."""
        kind = KINDS.get(type(value)) or kind_of(type(value))
        if kind in ("shared", "function", "tensor"):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind == "items":
            items = [self._clone(v, depth + 1) for v in value]
            return value if all(map(operator.is_, items, value)) else type(value)(items)
        if kind == "dict":
            pairs = {k: self._clone(v, depth + 1) for k, v in value.items()}
            return value if all(map(operator.is_, pairs.values(), value.values())) else pairs
        if kind == "bound":
            owner = self._clone(value.__self__, depth + 1)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind == "partial":
            args = [self._clone(v, depth + 1) for v in value.args]
            keywords = {k: self._clone(v, depth + 1) for k, v in value.keywords.items()}
            return functools.partial(self._clone(value.func, depth + 1), *args, **keywords)
        if kind == "module" or not hasattr(value, "__dict__") or depth > 40:
            return value
        out = object.__new__(type(value))
        self._memo[id(value)] = out
        self._keep.append(value)
        for k, v in vars(value).items():
            out.__dict__[k] = self._clone(v, depth + 1)
        return out


@functools.cache
def _reload() -> tuple[Any, set[str]]:
    from vllm.model_executor.model_loader.reload import meta
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info, set(meta.SKIP_TENSORS)


@functools.cache
def _sentinel() -> Any:
    """What stands for the layer in a recorded loader. On its own: rebuilding parameters needs none of vLLM's records."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    return layer_ref_sentinel


def _recorded(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], set[str]]:
    get_layerwise_info, never_recorded = _reload()
    info = get_layerwise_info(module)
    if info.load_numel_total is not None:  # `can_load()`, or `can_process()` in 0.18
        raise UnsupportedError(
            f"{type(module).__name__}: vLLM's own layerwise reload is under way on this model; finish it first "
            "(`finalize_layerwise_reload`), then enter `reload_weights`."
        )
    params, buffers = info.restore_metadata
    return dict(params), dict(buffers), never_recorded


def _template_of_live(module: torch.nn.Module, name: str, live: torch.Tensor) -> torch.Tensor:
    """vLLM records no biases. A kernel may have permuted one, or lost its loader, but not its shape."""
    dtype = getattr(module, "params_dtype", live.dtype) if name == "bias" else live.dtype
    out = torch.empty(live.shape, dtype=dtype, device="meta")
    out.__class__ = live.__class__
    out.__dict__ = dict(live.__dict__)
    if name == "bias" and not hasattr(out, "weight_loader") and hasattr(module, "weight_loader"):
        out.output_dim = 0  # type: ignore[attr-defined]
        out.weight_loader = module.weight_loader  # type: ignore[attr-defined]
    return out


def dress(tensor: torch.Tensor, template: torch.Tensor, owner: torch.nn.Module) -> None:
    """Give `tensor` the class and the attributes of `template`, its loaders bound to `owner`."""
    layer_ref_sentinel = _sentinel()
    tensor.__class__ = template.__class__
    tensor.__dict__ = dict(template.__dict__)
    for key, value in tensor.__dict__.items():
        if type(value) in _PLAIN:
            continue
        while getattr(value, "__name__", "") == "online_process_loader":
            # vLLM's own layerwise reload leaves its wrapper on what it recorded.
            value = tensor.__dict__[key] = value.__wrapped__
        if isinstance(value, types.MethodType) and (
            value.__self__ is layer_ref_sentinel or isinstance(value.__self__, type(owner))
        ):
            tensor.__dict__[key] = types.MethodType(value.__func__, owner)


def containers(name: str) -> Iterator[str]:
    """The names of the modules around a module: "a.b", "a" and "" of "a.b.c"."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def tied_group(layer: ShadowLayer) -> list[ShadowLayer]:
    """The layers that share a parameter with this one, itself included: they are processed and committed together."""
    group, todo = [layer], [layer]
    while todo:
        for staged in todo.pop().params.values():
            for owner, _ in staged.owners:
                if all(owner is not known for known in group):
                    group.append(owner)
                    todo.append(owner)
    return group
