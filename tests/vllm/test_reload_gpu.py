"""`reload_weights` on a GPU: eager, and under CUDA graphs, whose kernels read the addresses they were captured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scoped_patch.vllm import IncompleteReload, reload_weights

from .conftest import HAVE_VLLM, Engine
from .support.addresses import addresses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAVE_VLLM, reason="needs a CUDA device and vLLM"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1024}
#: several engines share the card; graphs of the whole decoding step, without Inductor's compilation
COMMON = {"gpu_memory_utilization": 0.2, "attention_backend": "TRITON_ATTN"}
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


@pytest.fixture(scope="module", params=["w4a16 graphs", "w4a4 graphs", "w4a16 eager"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    scheme, how = request.param.split()
    root: Path = tmp_path_factory.mktemp(scheme)
    return Engine(root, "dense", scheme, options=COMMON | (GRAPHS if how == "graphs" else {}), **SIZES)


@pytest.mark.parametrize("atomic", ["model", "layer"])
def test_reloads_answer_like_fresh_engines_and_move_nothing(engine: Any, atomic: Any) -> None:
    before = addresses(engine.model)
    assert engine.fresh[0] != engine.fresh[1]
    for seed in (1, 0, 1, 0):
        with reload_weights(engine.llm, atomic=atomic) as update:
            update.load((name, tensor.cuda()) for name, tensor in engine.state[seed].items())
        assert engine.generate() == engine.fresh[seed]
        assert update.report.moved == 0
        assert addresses(engine.model) == before


def test_old_outputs_between_buckets_and_after_a_failure(engine: Any) -> None:
    items = list(engine.state[1].items())
    with pytest.raises(IncompleteReload):
        _load_without_values(engine, items)
    assert engine.generate() == engine.fresh[0]
    with reload_weights(engine.llm) as update:
        update.load(items)
    assert engine.generate() == engine.fresh[1]
    with reload_weights(engine.llm) as update:
        update.load(engine.state[0].items())
    assert engine.generate() == engine.fresh[0]


def _load_without_values(engine: Any, items: list[Any]) -> None:
    with reload_weights(engine.llm) as update:
        for at in range(0, len(items), 9):
            update.load(item for item in items[at : at + 9] if not item[0].endswith("v_proj.weight_packed"))
            assert engine.generate() == engine.fresh[0]
