"""Several ranks on this machine, of gloo or NCCL, for tests: `results = spawn(2, function, ...)`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Importing takes longer than most tests: the fork server does it once for all groups of a test session.
_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "scoped_patch",
    "tests.support.preloaded",
]


class RankError(AssertionError):
    """A rank raised, died or took too long; the message holds its traceback."""


def spawn(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 180.0,
    start: str = "forkserver",
    backend: str = "gloo",
) -> list[Any]:
    """Run `function(rank, world, *args)` in `world` processes that form a group; what they return, by rank.

    The function must be importable (module level), its arguments and results picklable. Each rank computes on one thread.

    Args:
        timeout: seconds for the whole run; collectives give up a little earlier, and after two minutes at most, so that a
            rank that waits for another one says where.
        start: how processes start; CUDA wants `"spawn"`.
        backend: `"gloo"`, or `"nccl"`: rank i takes card i, and where there are fewer cards, ranks share them.

    Raises:
        RankError: a rank failed; all others are ended first. The first failure's traceback is the message.
    """
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        processes = [
            context.Process(target=_run, args=(rank, world, folder, timeout, backend, function, args), daemon=True)
            for rank in range(world)
        ]
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            _wait(processes, Path(folder), deadline)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        failures = _failures(processes, Path(folder))
        if failures:
            raise RankError("\n".join(failures))
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(world)]


def _wait(processes: list[Any], folder: Path, deadline: float) -> None:
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            return
        if any(process.exitcode not in (None, 0) for process in processes):
            # The others may fail for a reason of their own in a moment; more often they wait for the dead one.
            grace = time.monotonic() + 3
            while time.monotonic() < grace and any(process.is_alive() for process in processes):
                time.sleep(0.05)
            return
        time.sleep(0.02)


def _failures(processes: list[Any], folder: Path) -> list[str]:
    said = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    failures = [path.read_text() for path in said]
    for rank, process in enumerate(processes):
        if not (folder / f"{rank}.error").exists() and not (folder / f"{rank}.result").exists():
            how = "was ended: it took too long, or another rank failed" if process.exitcode in (-9, None) else "died"
            failures.append(f"rank {rank} {how} (exit code {process.exitcode})")
    return failures


def take_card(rank: int, world: int) -> Any:
    """Make card `rank` this process's own, for NCCL; with fewer cards than ranks, one that it shares. Returns the device.

    NCCL refuses two ranks on one card of one host. Told that every rank is a host, it sends through sockets: right, and
    slow, so that what is measured there says nothing about NCCL's speed.
    """
    import torch

    cards = torch.cuda.device_count()
    if cards < world:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = torch.device("cuda", rank % cards)
    torch.cuda.set_device(device)
    return device


def _run(
    rank: int,
    world: int,
    folder: str,
    timeout: float,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # The loopback device: finding the host's own address by name fails or takes seconds on some machines.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"] = str(rank), str(rank), str(world)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if backend == "nccl":
            take_card(rank, world)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=min(120.0, max(10.0, timeout - 15))),
        )
        result = pickle.dumps(function(rank, world, *args))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        Path(folder, f"{rank}.error").write_text(f"rank {rank} of {world} raised:\n{text}")
        # No goodbye to the group: the others may be inside a collective that will never end.
        os._exit(1)
    Path(folder, f"{rank}.result").write_bytes(result)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)
