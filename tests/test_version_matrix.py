"""The table that `make test-matrix` prints, and where it goes in the README."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from tests import version_matrix
from tests.version_matrix import MARKS, RESOLVED_ONLY, VERSIONS, Outcome, kept, table, write

OUTCOMES = [Outcome("5.3.0", True, 40, 2, 3, 1, ("tests.a::b",)), Outcome("5.4.0", False), Outcome("5.24.0", True, 45, 0)]


def test_a_row_for_each_version():
    lines = table(OUTCOMES).splitlines()
    assert lines[2] == "| 5.3.0 | all found | 40 passed, 2 failed | 3 tests and parts of 1 more skipped: not in this version |"
    assert lines[3] == "| 5.4.0 | some missing | not run |  |"
    assert lines[4] == "| 5.24.0 | all found | 45 passed |  |"


def test_it_goes_between_its_marks_each_time(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("## Install\n\ntext\n\n## Try it\n\nmore\n")
    write("| old |", readme)
    write("| new |", readme)
    text = readme.read_text()
    assert text.count(MARKS[0]) == text.count(MARKS[1]) == 1
    assert "| new |" in text
    assert "| old |" not in text
    assert text.index("text") < text.index(MARKS[0]) < text.index("## Try it")


def test_what_came_of_a_run_whole_is_kept_and_what_is_not_there_is_said(tmp_path):
    home = tmp_path / "transformers-5.3.0"
    home.mkdir()
    with pytest.raises(SystemExit, match=r"no whole run of 5\.3\.0 was kept"):
        kept(tmp_path, "5.3.0")
    (home / "outcome.json").write_text(json.dumps(asdict(OUTCOMES[0])))
    assert kept(tmp_path, "5.3.0") == OUTCOMES[0]


def test_what_failed_is_run_again_and_both_commits_are_kept(tmp_path, monkeypatch):
    home = tmp_path / "transformers-5.3.0"
    home.mkdir()
    before = replace(OUTCOMES[0], names=("tests.a::b[x]", "tests.c::d"), commit="old")
    (home / "outcome.json").write_text(json.dumps(asdict(before)))
    asked = []

    def run(python, version, tests, workers):
        asked.append(tests)
        return Outcome(version, True, 1, 1, 0, 0, ("tests.c::d",), "new")

    monkeypatch.setattr(version_matrix, "run", run)
    python = home / "bin" / "python"
    found = version_matrix.again(python, "5.3.0", 1)
    assert asked == [("tests/a.py::b[x]", "tests/c.py::d")]
    assert (found.passed, found.failed, found.absent, found.names) == (41, 1, 3, ("tests.c::d",))
    assert found.commit == "old, what failed there again on new"
    assert kept(tmp_path, "5.3.0") == found


def test_versions_are_in_order_and_named_once():
    both = [*VERSIONS, *RESOLVED_ONLY]
    assert len(set(both)) == len(both)
    assert list(VERSIONS) == sorted(VERSIONS, key=lambda version: tuple(map(int, version.split("."))))
