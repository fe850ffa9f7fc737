"""The settings that sequence parallelism is run in: families, lengths, rows, layouts, and which of them can be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "deepseek_v3",
    "apertus",
)
#: families with a recurrence; upstream it runs on through packed samples, so their reference is sample by sample
RECURRENT = ("qwen3_5_text", "kimi_linear")
#: families without router logits of their own are not asked for an auxiliary loss
WITH_ROUTER = ("qwen3_moe", "gpt_oss")
NO_SDPA = ("gpt_oss",)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        ranks: how many share a sequence.
        family, attention: a tiny model and its attention implementation (`flash` is the stand-in).
        batch, length: of the input ids.
        rows: `plain`; `padded` on the left in the last row; `packed` position ids; `masked` by a custom 4-D mask.
        call: `logits`; `fused`; `sharded` (cut inputs and outputs); `sharded_fused`; with `tiled` also in tiles.
        reduction: what is done with the gradients of all ranks.
        checkpoint: None, `reentrant` or `nonreentrant` activation checkpointing.
        nesting: `one` call of patched(), or two scopes: `sp_outer`, `sp_inner`.
        device: where the model is; ranks may share a card.
    """

    family: str
    attention: str = "sdpa"
    batch: int = 1
    length: int = 32
    rows: str = "plain"
    call: str = "logits"
    reduction: str = "mean"
    checkpoint: str | None = None
    nesting: str = "one"
    ranks: int = 2
    device: str = "cpu"

    def __str__(self) -> str:
        parts = [self.family, self.attention, f"{self.batch}x{self.length}", self.rows, self.call, self.reduction]
        parts += [f"{self.checkpoint} checkpoints"] if self.checkpoint else []
        return " ".join([*parts, self.nesting])

    @property
    def fused(self) -> bool:
        return "fused" in self.call or "tiled" in self.call

    @property
    def sharded(self) -> bool:
        return self.call.startswith("sharded")


def possible(case: Case) -> bool:
    """Is there such a run? transformers, or the layout, rules some combinations out."""
    if case.attention == "sdpa" and case.family in NO_SDPA:
        return False
    if case.attention == "flash" and (case.rows == "masked" or case.family in ("gemma4_text", *RECURRENT)):
        return False
    if case.rows == "masked" and case.family in (*RECURRENT, *WITH_ROUTER):
        return False  # no padding to tell a recurrence or an auxiliary loss of
    if case.rows == "packed" and (case.length < 8 or case.family in NO_SDPA):
        return False  # this eager family leaks across packed samples upstream
    if case.attention == "flash" and case.rows == "packed" and case.batch != 1:
        return False
    if case.rows == "padded" and case.length < 8:
        return False
    if case.call == "sharded" and case.nesting != "one":
        return False
    return not (case.call == "logits" and case.nesting != "one")


def make_batch(case: Case) -> dict[str, Tensor]:
    """The same on every rank; labels leave out the first third."""
    generator = torch.Generator().manual_seed(case.length + case.batch)
    ids = torch.randint(3, 100, (case.batch, case.length), generator=generator)
    labels = ids.clone()
    labels[:, : case.length // 3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if case.rows == "padded":
        mask = torch.ones_like(ids)
        mask[-1, : case.length // 5] = 0
        batch["attention_mask"] = mask
        batch["labels"] = labels.masked_fill(mask == 0, -100)
    elif case.rows == "packed":
        batch["position_ids"] = packed_positions(case.length).expand(case.batch, -1).contiguous()
    elif case.rows == "masked":
        seen = torch.ones(case.length, case.length, dtype=torch.bool).tril()
        seen[:, 1] = False  # nobody but itself looks at the second token
        seen.fill_diagonal_(True)
        seen = seen.expand(case.batch, 1, -1, -1)
        additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        batch["attention_mask"] = seen if case.attention == "sdpa" else additive
    return batch


def sample_lengths(length: int) -> list[int]:
    return [length // 3, length - length // 3 - 2, 2]


def packed_positions(length: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in sample_lengths(length)])[None]


def told_lengths(length: int, device: Any) -> dict[str, Any]:
    """The samples said in full, as flash attention takes them: left to itself, transformers hands the longest length on as a
    tensor, which FlashAttention 4 refuses.
    """
    lengths = sample_lengths(length)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def break_the_exchange(world: int) -> None:
    """In this process, from here on: heads see the tokens of their own rank only, under the right shapes."""
    from scoped_patch.patches.ulysses import attention

    def stay(tensors: tuple[Tensor, ...], group: Any) -> tuple[Tensor, ...]:
        return tuple(x.narrow(1, 0, x.shape[1] // world).repeat(1, 1, world, 1) for x in tensors)

    attention.heads_from_sequence = stay


def pairwise(axes: dict[str, tuple[Any, ...]], base: Any, possible: Callable[[Any], bool] = possible) -> list[Any]:
    """Cases like `base` in which every possible pair of two axes' values occurs at least once. Greedy and deterministic."""
    names = list(axes)
    pairs: set[tuple[tuple[str, Any], tuple[str, Any]]] = set()
    for a, b in itertools.combinations(names, 2):
        pairs |= {((a, x), (b, y)) for x in axes[a] for y in axes[b]}
    generator = random.Random(0)
    chosen: list[Any] = []
    while pairs:
        first = min(pairs, key=repr)
        best: Any = None
        best_gain: set[Any] = set()
        for _ in range(120):
            values = {name: generator.choice(axes[name]) for name in names}
            values |= dict(first)
            case = replace(base, **values)
            if not possible(case):
                continue
            gain = {p for p in pairs if all(values[name] == value for name, value in p)}
            if len(gain) > len(best_gain):
                best, best_gain = case, gain
        if best is None:
            pairs.discard(first)
            continue
        chosen.append(best)
        pairs -= best_gain
    return chosen
