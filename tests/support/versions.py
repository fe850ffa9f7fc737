"""What the installed transformers does not have, and a test therefore leaves out.

That is known by trying: a family is missing where its tiny model cannot be imported, an output where the unpatched model does
not give it. Only `make test-matrix` takes such an answer; on the version that we develop on it is a failure.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator

#: set by `make test-matrix`
SEVERAL_VERSIONS = "SCOPED_PATCH_MATRIX" in os.environ

#: how a rank begins a line that is no failure
ABSENT = "not in this transformers: "

#: what the test that runs now has left out; emptied before the next one
left_out: list[str] = []


class NotInThisTransformersError(Exception):
    """The whole test, or the part of it that stands in a function of its own, needs what is not there."""


def absence(error: BaseException) -> str | None:
    """What is not there, if that is what an error says; None where the error is a failure."""
    if not SEVERAL_VERSIONS:
        return None
    if isinstance(error, NotInThisTransformersError) or (
        isinstance(error, ImportError) and "transformers.models" in str(error)
    ):
        return str(error)
    return None


def leave_out(what: str) -> None:
    """Note that the rest of the test goes on without this.

    Raises:
        NotInThisTransformersError: this is the version that we develop on, which has everything.
    """
    if not SEVERAL_VERSIONS:
        raise NotInThisTransformersError(what)
    if what not in left_out:
        left_out.append(what)


@contextlib.contextmanager
def unpatched(what: str) -> Iterator[None]:
    """Around what a test compares with, computed without us: where that fails there is nothing to compare."""
    try:
        yield
    except Exception as error:
        if not SEVERAL_VERSIONS:
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise NotInThisTransformersError(f"unpatched, {what}: {type(error).__name__}: {first}") from error


def failures_of(lines: Iterable[str]) -> list[str]:
    """Of the lines that ranks return, those that are failures; the others are noted as left out."""
    failures = []
    for line in lines:
        if line.startswith(ABSENT):
            leave_out(line.removeprefix(ABSENT))
        else:
            failures.append(line)
    return failures


def present(families: Iterable[str]) -> tuple[str, ...]:
    """Those families of `tests.tiny_models` that there are."""
    found = []
    for family in families:
        missing = _missing(family) if SEVERAL_VERSIONS else None
        if missing is None:
            found.append(family)
        else:
            leave_out(missing)
    return tuple(found)


def exported(name: str) -> bool:
    """Has transformers a class of that name? Where not, it is noted as left out."""
    import transformers

    found = hasattr(transformers, name)
    if not found:
        leave_out(f"transformers.{name}")
    return found


@functools.cache
def _missing(family: str) -> str | None:
    from tests.tiny_models import build

    try:
        build(family)
    except ImportError as error:
        return absence(error)
    return None
