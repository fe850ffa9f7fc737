"""Batches of vision-language models, and one sequence-parallel run of such a model against one process.

A row is a list of parts: text of so many tokens, images, videos. Every family gets the rows in its own shape: grids or fixed
sizes, videos as one block or frame by frame, its own token types and position ids.
"""

from __future__ import annotations

import itertools
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scoped_patch import Ulysses, assert_clean, patched
from scoped_patch.models.spec import forward_names
from tests.support import versions
from tests.support.scores import IGNORE, reference, shifted
from tests.support.ulysses import reduced_gradients, relative, snapshot, take, together
from tests.tiny_models import IMG, MROPE, VEND, VID, VLMS, VSTART, build

FAMILIES = VLMS
#: a video is one block of t * h * w tokens
BLOCK_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "gemma4")
#: every frame of a video is a block of its own, after its time stamp
FRAME_VIDEOS = ("qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_moe")
#: the frames of a video are averaged
POOLED_VIDEOS = ("kimi_k25",)
VIDEOS = BLOCK_VIDEOS + FRAME_VIDEOS + POOLED_VIDEOS
#: images and videos have the same placeholder, so that one batch cannot hold both
ONE_PLACEHOLDER = ("glm4v", "glm4v_moe")
#: remote code; `sdpa` is its flash class here
REMOTE = ("kimi_vl",)
#: with an auxiliary loss of their own
ROUTERS = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
#: their masks see whole images at once; transformers wants to know where these are
TYPED = ("gemma3", "gemma4")
FIXED_SIZE = ("gemma3", "gemma4")


#: with a recurrence, whose float32 gradients are good to a few 1e-4 (the same runs in float64 agree to 1e-5)
RECURRENT = ("qwen3_5", "qwen3_5_moe")


def tolerance(family: str) -> float:
    """Of outputs and gradients, relative to the largest entry."""
    return 1e-3 if family in RECURRENT else 1e-4


class Image(NamedTuple):
    """A picture of so many patches; 2x2 of them make a token."""

    height: int = 4
    width: int = 4


class Video(NamedTuple):
    frames: int = 2
    height: int = 4
    width: int = 4


Part = int | Image | Video
Row = Sequence[Part]

#: what is in a batch -> the rows (the first one, where there is one row)
CONTENTS: dict[str, tuple[Row, Row]] = {
    "text": ([27], [27]),
    "image": ([6, Image(), 15], [3, Image(), 18]),
    "images": ([2, Image(), 3, Image(4, 8), 4], [7, Image(), 1, Image(), 7]),
    "some": ([2, Image(), 1, Image(), 1, Image(), 2], [27]),
    "only": ([0, Image(), Image(), Image()], [Image(), 3, Image()]),
    "video": ([3, Video(), 6], [2, Video(), 11]),
    "long_video": ([1, Video(4), 2], [3, Video(), 5]),
    "both": ([2, Video(), 2, Image(), 1], [4, Image(4, 8), 10]),
}


def make_batch(family: str, rows: Sequence[Row], padding: str | None = None, seed: int = 0) -> dict[str, Any]:
    """The rows as a family takes them: ids, labels, pixels, grids, token types; padded to one length.

    Args:
        padding: `left` or `right`: the last row is five tokens longer than it was, all of them padding. Without it rows are
            filled up with text.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    made = [_row(family, row, generator) for row in rows]
    width = max(len(ids) for ids, _ in made)
    if padding:
        width = max(width, len(made[-1][0]) + 5)
    batch, length = len(made), width
    ids = torch.randint(3, 100, (batch, length), generator=generator)
    types, mask = torch.zeros_like(ids), torch.ones_like(ids)
    for number, (row, kinds) in enumerate(made):
        rest = length - len(row)
        short = bool(padding) and number == batch - 1
        start = rest if short and padding == "left" else 0
        ids[number, start : start + len(row)] = torch.tensor(row)
        types[number, start : start + len(row)] = torch.tensor(kinds)
        if short:
            ids[number, len(row) :] = 0
            if padding == "left":
                ids[number, :start] = 0
                ids[number, start:] = torch.tensor(row)
            mask[number] = 0
            mask[number, start : start + len(row)] = 1
    labels = torch.where((ids == IMG) | (ids == VID) | (mask == 0), IGNORE, ids)
    labels[:, : length // 4] = IGNORE
    given: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if padding or family == "gemma3":
        given["attention_mask"] = mask
    parts = [part for row in rows for part in row]
    given |= pixels(family, [p for p in parts if isinstance(p, Image)], [p for p in parts if isinstance(p, Video)], generator)
    if family == "gemma3":
        given["token_type_ids"] = types
    elif family in TYPED or (family in MROPE and bool(types.any())):
        given["mm_token_type_ids"] = types
    return given


def _row(family: str, row: Row, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Token ids and token types (0 text, 1 image, 2 video)."""
    ids: list[int] = []
    kinds: list[int] = []

    def text(count: int) -> None:
        ids.extend(torch.randint(3, 100, (count,), generator=generator).tolist())
        kinds.extend([0] * count)

    def visual(count: int, token: int, kind: int) -> None:
        ids.extend([VSTART, *[token] * count, VEND])
        kinds.extend([0, *[kind] * count, 0])

    for part in row:
        if isinstance(part, Image):
            visual(4 if family in FIXED_SIZE else part.height * part.width // 4, IMG, 1)
        elif isinstance(part, Video):
            frame = part.height * part.width // 4
            token = IMG if family in ONE_PLACEHOLDER else VID
            if family in FRAME_VIDEOS:
                for _ in range(part.frames):
                    text(1)
                    visual(frame, token, 2)
            else:
                visual(frame * (part.frames if family in BLOCK_VIDEOS else 1), token, 2)
        else:
            text(part)
    return ids, kinds


def pixels(family: str, images: Sequence[Image], videos: Sequence[Video], generator: torch.Generator) -> dict[str, Any]:
    """Pixel tensors and their shapes, as the family's processor names them; nothing for what there is none of."""
    made: dict[str, Any] = {}
    if family == "gemma3":
        return {"pixel_values": torch.randn(len(images), 3, 16, 16, generator=generator)} if images else {}
    if family == "gemma4":
        y, x = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        places = torch.stack([x.flatten(), y.flatten()], -1)
        frames = sum(video.frames for video in videos)
        if images:
            made["pixel_values"] = torch.rand(len(images), 16, 48, generator=generator)
            made["image_position_ids"] = places.expand(len(images), -1, -1).contiguous()
        if videos:
            made["pixel_values_videos"] = torch.rand(frames, 16, 48, generator=generator)
            made["video_position_ids"] = places.expand(frames, -1, -1).contiguous()
            made["num_frames_per_video"] = torch.tensor([video.frames for video in videos])
        return made
    shape = (3, 4, 4) if family in POOLED_VIDEOS + REMOTE else (3 * 2 * 4 * 4,)
    for name, grid_name, grids in (
        ("pixel_values", "image_grid_thw", [(1, *image) for image in images]),
        ("pixel_values_videos", "video_grid_thw", list(videos)),
    ):
        if grids:
            made[name] = torch.randn(sum(t * h * w for t, h, w in grids), *shape, generator=generator)
            made[grid_name] = torch.tensor(grids)
    if family in REMOTE and images:
        made["image_grid_hws"] = made.pop("image_grid_thw")[:, 1:]
    return made


def position_ids(model: Any, family: str, batch: dict[str, Any], kind: str) -> Tensor:
    """Position ids that the caller gives: [3, B, S] as the model makes them, [4, B, S] with the text's in front, or [B, S]."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    text = (mask.cumsum(-1) - 1).clamp(min=0)
    if family not in MROPE:
        return text
    if "mm_token_type_ids" in batch:
        names = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
        axes = model.model.get_rope_index(ids, **{name: batch[name] for name in names if name in batch})[0]
    else:
        axes = text.expand(3, *text.shape)
    return torch.cat([text[None], axes]) if kind == "axes4" else axes.contiguous()


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        ranks: how many share a sequence.
        contents: a key of `CONTENTS`.
        padding: None, `left` or `right`.
        positions: `own` (the model makes them), `axes3`, `axes4` (families without several axes get [B, S]).
        call: `logits`, `fused`, `tiled`, `sharded` (cut outputs), `sharded_fused` (local shift_labels and temperature).
        reduction: what is done with the gradients of all ranks.
        checkpoint: None, `reentrant` or `nonreentrant` activation checkpointing.
    """

    family: str
    attention: str = "sdpa"
    batch: int = 1
    contents: str = "image"
    padding: str | None = None
    positions: str = "own"
    call: str = "logits"
    reduction: str = "mean"
    checkpoint: str | None = None
    ranks: int = 2

    def __str__(self) -> str:
        parts = [self.family, self.attention, f"{self.batch} rows of {self.contents}", f"padding {self.padding}"]
        return " ".join([*parts, self.positions, self.call, self.reduction, str(self.checkpoint)])

    @property
    def fused(self) -> bool:
        return self.call in ("fused", "tiled", "sharded_fused")

    @property
    def sharded(self) -> bool:
        return self.call.startswith("sharded")

    @property
    def rows(self) -> list[Row]:
        return list(CONTENTS[self.contents][: self.batch])


def possible(case: Case) -> bool:
    """Does the family take such a batch?"""
    if case.contents in ("video", "long_video", "both") and case.family not in VIDEOS:
        return False
    return not (case.contents == "both" and case.family in ONE_PLACEHOLDER)


def run_cases(rank: int, world: int, cases: Iterable[Case]) -> list[str]:
    """Run every case; one line per failure, or per case that the unpatched model cannot do (see `versions.failures_of`).

    What the comparisons exchange goes through a group of their own.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    own = dist.new_group(list(range(world)))
    failures = []
    for case in cases:
        try:
            run_case(case, world, rank, own)
        except Exception as error:
            if (missing := versions.absence(error)) is not None:
                failures.append(versions.ABSENT + missing)
                continue
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().splitlines()
            failures.append(f"rank {rank} of {world}: {case}: {type(error).__name__}: {text[0] if text else ''} ({where.name})")
    return failures


def has_routers(family: str, model: Any) -> bool:
    """Does the model take `output_router_logits` beside labels? One version of transformers reads a weight that it has not."""
    known = hasattr(model.config.get_text_config(), "router_aux_loss_coef")
    return family in ROUTERS and (known or not versions.SEVERAL_VERSIONS)


def run_case(case: Case, world: int, rank: int, own: Any = None) -> None:
    """Raise unless logits (or log-probs and entropy), loss and all gradients equal one process."""
    if case.family in REMOTE:
        model, _ = build(case.family, attention_class="eager" if case.attention == "eager" else "flash_attention_2")
    else:
        model, _ = build(case.family, attn=case.attention)
    batch = make_batch(case.family, case.rows, case.padding)
    if case.positions != "own":
        with versions.unpatched(str(case)):
            batch["position_ids"] = position_ids(model, case.family, batch, case.positions)
    if has_routers(case.family, model):
        batch["output_router_logits"] = True
    compare(model, batch, case, world, rank, own)


def compare(model: Any, batch: dict[str, Any], case: Case, world: int, rank: int, own: Any = None) -> None:
    """As `run_case`, on a batch of one's own."""
    problem: Exception | None = None
    found: dict[str, Tensor] = {}
    try:
        if case.checkpoint:
            enable_checkpointing(model, case.checkpoint == "reentrant")
        temperature = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(9)) + 0.5
        scored = not (case.sharded and "loss_function" not in forward_names(model))  # which the cut layout refuses
        with versions.unpatched(str(case)):
            wanted, right = one_process(model, batch, temperature if case.fused else None, scored)
        before = snapshot(model)
        found = spread(model, batch, temperature, case, wanted, world, rank)
        assert_clean()
        assert snapshot(model) == before, "the model is not as it was"
        for name, p in model.named_parameters():
            if p.grad is None and ".experts." in name and case.family in REMOTE:
                p.grad = torch.zeros_like(p)  # an expert that is a module of its own, and was not chosen by this rank's tokens
        names = {name for name, p in model.named_parameters() if p.grad is not None}
        # a tower that saw no image may have zeros where the unpatched model has nothing
        assert right.keys() <= names, f"no gradient of {sorted(right.keys() - names)}"
    except Exception as error:
        problem = error
    together(problem, own)
    rtol = tolerance(case.family)
    off = [line for name, theirs in wanted.items() for line in _off(name, found[name], theirs, rtol)]
    off += _gradients_off(reduced_gradients(model, world, case.reduction, own), right, rtol)
    together(AssertionError(off[0]) if off else None, own)


