"""The fused head beside other ways to get per-token log-probabilities and entropies of a language model head.

    python tests/benchmarks/bench_fused_head.py              # on a GPU: every shape, every peer that is installed
    python tests/benchmarks/bench_fused_head.py --cpu        # the torch backend against the naive way, processor time
    python tests/benchmarks/bench_fused_head.py --rl         # 60 % of the tokens without gradient
    python tests/benchmarks/bench_fused_head.py --model      # one training step of a Qwen3-0.6B-shaped model

Times are medians of forward plus backward with gradients of the hidden states and the weight, and an upstream gradient
of its own for each token and output. The floor is four matrix products by cuBLAS (logits twice, and the two gradients),
measured in the same run. Errors are relative (norms) against float64; the weight's on 200 sampled rows of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoped_patch.ops.linear_cross_entropy import linear_cross_entropy

MIB = 1 << 20
SHAPES = [(8192, 4096, 151936), (8192, 2048, 151936), (32768, 2048, 151936), (4096, 4096, 32000)]
CPU_SHAPES = [(2048, 576, 49152)]
Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def ours(memory: str | int, backend: str = "auto") -> Run:
    def run(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out = linear_cross_entropy(h, w, y, memory=memory, backend=backend)
        return out.log_probs, out.entropy

    return run


def naive(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    log_p = torch.log_softmax((h @ w.t()).float(), -1)
    return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def torch_own() -> Run:
    f, options = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions
    chunked = options()
    return lambda h, w, y: (-f(h, w, y, reduction="none", options=chunked),)


def trl_head() -> Run:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Head

    def run(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return Head.apply(h, w, None, y, 1.0, 32768, None, 1.0, ("entropy",))[:2]

    return run


def verl_triton() -> Run:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as f

    return lambda h, w, y: f(h, w, y, 1.0, "none")


def verl_torch() -> Run:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    module = FusedLinearForPPO(chunk_size=512)
    return lambda h, w, y: module(h, w, y, temperature=1.0)


def liger_cute() -> Run:
    # The route is named, so that a silent fallback to another kernel cannot pass for it.
    import liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90  # noqa: F401
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Head

    def run(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        nll, entropy = Head.apply(h, w, y, 1.0, -100, 1, True)
        return -nll, entropy

    return run


def unsloth() -> Run:
    from unsloth_zoo.fused_losses.fused_linear import fused_linear_logprobs as f

    return lambda h, w, y: f(h, w, y, temperature=1.0, return_entropy=True)


def cut_cross_entropy() -> Run:
    from cut_cross_entropy import linear_cross_entropy as f

    return lambda h, w, y: (-f(h, w, y, reduction="none", impl="cce"),)


RUNS: dict[str, Callable[[], Run]] = {
    "scoped_patch, memory=low": lambda: ours("low"),
    "scoped_patch, memory=512 MiB": lambda: ours(512 * MIB),
    "scoped_patch, memory=auto": lambda: ours("auto"),
    "scoped_patch, torch backend": lambda: ours("auto", "torch"),
    "naive": lambda: naive,
    "naive, compiled": lambda: torch.compile(naive, dynamic=False),
    "Liger CuTe SM90": liger_cute,
    "verl triton": verl_triton,
    "verl torch": verl_torch,
    "unsloth": unsloth,
    "TRL": trl_head,
    "torch.nn.functional": torch_own,
    "cut-cross-entropy": cut_cross_entropy,
}


class Clock:
    """Milliseconds between marks: on a GPU by its own clock, else of processor time (which a busy machine leaves alone)."""

    def __init__(self, device: str) -> None:
        self.device = device

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def mark(self) -> Any:
        if self.device != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self.device == "cuda" else (end - start) * 1e3

    def median(self, f: Callable[[], Any], seconds: float = 0.4, least: int = 5, most: int = 30) -> float:
        f()
        self.sync()
        times: list[float] = []
        begin = time.time()
        while len(times) < least or (time.time() - begin < seconds and len(times) < most):
            start = self.mark()
            f()
            end = self.mark()
            self.sync()
            times.append(self.between(start, end))
        return statistics.median(times)


def clean(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def problem(shape: tuple[int, int, int], device: str, dtype: torch.dtype, without_gradient: float) -> dict[str, Any]:
    """Random inputs with logits of standard deviation 4, labels drawn from the model's own softmax, and references."""
    n, size, vocab = shape
    g = torch.Generator(device).manual_seed(n + size + vocab)
    h = torch.randn(n, size, generator=g, device=device).to(dtype)
    w = (torch.randn(vocab, size, generator=g, device=device) * (4 / math.sqrt(size))).to(dtype)
    wide = torch.float64
    w64 = w.to(wide)
    lse, lp, entropy = (torch.empty(n, dtype=wide, device=device) for _ in range(3))
    y = torch.empty(n, dtype=torch.int64, device=device)
    for i in range(0, n, 512):
        z = h[i : i + 512].to(wide) @ w64.t()
        noise = -torch.log(-torch.log(torch.rand(z.shape, generator=g, device=device).clamp(1e-20, 1 - 1e-7)))
        label = (z.float() + noise).argmax(-1)
        y[i : i + 512] = label
        lse[i : i + 512] = total = torch.logsumexp(z, -1)
        lp[i : i + 512] = z.gather(1, label[:, None])[:, 0] - total
        entropy[i : i + 512] = total - (torch.exp(z - total[:, None]) * z).sum(-1)
        del z, noise
    ups = [torch.randn(n, generator=g, device=device), 0.1 * torch.randn(n, generator=g, device=device)]
    if without_gradient:
        quiet = torch.rand(n, generator=g, device=device) < without_gradient
        ups = [up.masked_fill(quiet, 0) for up in ups]
    rows = torch.randperm(n, generator=g, device=device)[: min(n, 100)]
    columns = torch.cat([y[rows], torch.randperm(vocab, generator=g, device=device)[:100]]).unique()

    def d_logits(z: Tensor, at: Tensor, hit: Tensor, ups: list[Tensor]) -> Tensor:
        log_p = z - lse[at, None]
        p = log_p.exp()
        a, b = (up.to(wide)[at, None] for up in ups)
        return a * (hit.to(wide) - p) - b * p * (log_p + entropy[at, None])

    references = {}
    vocabulary, every = torch.arange(vocab, device=device), torch.arange(n, device=device)
    for outputs, used in ((2, ups), (1, [ups[0], torch.zeros_like(ups[1])])):
        of_rows = d_logits(h[rows].to(wide) @ w64.t(), rows, y[rows, None] == vocabulary, used) @ w64
        of_columns = d_logits(h.to(wide) @ w64[columns].t(), every, y[:, None] == columns, used).t() @ h.to(wide)
        references[outputs] = (of_rows, of_columns)
    h.requires_grad_()
    w.requires_grad_()
    return {
        "h": h, "w": w, "y": y, "ups": ups, "lp": lp, "entropy": entropy, "rows": rows, "columns": columns,
        "references": references,
    }  # fmt: skip


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b).norm() / b.norm())


