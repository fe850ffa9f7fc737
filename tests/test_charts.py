"""The README's charts: drawn from the benchmarks' numbers as they are now, for light and dark pages. Needs no matplotlib."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load():
    spec = importlib.util.spec_from_file_location("docs_charts", ROOT / "docs" / "charts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_charts"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


drawing = load()
CHARTS = drawing.charts()


@pytest.mark.parametrize("theme", drawing.THEMES)
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_a_chart_shows_the_numbers_of_today(chart, theme):
    svg = drawing.file_of(chart, theme).read_text()
    assert svg.count(chart.mark) == 1, "the benchmarks' numbers have changed: run `python docs/charts.py` (extra: bench)"
    assert not re.search(r"numbers: (?!" + chart.digest + ")", svg)
    shown = ["".join(text.itertext()).strip() for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {bar.label for bar in chart.bars} <= set(shown)
    for bar in chart.bars:
        assert (f"{bar.ms:,.0f}" if bar.ms >= 100 else f"{bar.ms:.1f}") in shown
    assert svg.count(drawing.THEMES[theme][2]) == 2 * sum(bar.ours for bar in chart.bars)


def test_a_changed_number_or_label_is_another_digest():
    for chart in CHARTS:
        first, *rest = chart.bars
        for changed in (replace(first, ms=first.ms + 0.1), replace(first, mib=first.mib + 1), replace(first, label="other")):
            assert replace(chart, bars=(changed, *rest)).digest != chart.digest
        assert replace(chart, bars=tuple(chart.bars)).digest == chart.digest


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_readme_shows_each_chart_in_both_themes(chart):
    readme = (ROOT / "README.md").read_text()
    pictures = [part for part in re.findall(r"<picture>.*?</picture>", readme, re.DOTALL) if f"/{chart.name}-" in part]
    assert len(pictures) == 1
    assert re.search(rf'<source media="\(prefers-color-scheme: dark\)" srcset="docs/img/{chart.name}-dark.svg">', pictures[0])
    assert re.search(rf'<img src="docs/img/{chart.name}-light.svg" alt="[^"]+">', pictures[0])
