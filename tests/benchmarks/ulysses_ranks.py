"""Ranks of `bench_ulysses.py`: its own processes, or those that torchrun started; where each runs, and clocks for it."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scoped_patch.ops.sequence_parallel import collectives
from tests.benchmarks.bench_tiled_mlp import LiveBytes
from tests.support.ranks import take_card

MIB = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where this rank runs.

    Attributes:
        rank, world: of the default group, which the measured collectives use.
        device: this rank's; ranks may share a card.
        backend: `gloo` or `nccl`.
        shared: ranks share cards, so that no time says anything about the backend.
        control: a gloo group, for what is not measured: a rank that waits in it keeps no card busy.
    """

    rank: int
    world: int
    device: torch.device
    backend: str
    shared: bool
    control: Any

    def wait(self) -> None:
        """Until all ranks have come here, and their devices are done."""
        self.finish()
        dist.barrier(group=self.control)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def timed(self, run: Callable[[Any], Any], repeats: int, before: Callable[[], Any] = lambda: None) -> float:
        """Median milliseconds of `run`, given what `before` returns; the first is left out. Ranks start together."""
        times = []
        for _ in range(repeats + 1):
            given = before()
            self.wait()
            clock = Clock(self.device)
            run(given)
            clock.mark("all")
            times.append(clock.parts()["all"])
        return statistics.median(times[1:])

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[float]]:
        """MiB at most in use inside the block beyond what was before, appended at its end."""
        made: list[float] = []
        if self.device.type == "cuda":
            self.finish()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            yield made
            self.finish()
            made.append((torch.cuda.max_memory_allocated(self.device) - before) / MIB)
        else:
            with LiveBytes() as live:
                yield made
            made.append(live.peak / MIB)


class Clock:
    """Named parts of a stretch of work: a mark ends the part that it names, and begins the next one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        at: Any = time.perf_counter()
        if self._cuda:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        self._marks.append((part, at))

    def parts(self) -> dict[str, float]:
        """Milliseconds by name."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        made: dict[str, float] = {}
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            took = start.elapsed_time(end) if self._cuda else (end - start) * 1e3
            made[part] = made.get(part, 0.0) + took
        return made


@contextlib.contextmanager
def marked(clock: Clock) -> Iterator[None]:
    """Inside the block the library's all-to-alls are parts of their own, and what was before each is packing."""
    start, finish = dist.all_to_all_single, collectives._finish

    def started(*args: Any, **kwargs: Any) -> Any:
        clock.mark("pack")
        return start(*args, **kwargs)

    def finished(*args: Any) -> None:
        finish(*args)
        clock.mark("all_to_all")

    dist.all_to_all_single, collectives._finish = started, finished  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_to_all_single, collectives._finish = start, finish  # type: ignore[assignment]


class _Done:
    def wait(self, *_: Any) -> bool:
        return True


@contextlib.contextmanager
def without_communication() -> Iterator[None]:
    """Inside the block an all-to-all hands back what it was given, at no cost: what is left is all else."""
    single, several = dist.all_to_all_single, dist.all_to_all

    def same(out: Tensor, given: Tensor, **options: Any) -> Any:
        out.set_(given)  # type: ignore[call-overload]
        return _Done() if options.get("async_op") else None

    def same_list(out: list[Tensor], given: list[Tensor], **_: Any) -> None:
        for ours, theirs in zip(out, given, strict=True):
            ours.set_(theirs)  # type: ignore[call-overload]

    dist.all_to_all_single, dist.all_to_all = same, same_list  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_to_all_single, dist.all_to_all = single, several  # type: ignore[assignment]


def run_ranks(options: argparse.Namespace, work: Callable[[Place, argparse.Namespace], int]) -> int:
    """Call `work` on every rank; the exit status. Under torchrun this process is one of them."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if options.ranks not in (None, world):
            sys.exit(f"--ranks {options.ranks}, and torchrun started {world}: leave --ranks out")
        _check(options, world)
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        return _run(int(os.environ["RANK"]), local, world, "env://", options, work)
    world = options.ranks or 2
    _check(options, world)
    context: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        where = f"file://{folder}/rendezvous"
        started = [context.Process(target=_process, args=(rank, world, where, options, work)) for rank in range(world)]
        for process in started:
            process.start()
        try:
            return _joined(started)
        finally:
            for process in started:
                process.kill()


def _joined(processes: list[Any]) -> int:
    """The worst exit status. Ranks whose peer died wait for it, so they are not waited for."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0, 1) for process in processes):
            sys.exit("a rank died")
        time.sleep(0.1)
    return max(abs(process.exitcode) for process in processes)


def _process(rank: int, world: int, where: str, options: argparse.Namespace, work: Any) -> None:
    try:
        status = _run(rank, rank, world, where, options, work)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(2)  # no goodbye: the others may be in a collective
    sys.exit(status)


def _check(options: argparse.Namespace, world: int) -> None:
    cards = torch.cuda.device_count()
    if options.device == "cuda" and not cards:
        sys.exit("--device cuda: there is no CUDA device")
    if options.backend == "nccl":
        if options.device != "cuda":
            sys.exit("--backend nccl needs --device cuda")
        if cards < world and not options.share:
            sys.exit(
                f"--backend nccl: {world} ranks and {cards} CUDA devices. Start fewer ranks, say --backend gloo, or "
                "--share for ranks that share cards (equality over NCCL; the times mean nothing)"
            )
    if options.sp and world % options.sp:
        sys.exit(f"--sp {options.sp} does not divide the {world} ranks")


def _run(rank: int, local: int, world: int, where: str, options: argparse.Namespace, work: Any) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cards = torch.cuda.device_count()
    device = torch.device("cpu")
    backend = options.backend or ("nccl" if options.device == "cuda" and cards >= world else "gloo")
    if options.device == "cuda":
        device = take_card(local, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    rendezvous: dict[str, Any] = {} if where == "env://" else {"init_method": where, "rank": rank, "world_size": world}
    # As with NCCL, tensors of the CPU are refused where the model is on a GPU.
    dist.init_process_group("cuda:gloo" if (backend, device.type) == ("gloo", "cuda") else backend, **rendezvous)
    shared = device.type == "cuda" and cards < int(os.environ.get("LOCAL_WORLD_SIZE", world))
    place = Place(rank, world, device, backend, shared, dist.new_group(backend="gloo"))
    status = work(place, options)
    place.wait()
    dist.destroy_process_group()
    return status
