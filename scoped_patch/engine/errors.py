"""Every error the library raises. Each also subclasses the builtin that a caller would already catch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class ScopedPatchError(Exception):
    """Base of all errors of this library."""


class ConflictError(ScopedPatchError, RuntimeError):
    """Two edits want one place, or another thread holds it; the message names both parties and the remedy."""


class ForeignOverwriteError(ScopedPatchError, RuntimeError):
    """Somebody else changed a patched place while the scope was open, so it was not put back."""


class OutOfOrderExit(ScopedPatchError, RuntimeError):
    """A scope was closed while a later one still covered one of its places."""


class RestoreError(ScopedPatchError, RuntimeError):
    """A place could not be put back, or reads differently than what was written."""


class LeakError(ScopedPatchError, AssertionError):
    """`assert_clean()` found live edits."""


class UnsupportedError(ScopedPatchError, NotImplementedError):
    """A patch cannot act on this target; the message names the target, the symbol looked for and the versions."""


class TargetError(ScopedPatchError, LookupError):
    """The thing to patch could not be found."""


class BadTargetError(ScopedPatchError, TypeError):
    """The thing to patch is of a kind that cannot be patched."""


class BadOptionError(ScopedPatchError, ValueError):
    """An option has a value that cannot work; the message says which values do."""


class SeamNotReachedError(ScopedPatchError, RuntimeError):
    """The model ran, but never came past the place that a patch changed: the patch would have had no effect."""


class ScopeStateError(ScopedPatchError, RuntimeError):
    """A scope was used in a state in which it cannot do what was asked."""


class NotEnteredError(ScopeStateError, AttributeError):
    """Something of the entered scope was asked of the scope object that was not entered."""


class PatchErrorGroup(ScopedPatchError, ExceptionGroup):
    """Several failures of one enter or exit, reported together."""

    def __new__(cls, message: str, errors: Iterable[Exception]) -> PatchErrorGroup:
        return super().__new__(cls, message, list(errors))

    def derive(self, excs: Any) -> PatchErrorGroup:  # type: ignore[override]
        return PatchErrorGroup(self.message, excs)


def join_errors(message: str, errors: Sequence[Exception]) -> Exception | None:
    """None for no errors, the error itself for one, a `PatchErrorGroup` for several."""
    if len(errors) < 2:
        return errors[0] if errors else None
    return PatchErrorGroup(f"{message} ({len(errors)} problems)", errors)


def raise_errors(message: str, errors: Sequence[Exception]) -> None:
    """Raise `join_errors(...)`, if there is anything to raise."""
    error = join_errors(message, errors)
    if error is not None:
        raise error


def finish(action: Callable[[], None]) -> None:
    """Run an action that can be run again until it has come to its end; an interrupt is raised after that.

    Undoing is short, so it is finished first, however often Ctrl-C comes.
    """
    interrupt: BaseException | None = None
    while True:
        try:
            action()
            break
        except Exception:
            raise
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
