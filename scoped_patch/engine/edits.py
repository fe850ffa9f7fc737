"""Edits and patches: what to change and why. Pure descriptions; only a session writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .slots import Slot, same

if TYPE_CHECKING:
    from .session import Session

DEFAULT_RANK = 50
_MEMO_SIZE = 8


class Counter:
    """How often a patched callable ran. Shared by all sessions of one plan; sessions subtract what was there."""

    __slots__ = ("calls", "traced")

    def __init__(self) -> None:
        self.calls = 0
        #: compiled code runs it too, which is not counted: a count would make every call a new graph
        self.traced = False


@dataclass(frozen=True, eq=False)
class Edit:
    """One change of one slot.

    Attributes:
        slot: where.
        make: from the value that is there now (inherited values included; MISSING when there is none) to the raw value
            to store. Must be pure and quick: it runs with the library's lock held, and may be called again when scopes
            around it come and go.
        action: `"wrap"` builds on the prior value, `"replace"` ignores it.
        reason: why, in a few words; shown by `explain()`.
        rank: who wraps whom when several wraps meet on one slot, whatever the order of entering: lower is further in.
        commutes: this edit gives the same result in whatever order scopes are entered and left, so leaving out of order
            is no error.
        token: two edits of one slot with an equal token (not None) are the same edit; a nested scope shares it.
        exclusive: two edits of one slot with an equal `exclusive` name and different tokens refuse to stack.
        any_thread: scopes of several threads may hold this same edit (see `token`) at once: what it puts there serves every
            model and keeps nothing between calls.
        counter: counts calls, when the new value is a callable that counts.
        to: what the new value is, for people.
        hidden: not shown as a row of its own in `explain()`.
    """

    slot: Slot
    make: Callable[[Any], Any]
    action: Literal["wrap", "replace"] = "wrap"
    reason: str = ""
    rank: int = DEFAULT_RANK
    commutes: bool = False
    token: Hashable = None
    exclusive: str | None = None
    any_thread: bool = False
    counter: Counter | None = None
    to: str = ""
    hidden: bool = False
    _memo: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def build(self, prior: Any) -> Any:
        """`make(prior)`, the same object again for the same prior: compiled code keeps its graphs on re-entry."""
        memo = self._memo
        for known, made in memo:
            if known is prior or same(known, prior):
                return made
        made = self.make(prior)
        # Several, since a scope that comes and goes further in changes what this edit builds on.
        memo.insert(0, (prior, made))
        del memo[_MEMO_SIZE:]
        return made

    @property
    def order(self) -> tuple[bool, int]:
        return (self.action == "wrap", self.rank)


@dataclass(frozen=True)
class Support:
    """Whether a patch can act on a target.

    Attributes:
        ok: it can.
        reason: what was looked for and not found, in which version, and what to do.
        skipped: parts the patch leaves alone although it acts, with the reason of each; shown by `explain()`.
        notes: remarks for `explain()`, such as "structure inferred".
    """

    ok: bool
    reason: str = ""
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


class Patch(ABC):
    """A reversible change, described but not done.

    Subclass it and implement `plan`. A patch never writes: `plan` returns edits, and a session applies and undoes them.

    Attributes:
        name: shown by `explain()` and in every error.
    """

    name: str = ""

    def supports(self, target: Any) -> Support:
        """Can this patch act on `target`? Says why not, naming what was looked for."""
        return Support(True)

    @abstractmethod
    def plan(self, target: Any) -> Iterable[Edit]:
        """The edits this patch makes on `target`. Pure; must work on models on the meta device."""

    def fingerprint(self, target: Any) -> Hashable:
        """A cheap value that changes when a plan made earlier no longer fits `target`; None when it always fits."""
        return None

    def ready(self, target: Any) -> str | None:
        """Why it cannot be entered in this process now, or None: what plans do without, such as a process group."""
        return None

    def audit(self, session: Session) -> None:  # noqa: B027  (most patches have nothing to say here)
        """Called when a scope is left without an exception, before anything is restored.

        Raises:
            SeamNotReachedError: the scope was used, but never came past what this patch changed.
        """


class EditPatch(Patch):
    """A patch made of ready edits; what `replace_attribute` and `wrap_call` return.

    Args:
        name: shown by `explain()` and in every error.
        make_edits: from the target to the edits.
        fingerprint: a cheap value that changes when the edits have to be made again; they always fit by default.
    """

    def __init__(
        self,
        name: str,
        make_edits: Callable[[Any], Iterable[Edit]],
        fingerprint: Callable[[], Hashable] = lambda: None,
    ) -> None:
        self.name = name
        self._make_edits = make_edits
        self._fingerprint = fingerprint

    def plan(self, target: Any) -> Iterable[Edit]:
        return self._make_edits(target)

    def fingerprint(self, target: Any) -> Hashable:
        return self._fingerprint()

    def __repr__(self) -> str:
        return f"<{self.name}>"
