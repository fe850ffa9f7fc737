"""bench_ulysses.py on two gloo ranks and small sizes: its numbers are what they say they are, and it fails when it should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks import bench_ulysses, ulysses_layer, ulysses_ranks, ulysses_report

ROOT = Path(__file__).parents[1]
BENCH = str(ROOT / "tests" / "benchmarks" / "bench_ulysses.py")
SMALL = ["--heads", "8", "--kv-heads", "1", "--head-dim", "16", "--hidden", "32", "--length", "48", "--layers", "1"]
SMALL += ["--repeats", "1"]


def ran(command: list[str], path: Path, status: int = 0) -> tuple[dict, str]:
    environment = {name: x for name, x in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def test_two_ranks_on_the_cpu_under_torchrun(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    found, printed = ran([*launcher, BENCH, *SMALL, "--every", "9", "--fsdp"], tmp_path / "found.json")
    where = found["environment"]
    assert (where["ranks"], where["backend"], where["torch"], where["shared"]) == (2, "gloo", torch.__version__, False)
    assert where["command"].startswith("python tests/benchmarks/bench_ulysses.py --heads 8")

    assert [row["problems"] for row in found["equality"]] == [[]] * 3
    assert any("FSDP2" in row["setting"] for row in found["equality"])
    for row in found["equality"]:
        exact = "float32" in row["setting"]
        assert 0 < row["outputs"] < (1e-5 if exact else 1e-2)
        assert 0 < row["gradients"] < (1e-5 if exact else 5e-2)
        assert row["bytes"] == row["formula"]
    assert found["left_out"] == ["flash_attention_4 needs a CUDA device"]

    step = found["step"]
    assert list(step) == ["one process", "sp=1", "sp=2, rank 0", "sp=2, rank 1"]
    assert [one["collectives"] for one in step.values()] == [0, 0, 6, 6]
    # of this model (16 heads, 4 of KV, 64 wide): out and back of 24 tokens a rank, and the outputs' gather and its gradient
    exchanged = 2 * 24 * 64 * (16 + 2 * 4 + 16) * 4
    assert step["sp=2, rank 0"]["mib_handed_in"] * 2**20 >= exchanged
    assert max(one["log_probs_off"] for one in step.values()) < 1e-5
    assert max(one["gradient_off"] for one in step.values()) < 1e-4
    assert all(one["ms"] > 0 and one["peak_mib"] > 1 for one in step.values())

    (layer,) = found["layer"]
    # 24 tokens of a rank, 8 query heads, one KV head to each of two ranks, 16 wide, float32; forward and backward
    assert layer["formula"] == 2 * 24 * 16 * 4 * ((8 + 2 * 2 * 1) + 8)
    assert layer["fastest"] in ("two", "overlapped", "lists")
    for rank in layer["ranks"]:
        assert (rank["bytes"], rank["collectives"]) == (layer["formula"], 4)
        for way in ("forward", "backward"):
            parts = [rank[way][part] for part in ulysses_layer.PARTS]
            assert all(ms > 0 for ms in parts)
            assert 0.05 * rank[way]["whole"] < sum(parts) < 20 * rank[way]["whole"]  # other runs, of milliseconds
        assert rank["ways"]["overlapped"]["off"] < 1e-5
        assert rank["ways"]["lists"]["off"] < 1e-5
        assert 0 < rank["peak_mib"] < 10
    for rank in layer["bandwidth"]:
        assert rank["bytes"] == layer["formula"] / 2
        assert rank["exchange_ms"] >= rank["collectives_ms"] > 0
        assert rank["bare_gb_per_s"] == pytest.approx(rank["bytes"] / 2 / rank["bare_ms"] / 1e6)

    for title in ("Equality with one process: 3 of 3", "A training step", "48 tokens, one layer: 8 heads, 1 KV heads"):
        assert f"### {title}" in printed
    assert "--json" not in printed
    assert printed.count("### Equality") == 1  # one rank prints
    assert printed.splitlines() == "\n".join(ulysses_report.lines(found)).splitlines()

    # Bars are for NCCL with a card for each rank. Sockets and milliseconds meet none.
    assert "bar:" not in printed
    where["backend"] = "nccl"
    assert "(bar: at most 10 %; NOT met)" in "\n".join(ulysses_report.lines(found))
    where["shared"] = True
    assert "bar:" not in "\n".join(ulysses_report.lines(found))


def test_what_is_off_is_said_and_ends_with_1(tmp_path):
    """In processes of its own: a benchmark whose model is given heads of its own tokens only."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from tests.benchmarks import bench_ulysses\n"
        "from tests.benchmarks.ulysses_ranks import run_ranks\n"
        "from tests.support.ulysses_cases import break_the_exchange\n"
        "def work(place, options):\n"
        "    break_the_exchange(place.world)\n"
        "    return bench_ulysses.work(place, options)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(run_ranks(bench_ulysses.parsed(), work))\n"
    )
    found, printed = ran([sys.executable, str(script), "--only", "equality", "--every", "9"], tmp_path / "found.json", 1)
    assert all(row["problems"] for row in found["equality"])
    assert "Equality with one process: 0 of 2" in printed
    assert "rank 1: log_probs is off by" in printed


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--backend", "nccl"], "--backend nccl needs --device cuda"),
        (["--ranks", "4", "--sp", "3"], "--sp 3 does not divide the 4 ranks"),
    ],
)
def test_ranks_that_cannot_be_had_are_refused_before_any_starts(options, what):
    with pytest.raises(SystemExit, match=re.escape(what)):
        ulysses_ranks.run_ranks(bench_ulysses.parsed(options), bench_ulysses.work)


def test_too_few_cards_for_nccl_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = bench_ulysses.parsed(["--device", "cuda", "--backend", "nccl"])
    with pytest.raises(SystemExit, match=r"2 ranks and 1 CUDA devices.*--share"):
        ulysses_ranks.run_ranks(options, bench_ulysses.work)


def test_defaults_are_for_the_device():
    cpu, cuda = bench_ulysses.parsed([]), bench_ulysses.parsed(["--device", "cuda"])
    assert (cpu.length, cpu.dtype) == ([1024], "float32")
    assert (cuda.length, cuda.dtype) == ([32768, 131072], "bfloat16")


def test_parts_of_a_clock_add_up():
    clock = ulysses_ranks.Clock(torch.device("cpu"))
    for part in ("pack", "all_to_all", "pack"):
        clock.mark(part)
    parts = clock.parts()
    assert list(parts) == ["pack", "all_to_all"]
    assert sum(parts.values()) == pytest.approx((clock._marks[-1][1] - clock._marks[0][1]) * 1e3)
