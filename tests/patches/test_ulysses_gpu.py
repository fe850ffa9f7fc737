"""Sequence parallelism on a GPU: ranks that share one card, through gloo. Flash attention, and FlexAttention's gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scoped_patch import Ulysses, patched
from tests.support.ranks import spawn
from tests.support.scores import unpatched
from tests.support.ulysses import run_cases
from tests.support.ulysses_cases import FAMILIES, NO_SDPA, Case, make_batch, told_lengths
from tests.support.ulysses_equality import why_no_flash
from tests.tiny_models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]

#: kernel, family, rows; torch's flash kernel takes no mask
FLASH = [("sdpa by flash", "llama", "plain"), ("sdpa by flash", "qwen3", "plain")]
FLASH += [
    ("flash_attention_4", family, rows)
    for family, rows in (("llama", "plain"), ("mistral", "plain"), ("qwen3", "plain"), ("qwen3", "padded"), ("qwen3", "packed"))
]


def assert_equal(ranks: int, cases: list[Case]) -> None:
    failures = [line for lines in spawn(ranks, run_on_one_card, cases, timeout=800, start="spawn") for line in lines]
    assert not failures, "\n".join(failures)


def run_on_one_card(rank: int, world: int, cases: list[Case]) -> list[str]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(4)
    return run_cases(rank, world, cases)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sdpa_equals_one_process(ranks):
    families = [family for family in FAMILIES if family not in NO_SDPA]
    cases = [Case(family, "sdpa", 2, 33, ranks=ranks, device="cuda") for family in families]
    cases += [Case("qwen3", "sdpa", 2, 57, rows, "sharded_fused", ranks=ranks, device="cuda") for rows in ("padded", "packed")]
    cases += [Case("mistral", "sdpa", 1, 57, "plain", "tiled", checkpoint="nonreentrant", ranks=ranks, device="cuda")]
    cases += [Case("gpt_oss", "eager", 2, 33, ranks=ranks, device="cuda")]
    assert_equal(ranks, cases)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_flex_equals_one_process(family, ranks):
    """Outputs and gradients: FlexAttention has none of the latter on a CPU."""
    rows = {"llama": "packed", "qwen2": "padded"}
    case = Case(family, "flex_attention", 2, 57, rows.get(family, "plain"), "fused", ranks=ranks, device="cuda")
    assert_equal(ranks, [case])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kernel", "family", "rows"), FLASH)
def test_flash_is_as_near_as_one_process(kernel, family, rows, ranks):
    """In bfloat16, against float32: no further off than the unpatched model with the same kernel is, but for a margin."""
    why = why_no_flash(torch.device("cuda")) if kernel == "flash_attention_4" else None
    if why is not None:
        pytest.skip(why)
    for ours, usual in spawn(ranks, errors, family, rows, kernel, timeout=600, start="spawn"):
        far = {name: (ours[name], usual[name]) for name in ours if not ours[name] <= 1.5 * usual[name] + 2e-3}
        assert not far


def errors(rank: int, world: int, family: str, rows: str, kernel: str) -> tuple[dict[str, float], dict[str, float]]:
    """How far log-probs, entropy and every gradient are from float32: spread over the ranks, and in one process."""
    case = Case(family, batch=1 if rows == "packed" else 2, length=301, rows=rows, call="fused", device="cuda")
    batch: dict[str, Any] = {name: x.cuda() for name, x in make_batch(case).items()}
    if rows == "packed":
        batch |= told_lengths(case.length, "cuda")
    options: dict[str, Any] = {"head_dim": 64, "initializer_range": 0.1}
    options |= {"sliding_window": 40} if family == "mistral" else {}
    exact, _ = build(family, attn="eager", **options)
    right = _plain(exact.cuda(), {name: x for name, x in batch.items() if "seq_len" not in name and "length" not in name})
    name = kernel if kernel == "flash_attention_4" else "sdpa"
    model, _ = build(family, attn=name, dtype=torch.bfloat16, **options)
    model.cuda()
    with _only_flash() if name == "sdpa" else contextlib.nullcontext():
        usual = _plain(model, batch)
        with patched(model, sp=Ulysses(world), fused="torch"):
            out = model(**batch)
            found = _scores(model, out.log_probs, out.entropy)
    for name, x in found.items():
        if "." in name:
            dist.all_reduce(x)
            x /= world
    return _off(found, right), _off(usual, right)


def _only_flash() -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def _plain(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    scores = unpatched(model, {**batch, "use_cache": False})
    return _scores(model, scores.log_probs, scores.entropy)


def _scores(model: Any, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"log_probs": log_probs.detach().cpu(), "entropy": entropy.detach().cpu(), **found}


def _off(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == right.keys()
    return {name: float((found[name] - x).norm() / x.norm()) for name, x in right.items()}
