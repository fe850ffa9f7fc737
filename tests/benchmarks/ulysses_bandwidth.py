"""The library's exchange against bare all-to-alls of the same bytes in the same run."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from scoped_patch.ops.sequence_parallel import HeadLayout, heads_from_sequence, sequence_from_heads
from tests.benchmarks.ulysses_layer import Shape
from tests.benchmarks.ulysses_ranks import Clock, Place, marked


def measure(shape: Shape, length: int, place: Place, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """GB/s that a rank sends to others in the two forward exchanges of a layer, three ways.

    `bare`: two `all_to_all_single` of the same bytes on buffers that are there already. `collectives`: the library's, the time
    inside of the collectives. `exchange`: the library's with packing and unpacking.

    Of n ranks each keeps 1/n of its buffer, so that bus bandwidth is bytes * (n - 1) / n over the time.
    """
    layout = HeadLayout(shape.heads, shape.kv_heads, place.world)
    tokens = length // place.world
    sent = place.world * layout.kv_per_rank
    tensors = [
        torch.randn(1, heads, tokens, shape.head_dim, device=place.device, dtype=dtype) for heads in (shape.heads, sent, sent)
    ]
    there = torch.randn(1, length, layout.per_rank, shape.head_dim, device=place.device, dtype=dtype)
    first, second = shape.bytes(length, place.world, dtype.itemsize)
    buffers = [torch.randn(size // dtype.itemsize, device=place.device, dtype=dtype) for size in (first, second)]
    received = [torch.empty_like(buffer) for buffer in buffers]
    group: Any = dist.group.WORLD

    def bare(_: Any) -> None:
        for out, buffer in zip(received, buffers, strict=True):
            dist.all_to_all_single(out, buffer)

    inside, whole = [], []
    for _ in range(repeats + 1):
        place.wait()
        clock = Clock(place.device)
        with marked(clock):
            heads_from_sequence(tensors, group)
            sequence_from_heads(there, group)
        clock.mark("unpack")
        parts = clock.parts()
        inside.append(parts["all_to_all"])
        whole.append(sum(parts.values()))
    times = {
        "bare": place.timed(bare, repeats),
        "collectives": statistics.median(inside[1:]),
        "exchange": statistics.median(whole[1:]),
    }
    moved = (first + second) * (place.world - 1) / place.world
    found: dict[str, Any] = {f"{name}_ms": ms for name, ms in times.items()}
    found |= {f"{name}_gb_per_s": moved / ms / 1e6 for name, ms in times.items()}
    found["share_of_bare"] = times["bare"] / times["collectives"]
    found["bytes"] = first + second
    return found
