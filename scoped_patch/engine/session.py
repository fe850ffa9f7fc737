"""Sessions: what one `with` holds. Entering is all or nothing, leaving is idempotent and never loses a place."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .errors import ConflictError, LeakError, ScopedPatchError, ScopeStateError, raise_errors
from .live import LIVE, Snapshot
from .slots import Slot, same

if TYPE_CHECKING:
    from .edits import Edit
    from .plan import Plan, PlannedEdit
    from .report import Explanation

logger = logging.getLogger("scoped_patch")

OnForeign = Literal["error", "keep", "restore"]


@dataclass(slots=True)
class Record:
    """One applied edit.

    Attributes:
        slot: where.
        prior: the exact raw value before the write; MISSING when the place held nothing of its own.
        value: the raw value read back after the write.
        patch: the name of the patch.
        location: file:line of the with-statement.
        calls_before: the edit's call count when this session began.
    """

    planned: PlannedEdit
    prior: Any
    value: Any
    location: str
    calls_before: int

    @property
    def slot(self) -> Slot:
        return self.planned.edit.slot

    @property
    def edit(self) -> Edit:
        return self.planned.edit

    @property
    def patch(self) -> str:
        return self.planned.patch.name

    @property
    def calls(self) -> int | None:
        counter = self.planned.edit.counter
        return None if counter is None else counter.calls - self.calls_before


class Session:
    """The edits of one entered scope. Made by `with patched(...)`, a decorated call, or `patched(...).apply()`.

    Attributes:
        target: what was patched, as the caller gave it.
        root: the object whose scopes belong together (the model under its wrappers); the target by default.
        location: file:line of the with-statement.
        records: one per applied edit, in order of application.
        exit_error: the error of leaving, when the body's own exception passed through in its place.
    """

    def __init__(self, target: Any, root: Any, plan: Plan, on_foreign: OnForeign) -> None:
        self.target = target
        self.root = root
        self.plan = plan
        self.on_foreign: OnForeign = on_foreign
        self.records: list[Record] = []
        self.location = "?"
        self.thread = threading.get_ident()
        self.thread_name = threading.current_thread().name
        self.state: Literal["new", "entering", "live", "leaving", "closed"] = "new"
        self.exit_error: ScopedPatchError | None = None
        self._snapshot: Snapshot | None = None

    # ------------------------------------------------------------------------------------------------- entering
    def enter(self) -> None:
        """Apply the plan; on any failure, Ctrl-C included, undo what was done and let the failure through."""
        if self.state != "new":
            raise ScopeStateError(f"this session is already {self.state}; enter the scope again for a fresh one")
        self.location = caller_location()
        self.state = "entering"
        try:
            with LIVE.lock:
                LIVE.wait_for_replays()
                LIVE.sessions.append(self)
                for planned in self.plan.edits:
                    self._apply(planned)
                self.plan.start_pending(self)
                LIVE.version += 1
                self.state = "live"
        except BaseException as failure:
            problems = self._undo_all()
            for problem in problems:
                failure.add_note(f"while undoing: {type(problem).__name__}: {problem}")
            raise
        for record in self.records:
            logger.debug("%s: %s %s (%s)", record.patch, record.edit.action, record.slot.label, record.edit.reason)

    def _apply(self, planned: PlannedEdit) -> None:
        edit = planned.edit
        counter = edit.counter
        record = Record(planned, edit.slot.read(), None, self.location, counter.calls if counter else 0)
        self.records.append(record)  # before the write, so that whatever happens next can be undone
        LIVE.install(edit, planned.patch.name, self)
        record.value = edit.slot.read()

    def apply_late(self, planned: PlannedEdit) -> None:
        """Apply an edit whose module was imported while this session is live."""
        with LIVE.lock:
            if self.state == "live":
                self._apply(planned)
                LIVE.version += 1

    # ------------------------------------------------------------------------------------------------- leaving
    def restore(self) -> None:
        """Undo every edit of this session. Calling it again does nothing.

        Raises:
            OutOfOrderExit, ForeignOverwriteError, RestoreError: one of them, or a `PatchErrorGroup` of several, after
                everything that could be put back has been.
        """
        self.leave(None)

    def leave(self, body: BaseException | None) -> None:
        """What `__exit__` calls: audit (when the body ended well), restore, report."""
        if self.state in ("new", "closed"):
            return
        errors: list[Exception] = []
        if body is None and self.state == "live":
            for patch in self.plan.patches:
                try:
                    patch.audit(self)
                except Exception as error:
                    errors.append(error)
        errors += self._undo_all()
        if not errors:
            return
        if body is None:
            raise_errors(f"leaving the scope entered at {self.location}", errors)
        try:
            raise_errors(f"leaving the scope entered at {self.location}", errors, cause=body)
        except ScopedPatchError as error:
            # The body's own exception passes through; what went wrong on the way out rides on it.
            self.exit_error = error
            body.add_note(f"scoped_patch, while leaving the scope: {type(error).__name__}: {error}")  # type: ignore[union-attr]
            logger.error("while leaving the scope entered at %s: %s", self.location, error)

    def _undo_all(self) -> list[Exception]:
        """Undo everything, however often it is interrupted; interrupts are raised once all is done."""
        interrupt: BaseException | None = None
        errors: list[Exception] = []
        while True:
            try:
                errors += self._undo()
                break
            except Exception:
                raise
            except BaseException as error:  # KeyboardInterrupt: restoring is short, so it is finished first
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return errors

    def _undo(self) -> list[Exception]:
        errors: list[Exception] = []
        with LIVE.lock:
            LIVE.wait_for_replays()
            if self.state == "closed":
                return errors
            if self._snapshot is None and self.state == "live":
                self._snapshot = LIVE.freeze([self])
            self.state = "leaving"
            left: list[Record] = []
            for record in reversed(self.records):
                try:
                    problem = LIVE.remove(record.edit, self, self.on_foreign)
                except Exception as error:
                    left.append(record)
                    problem = error
                if problem is not None:
                    errors.append(problem)
            LIVE.version += 1
            if left:
                # Still patched: stays on the live list, and a later restore() tries these again.
                left.reverse()
                self.records[:] = left
            else:
                if self in LIVE.sessions:
                    LIVE.sessions.remove(self)
                self.state = "closed"
        return errors

    # ------------------------------------------------------------------------------------------------- replay
    @contextmanager
    def replay(self) -> Iterator[None]:
        """Put this session's edits on for the length of the block, over whatever is live, then put that back.

        Works from any thread and after the session was left: activation recomputation uses it, so that a forward
        recorded inside the scope is recomputed as it ran. Other threads' replays of other sessions are waited for.
        """
        snapshot = self._snapshot
        if snapshot is None:
            if self.state != "live":
                raise ScopeStateError(f"this session is {self.state}: there is nothing to replay")
            snapshot = LIVE.freeze([self])
        with LIVE.replay(snapshot):
            yield

    # ------------------------------------------------------------------------------------------------- reports
    def explain(self, full: bool = False) -> Explanation:
        """A table of what was changed: patch, where, from, to, why, calls since entry.

        Args:
            full: one row per edit; by default the same edit on many layers is one row.
        """
        from .report import explain_session

        return explain_session(self, full)

    def diff(self) -> list[dict[str, Any]]:
        """The same as data: one dict per edit, with the values themselves."""
        from .report import diff_session

        return diff_session(self)

    def __enter__(self) -> Session:
        # For `with scope.apply() as session:`; the session is live already.
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.leave(value)

    def __repr__(self) -> str:
        names = "+".join(p.name for p in self.plan.patches) or "nothing"
        return f"<Session {names}, {len(self.records)} edits, {self.state}, entered at {self.location}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise ScopeStateError("a session cannot be pickled or copied: it is a fact of this process")


def active() -> list[Session]:
    """The sessions that are live in this process, oldest first."""
    with LIVE.lock:
        return list(LIVE.sessions)


def assert_clean() -> None:
    """Raise unless no edit of this library is live.

    Raises:
        LeakError: lists every live session with the place it was entered at, and every place still patched.
    """
    with LIVE.lock:
        sessions, states = list(LIVE.sessions), [s for s in LIVE.states.values() if s.segments or s.target]
    if sessions or states:
        lines = [f"  {session!r}" for session in sessions] + [f"  patched: {state.slot.label}" for state in states]
        raise LeakError("scopes are still live:\n" + "\n".join(lines))


def is_live(slot: Slot) -> bool:
    """Is this place patched, and does it still read what was written?"""
    with LIVE.lock:
        state = LIVE.states.get(slot.place)
        return bool(state and state.segments and same(slot.read(), state.segments[-1].top))


def caller_location() -> str:
    """file:line of the nearest frame outside this library and outside contextlib."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "contextlib" and not module.startswith("scoped_patch."):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


__all__ = ["ConflictError", "OnForeign", "Record", "Session", "active", "assert_clean", "caller_location", "is_live"]
