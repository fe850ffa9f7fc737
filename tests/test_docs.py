"""Every ```python block of the docs runs, in order, one namespace a page. What needs an engine or a GPU is marked ```py."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path

import pytest

from scoped_patch import assert_clean
from scoped_patch.compat import verl
from tests.support import stub_packages

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


#: packages that a page shows and tests do not install, and names that stand for what only their users have
STUBBED = {"migrating"}
GIVEN = {
    "migrating": {
        "make_engine_model": stub_packages.EngineModel,
        "named_tensors": stub_packages.weights,
    }
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page):
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}", **GIVEN.get(page.stem, {})}
    stubs = stub_packages.installed() if page.stem in STUBBED else contextlib.nullcontext(lambda: None)
    with stubs as put_classes_back:
        section = 0
        for match in BLOCK.finditer(text):
            if text[: match.start()].count("\n## ") != section:  # what one section has done for good is not the next one's
                section = text[: match.start()].count("\n## ")
                put_classes_back()
            line = text[: match.start()].count("\n") + 1
            # Compiled under the page's name and at its line, so that a failure points into the page.
            exec(compile("\n" * line + match.group(1), str(page), "exec"), namespace)
    assert_clean()


@pytest.mark.parametrize(
    "name",
    [
        "apply_monkey_patch",
        "apply_qat_patches",
        "prepare_qat_for_load_weights",
        "manual_process_weights_after_loading",
    ],
)
def test_the_stand_ins_have_the_signatures_of_what_they_stand_for(name):
    """verl's, which ours match: names, order and defaults."""
    theirs = inspect.signature(getattr(stub_packages, name)).parameters
    ours = inspect.signature(getattr(verl, name)).parameters
    assert [(p.name, p.default, p.kind) for p in theirs.values()] == [(p.name, p.default, p.kind) for p in ours.values()]


def test_links_lead_somewhere():
    for page in [*PAGES, PAGES[0].parents[1] / "README.md"]:
        for link in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
