"""Sequence parallelism over any number of ranks: equality with one process, time by part, bytes, bandwidth, memory.

    python tests/benchmarks/bench_ulysses.py                                     two gloo ranks on the CPU
    python tests/benchmarks/bench_ulysses.py --ranks 4 --sp 2 --fsdp             four, with FSDP2 on a (dp, sp) mesh
    python tests/benchmarks/bench_ulysses.py --device cuda --ranks 4 --fsdp      four GPUs, NCCL
    torchrun --nproc-per-node 4 tests/benchmarks/bench_ulysses.py --device cuda --fsdp --json results.json
    python tests/benchmarks/bench_ulysses.py --device cuda --attention flash_attention_4 --dtype bfloat16 --length 16384
                                                                                 with fewer GPUs than ranks: gloo, shared
    python tests/benchmarks/bench_ulysses.py --device cuda --backend nccl --share --only equality
                                                                                 NCCL although ranks share a card

Ends with 1 if anything is not as in one process, or moves other bytes than documented. Parts (`--only`):

equality: tiny Llama and Qwen3 models, KV heads below and above the ranks, plain and packed rows, each attention that runs here.
step: a training step of a small Llama in one process, with `sp=1`, and on every rank.
layer: one attention layer of Qwen3-8B's shape at every `--length`, split into projections, packing, all-to-all, attention and
unpacking; the same with communication behind computation, and with an all-to-all of lists for each tensor; and the bandwidth
of the exchange beside that of bare all-to-alls. All ranks share one sequence here.

On a machine whose cores, or whose one card, the ranks share, times show what the exchange costs there and no gain.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")))

import torch

from tests.benchmarks import ulysses_bandwidth, ulysses_layer, ulysses_report, ulysses_step
from tests.benchmarks.ulysses_ranks import Place, run_ranks
from tests.support import ulysses_equality

SECTIONS = ("equality", "step", "layer")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes to start (2); under torchrun its own number")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="nccl where every rank has a GPU, else gloo")
    parser.add_argument("--share", action="store_true", help="let ranks of NCCL share cards")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--sp", type=int, help="equality: ranks that share a sequence (all); the others are data parallel")
    parser.add_argument("--fsdp", action="store_true", help="equality: FSDP2, fused head, tiles and checkpointing too")
    parser.add_argument("--every", type=int, default=1, help="equality: take every n-th setting")
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "flash_attention_4"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="step and layer (bfloat16 on a GPU, else float32)")
    parser.add_argument("--length", type=int, nargs="+", help="tokens (1024; on a GPU 32768 and 131072); step: the least")
    parser.add_argument("--layers", type=int, default=4, help="of the step's model")
    parser.add_argument("--repeats", type=int, default=3)
    for name, value in asdict(ulysses_layer.Shape()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value, help="of the layer")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.length = options.length or ([32768, 131072] if options.device == "cuda" else [1024])
    return options


def work(place: Place, options: argparse.Namespace) -> int:
    """Everything that was asked for, on this rank; the exit status, the same on every rank."""
    found: dict[str, Any] = {"environment": _environment(place)}
    if "equality" in options.only:
        found["equality"] = _equality(place, options)
        found["left_out"] = [why for why in (ulysses_equality.why_no_flash(place.device),) if why]
    if "step" in options.only:
        found["step"] = ulysses_step.measure(options, place)
    if "layer" in options.only:
        found["layer"] = [_layer(place, options, length) for length in options.length]
    wrong = any(row["problems"] or row["bytes"] != row["formula"] for row in found.get("equality", []))
    wrong |= any(rank["bytes"] != one["formula"] for one in found.get("layer", []) for rank in one["ranks"])
    if place.rank == 0:
        print("\n".join(ulysses_report.lines(found)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(wrong)


def _without_json(arguments: list[str]) -> list[str]:
    """Where the numbers were written to makes none of them."""
    kept = list(arguments)
    if "--json" in kept:
        at = kept.index("--json")
        del kept[at : at + 2]
    return [one for one in kept if not one.startswith("--json=")]


def _environment(place: Place) -> dict[str, Any]:
    import transformers

    cuda = place.device.type == "cuda"
    return {
        "command": shlex.join(["python", "tests/benchmarks/bench_ulysses.py", *_without_json(sys.argv[1:])]),
        "ranks": place.world,
        "backend": place.backend,
        "device": torch.cuda.get_device_name(place.device) if cuda else f"cpu, {os.cpu_count()} cores",
        "cards": torch.cuda.device_count() if cuda else 0,
        "shared": place.shared,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if place.backend == "nccl" else None,
    }


def _equality(place: Place, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each setting: of every number the worst of all ranks."""
    sp = options.sp or place.world
    mesh = ulysses_equality.make_mesh(sp, place.device)
    rows = []
    for setting in ulysses_equality.settings(sp, place.device, options.fsdp)[:: options.every]:
        ranks = [asdict(found) for found in place.gather(ulysses_equality.measure(setting, mesh, place.device))]
        row: dict[str, Any] = {"setting": str(setting), **ranks[0]}
        for name in ("outputs", "gradients", "usual_outputs", "usual_gradients"):
            row[name] = max(rank[name] for rank in ranks)
        row["problems"] = [f"rank {i}: {problem}" for i, rank in enumerate(ranks) for problem in rank["problems"]]
        rows.append(row)
    return rows


def _layer(place: Place, options: argparse.Namespace, length: int) -> dict[str, Any]:
    shape = ulysses_layer.Shape(options.heads, options.kv_heads, options.head_dim, options.hidden)
    dtype = getattr(torch, options.dtype)
    layer = ulysses_layer.Layer(shape, length, place, dtype, options.attention)
    ranks = place.gather(ulysses_layer.measure(layer, options.repeats))
    del layer
    bandwidth = place.gather(ulysses_bandwidth.measure(shape, length, place, dtype, options.repeats))
    times = {way: sum(rank["ways"][way]["least_ms"] for rank in ranks) for way in ranks[0]["ways"]}
    return {
        "length": length,
        "shape": asdict(shape),
        "attention": options.attention,
        "dtype": options.dtype,
        "formula": 2 * sum(shape.bytes(length, place.world, dtype.itemsize)),
        "fastest": min(times, key=times.__getitem__),
        "ranks": ranks,
        "bandwidth": bandwidth,
    }


if __name__ == "__main__":
    sys.exit(run_ranks(parsed(), work))
