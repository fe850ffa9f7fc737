#!/usr/bin/env python3
"""Time and peak extra memory of a weight update, against vLLM's own layerwise reload in the same process.

    python tests/benchmarks/bench_reload.py                 # CPU: 12 dense W4A4 layers on the emulation kernel, no engine
    python tests/benchmarks/bench_reload.py --cuda          # GPU: an in-process engine of Qwen3-8B's shape, W4A16
    python tests/benchmarks/bench_reload.py --cuda --graphs --layers 8

In layer order and shuffled; `atomic="model"` and `"layer"`. The ways take turns, so that other load on the machine falls on all
of them; a ratio is the median over the turns of (this way / vLLM's own in the same turn), of processor time on CPU. Memory is
the most that tensors took above what was there before, as a share of the bytes of the update: counted by torch's allocator, and
on CPU also as resident size, which includes what the C library holds back. "copies" is what moving the bytes alone takes: to
fresh memory and then to the live one, tensor by tensor (what any reload that processes a copy must do), and all of them to
fresh memory first (what any that commits everything together must).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.support import checkpoints, engine  # noqa: I001  (sets the environment before torch)

import torch

from scoped_patch.vllm import reload_weights
from scoped_patch.vllm.pages import advise


class Resident:
    """The peak of the process's resident size above the start, in bytes."""

    def __enter__(self) -> Resident:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.start = self.peak = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, resident())

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.peak, resident()) - self.start


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tracked(run: Callable[[], None], cuda: bool) -> int:
    """The most bytes that tensors made by `run` took at any one time."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(n for _, n in changes))


def native(model: torch.nn.Module, config: Any, items: Any, cuda: bool) -> None:
    """As vLLM's own workers do it: the device as default on a GPU (its weight-transfer engines), none on CPU."""
    from vllm.model_executor.model_loader import reload

    with torch.device("cuda") if cuda else contextlib.nullcontext():
        reload.initialize_layerwise_reload(model)
        model.load_weights(iter(items))
        finish = getattr(reload, "finalize_layerwise_reload", None) or reload.finalize_layerwise_processing
        finish(model, config.model_config)


def ours(target: Any, items: Any, atomic: Any) -> None:
    with reload_weights(target, atomic=atomic) as update:
        update.load(items)


def timed(run: Callable[[], None], cuda: bool) -> float:
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    run()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start


def copies(items: list[tuple[str, torch.Tensor]], live: list[torch.Tensor], together: bool) -> None:
    """Staging and commit with nothing around them; memory for all of it is asked for as an update does."""
    if together:
        staged = [torch.empty_like(t) for _, t in items]
        for (_, tensor), to in zip(items, staged, strict=True):
            advise(to)
            to.copy_(tensor)
        torch._foreach_copy_(live, staged)
        return
    for (_, tensor), to in zip(items, live, strict=True):
        to.copy_(tensor.clone())


