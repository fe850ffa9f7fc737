#!/usr/bin/env python3
"""Core tests on several versions of transformers, each in a virtual environment of its own; prints a table.

    make test-matrix
    python tests/version_matrix.py 5.3.0 5.24.0        # only these
    python tests/version_matrix.py --write             # and put the table into README.md
    python tests/version_matrix.py 5.3.0 --again       # only the tests that failed in the last run whole
    python tests/version_matrix.py --kept --write      # of runs that were made before, one by one; nothing is run

An environment holds transformers and what that version wants of its own; torch and all else come from the environment that
this runs in. What came of each run whole is kept beside it, with the commit it was made on. What a version does not have is
skipped there, and counted: whole tests, and parts of tests that go on without it (`tests/support/versions.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("5.3.0", "5.5.3", "5.10.4", "5.17.0", "5.24.0")
#: only whether everything the patches hold on to is there
RESOLVED_ONLY = ("5.4.0", "5.7.0", "5.12.0", "5.20.0")
TESTS = (
    "tests/models",
    "tests/patches",
    "tests/test_combinations.py",
    "tests/test_compose.py",
    "tests/test_guarantees.py",
)
#: how a reason to skip begins, and a property of tests that ran without a part
ABSENT = "not in this transformers"
MARKS = ("<!-- versions: made by tests/version_matrix.py -->", "<!-- versions end -->")


@dataclass
class Outcome:
    """What came of one version. `passed` and the rest are None where tests were not run."""

    version: str
    resolved: bool
    passed: int | None = None
    failed: int | None = None
    absent: int = 0
    parts: int = 0
    names: tuple[str, ...] = ()
    commit: str = ""

    def cells(self) -> tuple[str, ...]:
        tests = (
            "not run" if self.passed is None else f"{self.passed} passed" + (f", {self.failed} failed" if self.failed else "")
        )
        counts = [f"{self.absent} tests"] if self.absent else []
        counts += [f"parts of {self.parts} more"] if self.parts else []
        absent = f"{' and '.join(counts)} skipped: not in this version" if counts else ""
        return (self.version, "all found" if self.resolved else "some missing", tests, absent)


def environment(folder: Path, version: str) -> Path:
    """The interpreter of an environment with this version of transformers in front of what we run in."""
    home = folder / f"transformers-{version}"
    python = home / "bin" / "python"
    if not (home / ".installed").exists():
        venv.create(home, with_pip=True, clear=True)
        own = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
        Path(own, "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", f"transformers=={version}"], check=True)
        (home / ".installed").touch()
    return python


def run(python: Path, version: str, tests: tuple[str, ...], workers: int) -> Outcome:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SCOPED_PATCH_MATRIX": "1"}
    doctor = "from scoped_patch.doctor import TARGETS; from scoped_patch.engine.resolve import slot_from_path\n"
    doctor += "import transformers\nprint(transformers.__version__)\nfor path, _ in TARGETS: slot_from_path(path)"
    found = subprocess.run([python, "-c", doctor], env=env, cwd=ROOT, capture_output=True, text=True)
    if not found.stdout.startswith(version):
        raise SystemExit(f"{python} has transformers {found.stdout.strip() or found.stderr[-500:]!r}, wanted {version}")
    outcome = Outcome(version, found.returncode == 0)
    if not tests:
        return outcome
    report = python.parents[1] / "report.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", f"--junitxml={report}"]
    subprocess.run([*command, "-n", str(workers), *tests], env=env, cwd=ROOT)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.find("skipped") for case in cases]
    outcome.absent = sum(one is not None and ABSENT in (one.get("message") or "") for one in skipped)
    outcome.parts = sum(any(p.get("name") == ABSENT for p in case.iter("property")) for case in cases)
    outcome.failed = len(bad)
    outcome.passed = len(cases) - len(bad) - sum(one is not None for one in skipped)
    outcome.names = tuple(f"{case.get('classname')}::{case.get('name')}" for case in bad)
    outcome.commit = _commit()
    if tests == TESTS:
        _kept(python).write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def again(python: Path, version: str, workers: int) -> Outcome:
    """The last run whole, with what failed in it run again now. Both commits are kept."""
    before = kept(python.parents[2], version)
    if not before.names:
        return before
    names = (name.split("::", 1) for name in before.names)
    now = run(python, version, tuple(f"{module.replace('.', '/')}.py::{test}" for module, test in names), workers)
    counts = {
        "passed": (before.passed or 0) + (now.passed or 0),
        "failed": now.failed,
        "absent": before.absent + now.absent,
        "parts": before.parts + now.parts,
    }
    outcome = replace(now, **counts, commit=f"{before.commit}, what failed there again on {now.commit}")
    _kept(python).write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def _kept(python: Path) -> Path:
    return python.parents[1] / "outcome.json"


def kept(folder: Path, version: str) -> Outcome:
    """What came of the last run whole of a version."""
    file = _kept(folder / f"transformers-{version}" / "bin" / "python")
    if not file.exists():
        raise SystemExit(f"no whole run of {version} was kept in {folder}: run `python tests/version_matrix.py {version}`")
    outcome = Outcome(**json.loads(file.read_text()))
    outcome.names = tuple(outcome.names)
    return outcome


def _commit() -> str:
    """What was run, with a plus where files differ from it; empty where there is no git."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def table(outcomes: list[Outcome]) -> str:
    lines = ["| transformers | what the patches hold on to | core tests | |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(outcome.cells()) + " |" for outcome in outcomes)])


def write(text: str, file: Path = ROOT / "README.md") -> None:
    """Put the table between its marks, which are there or come at the end of the installation section."""
    readme = file.read_text()
    block = f"{MARKS[0]}\n{text}\n{MARKS[1]}"
    if MARKS[0] in readme:
        made = re.sub(re.escape(MARKS[0]) + r".*?" + re.escape(MARKS[1]), lambda _: block, readme, flags=re.DOTALL)
    else:
        made = readme.replace("## Try it\n", f"{block}\n\n## Try it\n", 1)
    file.write_text(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="*", help=f"by default {' '.join(VERSIONS)}, and {' '.join(RESOLVED_ONLY)} without tests"
    )
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="what to run")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venvs", help="where the environments are kept")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="run what failed in the last run whole, and nothing else")
    parser.add_argument("--kept", action="store_true", help="take what came of earlier runs instead of running tests")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    wanted = [(version, tuple(options.tests)) for version in options.versions or VERSIONS]
    if not options.versions:
        wanted += [(version, ()) for version in RESOLVED_ONLY]
    outcomes = []
    for version, tests in wanted:
        if options.kept and tests:
            outcomes.append(kept(options.folder, version))
        elif options.again and tests:
            outcomes.append(again(environment(options.folder, version), version, options.workers))
        else:
            outcomes.append(run(environment(options.folder, version), version, tests, options.workers))
    outcomes.sort(key=lambda outcome: tuple(map(int, outcome.version.split("."))))
    sys.stdout.write(table(outcomes) + "\n")
    for outcome in outcomes:
        if outcome.commit:
            sys.stdout.write(f"{outcome.version}: run on {outcome.commit}\n")
        for name in outcome.names:
            sys.stdout.write(f"{outcome.version}: {name}\n")
    if options.write:
        write(table(outcomes))
    return int(any(outcome.failed or not outcome.resolved for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
