"""The blocks of docs/vllm.md that need an engine, run against one; the other pages run in tests/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from scoped_patch import assert_clean
from scoped_patch.vllm import quantize_state_dict, reload_weights

from .support import checkpoints
from .test_reload import buckets, restore

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def run(containing: str, **names: Any) -> dict[str, Any]:
    """Run the one block of the page that contains these words, with `names` in scope."""
    text = PAGE.read_text()
    (match,) = (m for m in re.finditer(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if containing in m.group(1))
    line = text[: match.start()].count("\n") + 1
    exec(compile("\n" * line + match.group(1), str(PAGE), "exec"), names)
    return names


def test_an_update(engines: Any) -> None:
    engine = engines("dense", "w4a16")
    said: list[Any] = []
    run("for bucket in buckets:", llm=engine.llm, buckets=buckets(engine.state[1], 3), print=said.append)
    assert [report.moved for report in said] == [0]
    assert engine.generate() == engine.fresh[1]
    restore(engine)


def test_training_weights_to_an_engine(engines: Any) -> None:
    engine = engines("dense", "w4a16")
    state = checkpoints.weights(checkpoints.config("dense"), 1)
    run("quantize_state_dict(model", llm=engine.llm, model=state)
    expected = dict(quantize_state_dict(state))
    assert all(name in engine.state[1] for name in expected)
    answer = engine.generate()
    assert answer != engine.fresh[0]
    assert torch.isfinite(torch.tensor(answer[1])).all()
    restore(engine)


def test_the_older_protocol(engines: Any) -> None:
    from vllm import LLM

    from .support import engine as support

    engine = engines("dense", "w4a16")
    # vLLM on CPU keeps what it packed of an unquantised layer; only layers with NVFP4 weights are processed again here.
    quantised = [(n, t) for n, t in engine.state[1].items() if "_proj." in n or "norm" in n]
    names = run("meta.prepare()", LLM=LLM, options=support.options(engine.path), pairs=quantised)
    mixed = dict(engine.state[0]) | dict(quantised)
    with reload_weights(engine.llm) as update:
        update.load(mixed.items())
    assert support.generate(names["llm"]) == engine.generate() != engine.fresh[0]
    restore(engine)
    assert_clean()