def setup(args: argparse.Namespace, root: Path) -> Iterator[tuple[Any, torch.nn.Module, Any, list[checkpoints.State]]]:
    shape = (
        dict(
            hidden_size=4096,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
        )
        if args.cuda
        else dict(
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 128,
            head_dim=64,
            vocab_size=2048,
        )
    )
    layers = args.layers or (8 if args.cuda else 12)
    paths, states = [], []
    for seed in (0, 1):
        cfg = checkpoints.config("dense", layers, **shape)
        state = random_state(cfg, seed, args.cuda)
        cfg["quantization_config"] = checkpoints.quantization_config("w4a16" if args.cuda else "w4a4")
        checkpoints.save(root / str(seed), cfg, {k: v.cpu() for k, v in state.items()})
        paths.append(root / str(seed))
        states.append(state)
    if args.cuda:
        own = {"attention_backend": args.attention} if args.attention else {}
        if args.graphs:  # of the whole decoding step, without Inductor's compilation
            own["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        llm = engine.start(paths[0], enforce_eager=not args.graphs, kv_cache_memory_bytes=1 << 30, max_model_len=256, **own)
        yield llm, engine.model(llm), engine.worker(llm).vllm_config, states
        return
    from tests.vllm.support.kernels import cpu_kernels
    from tests.vllm.support.probe import build_with_config

    with cpu_kernels():
        model, config = build_with_config(paths[0])
        yield model, model, config, states


def random_state(cfg: dict[str, Any], seed: int, cuda: bool) -> checkpoints.State:
    """Random packed weights: quantising eight thousand million of them for real would take longer than the benchmark."""
    device = "cuda" if cuda else "cpu"
    meta = checkpoints.quantize_shapes(cfg, "w4a16" if cuda else "w4a4")
    gen = torch.Generator(device).manual_seed(seed)
    out: checkpoints.State = {}
    for name, (shape, dtype) in meta.items():
        if dtype == torch.uint8:
            out[name] = torch.randint(0, 256, shape, dtype=dtype, device=device, generator=gen)
        elif dtype == torch.float8_e4m3fn:
            out[name] = (torch.rand(shape, device=device, generator=gen) * 200 + 100).to(dtype)
        elif name.endswith("global_scale"):
            out[name] = torch.full(shape, 20000.0 + seed, device=device)
        elif "norm" in name:
            out[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            out[name] = (torch.randn(shape, device=device, generator=gen) * 0.05).to(dtype)
    return out


def ways(target: Any, model: torch.nn.Module, config: Any, lists: list[Any], cuda: bool) -> dict[str, Callable[[], None]]:
    turn = itertools.count()  # the two states alternate, so that every reload changes every weight
    live = [torch.empty_like(t) for _, t in lists[0]]

    def items() -> Any:
        return lists[next(turn) % 2]

    return {
        "vLLM layerwise": lambda: native(model, config, items(), cuda),
        'atomic="model"': lambda: ours(target, items(), "model"),
        'atomic="layer"': lambda: ours(target, items(), "layer"),
        "copies": lambda: copies(items(), live, False),
        "copies together": lambda: copies(items(), live, True),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cuda", action="store_true")
    options.add_argument("--graphs", action="store_true")
    options.add_argument("--attention", help="vLLM's attention backend, such as TRITON_ATTN")
    options.add_argument("--layers", type=int)
    options.add_argument("--hidden", type=int, default=2048, help="width of the CPU model")
    options.add_argument("--times", type=int, default=15)
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for target, model, config, states in setup(args, Path(root)):
            if args.cuda:  # first: before 0.30 vLLM's own reload moves Marlin's workspace, and a captured graph then never ends
                check(target, states)
            rows += [row for order in ("layer order", "shuffled") for row in run(args, target, model, config, states, order)]
    if args.json:
        import vllm

        about = dict(vllm=vllm.__version__, torch=torch.__version__, graphs=args.graphs, layers=args.layers)
        about["device"] = torch.cuda.get_device_name() if args.cuda else "cpu"
        args.json.write_text(json.dumps(about | dict(rows=rows), indent=1))


def run(
    args: argparse.Namespace, target: Any, model: torch.nn.Module, config: Any, states: list[checkpoints.State], order: str
) -> Iterator[dict[str, Any]]:
    size = sum(t.nbytes for t in states[0].values())
    lists = [list(state.items()) for state in states]
    if order == "shuffled":
        at = torch.randperm(len(lists[0]), generator=torch.Generator().manual_seed(0)).tolist()
        lists = [[items[i] for i in at] for items in lists]
    found = ways(target, model, config, lists, args.cuda)
    for way in found.values():
        way()  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for at in range(args.times):
        names = list(found)
        for name in names[at % len(names) :] + names[: at % len(names)]:
            seconds[name].append(timed(found[name], args.cuda))
    for name, way in found.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["vLLM layerwise"], strict=True))
        row = dict(order=order, way=name, seconds=statistics.median(seconds[name]), best=min(seconds[name]), ratio=ratio)
        text = f"{order:12} {name:16} {row['seconds']:8.3f} s (best {row['best']:.3f})  x{ratio:5.2f}"
        if not name.startswith("copies"):
            row["peak"] = min(tracked(way, args.cuda) for _ in range(2)) / size
            text += f"  peak {row['peak']:6.1%} of {size / 1e6:.0f} MB"
            if not args.cuda:
                with Resident() as memory:
                    way()
                row["resident"] = memory.bytes / size
                text += f", resident {row['resident']:6.1%}"
        print(text, flush=True)
        yield row | dict(mb=size / 1e6)


def check(llm: Any, states: list[checkpoints.State]) -> None:
    """What the engine answers after a reload depends on the weights alone, not on how often they came."""
    answers = []
    for seed in (0, 1, 0, 1):
        ours(llm, states[seed].items(), "model")
        answers.append(engine.generate(llm))
    print("answers repeat:", answers[:2] == answers[2:], "and differ:", answers[0] != answers[1], flush=True)


if __name__ == "__main__":
    main()
