"""Outputs with declared fields for log-probs and entropy.

DDP and accelerate rebuild outputs from their declared fields, so a field that is only set would raise or vanish. Each
upstream output class gets one subclass that declares them.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

_CLASSES: dict[type, type] = {}
#: of the declared classes, in order; Dynamo does not trace `dataclasses.fields` of a class
_NAMES: dict[type, tuple[str, ...]] = {}

EXTRA_FIELDS = ("log_probs", "entropy")


def fused_output_class(upstream: type) -> type:
    """The subclass of a `ModelOutput` dataclass that declares `log_probs` and `entropy`; one per upstream class."""
    known = _CLASSES.get(upstream)
    if known is None:
        known = _CLASSES[upstream] = _declare(upstream)
        _NAMES[known] = tuple(field.name for field in dataclasses.fields(known))
    return known


def fused_output(upstream: type, values: dict[str, Any]) -> Any:
    """An output of that subclass. Made by position: transformers takes the keyword `past_key_values` for `cache`, also
    where a remote-code class declares it by its old name.
    """
    made = fused_output_class(upstream)
    return made(*[values[name] for name in _NAMES[made]])


def _declare(upstream: type) -> type:
    fields = [(name, Any, dataclasses.field(default=None)) for name in EXTRA_FIELDS]
    made = dataclasses.make_dataclass(
        f"Fused{upstream.__name__}",
        fields,
        bases=(upstream,),
        namespace={
            "__doc__": f"{upstream.__name__} with `log_probs` and `entropy` ([batch, sequence], fp32); `logits` is None.",
            "__module__": __name__,
            "__reduce__": _reduce,
        },
        repr=False,
        eq=False,
    )
    return made


def _reduce(self: Any) -> tuple[Any, ...]:
    upstream = type(self).__mro__[1]
    return (_rebuild, (upstream, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}))


def _rebuild(upstream: type, values: dict[str, Any]) -> Any:
    return fused_output(upstream, values)


def declare_for(forward: Any) -> None:
    """Declare the subclasses for a forward's annotated outputs now, so that traced code finds them ready."""
    try:
        annotation = inspect.signature(forward).return_annotation
    except (TypeError, ValueError):
        return
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            fused_output_class(candidate)
