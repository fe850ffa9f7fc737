"""What the scope itself costs: entering and leaving, a patched call, the import.

    python tests/benchmarks/bench_scope.py

Bars: 5 ms for enter + exit of four kinds of edits on 80 layers, 250 ns per patched call, 0.3 s of import beyond torch.
Processor time, and the minimum next to the median: on a busy machine the median measures the neighbours' cache misses.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from scoped_patch import Edit, Patch, Session, patched, wrap_call
from scoped_patch.engine import ItemSlot, attribute_slot
from scoped_patch.models.modules import forward_edit
from scoped_patch.models.placement import Placement

LAYERS = 80


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Identity()
        self.window = 128

    def forward(self, x: Any) -> Any:
        return x

    def attend(self, x: Any) -> Any:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))


class FourKinds(Patch):
    """Per layer: its forward, an inherited method, an attribute of its own, a child module."""

    name = "four_kinds"

    def plan(self, target: Model) -> Iterable[Edit]:
        stand_in = nn.Identity()
        for i, layer in enumerate(target.layers):
            label = f"layers.{i}"
            yield forward_edit(layer, label, nothing, name="patched_forward", rank=10, reason="nothing", to="the same")
            yield Edit(attribute_slot(layer, "attend", f"{label}.attend"), lambda prior: lambda x: prior(x))
            yield Edit(attribute_slot(layer, "window", f"{label}.window"), lambda prior: 256, "replace")
            yield Edit(ItemSlot(layer._modules, "mlp", f"{label}.mlp", layer), lambda prior: stand_in, "replace")


def nothing(prior: Callable[..., Any], module: nn.Module, x: Any) -> Any:
    return prior(x)


def enter_and_leave(scope: Any, runs: int = 300) -> list[float]:
    """Milliseconds of this thread's processor time, one for each run."""
    times = []
    for _ in range(runs):
        start = time.thread_time_ns()
        with scope:
            pass
        times.append((time.thread_time_ns() - start) / 1e6)
    return times


def replaying(session: Session, runs: int = 300) -> list[float]:
    times = []
    for _ in range(runs):
        start = time.thread_time_ns()
        with session.replay():
            pass
        times.append((time.thread_time_ns() - start) / 1e6)
    return times


def per_call(module: nn.Module, runs: int = 300, calls: int = 400) -> list[float]:
    """Nanoseconds of this thread's processor time per call, one for each run."""
    x, times = object(), []
    for _ in range(runs):
        start = time.thread_time_ns()
        for _ in range(calls):
            module(x)
        times.append((time.thread_time_ns() - start) / calls)
    return times


def per_look(placement: Placement, runs: int = 300, calls: int = 20) -> list[float]:
    """Nanoseconds per call of the model, one for each run."""
    times = []
    for _ in range(runs):
        start = time.thread_time_ns()
        for _ in range(calls):
            placement.check()
        times.append((time.thread_time_ns() - start) / calls)
    return times


def import_seconds() -> list[float]:
    code = "import torch, time; t = time.process_time(); import scoped_patch; print(time.process_time() - t)"
    run = [sys.executable, "-c", code]
    return [float(subprocess.run(run, capture_output=True, check=True, text=True).stdout) for _ in range(5)]


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="What the scope itself costs (processor time)", title_justify="left")
    for column in ("what", "minimum", "median", "bar"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def add(what: str, times: list[float], unit: str, bar: str = "", less: list[float] | None = None) -> None:
        best, middle = min(times), statistics.median(times)
        if less is None:
            table.add_row(what, f"{best:.3g} {unit}", f"{middle:.3g} {unit}", bar)
        else:
            best, middle = best - min(less), middle - statistics.median(less)
            table.add_row(what, f"{best:+.0f} {unit}", f"{middle:+.0f} {unit}", bar)

    model = Model()
    scope = patched(model, FourKinds())
    add(f"enter + exit, 4 kinds of edits on {LAYERS} layers", enter_and_leave(scope), "ms", "5 ms")
    with patched(model, WrapFour()):
        add("the same number inside another scope on the same places", enter_and_leave(patched(model, WrapFour())), "ms")
    with scope as session:
        add("replay inside the scope", replaying(session), "ms")
    add("replay after it", replaying(session), "ms")

    layer = Layer()
    plain = per_call(layer)
    add("nn.Module call, unpatched", plain, "ns")
    for name, patch, bar in (
        ("  with a bare method on the instance", Bare(), ""),
        ("  with a forward edit that does nothing", OneForward(), "250 ns"),
        ("  with wrap_call of what does nothing", wrap_call(layer, "forward", lambda original, x: original(x)), "250 ns"),
    ):
        with patched(layer, patch):
            add(name, per_call(layer), "ns", bar, less=plain)
    placement = Placement("bench", model, [part for layer in model.layers for part in (layer, layer.mlp)])
    add(f"looking whether {2 * LAYERS} patched modules are there", per_look(placement), "ns")
    add("import scoped_patch, torch being there", import_seconds(), "s", "0.3 s")
    Console().print(table)


class WrapFour(Patch):
    name = "wrap_four"

    def plan(self, target: Model) -> Iterable[Edit]:
        for i, layer in enumerate(target.layers):
            for method in ("forward", "attend", "extra_repr", "register_buffer"):
                yield Edit(attribute_slot(layer, method, f"layers.{i}.{method}"), lambda prior: lambda x: prior(x))


class OneForward(Patch):
    name = "one_forward"

    def plan(self, target: Layer) -> Iterable[Edit]:
        yield forward_edit(target, "layer", nothing, name="patched_forward", rank=10, reason="nothing", to="the same")


class Bare(Patch):
    name = "bare"

    def plan(self, target: Layer) -> Iterable[Edit]:
        def bare_forward(self: Layer, x: Any) -> Any:
            return x

        yield Edit(attribute_slot(target, "forward"), lambda prior: types.MethodType(bare_forward, target), "replace")


if __name__ == "__main__":
    main()
