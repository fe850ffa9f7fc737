"""Two tensor-parallel ranks in processes of their own: all commit, or all keep the old weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scoped_patch.engine.errors import BadTargetError
from scoped_patch.vllm import RemoteReloadError, reload_engine, reload_weights

from .support import checkpoints


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from .support import engine

    root = tmp_path_factory.mktemp("remote")
    made = [checkpoints.write(root, "dense", "w4a4", seed) for seed in (0, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
        llm = engine.start(
            made[0][0],
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            worker_extension_cls="tests.vllm.support.extension.FailingExtension",
        )
    llm.states = [state for _, state in made]
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_two_ranks_commit_together_or_not_at_all(remote: Any) -> None:
    from .support.engine import generate

    first = generate(remote)
    before = remote.collective_rpc("scoped_patch_test_addresses")
    with reload_engine(remote, bucket_bytes=100_000) as update:
        update.load(remote.states[1].items())
        assert generate(remote) == first
    assert [r["version"] for r in update.ranks] == [1, 1]
    assert [r["moved"] for r in update.ranks] == [0, 0]
    second = generate(remote)
    assert second != first
    for where in ("load", "prepare", "commit"):
        remote.collective_rpc("scoped_patch_test_fail", args=(where, 1))
        with pytest.raises(RemoteReloadError, match=f"rank 1: RuntimeError: told to fail in {where}") as caught:
            send(remote, remote.states[0])
        assert list(caught.value.ranks) == [1]
        assert generate(remote) == second
        states = [json.loads(text) for text in remote.collective_rpc("scoped_patch_status")]
        assert [state["version"] for state in states] == [1, 1]
    remote.collective_rpc("scoped_patch_test_fail", args=("tamper", 1))
    with pytest.raises(RemoteReloadError, match="the ranks do not hold the same update") as caught:
        send(remote, remote.states[0])
    assert list(caught.value.ranks) == [1]
    assert generate(remote) == second
    assert remote.collective_rpc("scoped_patch_test_addresses") == before
    remote.collective_rpc("scoped_patch_test_fail", args=("", 1))
    with pytest.raises(RemoteReloadError, match="k_proj"):
        send(remote, {n: t for n, t in remote.states[0].items() if "layers.0.self_attn.k_proj" not in n})
    with pytest.raises(RemoteReloadError, match="down_proj"):
        send(remote, {n: t.repeat(2, 1) if n.endswith("down_proj.weight_packed") else t for n, t in remote.states[0].items()})
    with pytest.raises(ZeroDivisionError):
        send(remote, (1 / 0 for _ in range(1)))
    assert generate(remote) == second
    send(remote, remote.states[0])
    assert generate(remote) == first
    assert remote.collective_rpc("scoped_patch_test_addresses") == before
    with pytest.raises(BadTargetError, match="WorkerExtension"):
        reload_weights(remote).__enter__()


def send(remote: Any, state: Any) -> None:
    with reload_engine(remote) as update:
        update.load(state.items() if isinstance(state, dict) else state)


def test_what_cannot_be_driven() -> None:
    class Later:
        async def collective_rpc(self) -> None: ...

    with pytest.raises(BadTargetError, match="asynchronous"):
        reload_engine(Later())
    with pytest.raises(BadTargetError, match="no collective_rpc"):
        reload_engine(torch.nn.Linear(1, 1))
