"""Many checks in one group of ranks: starting ranks costs more than most checks."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from typing import Any

from tests.support.ranks import spawn


def run_checks(module: str, names: list[str], world: int, timeout: float = 240.0) -> None:
    """Run functions `check(rank, world)` of a module, by name, on all ranks of one group; fail with all that failed."""
    results = spawn(world, _run, module, names, timeout=timeout)
    failures = [line for lines in results for line in lines]
    assert not failures, "\n".join(failures)


def _run(rank: int, world: int, module: str, names: list[str]) -> list[str]:
    import torch.distributed as dist
    import transformers

    from scoped_patch import active, assert_clean

    transformers.logging.set_verbosity_error()
    functions: Any = importlib.import_module(module)
    failures = []
    for name in names:
        try:
            getattr(functions, name)(rank, world)
            assert_clean()
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-3:])
            failures.append(f"--- {name} on rank {rank} of {world}:\n{text}")
            for session in reversed(active()):
                with contextlib.suppress(Exception):
                    session.restore()
        dist.barrier()
    return failures
