"""Sequence parallelism under torch.compile: one graph, both ways of nesting, no compilation on entering again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scoped_patch import patched
from tests.support.checks import run_checks
from tests.support.scores import objective, unpatched
from tests.support.ulysses import reduced_gradients, take
from tests.tiny_models import build

IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))


class _CountingBackend:
    """aot_eager, counting the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(module, inputs)


def _check(call: nn.Module, model: nn.Module, scores: Any, gradients: dict[str, torch.Tensor], world: int) -> None:
    out = call(input_ids=IDS, use_cache=False)
    torch.testing.assert_close(out.log_probs.double(), scores.log_probs, rtol=1e-4, atol=1e-4)
    objective(out).backward()
    for name, g in reduced_gradients(model, world, "mean").items():
        torch.testing.assert_close(g, gradients[name], rtol=1e-3, atol=1e-4)


def check_one_graph_and_the_same_again(rank: int, world: int) -> None:
    model, _ = build("llama")
    scores = unpatched(model, {"input_ids": IDS, "use_cache": False})
    objective(scores).backward()
    gradients = take(model)
    torch.compiler.reset()
    backend = _CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    step = patched(compiled, sp=world, fused="torch")
    for _ in range(3):
        with step:
            _check(compiled, model, scores, gradients, world)
    assert backend.graphs == 1
    with torch.no_grad():
        plain = compiled(input_ids=IDS, use_cache=False).logits
        assert torch.equal(plain, model(input_ids=IDS, use_cache=False).logits)


def check_compiling_inside_the_scope(rank: int, world: int) -> None:
    model, _ = build("qwen3")
    scores = unpatched(model, {"input_ids": IDS, "use_cache": False})
    objective(scores).backward()
    gradients = take(model)
    torch.compiler.reset()
    with patched(model, sp=world, fused="torch"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        _check(compiled, model, scores, gradients, world)


@pytest.mark.timeout(400)
def test_compiled_on_two_ranks():
    run_checks(__name__, ["check_one_graph_and_the_same_again", "check_compiling_inside_the_scope"], 2, timeout=360)
