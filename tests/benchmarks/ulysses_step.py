"""A training step of a small Llama: one process, `sp=1`, and every rank of all of them."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from scoped_patch import patched
from scoped_patch.ops.sequence_parallel import count_collectives
from tests.benchmarks.ulysses_ranks import MIB, Place

HEADS, KV_HEADS, HEAD_DIM = 16, 4, 64


def measure(options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Rows by name, on every rank; those of one process are measured on the first rank while the others wait."""
    alone: dict[str, Any] = {}
    if place.rank == 0:
        alone = {"one process": _step(options, place, None), "sp=1": _step(options, place, 1)}
    spread = _step(options, place, place.world)
    alone = place.gather(alone)[0]
    plain = alone["one process"]
    rows = {name: _row(one, plain) for name, one in alone.items()}
    for rank, row in enumerate(place.gather(_row(spread, plain))):
        rows[f"sp={place.world}, rank {rank}"] = row
    return rows


def _row(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    row = {name: x for name, x in found.items() if not isinstance(x, torch.Tensor)}
    row["log_probs_off"] = (found["log_probs"] - plain["log_probs"]).abs().max().item()
    row["gradient_off"] = ((found["gradient"] - plain["gradient"]).abs().max() / plain["gradient"].abs().max()).item()
    return row


def _step(options: argparse.Namespace, place: Place, sp: int | None) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    length = min(options.length)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=2048,
        num_hidden_layers=options.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=length,
    )
    dtype = getattr(torch, options.dtype)
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation=options.attention, dtype=dtype).to(place.device)
    ids = torch.randint(0, 4096, (1, length), generator=torch.Generator().manual_seed(1)).to(place.device)
    kept: list[torch.Tensor] = []
    together = sp is not None and sp > 1

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, use_cache=False)
        kept[:] = [out.log_probs.detach().float().cpu()]
        out.log_probs.mean().backward()

    here = place if together else _Alone(place)
    with patched(model, sp=sp, fused="torch"), count_collectives() as log:
        milliseconds = here.timed(lambda _: step(), options.repeats)
        calls, size = len(log.calls), log.bytes()
        with place.peak() as peak:
            step()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad.float()
    if together:
        dist.all_reduce(gradient)
        gradient /= sp
    runs = options.repeats + 1
    return {
        "ms": milliseconds,
        "log_probs": kept[0],
        "gradient": gradient.cpu(),
        "collectives": calls // runs,
        "mib_handed_in": size / runs / MIB,
        "peak_mib": peak[0],
    }


class _Alone(Place):
    """The same clock, without waiting for the other ranks."""

    def __init__(self, place: Place) -> None:
        super().__init__(**vars(place))

    def wait(self) -> None:
        self.finish()