def floor(shape: tuple[int, int, int], clock: Clock, dtype: torch.dtype) -> dict[str, float]:
    n, size, vocab = shape
    h = torch.randn(n, size, device=clock.device).to(dtype)
    w = (torch.randn(vocab, size, device=clock.device) * 0.05).to(dtype)
    z = torch.randn(n, vocab, device=clock.device, dtype=dtype)
    dh, dw = torch.empty_like(h), torch.empty_like(w)
    times = {
        "dh": clock.median(lambda: torch.mm(z, w, out=dh)),
        "dw": clock.median(lambda: torch.mm(z.t(), h, out=dw)),
        "logits": clock.median(lambda: torch.mm(h, w.t(), out=z)),
    }
    times["floor4"] = 2 * times["logits"] + times["dh"] + times["dw"]
    return times


def measure(run: Run, p: dict[str, Any], clock: Clock, seconds: float) -> dict[str, Any]:
    h, w, y = p["h"], p["w"], p["y"]

    def backward(outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ups = [up.to(out.dtype) for up, out in zip(p["ups"], outs, strict=False)]
        return torch.autograd.grad(outs, (h, w), ups)

    outs = run(h, w, y)
    grads = backward(outs)
    dh, dw = p["references"][len(outs)]
    result: dict[str, Any] = {"outputs": len(outs), "log_prob_error": relative(outs[0], p["lp"])}
    if len(outs) > 1:
        result["entropy_error"] = relative(outs[1], p["entropy"])
    result["dh_error"] = relative(grads[0][p["rows"]], dh)
    result["dw_error"] = relative(grads[1][p["columns"]], dw)
    del outs, grads
    clean(clock.device)
    if clock.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        outs = run(h, w, y)
        result["forward_peak_mib"] = (torch.cuda.max_memory_allocated() - before) / MIB
        result["kept_mib"] = (torch.cuda.memory_allocated() - before) / MIB
        grads = backward(outs)
        result["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / MIB
        del outs, grads
    forward, total = [], []
    begin = time.time()
    least = 4 if clock.device == "cuda" else 3
    while len(total) < least or (time.time() - begin < seconds and len(total) < 25):
        clock.sync()
        start = clock.mark()
        outs = run(h, w, y)
        middle = clock.mark()
        grads = backward(outs)
        end = clock.mark()
        clock.sync()
        forward.append(clock.between(start, middle))
        total.append(clock.between(start, end))
        del outs, grads
    result["forward_ms"], result["total_ms"] = statistics.median(forward[1:]), statistics.median(total[1:])
    if clock.device == "cuda":
        with torch.no_grad():
            result["no_grad_ms"] = clock.median(lambda: run(h, w, y), seconds / 3, 3, 10)
    return result


def heads(arguments: argparse.Namespace, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    clock, rows = Clock(device), []
    for shape in arguments.shapes or (CPU_SHAPES if device == "cpu" else SHAPES):
        floors = [] if device == "cpu" else [floor(shape, clock, dtype)]
        clean(device)
        p = problem(shape, device, dtype, arguments.without_gradient)
        clean(device)
        for name, load in RUNS.items():
            if not re.search(arguments.only, name) or (
                device == "cpu" and not re.search("naive$|low|auto|TRL|functional", name)
            ):
                continue
            row: dict[str, Any] = {"shape": shape, "name": name}
            try:
                run = load()
            except (ImportError, AttributeError) as error:
                print(f"{name}: not here ({error})", flush=True)
                continue
            try:
                row.update(measure(run, p, clock, arguments.seconds))
            except Exception as error:  # a peer's failure is a result too
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            rows.append(row)
            print(json.dumps(row), flush=True)
            clean(device)
        del p
        clean(device)
        if device == "cuda":
            # The chip slows down as it warms up: measure the floor on both sides and take the mean.
            floors.append(floor(shape, clock, dtype))
            mean = {key: sum(f[key] for f in floors) / 2 for key in floors[0]}
            rows.append({"shape": shape, "name": "cuBLAS floor", **mean, "each": [f["floor4"] for f in floors]})
            for row in rows:
                if row["shape"] == shape and "total_ms" in row:
                    row["of_floor"] = row["total_ms"] / mean["floor4"]
            print(json.dumps(rows[-1]), flush=True)
            clean(device)
    return rows


def model_step(seconds: float) -> list[dict[str, Any]]:
    """One training step (forward, loss, backward) of a random Qwen3-0.6B-shaped model on 8192 tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from scoped_patch import patched

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        ids = torch.randint(0, config.vocab_size, (4, 2048))
    weights = torch.randn(4, 2047, device="cuda")
    clock = Clock("cuda")

    def plain() -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]

    def fused() -> Tensor:
        return model(input_ids=ids, labels=ids).log_probs[:, :-1]

    results, gradients = [], {}
    for name, forward in (("unpatched", plain), ("patched(model, fused='triton')", fused)):
        model.zero_grad()
        scope = patched(model, fused="triton") if forward is fused else None
        if scope is not None:
            scope.__enter__()
        try:
            log_probs = forward()
            (log_probs * weights).mean().backward()
            gradients[name] = (log_probs.detach(), model.model.embed_tokens.weight.grad.float().clone())
            del log_probs
            model.zero_grad()
            clean("cuda")
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            (forward() * weights).mean().backward()
            peak = (torch.cuda.max_memory_allocated() - before) / MIB

            def step(forward: Callable[[], Tensor] = forward) -> None:
                model.zero_grad()
                (forward() * weights).mean().backward()

            row = {"name": name, "total_ms": clock.median(step, seconds * 3, 5, 20), "peak_mib": peak}
        finally:
            if scope is not None:
                scope.__exit__(None, None, None)
        results.append(row)
        print(json.dumps(row), flush=True)
    (lp, grad), (fused_lp, fused_grad) = gradients.values()
    results.append({
        "name": "fused against unpatched",
        "log_prob_difference": float((lp - fused_lp).abs().max()),
        "embedding_gradient_difference": float((grad - fused_grad).norm() / grad.norm()),
    })  # fmt: skip
    print(json.dumps(results[-1]), flush=True)
    return results


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one table per shape."""
    lines = []
    for shape in dict.fromkeys(tuple(r["shape"]) for r in rows):
        mine = [r for r in rows if tuple(r["shape"]) == shape]
        bottom = next((r for r in mine if r["name"] == "cuBLAS floor"), None)
        lines.append(f"\n{shape[0]} tokens, hidden size {shape[1]}, vocabulary {shape[2]}")
        lines[-1] += f": floor {bottom['floor4']:.1f} ms\n" if bottom else "\n"
        lines += ["| | ms | of floor | forward ms | peak MiB | log_prob error | dW error |", "|---|---|---|---|---|---|---|"]
        for r in mine:
            if "total_ms" in r:
                only = "" if r["outputs"] == 2 else " (log_prob only)"
                share = f"{r['of_floor']:.2f}" if "of_floor" in r else "-"
                peak = f"{r['peak_mib']:.0f}" if "peak_mib" in r else "-"
                lines.append(
                    f"| {r['name']}{only} | {r['total_ms']:.1f} | {share} | {r['forward_ms']:.1f} | {peak} | "
                    f"{r['log_prob_error']:.0e} | {r['dw_error']:.0e} |"
                )
            elif "error" in r:
                lines.append(f"| {r['name']} | failed: {r['error'][:80]} | | | | | |")
    return "\n".join(lines)


def environment(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("triton", "transformers"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    else:
        found["threads"] = torch.get_num_threads()
    if shutil.which("git"):
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        found["commit"] = head.stdout.strip() or None
    found["command"] = " ".join(["python", *sys.argv])
    return found


def shape_list(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(v) for v in one.split(",")) for one in text.split(";")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rl", dest="without_gradient", action="store_const", const=0.6, default=0.0)
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--shapes", type=shape_list, help="N,H,V;N,H,V")
    parser.add_argument("--only", default="", help="regular expression over the names")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each row")
    parser.add_argument("--out", type=Path, help="write the raw numbers here, as JSON")
    arguments = parser.parse_args()
    device = "cpu" if arguments.cpu or not torch.cuda.is_available() else "cuda"
    data = {"environment": environment(device)}
    if arguments.model:
        data["model"] = model_step(arguments.seconds)
    else:
        data["heads"] = heads(arguments, device, torch.float32 if device == "cpu" else torch.bfloat16)
        print(table(data["heads"]))
    if arguments.out:
        arguments.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
