"""What cannot stack, what was left out of order, and what somebody else has changed: the rules and their messages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from .errors import ConflictError, ForeignOverwriteError, OutOfOrderExit
from .replay import Snapshot
from .slots import MISSING, Slot, same

if TYPE_CHECKING:
    from .edits import Edit
    from .segments import Layer, SlotState
    from .session import Session


def refuse_other_thread(edit: Edit, patch: str, layer: Layer, session: Session) -> None:
    """One place belongs to one thread at a time. Replays are exempt: they stand for an earlier moment. So are edits that
    are the same for everybody, such as an entry in a registry of the process."""
    if edit.any_thread and layer.is_same_edit(edit):
        return
    for holder in layer.holders:
        if not isinstance(holder, Snapshot) and holder.thread != session.thread:
            raise ConflictError(
                f"{patch!r} cannot patch {edit.slot.label} from this thread: it is held by {layer.patch!r}, entered at "
                f"{holder.location} in another thread ({holder.thread_name}). Patches are facts of the whole process: "
                f"leave that scope first, or enter one scope around both threads"
            )


def refuse_unstackable(edit: Edit, patch: str, layer: Layer, session: Session) -> None:
    """A replace covers nobody else's edit, and an exclusive patch stacks on no other setting of itself."""
    holder = next((holder for holder in layer.holders if holder is not session), None)
    if holder is None:
        return
    where = f"{edit.slot.label} is held by {layer.patch!r}, entered at {holder.location}"
    if edit.action == "replace" and not (edit.commutes and layer.edit.commutes) and not layer.edit.hidden:
        raise ConflictError(
            f"{patch!r} wants to replace a place that another scope has patched: {where}. Leave that scope first, "
            f"or wrap instead of replacing"
        )
    if edit.exclusive is not None and edit.exclusive == layer.edit.exclusive:
        raise ConflictError(
            f"{patch!r} is already on this model with other options: {where}. Leave that scope first, or give both "
            f"the same options"
        )


def refuse_covered(edit: Edit, patch: str, layer: Layer) -> None:
    """The same edit lies under somebody else's change."""
    raise ConflictError(
        f"{patch!r} is already on {edit.slot.label} {_by(layer)}, and somebody else has changed the place since: whether "
        f"the change builds on the patch cannot be seen. Leave that scope first"
    )


def refuse_moved(edit: Edit, patch: str, raw: Any, others: Iterable[SlotState]) -> None:
    """Nor is the same edit put on twice because somebody stored the patched value under a second name."""
    for state in others:
        if not state.segments or state.segments[-1].top is not raw:
            continue
        for layer in state.segments[-1].layers:
            if layer.is_same_edit(edit) or (edit.exclusive is not None and edit.exclusive == layer.edit.exclusive):
                raise ConflictError(
                    f"{patch!r} is already on {edit.slot.label}: it was put on {state.slot.label} {_by(layer)}, and "
                    f"somebody has moved it here since. Leave that scope first"
                )


def out_of_order(slot: Slot, session: Session, layer: Layer, others: tuple[Layer, ...]) -> OutOfOrderExit | None:
    """Is this session left before one that was entered later, on one place, by edits that do not commute?"""
    for other in reversed(others):
        later = min(other.holders, key=lambda holder: holder.serial)
        if later.serial > session.serial and not (layer.edit.commutes and other.edit.commutes):
            return OutOfOrderExit(
                f"{slot.label}: {layer.patch!r} (entered at {session.location}) was left before {other.patch!r} (entered "
                f"later, at {later.location}), which builds on it. It was taken out from under; close scopes on one "
                f"place in the reverse order of entering"
            )
    return None


def moved_to(slot: Slot, ours: Any) -> list[Hashable]:
    """Other names of the same owner under which somebody has stored our value (accelerate's `_old_forward`)."""
    own = getattr(slot.owner, "__dict__", None)
    if not isinstance(own, dict) or slot.mapping is not own or ours is MISSING:
        return []
    return [key for key, value in own.items() if key != slot.key and same(value, ours)]


def foreign(slot: Slot, layer: Layer, session: Session, found: Any, wanted: Any) -> ForeignOverwriteError:
    return ForeignOverwriteError(
        f"{slot.label} was changed by somebody else while {layer.patch!r} (entered at {session.location}) was live: "
        f"found {found!r}, and it was left as it is instead of being put back to {wanted!r}. Pass on_foreign='restore' to "
        f"put the original back, or on_foreign='keep' to accept such changes silently"
    )


def _by(layer: Layer) -> str:
    return f"by the scope entered at {layer.holders[-1].location}"
