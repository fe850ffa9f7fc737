"""Reports: what a plan would do and what a session did, as a table for people and as data."""

from __future__ import annotations

import html
import re
import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .attributes import is_class
from .slots import MISSING

if TYPE_CHECKING:
    from .plan import Plan, PlannedEdit
    from .session import Session

COLUMNS = ("patch", "where", "from", "to", "why", "calls")


@dataclass
class Row:
    """One edit, or the same edit on many layers.

    Attributes:
        patch, where, before, after, why: as shown.
        count: how many places this row stands for.
        calls: calls since entry, all places together; None where calls are not counted.
        traced: compiled code runs it, and its calls are not counted.
        idle: how many of the counted places were never called.
    """

    patch: str
    where: str
    before: str
    after: str
    why: str
    count: int = 1
    calls: int | None = None
    traced: bool = False
    idle: int = 0

    def cells(self, planned: bool) -> tuple[str, ...]:
        where = self.where if self.count == 1 else f"{self.where} (x{self.count})"
        if planned or self.calls is None:
            calls = "-"
        elif self.traced:
            calls = f"{self.calls} + compiled" if self.calls else "compiled"
        elif self.calls == 0:
            calls = "0 !"
        elif self.idle:
            calls = f"{self.calls} ({self.idle} of {self.count} never) !"
        else:
            calls = str(self.calls)
        return (self.patch, where, self.before, self.after, self.why, calls)


@dataclass
class Explanation:
    """A table of edits with its remarks. `str()` is plain text; rich and notebooks render it as a table.

    Attributes:
        title: one line about the scope.
        rows: the edits.
        remarks: what was skipped and why, notes of the patches, edits that wait for an import.
    """

    title: str
    rows: list[Row]
    remarks: list[str] = field(default_factory=list)
    planned: bool = False

    def __str__(self) -> str:
        cells = [COLUMNS, *(row.cells(self.planned) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *lines, *(f"- {remark}" for remark in self.remarks)])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", title_style="bold")
        for column in COLUMNS:
            table.add_column(column, overflow="fold", justify="right" if column == "calls" else "left")
        for row in self.rows:
            cells = row.cells(self.planned)
            table.add_row(*map(Text, cells), style="yellow" if cells[-1].endswith("!") else None)
        return Group(table, *(Text(f"- {remark}") for remark in self.remarks))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells(self.planned)) + "</tr>" for row in self.rows
        )
        remarks = "".join(f"<li>{html.escape(remark)}</li>" for remark in self.remarks)
        return f"<p>{html.escape(self.title)}</p><table><tr>{head}</tr>{body}</table><ul>{remarks}</ul>"


def explain_plan(plan: Plan, full: bool = False) -> Explanation:
    rows = [_row(one, one.edit.slot.read(), None) for one in plan.edits if full or not one.edit.hidden]
    title = f"plan for {describe_target(plan.target)}: {_how_many(len(plan), len(rows))}"
    return Explanation(title, rows if full else _fold(rows), _remarks(plan), planned=True)


def explain_session(session: Session, full: bool = False) -> Explanation:
    rows = [_row(record.planned, record.prior, record.calls) for record in session.records if full or not record.edit.hidden]
    title = (
        f"scope on {describe_target(session.target)}, entered at {session.location}: "
        f"{_how_many(len(session.records), len(rows))}, {session.state}"
    )
    return Explanation(title, rows if full else _fold(rows), _remarks(session.plan))


def _how_many(edits: int, shown: int) -> str:
    return f"{edits} edits" if shown == edits else f"{edits} edits ({edits - shown} listed only in full)"


def diff_session(session: Session) -> list[dict[str, Any]]:
    return [
        {
            "patch": record.patch,
            "where": record.slot.label,
            "owner": record.slot.owner,
            "key": record.slot.key,
            "action": record.edit.action,
            "before": record.prior,
            "after": record.value,
            "reason": record.edit.reason,
            "location": record.location,
            "calls": record.calls,
        }
        for record in session.records
    ]


def _row(planned: PlannedEdit, before: Any, calls: int | None) -> Row:
    edit = planned.edit
    after = edit.to or edit.action
    try:
        before = edit.slot.value_of(before)  # what is inherited has a name too
    except Exception:
        before = MISSING
    traced = edit.counter is not None and edit.counter.traced
    return Row(
        planned.patch.name, edit.slot.label, describe_value(before), after, edit.reason, 1, calls, traced, int(calls == 0)
    )


def _fold(rows: list[Row]) -> list[Row]:
    """One row for the same edit on many layers: paths that differ only in their numbers."""
    folded: dict[tuple[str, ...], Row] = {}
    for row in rows:
        where = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.where)
        # values of many layers differ in their addresses or weights; what kind of value it is does not
        key = (row.patch, where, row.after, row.why)
        known = folded.get(key)
        if known is None:
            folded[key] = Row(row.patch, row.where, row.before, row.after, row.why, 1, row.calls, row.traced, row.idle)
            continue
        known.where = where
        known.count += 1
        known.idle += row.idle
        known.traced = known.traced or row.traced
        if row.calls is not None:
            known.calls = (known.calls or 0) + row.calls
    return list(folded.values())


def _remarks(plan: Plan) -> list[str]:
    remarks = []
    for patch, support in plan.supports:
        remarks += [f"{patch.name} skipped: {text}" for text in support.skipped]
        remarks += [f"{patch.name}: {text}" for text in support.notes]
    remarks += [
        f"{patch.name}: waits for {pending.module} to be imported ({pending.label})"
        for patch, pending in plan.pending
        if pending.module not in sys.modules
    ]
    return remarks


def describe_target(target: Any) -> str:
    if target is None:
        return "no model"
    if is_class(target):
        return f"class {target.__qualname__}"
    if isinstance(target, types.ModuleType):
        return f"module {target.__name__}"
    return target if isinstance(target, str) else type(target).__qualname__


def describe_value(value: Any) -> str:
    """A few words for any value; never fails, and never prints a tensor or a whole model."""
    if value is MISSING:
        return "(nothing)"
    value = value.__func__ if isinstance(value, _BOUND) else value
    if isinstance(value, _NAMED):
        return str(value.__qualname__)
    if isinstance(value, _SIMPLE) or (isinstance(value, _SMALL) and len(value) <= 4 and all(map(_is_simple, value))):
        text = repr(value)
        if len(text) <= 40:
            return text
    return type(value).__qualname__


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE)


_BOUND = (types.MethodType, staticmethod, classmethod)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_SIMPLE = (str, bytes, int, float, complex, types.NoneType)
_SMALL = (tuple, list, set, frozenset)
