"""Tiled MLP against the plain block, torch's checkpoint and two peers: time, peak memory, gradient error, in one run.

    python tests/benchmarks/bench_tiled_mlp.py                       a small SwiGLU block on whatever device there is
    python tests/benchmarks/bench_tiled_mlp.py --full --peers DIR    65536 tokens, 4096 x 12288, bfloat16, peers beside us

Peers are measured if found in DIR: `verl_kernels/tiled_mlp.py` (verl's file of that name) and a wheel or a package of
`liger_kernel`. Peak is the extra memory of one forward and backward, gradients included, MiB. Errors are relative to a
float64 computation, in the Euclidean norm.
"""

from __future__ import annotations

import argparse
import gc
import glob
import importlib
import importlib.util
import math
import os
import statistics
import sys
import time
import types
import weakref
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
sys.path.insert(0, ROOT)
try:
    import scoped_patch  # noqa: F401
except ImportError:
    # A machine with a GPU and torch, and not all that the patches need: the operations alone do not need it either.
    sys.modules["scoped_patch"] = types.ModuleType("scoped_patch")
    sys.modules["scoped_patch"].__path__ = [os.path.join(ROOT, "scoped_patch")]

from scoped_patch.ops.tiled_mlp import tiled_call, tiled_mlp  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that torch operations make inside the block, as they come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Block(torch.nn.Module):
    """A SwiGLU block."""

    def __init__(self, hidden: int, intermediate: int, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, intermediate, bias=False, **factory)
        self.up_proj = torch.nn.Linear(hidden, intermediate, bias=False, **factory)
        self.down_proj = torch.nn.Linear(intermediate, hidden, bias=False, **factory)
        self.act_fn = torch.nn.SiLU()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, device=parameter.device) / math.sqrt(parameter.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def reference_gradients(block: Block, x: Tensor, dy: Tensor, chunk: int = 4096) -> list[Tensor]:
    """The weights' gradients, computed in float64 a chunk of tokens at a time."""
    gate, up, down = (p.detach().double() for p in block.parameters())
    sums = [torch.zeros_like(weight) for weight in (gate, up, down)]
    for xs, ds in zip(x.detach().flatten(0, -2).split(chunk), dy.flatten(0, -2).split(chunk), strict=True):
        xs, ds = xs.double(), ds.double()
        g, u = xs @ gate.t(), xs @ up.t()
        s = torch.sigmoid(g)
        dh = ds @ down
        sums[0] += (dh * u * s * (1 + g * (1 - s))).t() @ xs
        sums[1] += (dh * g * s).t() @ xs
        sums[2] += ds.t() @ (g * s * u)
    return sums


def load_verl(peers: str) -> Any:
    path = os.path.join(peers, "verl_kernels", "tiled_mlp.py")
    if not os.path.exists(path):
        return None
    spec = importlib.util.spec_from_file_location("verl_tiled_mlp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_liger(peers: str) -> Any:
    for wheel in glob.glob(os.path.join(peers, "liger_kernel-*.whl")):
        target = os.path.join("/tmp", os.path.basename(wheel) + ".unpacked")
        if not os.path.isdir(target):
            zipfile.ZipFile(wheel).extractall(target)
        sys.path.insert(0, target)
    sys.path.insert(0, peers)
    try:
        return importlib.import_module("liger_kernel.ops")
    except ImportError:
        return None


def contenders(block: Block, tiles: list[int], peers: str | None) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    weights = list(block.parameters())
    yield "plain", block
    yield "checkpoint", lambda x: checkpoint(block, x, use_reentrant=False)
    verl = load_verl(peers) if peers else None
    liger = load_liger(peers) if peers else None
    for name, module in (("verl", verl), ("liger", liger)):
        if module is None:
            print(f"({name}: not measured, {'not found in ' + peers if peers else 'no --peers directory given'})")
    for count in tiles:
        if verl is not None:
            yield f"verl tiled {count}", lambda x, n=count: verl.TiledMLP.apply(Block.forward, block, x, n, weights)
        if liger is not None:

            def forward(module: Block, t: Tensor) -> Tensor:
                if t.is_cuda:
                    return module.down_proj(liger.LigerSiLUMulFunction.apply(module.gate_proj(t), module.up_proj(t)))
                return Block.forward(module, t)

            yield f"liger tiled {count}", lambda x, n=count, f=forward: liger.apply_tiled_mlp(f, block, x, n, weights)
        yield f"tiled_mlp {count}", lambda x, n=count: tiled_mlp(x, *weights, activation="silu", tiles=n)
        yield f"tiled_call {count}", lambda x, n=count: tiled_call(block, x, weights, n)


def measure(
    function: Callable[[Tensor], Tensor], block: Block, x: Tensor, dy: Tensor, truth: list[Tensor], seconds: float
) -> dict[str, float]:
    cuda = x.is_cuda

    def clear() -> None:
        x.grad = None
        block.zero_grad(set_to_none=True)

    def mebibytes() -> float:
        clear()
        gc.collect()
        if not cuda:
            with LiveBytes() as live:
                function(x).backward(dy)
            return live.peak / 2**20
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = function(x)
        output.backward(dy)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - base) / 2**20

    clear()
    function(x).backward(dy)
    errors = [
        float((parameter.grad.double() - wanted).norm() / wanted.norm())
        for parameter, wanted in zip(block.parameters(), truth, strict=True)
        if parameter.grad is not None
    ]
    result = {"peak": mebibytes(), "error": max(errors)}
    times: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(times) < 4 or (time.perf_counter() - started < seconds and len(times) < 16):
        clear()
        marks = []
        output = None
        for step in range(3):
            if step == 1:
                output = function(x)
            elif step == 2 and output is not None:
                output.backward(dy)
            if cuda:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
        times.append((marks[1] - marks[0], marks[2] - marks[1]))
    clear()
    times = times[1:]
    result["forward"], result["backward"] = (statistics.median(t[i] for t in times) * 1e3 for i in (0, 1))
    result["total"] = statistics.median(sum(t) for t in times) * 1e3
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the large block, for a GPU")
    parser.add_argument("--peers", help="directory of the peers")
    parser.add_argument("--tiles", type=int, nargs="+", default=None)
    parser.add_argument("--seconds", type=float, default=None, help="time budget of each row")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, hidden, intermediate = (65536, 4096, 12288) if arguments.full else (4096, 256, 768)
    tiles = arguments.tiles or ([4, 16, 32] if arguments.full else [2, 4, 16])
    seconds = arguments.seconds if arguments.seconds is not None else (2.0 if arguments.full else 0.3)
    torch.manual_seed(3)
    block = Block(hidden, intermediate, device=device, dtype=torch.bfloat16)
    x = torch.randn(1, tokens, hidden, device=device).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(1, tokens, hidden, device=device).to(torch.bfloat16)
    truth = [gradient.float() for gradient in reference_gradients(block, x, dy)]
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"SwiGLU, {tokens} tokens, {hidden} x {intermediate}, bfloat16; {name}; torch {torch.__version__}")
    print(f"{'':16}{'forward ms':>12}{'backward ms':>12}{'both ms':>10}{'peak MiB':>10}{'dW error':>10}")
    for label, function in contenders(block, tiles, arguments.peers):
        try:
            row = measure(function, block, x, dy, truth, seconds)
        except Exception as error:
            print(f"{label:16}failed: {type(error).__name__}: {str(error)[:90]}")
            continue
        print(
            f"{label:16}{row['forward']:12.1f}{row['backward']:12.1f}{row['total']:10.1f}{row['peak']:10.1f}"
            f"{row['error']:10.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
