"""Scopes: the reusable thing that `patched(...)` returns. Each `with`, decorated call or `.apply()` is a new session."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from .edits import Patch
from .errors import BadOptionError, BadTargetError, ScopeStateError
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

    session_class: type[SessionT]

    def __init__(
        self, target: Any, patches: tuple[Patch, ...], *, root: Any = None, on_foreign: OnForeign = "error"
    ) -> None:
        if on_foreign not in ("error", "keep", "restore"):
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
        self._open = threading.local()

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
        """A last check before entering; subclasses add theirs."""

    def _stack(self) -> list[SessionT]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        stack: list[SessionT] = self._open.stack
        return stack

    def __enter__(self) -> SessionT:
        session = self.apply()
        self._stack().append(session)
        return session

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        stack = self._stack()
        if not stack:
            raise ScopeStateError("this scope was not entered by this thread")
        try:
            stack[-1].leave(value)
        finally:
            stack.pop()

    def __call__(self, function: F) -> F:
        """Use the scope as a decorator: every call (or awaited call) runs in a session of its own."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise BadTargetError(
                f"{function.__qualname__} is a generator: the scope would end before its body runs. Use the with-form inside"
            )
        if not callable(function):
            raise BadTargetError(f"a scope decorates functions, got {type(function).__name__}")
        import functools

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_scope(*args: Any, **kwargs: Any) -> Any:
                session = self.apply()
                return await _finish_async(session, function(*args, **kwargs))

        else:

            @functools.wraps(function)
            def in_scope(*args: Any, **kwargs: Any) -> Any:
                with self.apply():
                    return function(*args, **kwargs)

        return in_scope  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'+'.join(p.name for p in self.patches) or 'nothing'} on {type(self.target).__name__}>"


async def _finish_async(session: Session, awaitable: Any) -> Any:
    with session:
        return await awaitable
