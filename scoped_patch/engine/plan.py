"""Plans: all edits of a stack of patches on one target, checked against each other before anything is written."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

from .edits import Edit, Patch, Support
from .errors import BadTargetError, ConflictError, UnsupportedError, raise_errors
from .slots import Place

if TYPE_CHECKING:
    from .report import Explanation
    from .session import Session


@dataclass(frozen=True, eq=False)
class PlannedEdit:
    """An edit and the patch that wants it."""

    patch: Patch
    edit: Edit


class PendingEdit:
    """Edits of a module that is not imported yet: made when it is, if a scope that wants them is live then.

    Import hooks cannot be unregistered, so one hook per pending edit is registered, once, and it asks which sessions
    are live; after they have all been left it does nothing. Edits that cannot be made fail the import that calls for
    them: the code behind it would run unpatched.
    """

    def __init__(self, module: str, make: Callable[[ModuleType], Iterable[Edit]], label: str) -> None:
        self.module = module
        self.label = label
        self._make = make
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._hooked = False

    def start(self, patch: Patch, session: Session) -> None:
        module = sys.modules.get(self.module)
        if module is not None:
            self._apply(patch, session, module)
            return
        self._sessions.add(session)
        if not self._hooked:
            self._hooked = True
            wrapt.register_post_import_hook(lambda module: self._imported(patch, module), self.module)

    def _imported(self, patch: Patch, module: ModuleType) -> None:
        self._hooked = False  # hooks fire once: should the module be dropped and imported again, one more is needed
        sessions = sorted(self._sessions, key=lambda session: session.serial)
        self._sessions.clear()
        for session in sessions:
            self._apply(patch, session, module)

    def _apply(self, patch: Patch, session: Session, module: ModuleType) -> None:
        for edit in self._make(module):
            session.apply_late(PlannedEdit(patch, edit))


class Plan:
    """What a scope will do, before it does it.

    Attributes:
        target: the target as the patches saw it.
        patches: in the order given.
        edits: in the order of application: replaces first, then wraps by rank.
        supports: each patch with its answer to `supports(target)`.
        pending: edits that wait for a module to be imported.
    """

    def __init__(self, target: Any, patches: tuple[Patch, ...]) -> None:
        self.target = target
        self.patches = patches
        self.supports: list[tuple[Patch, Support]] = []
        self.edits: tuple[PlannedEdit, ...] = ()
        self.pending: list[tuple[Patch, PendingEdit]] = []
        self._check_support()
        self._collect()
        self.fingerprint = tuple(patch.fingerprint(target) for patch in patches)

    def fits(self) -> bool:
        """Would the same plan be made now? Cheap; asked at every enter of a scope that is used again."""
        return self.fingerprint == tuple(patch.fingerprint(self.target) for patch in self.patches) and all(
            one.edit.slot.current() for one in self.edits
        )

    def _check_support(self) -> None:
        errors: list[Exception] = []
        for patch in self.patches:
            try:
                support = patch.supports(self.target)
            except Exception as error:
                error.add_note(f"raised by {patch.name}.supports()")
                errors.append(error)
                continue
            self.supports.append((patch, support))
            if not support.ok:
                errors.append(UnsupportedError(f"{patch.name}: {support.reason}"))
        raise_errors("these patches cannot act on this target", errors)

    def _collect(self) -> None:
        planned: list[PlannedEdit] = []
        for patch in self.patches:
            for edit in patch.plan(self.target):
                if isinstance(edit, PendingEdit):
                    self.pending.append((patch, edit))
                elif isinstance(edit, Edit):
                    planned.append(PlannedEdit(patch, edit))
                else:
                    raise BadTargetError(f"{patch.name}: plan() must yield Edit objects, got {type(edit).__name__}")
        errors: list[Exception] = []
        known: dict[Place, list[PlannedEdit]] = {}
        for one in planned:
            others = known.setdefault(one.edit.slot.place, [])
            conflict = next((text for other in others if (text := _conflict(other, one))), None)
            if conflict is not None:
                errors.append(ConflictError(conflict))
            others.append(one)
        raise_errors("these patches cannot be combined", errors)
        planned.sort(key=lambda one: one.edit.order)  # stable: the order given decides between equals
        self.edits = tuple(planned)

    def start_pending(self, session: Session) -> None:
        for patch, pending in self.pending:
            pending.start(patch, session)

    def explain(self, full: bool = False) -> Explanation:
        """The same table as a live scope's, without doing anything."""
        from .report import explain_plan

        return explain_plan(self, full)

    def __str__(self) -> str:
        return str(self.explain())

    def __rich__(self) -> Any:
        return self.explain().__rich__()

    def __len__(self) -> int:
        return len(self.edits)

    def __repr__(self) -> str:
        return f"<Plan {'+'.join(p.name for p in self.patches) or 'nothing'}, {len(self.edits)} edits>"


def _conflict(first: PlannedEdit, second: PlannedEdit) -> str | None:
    """Why these two edits of one place cannot be in one scope, or None."""
    one, two = first.edit, second.edit
    if one is two or (one.token is not None and one.token == two.token):
        return None
    if one.action == two.action == "replace":
        return f"both {first.patch.name!r} and {second.patch.name!r} replace {one.slot.label}: keep one, or let the other wrap"
    if one.exclusive is not None and one.exclusive == two.exclusive:
        return f"{first.patch.name!r} and {second.patch.name!r} both want {one.slot.label} with different options: keep one"
    return None
