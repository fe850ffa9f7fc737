"""Path strings, what their errors say, and names that others took by value."""

from __future__ import annotations

import sys
import types

import pytest

from scoped_patch.engine import Scope, replace_attribute, slot_from_path, wrap_call
from scoped_patch.engine.errors import BadOptionError, BadTargetError, TargetError
from scoped_patch.engine.resolve import aliases_of, split_path, version_of
from scoped_patch.engine.slots import ClassSlot, DictSlot


@pytest.fixture
def package(monkeypatch):
    package, module = types.ModuleType("sp_package"), types.ModuleType("sp_package.module")
    package.__version__ = "1.2.3"

    class Thing:
        def method(self):
            return "method"

        class Inner:
            limit = 3

    def function():
        return "function"

    module.Thing, module.function = Thing, function
    function.__module__ = Thing.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, "sp_package", package)
    monkeypatch.setitem(sys.modules, "sp_package.module", module)
    return module


def test_a_path_leads_to_the_slot(package):
    slot = slot_from_path("sp_package.module:Thing.Inner.limit")
    assert isinstance(slot, ClassSlot)
    assert (slot.owner, slot.key, slot.label) == (package.Thing.Inner, "limit", "sp_package.module:Thing.Inner.limit")
    slot = slot_from_path("sp_package.module:function")
    assert isinstance(slot, DictSlot)
    assert slot.owner is package
    with Scope(None, (replace_attribute("sp_package.module:Thing.Inner.limit", 4),)):
        assert package.Thing.Inner.limit == 4
    assert package.Thing.Inner.limit == 3


@pytest.mark.parametrize("path", ["module", "module.attr", ":attr", "module:", "module:a..b", "module:a.1", "module:a b", ""])
def test_a_path_of_another_form_is_refused(path):
    with pytest.raises(BadTargetError, match=r"package\.module:attr\.path"):
        split_path(path)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sp_package.module:Thng.method", r"no 'Thng' in sp_package 1\.2\.3; did you mean 'Thing'\?"),
        ("sp_package.module:Thing.metod", r"Thing has no 'metod' in sp_package 1\.2\.3; did you mean 'method'\?"),
        ("sp_package.module:Thing.zzzzz", r"Thing has no 'zzzzz' in sp_package 1\.2\.3$"),
        ("sp_package.nothing:x", r"importing 'sp_package\.nothing' failed: ModuleNotFoundError"),
    ],
)
def test_an_error_names_the_symbol_the_version_and_what_is_near(package, path, text):
    with pytest.raises(TargetError, match=text):
        slot_from_path(path)


def test_a_symbol_that_was_removed_upstream_is_an_error_not_a_silence(package):
    patch = wrap_call("sp_package.module:function", lambda original: "patched")
    with Scope(None, (patch,)):
        assert package.function() == "patched"
    del package.function
    for form in (patch, replace_attribute("sp_package.module:function", 1), replace_attribute(package, "function", 1)):
        with pytest.raises(TargetError, match=r"no 'function' in sp_package 1\.2\.3"):
            Scope(None, (form,)).apply()
    with pytest.raises(TargetError, match=r"there is no 'gone' \(sp_package 1\.2\.3\)"):
        Scope(None, (replace_attribute(package.Thing, "gone", 1),)).plan()


def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "sp_failing.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError, match=r"importing 'sp_failing' failed: ZeroDivisionError"):
        slot_from_path("sp_failing:x")


def test_versions():
    assert version_of("pytest.mark") == f"pytest {pytest.__version__}"
    assert version_of("no_such_module") == "no_such_module"


# ----------------------------------------------------------------------------------------------------- by value
@pytest.fixture
def borrowers(package, monkeypatch):
    made = []
    for name in ("sp_borrower_one", "sp_borrower_two"):
        module = types.ModuleType(name)
        module.taken = package.function
        monkeypatch.setitem(sys.modules, name, module)
        made.append(module)
    made[1].again = package.function
    monkeypatch.setitem(sys.modules, "sp_not_a_module", object())
    return made


def test_aliases_are_found_by_identity(package, borrowers):
    slot = slot_from_path("sp_package.module:function")
    found = {(module.__name__, name) for module, name in aliases_of(slot, package.function)}
    assert found == {("sp_borrower_one", "taken"), ("sp_borrower_two", "taken"), ("sp_borrower_two", "again")}


@pytest.mark.parametrize("form", ["path", "module"])
def test_all_names_of_one_function_are_patched_and_come_back(package, borrowers, form):
    before = package.function
    target = ("sp_package.module:function",) if form == "path" else (package, "function")
    scope = Scope(None, (wrap_call(*target, lambda original: f"patched {original()}"),))
    for _ in range(2):
        with scope as session:
            for function in (package.function, borrowers[0].taken, borrowers[1].taken, borrowers[1].again):
                assert function() == "patched function"
            assert len(session.records) == 4
            assert sum("imported by value" in row.why for row in session.explain(full=True).rows) == 3
        assert package.function is borrowers[0].taken is borrowers[1].taken is borrowers[1].again is before


def test_a_borrower_that_came_between_two_uses_is_patched_too(package, borrowers, monkeypatch):
    scope = Scope(None, (wrap_call("sp_package.module:function", lambda original: "patched"),))
    with scope:
        pass
    late = types.ModuleType("sp_borrower_late")
    late.taken = package.function
    monkeypatch.setitem(sys.modules, "sp_borrower_late", late)
    with scope:
        assert late.taken() == "patched"
    assert late.taken() == "function"


def test_a_borrowed_name_is_followed_within_its_own_package_only(package, borrowers, monkeypatch):
    inside = types.ModuleType("sp_borrower_one.inside")
    inside.taken = package.function
    monkeypatch.setitem(sys.modules, "sp_borrower_one.inside", inside)
    with Scope(None, (wrap_call("sp_borrower_one:taken", lambda original: "patched"),)):
        assert borrowers[0].taken() == inside.taken() == "patched"
        assert package.function() == borrowers[1].taken() == "function"


def test_aliases_can_be_refused_or_ignored(package, borrowers):
    patch = replace_attribute(package, "function", lambda: "new", aliases="error")
    with pytest.raises(BadTargetError, match=r"sp_borrower_one\.taken.*aliases='patch' patches them too"):
        Scope(None, (patch,)).plan()
    with Scope(None, (replace_attribute(package, "function", lambda: "new", aliases="ignore"),)):
        assert package.function() == "new"
        assert borrowers[0].taken() == "function"
    with pytest.raises(BadOptionError, match="aliases must be one of 'patch', 'error', 'ignore', got 'yes'"):
        replace_attribute(package, "function", 1, aliases="yes")


def test_values_that_are_not_callable_are_no_aliases(package, borrowers):
    package.limit = borrowers[0].limit = None
    with Scope(None, (replace_attribute(package, "limit", 1),)) as session:
        assert len(session.records) == 1
        assert borrowers[0].limit is None
