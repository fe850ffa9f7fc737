"""What verl's FSDP engine does with a model: how it packs a batch, calls the model, and reads what comes out.

Written from the interface (verl 0.9, `workers/engine/fsdp/transformer_impl.py`), for tests of the drop-in functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scoped_patch.compat import verl
from tests.support.scores import Scores, reference


@dataclass
class Batch:
    """Samples of different lengths, and the temperature of the micro-batch: a number, or one per sample."""

    rows: list[Tensor]
    temperature: Any = 1.0

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]


def make_batch(lengths: Sequence[int], temperature: Any = 1.0, seed: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch([torch.randint(3, 100, (n,), generator=generator) for n in lengths], temperature)


class Engine:
    """One model, used as the engine does: built, patched, cast, checkpointed, wrapped, and stepped."""

    def __init__(self, module: nn.Module, sp: int = 1) -> None:
        self.module = module
        self.sp = sp
        self.pass_packed_cu_seqlens = "cu_seqlens" in inspect.signature(module.forward).parameters

    def inputs(self, batch: Batch) -> tuple[dict[str, Any], int]:
        """The call's keyword arguments, and how many tokens of padding all ranks have together."""
        ids = torch.cat(batch.rows)[None]
        positions = torch.cat([torch.arange(n) for n in batch.lengths])[None]
        rolled = ids.roll(-1, 1)
        bounds = torch.tensor([0, *batch.lengths]).cumsum(0)
        pad = 0
        if self.sp > 1:
            ids, positions, pad = verl.ulysses_pad_and_slice_inputs(ids, positions, self.sp)
            rolled, _, _ = verl.ulysses_pad_and_slice_inputs(rolled, None, self.sp)
        made = {
            "input_ids": ids,
            "attention_mask": None,
            "position_ids": positions,
            "temperature": batch.temperature,
            "return_dict": True,
            "shift_labels": rolled,
        }
        if self.pass_packed_cu_seqlens:
            bounds = torch.cat([bounds, bounds[-1:] + pad]) if pad else bounds
            made |= {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds.cpu()}
        return made, pad

    def step(self, batch: Batch, calculate_entropy: bool) -> dict[str, Tensor]:
        """`log_probs` and, where asked for, `entropy`: [total tokens], on every rank."""
        inputs, pad = self.inputs(batch)
        out = self.module(**inputs, use_cache=False)
        found = {"log_probs": out.log_probs.squeeze(0)}
        if calculate_entropy:
            found["entropy"] = out.entropy.squeeze(0)
        if self.sp > 1:
            found = {
                name: verl.gather_outputs_and_unpad(x, gather_dim=0, unpad_dim=0, padding_size=pad) for name, x in found.items()
            }
        return found


def truth(model: nn.Module, batch: Batch) -> Scores:
    """The same from an unpatched model, one sample at a time, float64 [total tokens]. 0 at the last token of each sample."""
    count = len(batch.rows)
    given = batch.temperature
    temperatures = given.tolist() if isinstance(given, Tensor) and given.ndim else [float(given)] * count
    found = []
    for row, temperature in zip(batch.rows, temperatures, strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits
        targets = torch.cat([row[1:], torch.tensor([-100])])[None]
        found.append(reference(logits, targets, temperature))
    return Scores(*(torch.cat([getattr(one, name)[0] for one in found]) for name in ("log_probs", "entropy")))


def response_mask(batch: Batch) -> Tensor:
    """Tokens that count: all but the last of each sample, whose target belongs to the next."""
    mask = torch.ones(sum(batch.lengths), dtype=torch.bool)
    mask[torch.tensor(batch.lengths).cumsum(0) - 1] = False
    return mask


def loss_of(found: Any, batch: Batch) -> Tensor:
    """A loss in which every token counts differently."""
    mask = response_mask(batch)
    weights = torch.linspace(-1, 1, len(mask), dtype=torch.float64)[mask]
    values = {name: found[name] if isinstance(found, dict) else getattr(found, name) for name in ("log_probs", "entropy")
              if not isinstance(found, dict) or name in found}  # fmt: skip
    total = (values["log_probs"][mask].double() * weights).sum()
    if "entropy" in values:
        total = total - 0.3 * (values["entropy"][mask].double() * weights.flip(0)).sum()
    return total / mask.sum()


def assert_scored(found: dict[str, Tensor], wanted: Scores, batch: Batch, atol: float = 2e-5) -> None:
    mask = response_mask(batch)
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.detach()[mask].double(), getattr(wanted, name).detach()[mask], rtol=0, atol=atol)
