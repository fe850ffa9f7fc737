"""What is missing, by name: checkpoint names where a sibling layer shows them, else parameters and slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .coverage import Box, Coverage, contains, show, volume
from .shadow import ShadowLayer, Staged


def missing_by_layer(layers: list[ShadowLayer], everything: bool, carry: bool) -> dict[str, list[str]]:
    """Per layer, what has not arrived.

    Args:
        everything: look at untouched layers too.
        carry: an unwritten part may be taken from a live parameter in the checkpoint's format.
    """
    out: dict[str, list[str]] = {}
    for layer in layers:
        if layer.processed or not (everything or layer.touched):
            continue
        for staged in layer.params.values():
            if staged.owners[0][0] is not layer or staged.coverage.complete():
                continue
            if staged.optional is not None and not staged.sources:
                continue
            if not everything and carry and staged.carried is not None:
                continue
            for box in staged.coverage.missing():
                names = _names_for(layers, staged, box) or [f"{staged.label}{show(box, staged.coverage.shape)}"]
                known = out.setdefault(layer.name, [])
                known += [name for name in names if name not in known]
    return out


def _names_for(layers: Iterable[ShadowLayer], staged: Staged, box: Box) -> list[str]:
    """The checkpoint names of a part, from how the same part of a sibling layer arrived."""
    for other in _siblings(layers, staged.label):
        found = Coverage(staged.coverage.shape)
        names = []
        for name, boxes in other.sources.items():
            inside = [one for one in boxes if contains(box, one)]
            if inside:
                names.append(_renumber(name, other.label, staged.label))
            for one in inside:
                found.add(one)
        if found.written >= volume(box):
            return names
    return []


def _siblings(layers: Iterable[ShadowLayer], label: str) -> Iterator[Staged]:
    kind = _without_numbers(label)
    for layer in layers:
        for staged in layer.params.values():
            if staged.sources and staged.label != label and _without_numbers(staged.label) == kind:
                yield staged


def _without_numbers(label: str) -> tuple[str, ...]:
    return tuple("#" if part.isdigit() else part for part in label.split("."))


def _renumber(name: str, from_label: str, to_label: str) -> str:
    """Carry `name` from one layer to its sibling: the numbers of the layer's own path change, in order."""
    old = [p for p in from_label.split(".") if p.isdigit()]
    new = [p for p in to_label.split(".") if p.isdigit()]
    out, at = [], 0
    for part in name.split("."):
        if part.isdigit() and at < len(old) and part == old[at]:
            part, at = new[at], at + 1
        out.append(part)
    return ".".join(out)
