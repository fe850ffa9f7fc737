"""Batches without images on some ranks: the vision tower runs all the same, on a blank image that changes nothing.

A rank whose batch has no images would skip the tower. Its parameters then have no gradient there, which trainers that
reduce gradients (DDP) do not expect, and a tower whose weights are sharded (FSDP) waits for that rank for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..engine import Edit, Patch, Support, attribute_slot
from ..engine.errors import ScopedPatchError, SeamNotReachedError
from ..models.attention import bind_positional
from ..models.modules import forward_edit, module_paths
from ..models.placement import Placement
from ..models.spec import describe, is_multimodal
from ..models.unwrap import class_names, unwrap
from ..models.vision import Vision, find_vision

RANK = 25

#: arguments that bring images (or their features) into a call
_MEDIA = ("pixel_values", "pixel_values_videos", "image_embeds", "video_embeds", "image_features", "mm_encoder_outputs")


@dataclass(frozen=True, eq=False)
class VLMMixedBatch(Patch):
    """A batch without images gives every parameter of the vision tower and its projector a gradient of zeros.

    The tower runs on the smallest black image, between the embedding and the decoder, where it runs when there are images,
    so that the collectives of sharded towers stay in step. Its features are tied to the embeddings with no effect: outputs
    and loss are bit for bit those without it, random numbers included.

    It runs where gradients are on and the tower is trained, and wherever the tower's weights are sharded: there also
    without gradients and for frozen towers, and in `generate()` when the prompt is read. Elsewhere it costs nothing.

    Added by `patched(...)` to every scope with `sp=` on a vision-language model; `vlm_mixed_batch=True` adds it without, and
    `vlm_mixed_batch=False` leaves it out.

    Args:
        required: refuse a model whose blank image cannot be made; otherwise it is left alone, and `explain()` says so.

    Raises (when entering):
        UnsupportedError: no vision-language model, or (`required`) nothing is known of the pixels it takes.
    """

    required: bool = True
    name: str = field(default="vlm_mixed_batch", init=False, repr=False)

    def supports(self, target: Any) -> Support:
        model = unwrap(target).model
        if not self.required and not is_multimodal(model):
            return Support(True)
        try:
            vision = find_vision(model)
            problem = _problem(vision)
        except ScopedPatchError as error:
            problem = str(error)
        if problem is None:
            return Support(True)
        if self.required:
            return Support(False, problem)
        return Support(True, skipped=(f"batches without images are as upstream: {problem}",))

    def fingerprint(self, target: Any) -> Hashable:
        try:
            vision = find_vision(unwrap(target).model)
        except ScopedPatchError as error:
            return str(error)
        return (id(vision.model), id(vision.base), id(vision.tower), id(vision.projector))

    def plan(self, target: Any) -> Iterable[Edit]:
        model = unwrap(target).model
        try:
            vision = find_vision(model)
            if _problem(vision) is not None:
                return
        except ScopedPatchError:
            return
        seam = _Seam(vision)
        path = module_paths(model).get(id(vision.base)) or type(vision.base).__name__
        common: dict[str, Any] = {"token": (self.name, id(vision.base))}
        parts = [vision.base, vision.tower, *([] if vision.projector is None else [vision.projector])]
        yield Placement(self.name, model, parts).edit()
        yield forward_edit(
            vision.base,
            path,
            seam.base_forward,
            name="vlm_mixed_batch_forward",
            rank=RANK,
            reason="see whether a batch has images",
            to="with a blank image where there is none",
            **common,
        )
        yield Edit(
            attribute_slot(vision.base, "get_input_embeddings", f"{path}.get_input_embeddings"),
            seam.input_embeddings,
            "wrap",
            "after the embedding, before the decoder",
            RANK,
            commutes=True,
            to="tied to the features of a blank image, with no effect",
            **common,
        )


def _problem(vision: Vision) -> str | None:
    if vision.blank() is None:
        return (
            f"{describe(vision.model)} has no blank image that could be made: nothing is known of the pixels that its vision "
            f"tower {vision.spec.tower} takes (looked for get_image_features with image_grid_thw, or an image_size)"
        )
    return None


class _Call:
    """One call without images."""

    tied = False


class _Seam:
    """What the edits of one plan share. `calls` are those that run now and have no images, innermost last."""

    def __init__(self, vision: Vision) -> None:
        self.vision = vision
        self.calls: list[_Call] = []
        self.positional = bind_positional(type(vision.base).forward)

    def base_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = {**kwargs, **dict(zip(self.positional, args, strict=False))}
        if any(_present(named.get(name)) for name in _MEDIA) or _continues(named) or not self._wanted():
            return prior(*args, **kwargs)
        if isinstance(named.get("inputs_embeds"), Tensor):
            # The embedding is not asked: this is where the tower would run next.
            named["inputs_embeds"] = self.tied(named["inputs_embeds"])
            return prior(**named)
        call = _Call()
        self.calls.append(call)
        try:
            out = prior(*args, **kwargs)
        finally:
            self.calls.remove(call)
        if not call.tied:
            raise SeamNotReachedError(
                f"vlm_mixed_batch: {describe(self.vision.model)} was called without images, and its "
                f"{type(module).__name__} never asked get_input_embeddings() for its embedding, after which the tower runs"
            )
        return out

    def _wanted(self) -> bool:
        parts = [self.vision.tower] if self.vision.projector is None else [self.vision.tower, self.vision.projector]
        if any(_sharded(module) for part in parts for module in part.modules()):
            return True
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.vision.parameters())

    def input_embeddings(self, prior: Callable[..., Any]) -> Callable[..., Any]:
        def tied_input_embeddings(*args: Any, **kwargs: Any) -> Any:
            embedding = prior(*args, **kwargs)
            call = self.calls[-1] if self.calls else None
            if call is None or call.tied:
                return embedding

            def embed(*inputs: Any, **options: Any) -> Any:
                embeds = embedding(*inputs, **options)
                if call.tied:
                    return embeds
                call.tied = True
                return self.tied(embeds)

            return embed

        tied_input_embeddings.__doc__ = prior.__doc__
        return tied_input_embeddings

    def tied(self, embeds: Tensor) -> Tensor:
        """The same embeddings; backward gives the features of a blank image gradients of zeros."""
        blank = self.vision.blank()
        assert blank is not None  # `supports` said so
        assert self.vision.features is not None
        with _random_numbers_kept(embeds.device):
            features = getattr(self.vision.base, self.vision.features)(**blank)
        reached = list({id(x): x for x in _tensors(features) if x.requires_grad}.values())
        return _Tied.apply(embeds, *reached) if reached else embeds  # type: ignore[no-untyped-call]


class _Tied(torch.autograd.Function):
    """Identity of the first tensor; zeros to all others. (Adding zero times them would turn -0.0 into 0.0.)"""

    @staticmethod
    def forward(ctx: Any, embeds: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in others]
        return embeds.view_as(embeds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))


def _present(given: Any) -> bool:
    return given is not None and not (isinstance(given, (Tensor, list, tuple, dict)) and len(given) == 0)


def _continues(named: dict[str, Any]) -> bool:
    """A step of generation: the prompt was read before, images and all."""
    cache = named.get("cache", named.get("past_key_values"))
    length = getattr(cache, "get_seq_length", None)
    return length is not None and int(length()) > 0


def _sharded(module: nn.Module) -> bool:
    return bool(class_names(module) & {"FSDPModule", "FullyShardedDataParallel"})


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        # An output class of transformers may have been given attributes that it does not declare, and so does not list.
        for value in (*x.values(), *getattr(x, "__dict__", {}).values()):
            yield from _tensors(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from _tensors(value)
    elif hasattr(x, "__dataclass_fields__"):
        for name in x.__dataclass_fields__:
            yield from _tensors(getattr(x, name))


@contextlib.contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Dropout in the tower draws, and gives back what it drew."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield
