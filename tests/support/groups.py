"""Batches whose rows share prefixes, as GRPO makes them, for text and vision models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests import tiny_models
from tests.support.scores import IGNORE

PREFIXES = (9, 1, 6)
RESPONSES = ((5, 7, 3), (4, 6), (1,))


@dataclass
class Groups:
    """A batch and what is known of it.

    Attributes:
        batch: input_ids, attention_mask, labels (responses only), and what images need.
        group_ids: [B].
        prefixes: per row, its prefix's tokens; shared within a group.
        responses: per row.
        tokens: P + sum(R), over all groups.
        scored: rows that have to reach the head.
    """

    batch: dict[str, Any]
    group_ids: Tensor
    prefixes: list[Tensor]
    responses: list[Tensor]
    tokens: int
    scored: int

    @property
    def real(self) -> Tensor:
        return self.batch["attention_mask"].bool()


def text_groups(
    prefixes: Sequence[int] = PREFIXES,
    responses: Sequence[Sequence[int]] = RESPONSES,
    side: str = "right",
    seed: int = 0,
    extra: int = 2,
) -> Groups:
    """Rows in random order, padded on a side or on `"both"`; responses of a group differ from their first token on.

    Args:
        prefixes: tokens of each group's prefix.
        responses: tokens of each response, per group.
        extra: columns of padding that even the longest row has.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[tuple[int, Tensor, Tensor]] = []
    for group, (length, members) in enumerate(zip(prefixes, responses, strict=True)):
        prefix = torch.randint(3, 100, (length,), generator=generator)
        for number, size in enumerate(members):
            response = torch.randint(3, 100, (size,), generator=generator)
            response[:1] = 50 + number
            rows.append((7 - group, prefix, response))
    shared = sum(p for p, members in zip(prefixes, responses, strict=True) if len(members) > 1)
    alone = sum(p for p, members in zip(prefixes, responses, strict=True) if len(members) == 1)
    tokens = shared + alone + sum(map(sum, responses))
    order = torch.randperm(len(rows), generator=generator).tolist()
    return assemble([rows[i] for i in order], side, extra, tokens)


def assemble(rows: Sequence[tuple[int, Tensor, Tensor]], side: str, extra: int, tokens: int) -> Groups:
    """(group, prefix, response) rows to a padded batch."""
    width = max(len(p) + len(r) for _, p, r in rows) + extra
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
    for row, (_, prefix, response) in enumerate(rows):
        whole = torch.cat([prefix, response])
        start = {"right": 0, "left": width - len(whole), "both": (width - len(whole)) // 2}[side]
        ids[row, start : start + len(whole)] = whole
        mask[row, start : start + len(whole)] = 1
        labels[row, start + len(prefix) : start + len(whole)] = response
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    scored = sum(len(response) for _, _, response in rows)
    return Groups(
        batch, torch.tensor([g for g, _, _ in rows]), [p for _, p, _ in rows], [r for _, _, r in rows], tokens, scored
    )


def image_groups(
    images: Sequence[int] = (1, 2), side: str = "right", in_responses: bool = False, alike: bool = True, seed: int = 0
) -> Groups:
    """Two prompts with images and three answers each.

    Args:
        images: in each prompt.
        in_responses: every answer has an image of its own too.
        alike: otherwise the last image of the prompts is another picture in each group's second row.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, pictures = [], []
    for group, count in enumerate(images):
        prefix = _with_images(8 + 10 * count, range(4, 4 + 10 * count, 10), generator)
        shown = [_picture(generator) for _ in range(count)]
        for number in range(3):
            response = _with_images(5 + 2 * number + 8 * in_responses, [2] if in_responses else [], generator)
            response[0] = 50 + number
            own = list(shown)
            if not alike and number == 1:
                own[-1] = _picture(generator)
            rows.append((group, prefix, response))
            pictures.append(own + ([_picture(generator)] if in_responses else []))
    order = torch.randperm(len(rows), generator=generator).tolist()
    rows, pictures = [rows[i] for i in order], [pictures[i] for i in order]
    tokens = sum(8 + 10 * count for count in images) + sum(len(r) for _, _, r in rows)
    made = assemble(rows, side, 2, tokens)
    all_pictures = [picture for row in pictures for picture in row]
    ids, labels = made.batch["input_ids"], made.batch["labels"]
    labels[labels >= tiny_models.IMG] = IGNORE
    made.scored = int((labels != IGNORE).sum())
    made.batch["pixel_values"] = torch.cat(all_pictures)
    made.batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(all_pictures))
    made.batch["mm_token_type_ids"] = (ids == tiny_models.IMG).long()
    return made


def _with_images(length: int, starts: Sequence[int], generator: torch.Generator) -> Tensor:
    ids = torch.randint(3, 100, (1, length), generator=generator)
    for start in starts:
        tiny_models._place_image(ids, start)
    return ids[0]


def _picture(generator: torch.Generator) -> Tensor:
    return torch.randn(16, tiny_models._PATCH_DIM, generator=generator)


@dataclass
class Counted:
    """What came past a model's embedding, its head and its vision tower, per call."""

    embedded: list[int] = field(default_factory=list)
    head_rows: list[int] = field(default_factory=list)
    patches: list[int] = field(default_factory=list)


def count(model: nn.Module, run: Callable[[], Any]) -> Counted:
    """Run, and count tokens that are embedded, rows that the head is given, and patches that a tower is given."""
    counted = Counted()
    handles = [
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: counted.embedded.append(args[0].numel())),
        model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: counted.head_rows.append(args[0].shape[:-1].numel())
        ),
    ]
    tower = getattr(model.model, "visual", None)
    if tower is not None:
        handles.append(tower.register_forward_pre_hook(lambda _, args: counted.patches.append(args[0].shape[0])))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return counted
