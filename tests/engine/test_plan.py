"""Edits and plans: pure descriptions, checked against each other before anything is written."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import pytest

from scoped_patch.engine import (
    Edit,
    EditPatch,
    ItemSlot,
    Patch,
    Scope,
    Support,
    assert_clean,
    attribute_slot,
    replace_attribute,
    wrap_call,
)
from scoped_patch.engine.errors import BadTargetError, ConflictError, PatchErrorGroup, TargetError, UnsupportedError


def patch(name, *edits):
    return EditPatch(name, lambda _: edits)


# ----------------------------------------------------------------------------------------------------- edits
def test_an_edit_makes_one_object_per_prior_whatever_comes_and_goes_below():
    """Compiled code guards on the object: a new one at each entering would be compiled again."""
    made = []

    def make(prior):
        made.append(prior)
        return (prior,)

    edit = Edit(ItemSlot({}, "x"), make)
    values = [edit.build(prior) for prior in "abababab"]
    assert made == ["a", "b"]
    assert values[0] is values[2]
    assert values[1] is values[3]

    class Thing:
        def method(self):
            pass

    thing = Thing()
    assert edit.build(thing.method) is edit.build(thing.method)  # a bound method is a new object each time
    for i in range(20):
        edit.build(i)
    assert len(edit._memo) == 8


def test_nested_scopes_reuse_what_they_made():
    thing = types.SimpleNamespace(call=lambda x: x)
    outer = Scope(None, (patch("outer", Edit(attribute_slot(thing, "call"), lambda p: lambda x: ("outer", p(x)), rank=20)),))
    inner = Scope(None, (patch("inner", Edit(attribute_slot(thing, "call"), lambda p: lambda x: ("inner", p(x)), rank=10)),))
    seen = set()
    for _ in range(4):
        with outer:
            seen.add(thing.call)
            with inner:
                seen.add(thing.call)
                assert thing.call(1) == ("outer", ("inner", 1))
    assert len(seen) == 2


# ----------------------------------------------------------------------------------------------------- conflicts
def test_all_conflicts_are_named_together_with_both_parties():
    table = {"a": 1, "b": 2}
    edits = {
        (name, key): Edit(ItemSlot(table, key, f"table.{key}"), lambda prior: 0, "replace")
        for name in ("p", "q")
        for key in "ab"
    }
    scope = Scope(None, tuple(patch(name, edits[name, "a"], edits[name, "b"]) for name in ("p", "q")))
    with pytest.raises(PatchErrorGroup) as caught:
        scope.plan()
    texts = [str(error) for error in caught.value.exceptions]
    assert [type(error) for error in caught.value.exceptions] == [ConflictError] * 2
    assert all("'p' and 'q'" in text for text in texts)
    assert "table.a" in texts[0]
    assert "table.b" in texts[1]
    with pytest.raises(PatchErrorGroup):
        scope.apply()
    assert table == {"a": 1, "b": 2}


def test_one_edit_wanted_twice_is_one_edit():
    table = {"a": 1}
    same = Edit(ItemSlot(table, "a"), lambda prior: prior + 1)
    tokens = [Edit(ItemSlot(table, "a"), lambda prior: prior * 10, "replace", token="t") for _ in "xy"]
    with Scope(None, (patch("p", same, tokens[0]), patch("q", same, tokens[1]))):
        assert table == {"a": 11}
    assert table == {"a": 1}


def test_two_settings_of_one_exclusive_patch_are_refused():
    table = {"a": 1}
    one, two = (Edit(ItemSlot(table, "a"), lambda prior: 0, token=token, exclusive="fused") for token in "xy")
    with pytest.raises(ConflictError, match="'p' and 'q' both want"):
        Scope(None, (patch("p", one), patch("q", two))).plan()


def test_edits_are_ordered_replaces_first_then_by_rank_then_as_given():
    table = {"a": ""}

    def add(text, rank):
        return Edit(ItemSlot(table, "a"), lambda prior: prior + text, rank=rank)

    fresh = Edit(ItemSlot(table, "a"), lambda prior: "fresh ", "replace", rank=99)
    with Scope(None, (patch("p", add("3", 30), add("1", 10), add("2a", 20)), patch("q", add("2b", 20), fresh))):
        assert table["a"] == "fresh 12a2b3"


# ----------------------------------------------------------------------------------------------------- support
class Refusing(Patch):
    name = "refusing"

    def supports(self, target):
        return Support(False, "no spam in ham 1.0")

    def plan(self, target):
        raise AssertionError("never asked")


class Failing(Patch):
    name = "failing"

    def supports(self, target):
        raise ZeroDivisionError("in supports")

    def plan(self, target):
        return ()


def test_a_supports_that_raises_is_reported_with_the_rest():
    with pytest.raises(PatchErrorGroup) as caught:
        Scope(None, (Refusing(), Failing())).plan()
    refused, failed = caught.value.exceptions
    assert isinstance(refused, UnsupportedError)
    assert isinstance(failed, ZeroDivisionError)
    assert failed.__notes__ == ["raised by failing.supports()"]


def test_a_patch_may_be_a_dataclass_with_equality():
    """Which makes it unhashable; nothing may depend on that."""

    @dataclass
    class Add(Patch):
        table: dict
        amount: int
        name: str = "add"

        def supports(self, target):
            return Support(True, notes=("a note",), skipped=("a part",))

        def plan(self, target):
            yield Edit(ItemSlot(self.table, "a"), lambda prior: prior + self.amount)

    table = {"a": 1}
    with Scope(None, (Add(table, 1), Add(table, 1))) as session:
        assert table == {"a": 3}
        assert "add: a note" in str(session.explain())
        assert "add skipped: a part" in str(session.explain())
    assert table == {"a": 1}


def test_planning_writes_nothing_and_can_be_shown():
    thing = types.SimpleNamespace(x=1)
    scope = Scope(thing, (replace_attribute(thing, "x", 2, reason="to see"),))
    plan = scope.plan()
    assert thing.x == 1
    assert len(plan) == 1
    assert "to see" in str(plan)
    assert "1 edits" in repr(plan)
    assert_clean()


# ----------------------------------------------------------------------------------------------------- reuse
def test_a_plan_is_made_again_when_it_no_longer_fits():
    class Follows(Patch):
        name = "follows"
        planned = 0

        def fingerprint(self, target):
            return tuple(target)

        def plan(self, target):
            Follows.planned += 1
            for key in list(target):
                yield Edit(ItemSlot(target, key), lambda prior: -prior, "wrap")

    table = {"a": 1}
    scope = Scope(table, (Follows(),))
    for _ in range(3):
        with scope:
            assert table == {"a": -1}
    assert Follows.planned == 1
    table["b"] = 2
    with scope:
        assert table == {"a": -1, "b": -2}
    assert Follows.planned == 2


def test_a_fingerprint_that_raises_changes_nothing():
    class Broken(Patch):
        name = "broken"

        def __init__(self):
            self.fine = True

        def fingerprint(self, target):
            if not self.fine:
                raise LookupError("gone")

        def plan(self, target):
            yield Edit(ItemSlot(target, "a"), lambda prior: 0)

    table, broken = {"a": 1}, Broken()
    scope = Scope(table, (broken,))
    with scope:
        broken.fine = False
    assert table == {"a": 1}
    with pytest.raises(LookupError, match="gone"), scope:
        raise AssertionError("not reached")
    assert table == {"a": 1}
    assert_clean()


def test_an_owner_that_got_a_new_dict_is_planned_again_not_patched_in_vain():
    class Thing:
        def method(self):
            return "plain"

    thing = Thing()
    scope = Scope(thing, (wrap_call(thing, "method", lambda original: "patched"),))
    with scope:
        assert thing.method() == "patched"
    thing.__dict__ = {"other": 1}
    with scope:
        assert thing.method() == "patched"
    assert thing.__dict__ == {"other": 1}


def test_what_is_no_edit_is_named():
    with pytest.raises(BadTargetError, match=r"bad: plan\(\) must yield Edit objects, got NoneType"):
        Scope(None, (patch("bad", None),)).plan()


# ----------------------------------------------------------------------------------------------------- imported later
@pytest.fixture
def lazy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, text="def answer():\n    return 41\n"):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    yield make
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def plus_one(original):
    return original() + 1


def test_a_reused_scope_patches_a_module_that_was_imported_between_two_uses(lazy):
    name = lazy("sp_between")
    scope = Scope(None, (wrap_call(f"{name}:answer", plus_one, when="imported"),))
    with scope:
        pass
    module = __import__(name)
    assert module.answer() == 41
    for _ in range(2):
        with scope as session:
            assert module.answer() == 42
            assert len(session.records) == 1
    assert module.answer() == 41


def test_one_hook_serves_many_entries_and_a_module_that_is_imported_again(lazy, monkeypatch):
    import wrapt

    hooks = []
    real = wrapt.register_post_import_hook
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda hook, name: (hooks.append(name), real(hook, name)))
    name = lazy("sp_again")
    scope = Scope(None, (wrap_call(f"{name}:answer", plus_one, when="imported"),))
    for _ in range(5):
        with scope:
            pass
    assert hooks == [name]
    with scope:
        assert __import__(name).answer() == 42
        del sys.modules[name]
    with scope:
        module = __import__(name)
        assert module.answer() == 42
    assert module.answer() == 41


def test_a_late_module_is_patched_for_every_live_scope_in_order(lazy):
    name = lazy("sp_two_scopes", "def answer():\n    return ''\n")
    one, two = (
        Scope(None, (wrap_call(f"{name}:answer", lambda original, text=text: original() + text, when="imported"),))
        for text in "12"
    )
    with one, two:
        module = __import__(name)
        assert module.answer() == "12"
    assert module.answer() == ""


def test_a_late_module_without_the_symbol_fails_the_import_that_calls_for_it(lazy):
    name = lazy("sp_without", "def other():\n    return 1\n")
    with (
        Scope(None, (wrap_call(f"{name}:answer", plus_one, when="imported"),)),
        pytest.raises(TargetError, match="no 'answer'"),
    ):
        __import__(name)
    assert __import__(name).other() == 1


def test_what_a_late_module_took_by_value_is_put_back(lazy):
    origin, borrower = lazy("sp_lent"), lazy("sp_borrower", "from sp_lent import answer as mine, answer\n")
    module = __import__(origin)
    before = module.answer
    with Scope(None, (wrap_call(f"{origin}:answer", plus_one),)):
        late = __import__(borrower)
        assert late.mine() == 42
    assert late.mine is late.answer is before


def test_what_a_late_module_has_by_itself_is_left_alone(lazy):
    """A replacement may be at home in a module that is imported meanwhile."""
    origin = lazy("sp_replaced")
    home = lazy("sp_home", "import sp_fake\nkept = sp_fake.fake\nfrom sp_replaced import answer\n")
    lazy("sp_fake", "def fake():\n    return 'fake'\n")
    fake, module = __import__("sp_fake").fake, __import__(origin)
    before = module.answer
    with Scope(None, (replace_attribute(f"{origin}:answer", fake),)):
        late = __import__(home)
        assert late.answer() == "fake"
    assert late.kept is fake
    assert late.answer is before
