"""The parts of a vision-language model: its tower, what joins it to the text decoder, and what it wants to be called with.

Structure tells all of it for every family of transformers that we know; a `VisionSpec` entry says it outright. A model
without an entry works by inference, and `explain()` says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..engine.adhoc import signature_of
from ..engine.errors import UnsupportedError
from .modules import module_paths
from .spec import describe, find_decoder, is_multimodal, text_config

#: how pixels come: flattened patches [N, C*T*P*P] or patches [N, C, P, P] with a grid, whole images [N, C, H, W], or padded
#: patches [N, M, C*P*P] with their places
Pixels = Literal["patch_rows", "patches", "images", "placed_patches"]


@dataclass(frozen=True)
class VisionSpec:
    """What is known of a family.

    Attributes:
        model_type: `config.model_type` of the whole model.
        tower: dotted path of the vision tower.
        projector: dotted path of what brings its features into the decoder's width.
        decoder: dotted path of the text decoder.
        head: dotted path of the head.
        pixels: how pixels come.
        axes: of the position ids that the model makes itself: 1, or 3 (time, height, width).
        grid: the argument that gives the shape of each image.
        token_types: the argument that tells image tokens from text, or None.
        deepstack: the decoder adds features of deeper tower layers to its own first layers, at the visual tokens.
    """

    model_type: str
    tower: str = "model.visual"
    projector: str | None = "model.visual.merger"
    decoder: str = "model.language_model"
    head: str = "lm_head"
    pixels: Pixels | None = "patch_rows"
    axes: int = 3
    grid: str | None = "image_grid_thw"
    token_types: str | None = "mm_token_type_ids"
    deepstack: bool = False


#: the families of one design: a tower with its own merger, rope over time, height and width
_MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_moe")
_KIMI: dict[str, Any] = {"pixels": "patches", "axes": 1, "token_types": None}
_GEMMA: dict[str, Any] = {"tower": "model.vision_tower", "axes": 1}
_SPECS = {
    spec.model_type: spec
    for spec in (
        *(VisionSpec(name, deepstack=name.startswith("qwen3_vl")) for name in _MROPE),
        VisionSpec("kimi_k25", "model.vision_tower", "model.mm_projector", **_KIMI),
        VisionSpec(
            "kimi_vl",
            "vision_tower",
            "multi_modal_projector",
            "language_model.model",
            "language_model.lm_head",
            grid="image_grid_hws",
            **_KIMI,
        ),
        VisionSpec(
            "gemma3",
            projector="model.multi_modal_projector",
            pixels="images",
            grid=None,
            token_types="token_type_ids",
            **_GEMMA,
        ),
        VisionSpec("gemma4", projector="model.embed_vision", pixels="placed_patches", grid="image_position_ids", **_GEMMA),
    )
}


@dataclass(frozen=True, eq=False)
class Vision:
    """One model's vision side.

    Attributes:
        model: the unwrapped model.
        base: the module whose forward joins image features and text embeddings (the model itself, or a child).
        tower, decoder: modules.
        projector: module, or None where none was found apart from the tower.
        spec: what is known or was inferred.
        inferred: there is no entry for this family.
        features: name of the method of `base` that runs tower and projector, or None.
    """

    model: nn.Module
    base: nn.Module
    tower: nn.Module
    projector: nn.Module | None
    decoder: nn.Module
    spec: VisionSpec
    inferred: bool
    features: str | None

    def parameters(self) -> list[nn.Parameter]:
        """Of tower and projector, each once."""
        parts = [self.tower] if self.projector is None else [self.tower, self.projector]
        return list({id(p): p for part in parts for p in part.parameters()}.values())

    def notes(self) -> tuple[str, ...]:
        """One line for `explain()`."""
        spec = self.spec
        what = [f"vision tower {spec.tower}", f"projector {spec.projector or 'not found'}", f"decoder {spec.decoder}"]
        what += [f"position ids of {spec.axes} axes"] if spec.axes > 1 else []
        what += ["deepstack"] if spec.deepstack else []
        line = ", ".join(what)
        return (f"structure of {spec.model_type!r} inferred (no entry of its own): {line}" if self.inferred else line,)

    def blank(self) -> dict[str, Any] | None:
        """Arguments of `features` for the smallest black image, or None where their shape is not known."""
        make = _BLANKS.get(self.spec.pixels or "")
        if make is None or self.features is None:
            return None
        weight = next((p for p in self.tower.parameters() if p.is_floating_point()), None)
        where = {"device": weight.device, "dtype": weight.dtype} if weight is not None else {}
        return make(self.tower.config, self.spec.grid, where)


def find_vision(model: nn.Module) -> Vision:
    """The vision side of a model.

    Raises:
        UnsupportedError: it has none, or its tower cannot be found; names what was looked for.
    """
    if not is_multimodal(model):
        raise UnsupportedError(f"{describe(model)} is no vision-language model: its config has no vision_config")
    decoder, paths, base, features = _surroundings(model)
    known = _SPECS.get(getattr(model.config, "model_type", ""))
    modules = {path: id_ for id_, path in paths.items()}
    if known is not None and known.tower in modules and paths.get(id(decoder)) == known.decoder:
        spec, inferred = known, False
    else:
        spec, inferred = _infer(model, base, decoder, features, paths), True
    projector = None if spec.projector is None else model.get_submodule(spec.projector)
    return Vision(model, base, model.get_submodule(spec.tower), projector, decoder, spec, inferred, features)


#: methods that run the tower and the projector on pixels
_FEATURES = ("get_image_features", "_extract_image_features")
_TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder", "image_encoder", "vision")
_PROJECTORS = ("multi_modal_projector", "mm_projector", "embed_vision", "connector", "aligner", "projector", "vision_projector")


def infer_vision(model: nn.Module) -> VisionSpec:
    """What structure alone says of a model; raises as `find_vision` does."""
    decoder, paths, base, features = _surroundings(model)
    return _infer(model, base, decoder, features, paths)


def _surroundings(model: nn.Module) -> tuple[nn.Module, dict[int, str], nn.Module, str | None]:
    """The text decoder, all paths, the module that takes pixels, and the name of its method that runs the tower."""
    decoder = find_decoder(model)
    paths = module_paths(model)
    base = _base(model, decoder, paths)
    return decoder, paths, base, next((name for name in _FEATURES if callable(getattr(base, name, None))), None)


def _base(model: nn.Module, decoder: nn.Module, paths: dict[int, str]) -> nn.Module:
    """The innermost module around the decoder that takes pixels."""
    parts = paths[id(decoder)].split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return next((module for module in reversed(around) if _takes(module, "pixel_values")), model)


def _takes(module: nn.Module, name: str) -> bool:
    signature = signature_of(type(module).forward)
    return signature is not None and name in signature.parameters


def _infer(model: nn.Module, base: nn.Module, decoder: nn.Module, features: str | None, paths: dict[int, str]) -> VisionSpec:
    tower = next((base._modules[name] for name in _TOWERS if isinstance(base._modules.get(name), nn.Module)), None)
    if tower is None:
        getter: Any = getattr(model, "get_encoder", None)
        tower = getter(modality="image") if getter is not None and _accepts(getter, "modality") else None
    if tower is None or tower is base or tower is model or id(tower) not in paths:
        raise UnsupportedError(
            f"{describe(model)} has no vision tower that could be found: looked for {', '.join(_TOWERS)} in "
            f"{type(base).__name__} and asked get_encoder(modality='image')"
        )
    projector = next((base._modules[name] for name in _PROJECTORS if isinstance(base._modules.get(name), nn.Module)), None)
    if projector is None:
        projector = tower._modules.get("merger")
    rope = getattr(text_config(model), "rope_parameters", None) or {}
    takes = set(_parameters(getattr(base, features))) if features is not None else set()
    pixels: Pixels | None = None
    grid = next((name for name in ("image_grid_thw", "image_grid_hws", "image_position_ids") if name in takes), None)
    if grid == "image_position_ids":
        pixels = "placed_patches"
    elif grid is not None:
        flat = hasattr(getattr(tower, "config", None), "temporal_patch_size")
        pixels = "patch_rows" if flat else "patches"
    elif "pixel_values" in takes and hasattr(getattr(tower, "config", None), "image_size"):
        pixels = "images"
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return VisionSpec(
        getattr(model.config, "model_type", type(model).__name__),
        paths[id(tower)],
        None if projector is None else paths[id(projector)],
        paths[id(decoder)],
        paths.get(id(head), "") if head is not None else "",
        pixels,
        3 if isinstance(rope, dict) and "mrope_section" in rope else 1,
        grid,
        next((name for name in ("mm_token_type_ids", "token_type_ids") if _takes(base, name)), None),
        _takes(decoder, "deepstack_visual_embeds"),
    )


def _accepts(function: Any, name: str) -> bool:
    return name in _parameters(function)


def _parameters(function: Any) -> tuple[str, ...]:
    signature = signature_of(inspect.unwrap(function))
    return tuple(signature.parameters) if signature is not None else ()


def _channels(config: Any) -> int:
    return int(getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3)


def _merged(config: Any) -> tuple[int, int]:
    """Height and width, in patches, of the smallest image: one token."""
    kernel = getattr(config, "merge_kernel_size", None)
    if kernel is not None:
        return int(kernel[0]), int(kernel[1])
    size = int(getattr(config, "spatial_merge_size", 1))
    return size, size


def _grid(config: Any, name: str | None, device: Any) -> dict[str, Tensor]:
    height, width = _merged(config)
    shape = [height, width] if name == "image_grid_hws" else [1, height, width]
    return {str(name): torch.tensor([shape], device=device)}


def _patch_rows(config: Any, grid: str | None, where: dict[str, Any]) -> dict[str, Any]:
    height, width = _merged(config)
    size = _channels(config) * int(getattr(config, "temporal_patch_size", 1)) * int(config.patch_size) ** 2
    return {"pixel_values": torch.zeros(height * width, size, **where), **_grid(config, grid, where.get("device"))}


def _patches(config: Any, grid: str | None, where: dict[str, Any]) -> dict[str, Any]:
    height, width = _merged(config)
    pixels = torch.zeros(height * width, _channels(config), config.patch_size, config.patch_size, **where)
    return {"pixel_values": pixels, **_grid(config, grid, where.get("device"))}


def _images(config: Any, grid: str | None, where: dict[str, Any]) -> dict[str, Any]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(1, _channels(config), height, width, **where)}


def _placed_patches(config: Any, grid: str | None, where: dict[str, Any]) -> dict[str, Any]:
    side = int(getattr(config, "pooling_kernel_size", 1))
    y, x = torch.meshgrid(*(torch.arange(side, device=where.get("device")) for _ in range(2)), indexing="ij")
    pixels = torch.zeros(1, side * side, _channels(config) * int(config.patch_size) ** 2, **where)
    return {"pixel_values": pixels, str(grid): torch.stack([x.flatten(), y.flatten()], -1)[None]}


_BLANKS: dict[str, Callable[[Any, str | None, dict[str, Any]], dict[str, Any]]] = {
    "patch_rows": _patch_rows,
    "patches": _patches,
    "images": _images,
    "placed_patches": _placed_patches,
}
