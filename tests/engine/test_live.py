"""The live stack: ranks, shared edits, other people's changes, and the way back in any order."""

from __future__ import annotations

import types

import pytest

from scoped_patch.engine import (
    LIVE,
    MISSING,
    Edit,
    EditPatch,
    ItemSlot,
    Scope,
    assert_clean,
    attribute_slot,
    is_live,
    wrap_call,
)
from scoped_patch.engine.errors import ConflictError, ForeignOverwriteError, OutOfOrderExit, PatchErrorGroup


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert_clean()
    assert not LIVE.states
    assert not LIVE.sessions
    assert not LIVE._guarded


def adding(slot, text, **options):
    return Edit(slot, lambda prior: f"{text}({prior})", **options)


def scope(*edits, **options):
    return Scope(None, (EditPatch("+".join(e.to or "edit" for e in edits), lambda _: edits),), **options)


@pytest.fixture
def table():
    return {"x": "x"}


@pytest.fixture
def slot(table):
    return ItemSlot(table, "x", "table.x")


# ----------------------------------------------------------------------------------------------------- ranks
def test_an_inner_scope_of_lower_rank_slides_under_and_out_again(table, slot):
    sp, fused = scope(adding(slot, "sp", rank=20)), scope(adding(slot, "fused", rank=10))
    with sp:
        with fused as inner:
            assert table["x"] == "sp(fused(x))"
            assert inner.records[0].prior == "sp(x)"  # exactly what was there before the write
            assert inner.records[0].value == "sp(fused(x))"
        assert table["x"] == "sp(x)"
    with fused, sp:
        assert table["x"] == "sp(fused(x))"
    assert table["x"] == "x"


def test_leaving_in_order_is_in_order_even_where_ranks_put_the_inner_scope_below(table, slot):
    with scope(adding(slot, "outer", rank=50)), scope(adding(slot, "inner", rank=10)):
        pass
    outer, inner = scope(adding(slot, "outer", rank=50)).apply(), scope(adding(slot, "inner", rank=10)).apply()
    with pytest.raises(OutOfOrderExit, match="entered later"):
        outer.restore()
    assert table["x"] == "inner(x)"
    inner.restore()
    assert table["x"] == "x"


def test_three_scopes_leave_in_every_order(slot, table):
    import itertools

    for order in itertools.permutations(range(3)):
        sessions = [scope(adding(slot, str(i), rank=rank)).apply() for i, rank in enumerate((20, 10, 30))]
        assert table["x"] == "2(0(1(x)))"
        for at, i in enumerate(order):
            later = any(j > i for j in order[at + 1 :])
            if later:
                with pytest.raises(OutOfOrderExit, match=r"table\.x"):
                    sessions[i].restore()
            else:
                sessions[i].restore()
            assert sessions[i].state == "closed"
        assert table["x"] == "x"


def test_edits_that_commute_leave_in_any_order_and_one_that_does_not_makes_an_error(slot, table):
    one = scope(adding(slot, "1", commutes=True)).apply()
    two = scope(adding(slot, "2", commutes=True)).apply()
    one.restore()
    assert table["x"] == "2(x)"
    two.restore()
    one = scope(adding(slot, "1", commutes=True)).apply()
    two = scope(adding(slot, "2")).apply()
    with pytest.raises(OutOfOrderExit):
        one.restore()
    two.restore()


def test_a_replace_that_commutes_slides_under_what_is_live(slot, table):
    with scope(adding(slot, "wrap", commutes=True)), scope(Edit(slot, lambda prior: "new", "replace", commutes=True)):
        assert table["x"] == "wrap(new)"
    with scope(adding(slot, "wrap")), pytest.raises(ConflictError, match="wants to replace"):
        scope(Edit(slot, lambda prior: "new", "replace", commutes=True)).apply()


# ----------------------------------------------------------------------------------------------------- shared edits
def test_a_shared_edit_goes_with_its_last_holder_in_whatever_order(slot, table):
    def shared():
        return scope(adding(slot, "p", token="t"))

    for order in ((0, 1), (1, 0)):
        sessions = [shared().apply(), shared().apply()]
        assert table["x"] == "p(x)"
        sessions[order[0]].restore()
        assert table["x"] == "p(x)"
        sessions[order[1]].restore()
        assert table["x"] == "x"


def test_a_scope_inside_itself_shares_its_edits(slot, table):
    again = scope(Edit(slot, lambda prior: "new", "replace"))

    @again
    def recursive(depth):
        assert table["x"] == "new"
        return depth if depth == 3 else recursive(depth + 1)

    assert recursive(0) == 3
    assert table["x"] == "x"


def test_the_same_patch_over_a_foreign_change_cannot_know_and_says_so(slot, table):
    with scope(adding(slot, "p", token="t"), on_foreign="keep"):
        table["x"] = "theirs"
        with pytest.raises(ConflictError, match="somebody else has changed the place since"):
            scope(adding(slot, "p", token="t")).apply()
        table["x"] = "p(x)"
    assert table["x"] == "x"


