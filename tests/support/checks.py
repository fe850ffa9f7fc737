"""Many checks in one group of ranks: starting ranks costs more than most checks."""

from __future__ import annotations

import importlib
from typing import Any

from tests.support import versions
from tests.support.ranks import spawn


def run_checks(module: str, names: list[str], world: int, timeout: float = 240.0) -> None:
    """Run functions `check(rank, world)` of a module, by name, on all ranks of one group.

    The first that fails on any rank is what the test fails with: the other ranks may be waiting for that one, so no later
    check could be trusted to end. What the installed transformers lacks is left out, on all ranks alike.
    """
    done, missing = spawn(world, _run, module, names, timeout=timeout)[0]
    if not done:
        raise versions.NotInThisTransformersError("; ".join(missing))
    for what in missing:
        versions.leave_out(what)


def _run(rank: int, world: int, module: str, names: list[str]) -> tuple[int, list[str]]:
    """How many of the checks ran, and what was left out."""
    import torch.distributed as dist
    import transformers

    from scoped_patch import assert_clean

    transformers.logging.set_verbosity_error()
    functions: Any = importlib.import_module(module)
    done = 0
    for name in names:
        try:
            getattr(functions, name)(rank, world)
            done += 1
        except Exception as error:
            if (missing := versions.absence(error)) is None:
                error.add_note(f"in {name}")
                raise
            versions.leave_out(f"{name}: {missing}")
        assert_clean()
        dist.barrier()
    return done, versions.left_out
