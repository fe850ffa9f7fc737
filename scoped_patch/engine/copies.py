"""What copies and pickles see of a patched object: its unpatched state.

`copy`, `deepcopy` and `pickle` ask the *instance* for `__getstate__`. While an owner is patched it answers with its
unpatched state, so copies and files taken inside a scope never hold our edits. Only owners that `LIVE.guards_owner` names
are treated so. Not covered: classes that copy themselves without `__getstate__` (a `__deepcopy__` or `__reduce__` of
their own that reads `__dict__`).
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from .slots import MISSING, DescriptorSlot, Place, Slot

if TYPE_CHECKING:
    from .segments import SlotState

Guarded = dict[int, tuple[Any, set[Place]]]


def guard(guarded: Guarded, slot: Slot) -> None:
    """Let the slot's owner answer copies with its unpatched state, from its first live place on."""
    owner = slot.owner
    known = guarded.get(id(owner))
    if known is not None:
        known[1].add(slot.place)
        return
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict) and "__getstate__" not in own:
        guarded[id(owner)] = (owner, {slot.place})
        own["__getstate__"] = types.MethodType(unpatched_state, owner)


def unguard(guarded: Guarded, slot: Slot) -> None:
    """The place is not live any more; the owner's last one takes the guard with it."""
    owner = slot.owner
    known = guarded.get(id(owner))
    if known is None:
        return
    places = known[1]
    places.discard(slot.place)
    if not places:
        own = owner.__dict__
        if getattr(own.get("__getstate__"), "__func__", None) is unpatched_state:
            del own["__getstate__"]
        del guarded[id(owner)]


def unpatched_state(owner: Any) -> Any:
    """The state that `copy`, `deepcopy` and `pickle` see of a patched object: without any live edit."""
    from .live import LIVE

    with LIVE.lock:
        kind: Any = type(owner)
        state = kind.__getstate__(owner)
        own, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if not isinstance(own, dict):
            return state
        own = dict(own)
        own.pop("__getstate__", None)
        slots = dict(slots) if isinstance(slots, dict) else slots
        _, places = LIVE._guarded.get(id(owner), (owner, ()))
        replaced: dict[int, Any] = {}
        for state_of_place in [LIVE.states[place] for place in places if place in LIVE.states]:
            if state_of_place.segments:
                _take_out(owner, state_of_place, own, slots, replaced)
        return own if slots is None else (own, slots)


def _take_out(owner: Any, state: SlotState, own: dict[str, Any], slots: Any, replaced: dict[int, Any]) -> None:
    slot, original = state.slot, state.original
    if isinstance(slot, DescriptorSlot):
        stored: Any = slots if isinstance(slots, dict) and slot.key in slots else None
    elif slot.mapping is owner.__dict__:
        stored = own
    else:
        # A child mapping (nn.Module._modules): the copy gets one of its own, the live one stays as it is.
        live: Any = slot.mapping
        stored = replaced.get(id(live))
        if stored is None:
            name = next((name for name, value in owner.__dict__.items() if value is live), None)
            if name not in own:
                return
            stored = replaced[id(live)] = own[name] = type(live)(live)
    if stored is None:
        return
    if original is MISSING:
        stored.pop(slot.key, None)
    else:
        stored[slot.key] = original
