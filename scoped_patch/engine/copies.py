"""What copies and pickles see of a patched object: its unpatched state.

`copy`, `deepcopy` and `pickle` ask the *instance* for `__getstate__`. While an owner that `LIVE.guards_owner` names is patched
it answers with its unpatched state, so copies and files taken inside a scope never hold our edits. Other owners must not
show a further attribute (a config writes all of its own to a file): for them the class has an entry in `copyreg`'s table
while one of its instances is patched. Not covered: classes that copy themselves (a `__deepcopy__` or `__reduce__` of their
own), and items of plain dicts.
"""

from __future__ import annotations

import copyreg
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


def guard_by_class(guarded: Guarded, slot: Slot) -> None:
    """The same for an owner that must not show a further attribute."""
    owner, kind = slot.owner, type(slot.owner)
    known = guarded.get(id(owner))
    if known is not None:
        known[1].add(slot.place)
    elif _copies_by_state(owner, slot) and copyreg.dispatch_table.get(kind, reduce_unpatched) is reduce_unpatched:
        guarded[id(owner)] = (owner, {slot.place})
        copyreg.dispatch_table[kind] = reduce_unpatched


def _copies_by_state(owner: Any, slot: Slot) -> bool:
    if isinstance(owner, (type, types.ModuleType)) or not (isinstance(slot, DescriptorSlot) or slot.mapping is not owner):
        return False
    kind: Any = type(owner)
    plain: Any = object
    own_way = kind.__reduce_ex__ is not plain.__reduce_ex__ or kind.__reduce__ is not plain.__reduce__
    return not own_way and not hasattr(kind, "__deepcopy__")


def reduce_unpatched(owner: Any) -> Any:
    """What `copyreg` asks for: the owner's own reduction, with its unpatched state."""
    from .live import LIVE

    made = owner.__reduce_ex__(4)
    if id(owner) not in LIVE._guarded:
        return made  # another instance of the class
    return (*made[:2], unpatched_state(owner), *made[3:])


def unguard(guarded: Guarded, slot: Slot) -> None:
    """The place is not live any more; the owner's last one takes the guard with it."""
    owner = slot.owner
    known = guarded.get(id(owner))
    if known is None:
        return
    places = known[1]
    places.discard(slot.place)
    if not places:
        kind, own = type(owner), getattr(owner, "__dict__", {})
        if getattr(own.get("__getstate__"), "__func__", None) is unpatched_state:
            del own["__getstate__"]
        elif copyreg.dispatch_table.get(kind) is reduce_unpatched and not any(
            type(other) is kind for other, _ in guarded.values() if other is not owner
        ):
            del copyreg.dispatch_table[kind]
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
        live = [state for place in places if (state := LIVE.states.get(place)) is not None and state.segments]
        for one in live:
            _take_out(owner, one, own, slots, replaced)
        for one in live:
            _take_out_moved(one, own)
        return own if slots is None else (own, slots)


def _take_out(owner: Any, state: SlotState, own: dict[str, Any], slots: Any, replaced: dict[int, Any]) -> None:
    slot, unpatched = state.slot, state.unpatched
    if isinstance(slot, DescriptorSlot):
        stored: Any = slots if isinstance(slots, dict) and slot.key in slots else None
    elif slot.mapping is getattr(owner, "__dict__", None):
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
    if stored is None or not state.is_ours(slot.read()):
        return  # somebody else's value is his, in copies too
    if unpatched is MISSING:
        stored.pop(slot.key, None)
    else:
        stored[slot.key] = unpatched


def _take_out_moved(state: SlotState, own: dict[str, Any]) -> None:
    """Somebody keeps our value under another name (accelerate's `_old_forward`): the copy has what it stands for."""
    if state.slot.mapping is getattr(state.slot.owner, "__dict__", None):
        own.update({key: state.base_of(value) for key, value in own.items() if key != state.slot.key})
