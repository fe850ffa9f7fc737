"""Sequence parallelism on ranks of this machine: equality with one process, time, bytes; and the exchange by itself.

    python tests/benchmarks/bench_ulysses.py                                    two gloo ranks on the CPU
    python tests/benchmarks/bench_ulysses.py --device cuda --attention flash_attention_4 --dtype bfloat16 --length 16384
                                                                                the ranks share one card, through gloo

The first table is a training step of a small Llama: one process, `sp=1`, and every rank of `sp=RANKS`. On a machine whose
cores, or whose one card, the ranks share, they cannot be faster than one process: the times show what the exchange costs.
The second is the exchange of one layer: queries, keys and values in one buffer, against an all-to-all of lists for each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path.insert(0, ROOT)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from scoped_patch import patched  # noqa: E402
from scoped_patch.ops.sequence_parallel import count_collectives, heads_from_sequence, sequence_from_heads  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 16, 4, 64


def timed(function: Callable[[], Any], device: str, repeats: int) -> float:
    """Median milliseconds, the first call left out."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


def model_step(options: argparse.Namespace, sp: int | None) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=2048,
        num_hidden_layers=options.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=options.length,
    )
    dtype = getattr(torch, options.dtype)
    model = LlamaForCausalLM._from_config(config, attn_implementation=options.attention, dtype=dtype).to(options.device)
    ids = torch.randint(0, 4096, (1, options.length), generator=torch.Generator().manual_seed(1)).to(options.device)
    kept: list[torch.Tensor] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, use_cache=False)
        kept[:] = [out.log_probs.detach().float().cpu()]
        out.log_probs.mean().backward()

    scope = patched(model, sp=sp, fused="torch")
    with scope, count_collectives() as log:
        milliseconds = timed(step, options.device, options.repeats)
    norm = torch.stack([p.grad.float().square().sum() for p in model.parameters()])
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad.float().cpu()
    if sp is not None and sp > 1:
        dist.all_reduce(gradient)
        gradient /= sp
    calls = len(log.calls) // (options.repeats + 1)
    size = sum(size for _, size in log.calls) / (options.repeats + 1) / 2**20
    assert bool(norm.isfinite().all())
    return {"ms": milliseconds, "log_probs": kept[0], "gradient": gradient, "collectives": calls, "MiB": size}


def exchange(options: argparse.Namespace, ranks: int) -> tuple[float, float]:
    """Forward and backward of one layer's exchange: ours, and four all-to-alls of lists with copies around each."""
    dtype, size = getattr(torch, options.dtype), options.length // ranks
    shapes = [(1, heads, size, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tensors = [torch.randn(shape, device=options.device, dtype=dtype).requires_grad_() for shape in shapes]
    group = dist.group.WORLD
    listed = _takes_lists(tensors[0])

    def one(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        sent = [part.contiguous() for part in x.chunk(ranks, scatter)]
        received = [torch.empty_like(part) for part in sent]
        if listed:
            dist.all_to_all(received, sent, group=group)
        else:
            whole = torch.empty(ranks, *sent[0].shape, device=x.device, dtype=x.dtype)
            dist.all_to_all_single(whole, torch.stack(sent), group=group)
            received = list(whole.unbind())
        return torch.cat(received, gather)

    def lists() -> None:
        with torch.no_grad():
            q, *_ = (one(x, 1, 2) for x in tensors)
            one(q, 2, 1)
            there = [one(x, 2, 1) for x in (q, q[:, : KV_HEADS // ranks], q[:, : KV_HEADS // ranks])]
            one(there[0], 1, 2)

    def ours() -> None:
        for x in tensors:
            x.grad = None
        q, k, v = heads_from_sequence(tensors, group)
        (sequence_from_heads(q.transpose(1, 2), group).sum() + k.sum() + v.sum()).backward()

    return timed(ours, options.device, options.repeats), timed(lists, options.device, options.repeats)


def _takes_lists(x: torch.Tensor) -> bool:
    """Not every version of gloo has an all-to-all of lists; it is made of stacked ones there."""
    try:
        pieces = [x.detach()[..., :1, 0].contiguous() for _ in range(dist.get_world_size())]
        dist.all_to_all([torch.empty_like(piece) for piece in pieces], pieces)
    except RuntimeError:
        return False
    return True


def work(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    if options.device == "cpu":
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    found = {"step": model_step(options, ranks), "exchange": exchange(options, ranks)}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def alone(folder: str, options: argparse.Namespace) -> None:
    if options.device == "cpu":
        torch.set_num_threads(1)
    torch.save([model_step(options, None), model_step(options, 1)], f"{folder}/alone.pt")


def started(context: Any, processes: list[Any]) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a process failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        started(context, [context.Process(target=alone, args=(folder, options))])
        started(context, [context.Process(target=work, args=(r, options.ranks, folder, options)) for r in range(options.ranks)])
        plain, single = torch.load(f"{folder}/alone.pt")
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(options.ranks)]
    what = f"{options.length} tokens, {options.layers} layers, {options.attention}, {options.dtype}, {options.device}"
    print(f"\n{what}; torch {torch.__version__}, {os.cpu_count()} cores\n")
    print("| | step ms | log_probs off by | gradient off by | collectives | MiB handed in |")
    print("|---|---|---|---|---|---|")
    rows = [("one process", plain), ("sp=1", single)]
    rows += [(f"sp={options.ranks}, rank {rank}", found["step"]) for rank, found in enumerate(ranks)]
    for name, one in rows:
        log_probs = (one["log_probs"] - plain["log_probs"]).abs().max().item()
        gradient = (one["gradient"] - plain["gradient"]).abs().max() / plain["gradient"].abs().max()
        cells = f"{one['ms']:.1f} | {log_probs:.1e} | {gradient.item():.1e} | {one['collectives']} | {one['MiB']:.1f}"
        print(f"| {name} | {cells} |")
    print("\n| exchange of one layer, forward and backward | ms |\n|---|---|")
    print(f"| two collectives each way | {statistics.mean(found['exchange'][0] for found in ranks):.2f} |")
    print(
        f"| four all-to-alls of lists each way, with copies | {statistics.mean(found['exchange'][1] for found in ranks):.2f} |"
    )


if __name__ == "__main__":
    main()
