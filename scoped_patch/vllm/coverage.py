"""Which parts of a tensor have been written: a union of boxes, exact and small whatever the tensor's size."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

Box = tuple[tuple[int, int], ...]  # per dimension [start, stop)


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def box_of_view(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    view_shape: tuple[int, ...],
    view_stride: tuple[int, ...],
    view_offset: int,
) -> Box | None:
    """The box that a view covers in its base of `shape` and `stride` (elements, offset 0), or None when it is no box.

    A view made by narrowing, selecting, transposing or adding size-one dimensions is a box; one with a step is not.
    """
    if 0 in shape or 0 in view_shape:
        return tuple((0, 0) for _ in shape)
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -stride[d])
    start = dict.fromkeys(range(len(shape)), 0)
    rest = view_offset
    for d in order:
        start[d], rest = divmod(rest, stride[d])
    if rest:
        return None
    length = dict.fromkeys(range(len(shape)), 1)
    wanted = [(view_stride[i], view_shape[i]) for i in range(len(view_shape)) if view_shape[i] > 1]
    for step, count in wanted:
        for d in order:
            if stride[d] == step and length[d] == 1:
                length[d] = count
                break
        else:
            return _contiguous_box(shape, stride, view_shape, view_stride, view_offset)
    if any(start[d] + length[d] > shape[d] for d in order):
        return _contiguous_box(shape, stride, view_shape, view_stride, view_offset)
    return tuple((start[d], start[d] + length[d]) for d in range(len(shape)))


def _contiguous_box(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    view_shape: tuple[int, ...],
    view_stride: tuple[int, ...],
    view_offset: int,
) -> Box | None:
    """The box of a reshaped view, when both are contiguous and it covers whole rows of some dimension."""
    if stride != _contiguous(shape) or not _is_contiguous(view_shape, view_stride):
        return None
    count = 1
    for n in view_shape:
        count *= n
    for d in range(len(shape)):
        step = stride[d]
        if count % step or view_offset % step:
            continue
        index, lead = view_offset // step, []
        for n in reversed(shape[: d + 1]):
            index, at = divmod(index, n)
            lead.append(at)
        lead.reverse()
        if lead[d] + count // step <= shape[d]:
            head = tuple((i, i + 1) for i in lead[:d])
            return (*head, (lead[d], lead[d] + count // step), *((0, n) for n in shape[d + 1 :]))
    return None


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return all(n == 1 or s == t for n, s, t in zip(shape, stride, _contiguous(shape), strict=True))


@dataclass
class Coverage:
    """The written boxes of one tensor of `shape`."""

    shape: tuple[int, ...]
    boxes: set[Box] = field(default_factory=set)
    written: int = 0  # with overlaps counted twice: only an upper bound, so that most checks cost nothing
    _complete: bool = False  # what is whole stays so

    def __post_init__(self) -> None:
        self.size = math.prod(self.shape)

    def add(self, box: Box) -> None:
        if box not in self.boxes and all(start < stop for start, stop in box):
            self.boxes.add(box)
            self.written += volume(box)

    def complete(self) -> bool:
        if not self._complete:
            self._complete = not self.size or (
                self.written >= self.size and (whole(self.shape) in self.boxes or self._side_by_side() or not self.missing())
            )
        return self._complete

    def _side_by_side(self) -> bool:
        """Do shards follow each other along the first dimension, and make up all? Most do; `missing` takes any boxes."""
        return self.written == self.size and all(a[0][1] <= b[0][0] for a, b in itertools.pairwise(sorted(self.boxes)))

    def missing(self) -> list[Box]:
        """The unwritten part as disjoint boxes, merged along the first dimension; empty when all is written."""
        if 0 in self.shape:
            return []
        edges = [sorted({0, n, *(end for box in self.boxes for end in box[d])}) for d, n in enumerate(self.shape)]
        cells = [list(itertools.pairwise(e)) for e in edges]
        index = [{start: i for i, (start, _) in enumerate(c)} for c in cells]
        ends = [{stop: i + 1 for i, (_, stop) in enumerate(c)} for c in cells]
        done: set[tuple[int, ...]] = set()
        for box in self.boxes:
            spans = (range(index[d][start], ends[d][stop]) for d, (start, stop) in enumerate(box))
            done.update(itertools.product(*spans))
        todo = [
            tuple(cells[d][i] for d, i in enumerate(cell))
            for cell in itertools.product(*(range(len(c)) for c in cells))
            if cell not in done
        ]
        for d in reversed(range(len(self.shape))):
            todo = _merge(todo, d)
        return todo


def _merge(boxes: list[Box], dim: int) -> list[Box]:
    """Join boxes that touch along `dim` and agree in every other dimension."""
    out: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for box in sorted(boxes):
        runs = out.setdefault(box[:dim] + box[dim + 1 :], [])
        start, stop = box[dim]
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return sorted((*key[:dim], run, *key[dim:]) for key, runs in out.items() for run in runs)


def volume(box: Box) -> int:
    out = 1
    for start, stop in box:
        out *= stop - start
    return out


def overlap(a: Box, b: Box) -> bool:
    return all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a, b, strict=True))


def contains(outer: Box, inner: Box) -> bool:
    return all(x[0] <= y[0] and y[1] <= x[1] for x, y in zip(outer, inner, strict=True))


def show(box: Box, shape: tuple[int, ...]) -> str:
    """`[128:256, :]` for people; the empty string for the whole tensor."""
    if box == whole(shape):
        return ""
    parts = [":" if span == (0, n) else f"{span[0]}:{span[1]}" for span, n in zip(box, shape, strict=True)]
    return f"[{', '.join(parts)}]"
