"""`python -m scoped_patch`, and the program `scoped-patch`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn

from .cli import main


def program() -> NoReturn:
    """`main` as a process of its own, which ends as soon as everything is written.

    Python would free the model and the millions of objects of its libraries one by one, for half a second or more. What was
    registered to run at the end runs.
    """
    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):  # whoever read it has seen enough
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    program()
