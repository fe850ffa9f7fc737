"""Tables for people and data for programs."""

from __future__ import annotations

import io
import types

import pytest

from scoped_patch.engine import MISSING, Edit, EditPatch, ItemSlot, Scope, replace_attribute, wrap_call
from scoped_patch.engine.report import Explanation, Row, describe_target, describe_value


def layered(n, calls=()):
    layers = [types.SimpleNamespace(forward=lambda x: x) for _ in range(n)]
    from scoped_patch.engine import Counter, attribute_slot

    counters = [Counter() for _ in layers]
    edits = [
        Edit(
            attribute_slot(layer, "forward", f"model.layers.{i}.forward"),
            lambda prior: prior,
            reason="why",
            to="new",
            counter=counters[i],
        )
        for i, layer in enumerate(layers)
    ]
    return Scope("a model", (EditPatch("tiled", lambda _: edits),)), counters


def test_the_same_edit_on_many_layers_is_one_row_unless_all_is_wanted():
    scope, counters = layered(12)
    with scope as session:
        for counter in counters[:10]:
            counter.calls += 3
        (row,) = session.explain().rows
        assert (row.where, row.count, row.calls, row.idle) == ("model.layers.*.forward", 12, 30, 2)
        text = str(session.explain())
        assert "model.layers.*.forward (x12)" in text
        assert "30 (2 of 12 never) !" in text
        assert len(session.explain(full=True).rows) == 12
        assert "model.layers.11.forward" in str(session.explain(full=True))


def test_a_plan_shows_the_same_without_calls():
    scope, _ = layered(3)
    table = scope.plan().explain()
    assert table.planned
    assert table.rows[0].cells(planned=True)[-1] == "-"
    assert str(table).startswith("plan for a model: 3 edits")
    assert str(scope.plan()) == str(table)
    assert scope.plan().explain(full=True).rows[2].where == "model.layers.2.forward"


def test_hidden_edits_are_shown_only_when_all_is_wanted():
    table = {"a": 1}
    scope = Scope(None, (EditPatch("p", lambda _: [Edit(ItemSlot(table, "a"), lambda prior: 2, hidden=True)]),))
    with scope as session:
        assert session.explain().rows == []
        assert "1 edits (1 listed only in full), live" in session.explain().title
        assert len(session.explain(full=True).rows) == 1
        assert "1 edits, live" in session.explain(full=True).title
        assert "1 edits (1 listed only in full)" in session.plan.explain().title
        assert len(session.diff()) == 1


def test_what_was_there_is_named_inherited_or_not():
    class Thing:
        x = 1

        def method(self):
            return 1

    thing, table = Thing(), {}
    scope = Scope(
        thing,
        (
            wrap_call(thing, "method", lambda original: original()),
            replace_attribute(thing, "x", 2),
            EditPatch("p", lambda _: [Edit(ItemSlot(table, "k"), lambda prior: 1)]),
        ),
    )
    for explanation in (scope.plan().explain(full=True), scope.apply().explain(full=True)):
        before = {row.where.rpartition(".")[2]: row.before for row in explanation.rows}
        assert before["method"].endswith("Thing.method")
        assert before["x"] == "1"
        assert before["dict['k']"] == "(nothing)"
    from scoped_patch.engine import active

    active()[0].restore()


def test_rich_and_html_show_the_same_cells():
    from rich.console import Console

    scope, counters = layered(2)
    with scope as session:
        counters[0].calls += 1
        explanation = session.explain()
        console = Console(file=io.StringIO(), width=200)
        console.print(explanation)
        console.print(scope.plan())
    text, html = console.file.getvalue(), explanation._repr_html_()
    for cell in ("tiled", "model.layers.*.forward (x2)", "new", "why", "1 (1 of 2 never) !"):
        assert cell in text
        assert cell in html


def test_html_is_escaped():
    html = Explanation("<b>", [Row("p", "<i>", "a", "b", "&")], ["<script>"])._repr_html_()
    assert "<b>" not in html
    assert "&lt;i&gt;" in html
    assert "&lt;script&gt;" in html


def test_diff_is_the_same_as_data():
    table = {"a": 1}
    slot = ItemSlot(table, "a", "table.a")
    scope = Scope(table, (EditPatch("p", lambda _: [Edit(slot, lambda prior: 2, "replace", "why")]),))
    with scope as session:
        assert session.diff() == [
            {
                "patch": "p",
                "where": "table.a",
                "owner": table,
                "key": "a",
                "action": "replace",
                "before": 1,
                "after": 2,
                "reason": "why",
                "location": session.location,
                "calls": None,
            }
        ]
    assert "closed" in session.explain().title  # what was done can still be read afterwards


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (MISSING, "(nothing)"),
        (1, "1"),
        ("text", "'text'"),
        ("x" * 100, "str"),
        (None, "None"),
        ((1, "a"), "(1, 'a')"),
        ([1, 2, 3, 4, 5], "list"),
        ([[]], "list"),
        (len, "len"),
        (int, "int"),
        (object(), "object"),
        (staticmethod(len), "len"),
        ("text".join, "str.join"),
    ],
)
def test_values_in_a_few_words(value, text):
    assert describe_value(value) == text


def test_targets_in_a_few_words():
    assert describe_target(None) == "no model"
    assert describe_target(int) == "class int"
    assert describe_target(types) == "module types"
    assert describe_target("a string") == "a string"
    assert describe_target({}) == "dict"


def test_an_empty_scope_has_a_table_too():
    with Scope(None, ()) as session:
        assert "0 edits" in str(session.explain())
        assert session.diff() == []
