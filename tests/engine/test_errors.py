"""Errors: each is also what a caller would already catch."""

from __future__ import annotations

import pytest

from scoped_patch.engine import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConflictError, RuntimeError),
        (errors.ForeignOverwriteError, RuntimeError),
        (errors.OutOfOrderExit, RuntimeError),
        (errors.RestoreError, RuntimeError),
        (errors.LeakError, AssertionError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.TargetError, LookupError),
        (errors.BadTargetError, TypeError),
        (errors.BadOptionError, ValueError),
        (errors.SeamNotReachedError, RuntimeError),
        (errors.ScopeStateError, RuntimeError),
        (errors.PatchErrorGroup, ExceptionGroup),
    ],
)
def test_each_is_one_of_ours_and_a_builtin(error, builtin):
    assert issubclass(error, errors.ScopedPatchError)
    assert issubclass(error, builtin)


def test_one_error_stays_itself_and_several_are_grouped():
    one, two = ValueError("1"), errors.ConflictError("2")
    assert errors.join_errors("m", []) is None
    assert errors.join_errors("m", [one]) is one
    group = errors.join_errors("m", [one, two])
    assert isinstance(group, errors.PatchErrorGroup)
    assert group.exceptions == (one, two)
    assert "2 problems" in str(group)
    errors.raise_errors("m", [])
    with pytest.raises(ValueError, match="1"):
        errors.raise_errors("m", [one])


def test_a_group_can_be_split_and_stays_one_of_ours():
    group = errors.PatchErrorGroup("m", [ValueError("1"), errors.ConflictError("2")])
    matched, rest = group.split(errors.ConflictError)
    assert isinstance(matched, errors.PatchErrorGroup)
    assert isinstance(rest, errors.PatchErrorGroup)
    caught = []
    try:
        raise group
    except* errors.ConflictError as part:
        caught += part.exceptions
    except* ValueError as part:
        caught += part.exceptions
    assert [str(error) for error in caught] == ["2", "1"]


def test_finish_goes_on_after_interrupts_and_raises_the_last():
    todo = [KeyboardInterrupt("first"), KeyboardInterrupt("second"), None]

    def action():
        error = todo.pop(0)
        if error is not None:
            raise error

    with pytest.raises(KeyboardInterrupt, match="second"):
        errors.finish(action)
    assert todo == []
    todo[:] = [ValueError("no"), None]
    with pytest.raises(ValueError, match="no"):
        errors.finish(action)
    assert todo == [None]
