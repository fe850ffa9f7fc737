"""The tables of families in the docs are those of the tests' own lists."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.support import family_table
from tests.tiny_models import BUILDERS


@pytest.mark.parametrize("path", family_table.pages(), ids=lambda path: path.name)
def test_the_page_is_up_to_date(path):
    assert path.read_text() == family_table.pages()[path], "run: python -m tests.support.family_table"


def test_every_family_has_a_row_and_every_column_names_real_families():
    table = family_table.full_table()
    assert all(f"| {family} |" in table for family in BUILDERS)
    assert all(set(families) <= set(BUILDERS) for families in family_table.COLUMNS.values())
    assert sum(family in family_table.short_table() for family in BUILDERS) == len(BUILDERS)


def test_the_version_said_is_that_of_the_environment_it_comes_from():
    assert family_table.version().split(".")[0] == importlib.metadata.version("transformers").split(".")[0]
