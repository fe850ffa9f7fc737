"""Runs the tests of the Triton backend in Triton's interpreter, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported, and torch may have imported it long before those tests start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the Triton backend needs triton")


def run(selection: str) -> None:
    tests = Path(__file__).with_name("test_linear_cross_entropy_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", selection],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU those tests run compiled, by themselves")


@needs_no_gpu
def test_the_kernels_on_a_few_cases():
    run(
        "129-all or 1000-plain or 130-strided or (kept and not second) or minus_infinity or empty or summed_in_fp32 or 130-bias"
    )


@needs_no_gpu
def test_a_second_linear_term_and_a_vocabulary_over_two_ranks():
    run("(second_linear_term and (eh or ew)) or vocab_parallel")


@needs_no_gpu
@pytest.mark.slow
def test_the_kernels_on_the_whole_grid():
    run("test")