def test_one_name_with_other_options_is_refused_naming_the_holder(slot):
    with scope(adding(slot, "p", token=1, exclusive="fused", to="first")) as holder:
        with pytest.raises(ConflictError, match=r"'second' is already on this model with other options") as caught:
            scope(adding(slot, "p", token=2, exclusive="fused", to="second")).apply()
        assert holder.location in str(caught.value)
        with scope(adding(slot, "p", token=3, exclusive="other")):
            pass


# ----------------------------------------------------------------------------------------------------- foreign changes
@pytest.mark.parametrize("policy", ["error", "keep", "restore"])
def test_a_foreign_change_between_two_scopes(policy, slot, table):
    outer = scope(adding(slot, "outer"), on_foreign=policy).apply()
    table["x"] = "theirs"
    inner = scope(adding(slot, "inner"), on_foreign=policy).apply()
    assert table["x"] == "inner(theirs)"
    inner.restore()
    assert table["x"] == "theirs"
    if policy == "error":
        with pytest.raises(ForeignOverwriteError, match=r"found 'theirs'.*put back to 'x'"):
            outer.restore()
    else:
        outer.restore()
    assert table["x"] == ("x" if policy == "restore" else "theirs")


@pytest.mark.parametrize("policy", ["error", "keep", "restore"])
def test_a_foreign_change_between_two_scopes_and_the_outer_leaves_first(policy, slot, table):
    outer = scope(adding(slot, "outer"), on_foreign=policy).apply()
    table["x"] = "theirs"
    inner = scope(adding(slot, "inner"), on_foreign=policy).apply()
    if policy == "error":
        with pytest.raises(ForeignOverwriteError):
            outer.restore()
    else:
        outer.restore()
    assert table["x"] == ("inner(x)" if policy == "restore" else "inner(theirs)")
    inner.restore()
    assert table["x"] == ("x" if policy == "restore" else "theirs")


def test_somebody_who_puts_it_back_himself_has_changed_nothing(slot, table):
    with scope(adding(slot, "p")):
        table["x"] = "theirs"
        table["x"] = "p(x)"
    with scope(adding(slot, "p")):
        table["x"] = "x"  # the original
    assert table["x"] == "x"
    with scope(adding(slot, "p")):
        del table["x"]
        table["x"] = "x"
    assert table == {"x": "x"}


def test_a_foreign_deletion_is_a_foreign_change(slot, table):
    session = scope(adding(slot, "p")).apply()
    del table["x"]
    with pytest.raises(ForeignOverwriteError, match="found <missing>"):
        session.restore()
    assert table == {}
    table["x"] = "x"
    session = scope(adding(slot, "p"), on_foreign="restore").apply()
    del table["x"]
    session.restore()
    assert table == {"x": "x"}


def test_all_foreign_changes_are_reported_together():
    table = {"a": 1, "b": 2, "c": 3}
    session = scope(*(Edit(ItemSlot(table, key, key), lambda prior: 0) for key in "abc")).apply()
    table["a"] = table["c"] = 9
    with pytest.raises(PatchErrorGroup, match="2 problems") as caught:
        session.restore()
    assert [type(error) for error in caught.value.exceptions] == [ForeignOverwriteError] * 2
    assert table == {"a": 9, "b": 2, "c": 9}
    assert session.state == "closed"


def test_is_live_knows_whether_the_place_still_reads_ours(slot, table):
    assert not is_live(slot)
    with scope(adding(slot, "p"), on_foreign="keep"):
        assert is_live(slot)
        assert is_live(ItemSlot(table, "x"))
        table["x"] = "theirs"
        assert not is_live(slot)
    assert not is_live(slot)


# ----------------------------------------------------------------------------------------------------- moved values
class Model:
    """With accelerate's habit: a hook keeps the bound original under another name and takes its place."""

    def forward(self, x):
        return f"forward({x})"

    def add_hook(self):
        self._old_forward = self.forward
        self.forward = lambda x: f"hook({self._old_forward(x)})"

    def remove_hook(self):
        self.forward = self._old_forward
        del self._old_forward


def wrapping(model, name, text, **options):
    return Scope(None, (wrap_call(model, name, lambda original, x: f"{text}({original(x)})"),), **options)


def test_a_hook_that_comes_inside_stays_and_loses_the_patch():
    model = Model()
    with wrapping(model, "forward", "p"):
        model.add_hook()
        assert model.forward("x") == "hook(p(forward(x)))"
    assert model.forward("x") == "hook(forward(x))"
    model.remove_hook()
    assert model.forward("x") == "forward(x)"


def test_a_hook_that_comes_and_goes_inside():
    model = Model()
    with wrapping(model, "forward", "p"):
        model.add_hook()
        model.remove_hook()
        assert model.forward("x") == "p(forward(x))"
    assert model.__dict__ == {}