def enable_checkpointing(model: Any, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in the newest transformers
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def spread(
    model: Any, batch: dict[str, Any], temperature: Tensor, case: Case, wanted: dict[str, Tensor], world: int, rank: int
) -> dict[str, Tensor]:
    """Forward and backward over the ranks: whole outputs; gradients stay on the model, this rank's part of them."""
    if case.sharded:
        call = sharded_call(batch, temperature, case, world, rank)
        if "loss" not in wanted:
            del call["labels"]
    else:
        call = whole_call(batch, temperature, case)
    with patched(model, sp=ulysses(case, world), **others(case)) as scope:
        out = model(**call)
        found = {name: getattr(out, name) for name in wanted}
        objective(found, wanted, world if case.sharded else 1, rank).backward()
        found = {name: x.detach() for name, x in found.items()}
        if case.sharded:
            length = batch["input_ids"].shape[1]
            found = {name: x if x.ndim == 0 else scope.gather(x, 1, length) for name, x in found.items()}
    return found


def _off(name: str, found: Tensor, right: Tensor, rtol: float) -> list[str]:
    if found.shape != right.shape:
        return [f"{name} is {list(found.shape)}, wanted {list(right.shape)}"]
    off = relative(found, right)
    return [] if off <= rtol else [f"{name} is off by {off:.1e}"]


def _gradients_off(found: dict[str, Tensor], right: dict[str, Tensor], rtol: float) -> list[str]:
    """Each against its own largest entry; one that is next to nothing against a thousandth of the largest of all."""
    wrong = []
    largest = max(g.abs().max().item() for g in right.values())
    for name, ours in found.items():
        theirs = right[name] if name in right else torch.zeros_like(ours)
        scale = max(theirs.abs().max().item(), 1e-3 * largest)
        off = (ours - theirs).abs().max().item() / scale
        if not off <= rtol:
            wrong.append(f"the gradient of {name} is off by {off:.1e}")
    return wrong


def ulysses(case: Case, world: int) -> Ulysses:
    return Ulysses(world, inputs="sharded" if case.sharded else "full", grad_reduction=case.reduction)


def others(case: Case) -> dict[str, Any]:
    made: dict[str, Any] = {"fused": "torch"} if case.fused else {}
    if case.call == "tiled":
        made["tiled_mlp"] = 3
    return made


def whole_call(batch: dict[str, Any], temperature: Tensor, case: Case) -> dict[str, Any]:
    return {**batch, "temperature": temperature} if case.fused else batch


def sharded_call(batch: dict[str, Any], temperature: Tensor, case: Case, world: int, rank: int) -> dict[str, Any]:
    """Global ids and position ids; labels whole (`sharded`), or shift_labels and temperature of this rank's tokens."""
    made = dict(batch)
    if case.fused:
        length = batch["input_ids"].shape[1]
        size = -(-length // world)
        part = slice(rank * size, (rank + 1) * size)
        targets = nn.functional.pad(shifted(batch["labels"]), (0, size * world - length), value=IGNORE)
        # a loss is made where there are labels; their values do not matter beside shift_labels
        made["shift_labels"] = targets[:, part]
        made["temperature"] = nn.functional.pad(temperature, (0, size * world - length), value=1.0)[:, part]
    return made


def one_process(
    model: nn.Module, batch: dict[str, Any], temperature: Tensor | None, scored: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs (logits, or with a temperature log-probs and entropy; the loss, if `scored`) and gradients of the unpatched
    model."""
    model.zero_grad(set_to_none=True)
    out = model(**batch, use_cache=False)
    logits, loss = out.logits, out.loss
    wanted = {"logits": logits}
    if temperature is not None:
        targets = shifted(batch["labels"])
        scores = reference(logits, targets, temperature)
        wanted = {"log_probs": scores.log_probs, "entropy": scores.entropy}
        # transformers' own loss does not know of the temperature
        plain = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss = -scores.log_probs.sum() / (targets != IGNORE).sum() + (loss - plain)
    if scored:
        wanted["loss"] = loss
    objective(wanted, wanted, 1, 0).backward()
    return {name: x.detach() for name, x in wanted.items()}, take(model)


def objective(values: dict[str, Tensor], whole: dict[str, Tensor], world: int, rank: int) -> Tensor:
    """Every output enters with a weight of its own, and the loss. In a cut layout: this rank's share of it."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for name, right in whole.items():
        x = values[name]
        if x.ndim == 0:
            total = total + 10 * x.double()
            continue
        weights = torch.randn(right.shape, generator=generator, dtype=torch.float64)
        if world > 1:
            weights = weights[:, rank * x.shape[1] : (rank + 1) * x.shape[1]]
            x = x[:, : weights.shape[1]]
        total = total + (x.double() * weights).sum()
    return total


def product(axes: dict[str, Sequence[Any]], allowed: Callable[[Case], bool] = possible) -> list[Case]:
    made = [Case(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return [case for case in made if allowed(case)]
