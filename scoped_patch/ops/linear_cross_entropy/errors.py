"""Errors of the fused head that are more than a bad argument."""

from __future__ import annotations

from ...engine.errors import ScopedPatchError


class LabelOutOfRangeError(ScopedPatchError, ValueError, IndexError):
    """A label is neither `ignore_index` nor a row of the head's weight."""


class SecondOrderGradientError(ScopedPatchError, NotImplementedError):
    """A gradient of a gradient of the fused head was asked for; it does not keep what that needs."""
