"""The package as it is imported and shipped."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import scoped_patch

ROOT = Path(__file__).parent.parent
HEAVY = ("transformers", "triton", "vllm", "flash_attn")


def run_python(code: str, **options) -> str:
    """Run code in a fresh interpreter; its standard output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=240, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_in_nothing_heavy():
    loaded = run_python("import sys, scoped_patch; print(*sorted({name.split('.')[0] for name in sys.modules}))").split()
    assert "scoped_patch" in loaded
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("name", ["torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy"])
def test_import_brings_in_no_slow_part_of_torch(name):
    """Each of them takes longer than the package itself."""
    code = f"import sys, torch; assert {name!r} not in sys.modules; import scoped_patch; print({name!r} in sys.modules)"
    assert run_python(code) == "False\n"


@pytest.mark.parametrize("name", HEAVY)
def test_import_works_where_a_heavy_package_is_missing(name):
    """None in `sys.modules` makes every import of that name fail."""
    run_python(f"import sys; sys.modules[{name!r}] = None; import scoped_patch; scoped_patch.patched")


def test_engine_does_without_torch():
    """Under a bare parent package, because the real one hands on names of the rooms that do need torch."""
    run_python(
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "sys.modules['scoped_patch'] = parent = types.ModuleType('scoped_patch')\n"
        "parent.__path__ = ['scoped_patch']\n"
        "import scoped_patch.engine"
    )


def test_all_is_sorted_and_true():
    # Constants, classes, functions, each in alphabetical order: as ruff's RUF022 wants it.
    order = sorted(scoped_patch.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert scoped_patch.__all__ == order
    assert len(set(scoped_patch.__all__)) == len(scoped_patch.__all__)
    for name in scoped_patch.__all__:
        assert hasattr(scoped_patch, name), name


def test_dir_lists_the_public_names():
    assert set(scoped_patch.__all__) <= set(dir(scoped_patch))


def test_wheel_ships_the_package_its_types_and_its_licence(tmp_path):
    pytest.importorskip("hatchling", reason="the build backend is not installed (`make venv` does it)")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "scoped_patch").rglob("*.py")}
    assert modules | {"scoped_patch/py.typed"} <= shipped
    rest = shipped - modules - {"scoped_patch/py.typed"}
    assert all(".dist-info/" in name for name in rest), rest
    assert any(name.endswith("licenses/LICENSE") for name in rest)


def test_readme_example_runs():
    """And prints what the page says that it prints, but for where the block is."""
    page = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    printed = run_python(block)
    assert "fused_head" in printed
    assert re.sub(r"entered at \S+:(?=\d+: )", "entered at step.py:", printed).strip() == shown.strip()
