"""Scopes: the reusable thing that `patched(...)` returns. Each `with`, decorated call or `.apply()` is a new session.

Patches are facts of the process, not of a task or a generator. Two asyncio tasks that hold scopes on one place at a time
both see both scopes' edits, and leaving in another order than last-in-first-out raises `OutOfOrderExit` (the original is
back once both have left). A generator that is suspended inside a `with` leaves the patches on until it goes on or is
closed. Keep the block around code that does not wait, or put one scope around all of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from .edits import Patch
from .errors import BadOptionError, BadTargetError, NotEnteredError, ScopeStateError, UnsupportedError, raise_errors
from .live import LIVE
from .plan import Plan
from .session import OnForeign, Session

SessionT = TypeVar("SessionT", bound=Session)
F = TypeVar("F", bound=Callable[..., Any])


class Scope(Generic[SessionT]):
    """A stack of patches on one target, ready to be entered any number of times.

    Args:
        target: what the patches act on.
        patches: the patches, in the order given by the caller.
        root: the object whose scopes belong together; the target by default.
        on_foreign: what leaving does about a place that somebody else has changed meanwhile: `"error"` leaves it and
            raises, `"keep"` leaves it silently, `"restore"` puts the original back.

    Raises:
        UnsupportedError, ConflictError: when planning (at the first use, not here) finds that it cannot work.
    """

    session_class: type[SessionT] = Session  # type: ignore[assignment]

    def __init__(self, target: Any, patches: tuple[Patch, ...], *, root: Any = None, on_foreign: OnForeign = "error") -> None:
        if not (isinstance(on_foreign, str) and on_foreign in ("error", "keep", "restore")):
            raise BadOptionError(f"on_foreign must be 'error', 'keep' or 'restore', got {on_foreign!r}")
        for patch in patches:
            if not isinstance(patch, Patch):
                hint = " (an instance is needed, not the class)" if isinstance(patch, type) else ""
                raise BadTargetError(f"every patch must be a scoped_patch.Patch, got {patch!r}{hint}")
            if not patch.name:
                raise BadOptionError(f"{type(patch).__qualname__} has no name; set the class attribute `name`")
        self.target = target
        self.patches = patches
        self.root = target if root is None else root
        self.on_foreign: OnForeign = on_foreign
        self._plan: Plan | None = None
        # Sessions opened by `with`, each with the thread and the asyncio task that opened it.
        self._open: list[tuple[object, SessionT]] = []

    def plan(self) -> Plan:
        """What entering would do, without doing it. Made once and re-checked cheaply at every use."""
        if self._plan is None or not self._plan.fits():
            self._plan = Plan(self.target, self.patches)
        return self._plan

    def apply(self) -> SessionT:
        """Enter without a block: the session lives until its `restore()`, or to the end of the process.

        Dropping the returned handle restores nothing.
        """
        plan = self.plan()
        self.check_enter(plan)
        session = self.session_class(self.target, self.root, plan, self.on_foreign)
        session.enter()
        return session

    def check_enter(self, plan: Plan) -> None:
        """A last check before entering, of what planning does without; subclasses add theirs.

        Raises:
            UnsupportedError: a patch cannot be entered in this process now.
        """
        problems = [(patch, patch.ready(self.target)) for patch in plan.patches]
        errors: list[Exception] = [UnsupportedError(f"{patch.name}: {text}") for patch, text in problems if text is not None]
        raise_errors("these patches cannot be entered now", errors)

    def __enter__(self) -> SessionT:
        before = len(LIVE.sessions)
        try:
            session = self.apply()
            self._open.append((_who(), session))
            return session
        except BaseException:
            # An interrupt between entering and the block: Python will not call __exit__.
            for late in reversed(LIVE.sessions[before:]):
                if late.plan is self._plan and late.thread == threading.get_ident():
                    late.leave(sys.exception())
            raise

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        who = _who()
        # A block that has moved to another thread or task still closes what it opened: the last one, then.
        entry = next((entry for entry in reversed(self._open) if entry[0] == who), self._open[-1] if self._open else None)
        if entry is None:
            raise ScopeStateError("this scope is not entered: __exit__ was called without an __enter__")
        try:
            entry[1].leave(value)
        finally:
            if entry in self._open:
                self._open.remove(entry)

    def __call__(self, function: F) -> F:
        """Use the scope as a decorator: every call (or awaited call) runs in a session of its own.

        Raises:
            BadTargetError: not a function, or one whose body runs after the call has returned (a generator).
        """
        if isinstance(function, type) or not callable(function):
            raise BadTargetError(f"a scope decorates functions, got {function!r}")
        call = function if inspect.isroutine(function) else type(function).__call__
        if any(check(each) for check in _GENERATORS for each in (function, call)):
            raise BadTargetError(
                f"{getattr(function, '__qualname__', function)} is a generator: the scope would end before its body "
                f"runs. Use the with-form inside"
            )
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):

            @functools.wraps(function)
            async def in_scope(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def in_scope(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return in_scope  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        # Only for what the scope does not have. `with scope: scope.explain()` is an easy slip: the session is meant.
        if not name.startswith("_") and hasattr(self.session_class, name):
            if self._open:
                return getattr(self._open[-1][1], name)
            raise NotEnteredError(
                f"{name} belongs to the entered scope: `with patched(...) as scope: scope.{name}`, or "
                f"`scope = patched(...).apply()`. Before that, .plan() shows what entering would do"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        names = "+".join(patch.name for patch in self.patches) or "nothing"
        return f"<{type(self).__name__} {names} on {type(self.target).__name__}>"


_GENERATORS = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _who() -> object:
    """The thread and asyncio task that runs now."""
    asyncio = sys.modules.get("asyncio")
    task = None
    if asyncio is not None and asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
    return (threading.get_ident(), task)
