"""Every ```python block of the docs runs, in order, one namespace a page. What needs an engine or a GPU is marked ```py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scoped_patch import assert_clean

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page):
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        # Compiled under the page's name and at its line, so that a failure points into the page.
        exec(compile("\n" * line + match.group(1), str(page), "exec"), namespace)
    assert_clean()