def test_a_hook_that_was_there_and_goes_inside():
    model = Model()
    model.add_hook()
    with wrapping(model, "_old_forward", "p"):
        assert model.forward("x") == "hook(p(forward(x)))"
        model.remove_hook()
        assert model.forward("x") == "p(forward(x))"
    assert model.forward("x") == "forward(x)"
    assert "_old_forward" not in model.__dict__


def test_a_hook_between_two_scopes_in_order_and_not():
    for in_order in (True, False):
        model = Model()
        outer = wrapping(model, "forward", "outer").apply()
        model.add_hook()
        inner = wrapping(model, "_old_forward", "inner").apply()
        assert model.forward("x") == "hook(inner(outer(forward(x))))"
        for session in (inner, outer) if in_order else (outer, inner):
            session.restore()
        assert model.forward("x") == "hook(forward(x))"


def test_a_hook_over_two_scopes():
    model = Model()
    with wrapping(model, "forward", "outer"):
        with wrapping(model, "forward", "inner"):
            model.add_hook()
            assert model.forward("x") == "hook(inner(outer(forward(x))))"
        assert model.forward("x") == "hook(outer(forward(x)))"
    assert model.forward("x") == "hook(forward(x))"


def test_the_same_patch_on_a_moved_value_is_refused_not_doubled(monkeypatch):
    monkeypatch.setattr(LIVE, "guards_owner", lambda owner: isinstance(owner, Model))
    model = Model()

    def fused(name):
        edit = Edit(attribute_slot(model, name), lambda prior: lambda x: f"p({prior(x)})", token="t", exclusive="p")
        return Scope(None, (EditPatch("fused", lambda _: [edit]),))

    with fused("forward"):
        model.add_hook()
        with pytest.raises(ConflictError, match="somebody has moved it here since"):
            fused("_old_forward").apply()
        assert model.forward("x") == "hook(p(forward(x)))"
    assert model.forward("x") == "hook(forward(x))"


# ----------------------------------------------------------------------------------------------------- failures
class Failing(dict):
    """Refuses the n-th write from now."""

    countdown = 0

    def __setitem__(self, key, value):
        self.countdown -= 1
        if self.countdown == 0:
            raise OSError("no space")
        super().__setitem__(key, value)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_write_that_fails_once_while_entering(nth):
    table = Failing(a=1, b=2, c=3)
    table.countdown = nth
    edits = [Edit(ItemSlot(table, key), lambda prior: -prior) for key in "abc"]
    with pytest.raises(OSError, match="no space"):
        scope(*edits).apply()
    assert table == {"a": 1, "b": 2, "c": 3}
    assert list(table) == ["a", "b", "c"]
    assert_clean()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_write_that_fails_once_while_leaving_can_be_tried_again(nth):
    table = Failing(a=1, b=2, c=3)
    session = scope(*[Edit(ItemSlot(table, key, key), lambda prior: -prior) for key in "abc"]).apply()
    table.countdown = nth
    with pytest.raises(OSError, match="no space"):
        session.restore()
    assert sum(value < 0 for value in table.values()) == 1  # the others are back
    assert session in LIVE.sessions
    assert len(session.records) == 1
    session.restore()
    assert table == {"a": 1, "b": 2, "c": 3}


def test_a_make_that_fails_only_when_it_is_built_again(slot, table):
    """Taking the lower of two edits away builds the upper one anew; if that fails, it can be tried again."""
    fragile = {"calls": 0}

    def make(prior):
        fragile["calls"] += 1
        if fragile["calls"] == 2:
            raise OSError("no")
        return f"upper({prior})"

    lower, upper = scope(adding(slot, "lower")).apply(), scope(Edit(slot, make)).apply()
    with pytest.raises(OSError, match="no"):
        lower.restore()
    assert table["x"] == "upper(lower(x))"
    upper.restore()
    assert table["x"] == "lower(x)"
    lower.restore()
    assert table["x"] == "x"


def test_an_edit_that_makes_nothing_of_nothing():
    table = {}
    with scope(Edit(ItemSlot(table, "x"), lambda prior: MISSING, "replace")):
        assert table == {}
    assert table == {}


def test_entering_from_inside_a_patched_call(slot, table):
    thing = types.SimpleNamespace(call=lambda: table["x"])
    inner = scope(adding(slot, "inner"))

    def enters(original):
        with inner:
            return original()

    with Scope(None, (wrap_call(thing, "call", enters),)):
        assert thing.call() == "inner(x)"
        assert table["x"] == "x"


def test_entering_from_inside_make(slot, table):
    other = {"y": "y"}
    nested = scope(adding(ItemSlot(other, "y"), "nested"))

    def make(prior):
        with nested:
            return f"{other['y']} {prior}"

    with scope(Edit(slot, make)):
        assert table["x"] == "nested(y) x"
    assert other == {"y": "y"}
