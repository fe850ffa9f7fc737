"""Sessions: what one `with` holds. Entering is all or nothing, leaving is idempotent and never loses a place."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .errors import LeakError, ScopeStateError, finish, join_errors
from .live import LIVE
from .replay import Snapshot
from .resolve import copies_by_value
from .slots import ClassSlot, Slot

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

    _serials = itertools.count()

    def __init__(self, target: Any, root: Any, plan: Plan, on_foreign: OnForeign) -> None:
        self.target = target
        self.root = root
        self.plan = plan
        self.on_foreign: OnForeign = on_foreign
        self.records: list[Record] = []
        self.location = "?"
        self.serial = -1
        self.thread = threading.get_ident()
        self.thread_name = threading.current_thread().name
        self.state: Literal["new", "entering", "live", "leaving", "closed"] = "new"
        self.exit_error: Exception | None = None
        self._snapshot: Snapshot | None = None
        self._problems: dict[int, Exception] = {}
        self._modules: frozenset[str] | None = None

    # ------------------------------------------------------------------------------------------------- entering
    def enter(self) -> None:
        """Apply the plan; on any failure, Ctrl-C included, undo what was done and let the failure through."""
        if self.state != "new":
            raise ScopeStateError(f"this session is already {self.state}; enter the scope again for a fresh one")
        self.location = caller_location()
        try:
            with LIVE.lock:
                LIVE.before_change()
                self.state = "entering"
                self.serial = next(self._serials)
                LIVE.sessions.append(self)
                for planned in self.plan.edits:
                    self._apply(planned)
                self.plan.start_pending(self)
                LIVE.changed()
                self.state = "live"
            if logger.isEnabledFor(logging.DEBUG):
                for record in self.records:
                    logger.debug("%s: %s %s (%s)", record.patch, record.edit.action, record.slot.label, record.edit.reason)
        except BaseException as failure:
            self._abandon(failure)
            raise

    def _abandon(self, failure: BaseException) -> None:
        """Undo an enter that failed; what goes wrong on the way rides on the failure."""
        finish(self._undo)
        for problem in self._problems.values():
            failure.add_note(f"while undoing: {type(problem).__name__}: {problem}")

    def _apply(self, planned: PlannedEdit) -> None:
        edit = planned.edit
        counter = edit.counter
        prior = edit.slot.read()
        record = Record(planned, prior, None, self.location, 0 if counter is None else counter.calls)
        self.records.append(record)  # before the write, so that whatever happens next can be undone
        record.value = LIVE.install(edit, planned.patch.name, self, prior)
        if isinstance(edit.slot, ClassSlot):
            LIVE.rebuild_heirs(edit.slot)
        if self._modules is None and isinstance(edit.slot.owner, types.ModuleType):
            self._modules = frozenset(sys.modules)

    def apply_late(self, planned: PlannedEdit) -> None:
        """Apply an edit whose module was imported while this session is live."""
        with LIVE.lock:
            if self.state in ("entering", "live"):
                self._apply(planned)
                LIVE.changed()

    # ------------------------------------------------------------------------------------------------- leaving
    def restore(self) -> None:
        """Undo every edit of this session. Calling it again does nothing.

        Raises:
            OutOfOrderExit, ForeignOverwriteError, RestoreError: one of them, or a `PatchErrorGroup` of several, after
                everything that could be put back has been. What could not be stays live; calling it again tries again.
        """
        self.leave(None)

    def leave(self, body: BaseException | None) -> None:
        """What `__exit__` calls: audit (when the body ended well), restore, report."""
        if self.state in ("new", "closed"):
            return
        errors: list[Exception] = []
        try:
            if body is None and self.state == "live":
                self._audit(errors)
        finally:
            self._problems.clear()
            try:
                finish(self._undo)
            except Exception as problem:  # it could not even begin; the session is live as before
                errors.append(problem)
        errors += self._problems.values()
        error = join_errors(f"leaving the scope entered at {self.location}", errors)
        if error is None:
            return
        if body is None:
            raise error
        # The body's own exception passes through; what went wrong on the way out rides on it.
        error.__cause__ = body
        self.exit_error = error
        body.add_note(f"scoped_patch, while leaving the scope: {type(error).__name__}: {error}")
        logger.error("while leaving the scope entered at %s: %s", self.location, error)

    def _audit(self, errors: list[Exception]) -> None:
        for patch in self.plan.patches:
            try:
                patch.audit(self)
            except Exception as error:
                errors.append(error)

    def _undo(self) -> None:
        if self.state in ("new", "closed"):
            return
        with LIVE.lock:
            LIVE.before_change()
            if self.state == "live" and self._snapshot is None:
                self._snapshot = LIVE.freeze_session(self, [record.slot for record in self.records])
            self.state = "leaving"
            left: list[Record] = []
            for record in reversed(self.records):
                try:
                    problem = LIVE.remove(record.planned.edit, self, self.on_foreign)
                except Exception as error:
                    left.append(record)
                    problem = error
                if problem is not None:
                    self._problems.setdefault(id(record), problem)
            self._mend_late_imports()
            LIVE.changed()
            if left:
                # Still patched: stays on the live list, and a later restore() tries these again.
                left.reverse()
                self.records[:] = left
            else:
                if self in LIVE.sessions:
                    LIVE.sessions.remove(self)
                self.state = "closed"

    def _mend_late_imports(self) -> None:
        """Modules that were imported inside the scope may have taken our values by `from m import f`."""
        if self._modules is None or len(sys.modules) == len(self._modules):
            return
        for record in self.records:
            slot, value = record.slot, record.value
            if not isinstance(slot.owner, types.ModuleType) or not callable(value):
                continue
            wanted = slot.value_of(slot.read())
            for module, name in copies_by_value(value, not_in=self._modules):
                # A value that a replace brought along may be at home there; only its use under this name is ours.
                if wanted is not value and (record.edit.action == "wrap" or name == slot.key):
                    logger.debug("%s.%s was imported by value inside a scope; put back", module.__name__, name)
                    module.__dict__[name] = wanted

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
            with LIVE.lock:
                snapshot = LIVE.freeze_session(self, [record.slot for record in self.records])
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
        if self.state != "live":
            raise ScopeStateError(f"this session is {self.state}: the block would run unpatched. Enter the scope again")
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
        sessions, states = list(LIVE.sessions), [s for s in LIVE.states.values() if s.busy]
    if sessions or states:
        lines = [f"  {session!r}" for session in sessions] + [f"  patched: {state.slot.label}" for state in states]
        raise LeakError("scopes are still live:\n" + "\n".join(lines))


def is_live(slot: Slot) -> bool:
    """Is this place patched, and does it still read what was written?"""
    with LIVE.lock:
        state = LIVE.states.get(slot.place)
        return state is not None and bool(state.segments) and state.is_ours(slot.read())


def caller_location() -> str:
    """file:line of the nearest frame outside this library and outside the machinery that runs blocks and tasks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("scoped_patch", "contextlib", "asyncio"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
