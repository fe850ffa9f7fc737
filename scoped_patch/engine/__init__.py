"""Slots, edits, plans, sessions, the live stack. Knows nothing of torch: it can patch any Python object."""

from .adhoc import replace_attribute, replace_item, set_tracing, wrap_call
from .attributes import attribute_slot, item_slot, register_storage_finder
from .edits import Counter, Edit, EditPatch, Patch, Support
from .live import LIVE
from .plan import PendingEdit, Plan, PlannedEdit
from .replay import Snapshot
from .report import Explanation, Row
from .resolve import slot_from_path
from .scope import Scope
from .session import Record, Session, active, assert_clean, is_live
from .slots import MISSING, ItemSlot, Slot

__all__ = [
    "LIVE",
    "MISSING",
    "Counter",
    "Edit",
    "EditPatch",
    "Explanation",
    "ItemSlot",
    "Patch",
    "PendingEdit",
    "Plan",
    "PlannedEdit",
    "Record",
    "Row",
    "Scope",
    "Session",
    "Slot",
    "Snapshot",
    "Support",
    "active",
    "assert_clean",
    "attribute_slot",
    "is_live",
    "item_slot",
    "register_storage_finder",
    "replace_attribute",
    "replace_item",
    "set_tracing",
    "slot_from_path",
    "wrap_call",
]
