"""Many checks in one group of ranks: starting ranks costs more than most checks."""

from __future__ import annotations

import importlib
from typing import Any

from tests.support.ranks import spawn


def run_checks(module: str, names: list[str], world: int, timeout: float = 240.0) -> None:
    """Run functions `check(rank, world)` of a module, by name, on all ranks of one group.

    The first that fails on any rank is what the test fails with: the other ranks may be waiting for that one, so no later
    check could be trusted to end.
    """
    spawn(world, _run, module, names, timeout=timeout)


def _run(rank: int, world: int, module: str, names: list[str]) -> None:
    import torch.distributed as dist
    import transformers

    from scoped_patch import assert_clean

    transformers.logging.set_verbosity_error()
    functions: Any = importlib.import_module(module)
    for name in names:
        try:
            getattr(functions, name)(rank, world)
            assert_clean()
        except Exception as error:
            error.add_note(f"in {name}")
            raise
        dist.barrier()
