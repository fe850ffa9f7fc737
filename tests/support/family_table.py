"""Which patch is tested on which family, written into README.md and docs/families.md from the tests' own lists.

python -m tests.support.family_table          # write
python -m tests.support.family_table --check  # say whether they are up to date
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

from tests.patches import test_prefix_grouper, test_prefix_grouper_vlm, test_tiled_mlp_families
from tests.support import ulysses_cases, vlm
from tests.tiny_models import BUILDERS, TEXT, VLMS

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- families: written by tests/support/family_table.py -->", "<!-- end of families -->"

#: column -> the families that the tests of a patch run over
COLUMNS: dict[str, tuple[str, ...]] = {
    "`sp=`": (*ulysses_cases.FAMILIES, *ulysses_cases.RECURRENT, *vlm.FAMILIES),
    "`fused=`": (*TEXT, *VLMS),
    "`tiled_mlp=`": tuple(BUILDERS),
    "tower in tiles": tuple(test_tiled_mlp_families.TOWERS),
    "`prefix_grouper=`": (*test_prefix_grouper.FAMILIES, *test_prefix_grouper_vlm.FAMILIES),
    "`vlm_mixed_batch`": tuple(vlm.FAMILIES),
}


def cells(family: str) -> tuple[str, ...]:
    made = []
    for column, families in COLUMNS.items():
        for_towers = column in ("tower in tiles", "`vlm_mixed_batch`")
        made.append("yes" if family in families else "" if for_towers and family in TEXT else "no")
    return tuple(made)


def version() -> str:
    """What `make test` installs."""
    found = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert found is not None
    return found[1]


def full_table() -> str:
    """A row for each family."""
    rows = [(family, *cells(family)) for family in (*TEXT, *VLMS)]
    return _markdown(("family", *COLUMNS), rows)


def short_table() -> str:
    """Families with the same cells in one row."""
    rows = []
    for kind in (TEXT, VLMS):
        ordered = sorted(kind, key=lambda family: (cells(family).count("no"), cells(family)))
        for same, families in itertools.groupby(ordered, cells):
            together = set(families)
            names = [name for name in kind if name in together]
            rows.append((", ".join(names), *same))
    return _markdown(("families", *COLUMNS), rows)


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Each page as it should be."""
    line = f"Tested with transformers {version()}."
    made = {}
    for path, table in ((ROOT / "README.md", short_table()), (ROOT / "docs" / "families.md", full_table())):
        before, _, rest = path.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        made[path] = f"{before}{BEGIN}\n{line}\n\n{table}\n{END}{after}"
    return made


def main(arguments: list[str]) -> int:
    stale = [path for path, text in pages().items() if path.read_text() != text]
    if "--check" not in arguments:
        for path, text in pages().items():
            path.write_text(text)
        return 0
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
