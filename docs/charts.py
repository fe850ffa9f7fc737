#!/usr/bin/env python3
"""Draws the README's charts from the raw numbers of the benchmarks, each for a light and a dark page.

    pip install -e '.[bench]'
    python docs/charts.py

A drawing carries a digest of the numbers in it: `tests/test_charts.py` fails when they are no longer those of the benchmarks.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "img"

#: what is drawn how: text, other bars, our bars
THEMES = {"light": ("#1f2328", "#afb8c1", "#0969da"), "dark": ("#e6edf3", "#6e7681", "#58a6ff")}


@dataclass(frozen=True)
class Bar:
    label: str
    ms: float
    mib: float
    ours: bool = False


@dataclass(frozen=True)
class Chart:
    """One benchmark table: time and extra memory of forward and backward, side by side."""

    name: str
    title: str
    bars: tuple[Bar, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    @property
    def mark(self) -> str:
        return f"<!-- numbers: {self.digest} -->"


def _bars(names: dict[str, str], rows: dict[str, Any], ours: str) -> tuple[Bar, ...]:
    return tuple(Bar(label, rows[n]["total_ms"], rows[n]["peak_mib"], ours in n) for n, label in names.items())


def fused_head(results: dict[str, Any]) -> Chart:
    names = {
        "naive": "unfused",
        "naive, compiled": "unfused, torch.compile",
        "Liger CuTe SM90": "Liger-Kernel, CuTe",
        "unsloth": "unsloth-zoo",
        "verl triton": "verl, Triton",
        "scoped_patch, memory=auto": "fused, memory=auto",
        "scoped_patch, memory=512 MiB": "fused, memory=512 MiB",
        "scoped_patch, memory=low": "fused, memory=low",
    }
    shape = [8192, 4096, 151936]
    rows = {row["name"]: row for row in results["heads"] if row["shape"] == shape}
    bars = _bars(names, rows, ours="scoped_patch")
    return Chart("fused_head", "Log-probs and entropy: 8192 tokens, hidden size 4096, vocabulary 151,936", bars)


def tiled_mlp(results: dict[str, Any]) -> Chart:
    names = {
        "plain": "untiled",
        "checkpoint": "torch checkpoint",
        "verl tiled 16": "verl, 16 tiles",
        "liger tiled 16": "Liger-Kernel, 16 tiles",
        "tiled_mlp 4": "tiled_mlp=4",
        "tiled_mlp 16": "tiled_mlp=16",
    }
    rows = {row["name"]: row for row in results["rows"]}
    bars = _bars(names, rows, ours="tiled_mlp")
    return Chart("tiled_mlp", "Feed-forward block: 65,536 tokens, 4096 x 12288", bars)


def prefix_sharing(results: dict[str, Any]) -> Chart:
    names = {
        "repeated": "prefix repeated",
        "package, bench_varlen": "prefix_grouper package",
        "shared, auto": "prefix_grouper=True",
    }
    sides = next(model["sides"] for model in results["models"] if model["shape"] == "P 8192, R 1024, G 8")
    bars = (
        Bar(label, round(1000 * sides[n]["seconds"], 1), round(sides[n]["peak_mib"]), "shared" in n)
        for n, label in names.items()
    )
    return Chart(
        "prefix_sharing", "Training step: Qwen3-0.6B's shape, 8 responses of 1024 tokens to a prefix of 8192", tuple(bars)
    )


def charts() -> list[Chart]:
    """What there is to draw, from the raw numbers."""
    made = []
    for make, file in ((fused_head, "fused_head"), (tiled_mlp, "tiled_mlp"), (prefix_sharing, "prefix")):
        made.append(make(json.loads((RESULTS / f"{file}_h200.json").read_text())))
    return made


def file_of(chart: Chart, theme: str) -> Path:
    return IMAGES / f"{chart.name}-{theme}.svg"


def draw(chart: Chart, theme: str) -> str:
    """The chart as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    text, others, ours = THEMES[theme]
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": text,
    }
    with matplotlib.rc_context(style):
        figure, panels = pyplot.subplots(1, 2, figsize=(8.6, 0.75 + 0.27 * len(chart.bars)), sharey=True)
        figure.suptitle(chart.title, fontsize=10, x=0.01, ha="left")
        columns = (("milliseconds", [bar.ms for bar in chart.bars]), ("extra memory, GiB", [b.mib / 1024 for b in chart.bars]))
        for panel, (unit, values) in zip(panels, columns, strict=True):
            drawn = panel.barh(
                range(len(values)), values, color=[ours if bar.ours else others for bar in chart.bars], height=0.72
            )
            panel.bar_label(drawn, [f"{v:,.0f}" if v >= 100 else f"{v:.1f}" for v in values], padding=3, color=text)
            panel.set_yticks(range(len(values)), [bar.label for bar in chart.bars])
            panel.invert_yaxis()
            panel.set_title(unit, fontsize=9, loc="left", color=text)
            panel.set_xlim(0, 1.16 * max(values))
            panel.set_xticks([])
            panel.tick_params(length=0, colors=text)
            panel.spines[:].set_visible(False)
        panels[1].invert_yaxis()  # the panels share the axis: turned once
        figure.tight_layout(rect=(0, 0, 1, 1), w_pad=2)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": chart.title})
        pyplot.close(figure)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*lines, chart.mark]) + "\n"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for chart in charts():
        for theme in THEMES:
            file_of(chart, theme).write_text(draw(chart, theme))


if __name__ == "__main__":
    main()
