#!/usr/bin/env python3
"""Time and peak extra memory of a weight update, against vLLM's own layerwise reload in the same process.

    python tests/benchmarks/bench_reload.py                 # CPU: 12 dense W4A4 layers on the emulation kernel, no engine
    python tests/benchmarks/bench_reload.py --cuda          # GPU: an in-process engine of Qwen3-8B's shape, W4A16
    python tests/benchmarks/bench_reload.py --cuda --graphs --layers 8

In layer order and shuffled; `atomic="model"` and `"layer"`. Every number is the best of several reloads. Memory is the peak
above what was there before, as a share of the bytes of the update (resident size on CPU, the allocator's peak on CUDA).
On CPU the ratio is one of processor time, which other load on the machine does not change.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
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


class Peak:
    """Peak memory above the start, in bytes."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def __enter__(self) -> Peak:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return self
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
        if self.cuda:
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.start
            return
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.peak, resident()) - self.start


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def native(model: torch.nn.Module, config: Any, items: Any, device: str) -> None:
    from vllm.model_executor.model_loader import reload

    with torch.device(device):
        reload.initialize_layerwise_reload(model)
        model.load_weights(iter(items))
        finish = getattr(reload, "finalize_layerwise_reload", None) or reload.finalize_layerwise_processing
        finish(model, config.model_config)


def ours(target: Any, items: Any, atomic: Any) -> None:
    with reload_weights(target, atomic=atomic) as update:
        update.load(items)


def measure(run: Callable[[], None], cuda: bool, times: int, size: int) -> tuple[float, float]:
    clock = time.perf_counter if cuda else time.process_time
    seconds, peaks = [], []
    for _ in range(times):
        with Peak(cuda) as peak:
            start = clock()
            run()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(clock() - start)
        peaks.append(peak.bytes / size)
    return min(seconds), min(peaks)


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
        llm = engine.start(paths[0], enforce_eager=not args.graphs, kv_cache_memory_bytes=1 << 30, max_model_len=256)
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


def ways(target: Any, model: torch.nn.Module, config: Any, lists: list[Any], device: str) -> dict[str, Callable[[], None]]:
    turn = itertools.count()  # the two states alternate, so that every reload changes every weight

    def items() -> Any:
        return lists[next(turn) % 2]

    return {
        "vLLM layerwise": lambda: native(model, config, items(), device),
        'atomic="model"': lambda: ours(target, items(), "model"),
        'atomic="layer"': lambda: ours(target, items(), "layer"),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cuda", action="store_true")
    options.add_argument("--graphs", action="store_true")
    options.add_argument("--layers", type=int)
    options.add_argument("--hidden", type=int, default=2048, help="width of the CPU model")
    options.add_argument("--times", type=int, default=4)
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for target, model, config, states in setup(args, Path(root)):
            rows += [row for order in ("layer order", "shuffled") for row in run(args, target, model, config, states, order)]
            if args.cuda:
                check(target, states)
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
    found = ways(target, model, config, lists, "cuda" if args.cuda else "cpu")
    for way in found.values():
        way()  # warm up
    base = None
    for name, way in found.items():
        seconds, peak = measure(way, args.cuda, args.times, size)
        base = base or seconds
        print(
            f"{order:12} {name:16} {seconds:8.3f} s  x{seconds / base:5.2f}  peak {peak:6.1%} of {size / 1e6:.0f} MB",
            flush=True,
        )
        yield dict(order=order, way=name, seconds=seconds, ratio=seconds / base, peak=peak, mb=size / 1e6)


def check(llm: Any, states: list[checkpoints.State]) -> None:
    """What the engine answers after a reload depends on the weights alone, not on how often they came."""
    answers = []
    for seed in (0, 1, 0, 1):
        ours(llm, states[seed].items(), "model")
        answers.append(engine.generate(llm))
    print("answers repeat:", answers[:2] == answers[2:], "and differ:", answers[0] != answers[1], flush=True)


if __name__ == "__main__":
    main()
