"""Put staged content into live tensors, in place: `commit` once and for good, or `swap` and `unswap`, which keep the old.

`commit` is one call into torch, which no interrupt can split. `swap` moves chunk by chunk, with a journal: an interrupt half
way is taken back, and the previous weights stay at hand for a rollback at no cost in memory. Either way a tensor that holds a
C++ handle (vLLM's oneDNN linear on CPU keeps the pointer of its packed weight in a one-element tensor) changes owner instead
of being owned twice.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .errors import UnsupportedLayer
from .graph import layout, same_layout, storage_key

CHUNK = 32 << 20  # bytes moved at a time
HANDLE = 64  # bytes; CPU tensors up to this size may be handles, and change places


class Exchange:
    """Pairs of live and staged tensors, and of scalars, that change places together.

    Args:
        pairs: (path, live, staged) of equal shape, dtype, stride and device.
        scalars: (holder, key, live value, staged value).
    """

    def __init__(
        self,
        pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
        scalars: Iterable[tuple[Any, Any, Any, Any]] = (),
    ) -> None:
        self.scalars = list(scalars)
        with torch._C.DisableTorchFunctionSubclass():
            self.pairs = _byte_pairs(list(pairs))
        self._chunks: list[tuple[torch.Tensor, torch.Tensor]] = []  # for `swap`
        self._swapped: list[bool] = []
        # The chunk being swapped, which way, what its live side held before, and whether that side is done.
        self._journal: tuple[int, bool, torch.Tensor, bool] | None = None
        self._done: list[object] = []
        self._steps = -1

    @property
    def committed(self) -> bool:
        """Whether `commit` has happened: all of it, or none."""
        return len(self._done) == self._steps

    def commit(self) -> None:
        """Put the staged content live. An interrupt comes before it or after it (see `committed`), never in the middle."""
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        large: list[tuple[torch.Tensor, torch.Tensor]] = []
        for live, staged in self.pairs:
            (small if live.numel() <= HANDLE and live.device.type == "cpu" else large).append((live, staged))
        calls: list[tuple[Callable[[Any, Any], Any], Any, Any]] = [
            (_setter(holder), key, new) for holder, key, _, new in self.scalars
        ]
        if self.pairs:
            to = [live for live, _ in (*large, *small)] + [staged for _, staged in small]
            source = [staged for _, staged in large] + [s.clone() for _, s in small] + [live.clone() for live, _ in small]
            calls.append((torch._foreach_copy_, to, source))
        columns = tuple(zip(*calls, strict=True)) or ((), (), ())
        self._steps = len(calls)
        try:
            # Python attends to signals between its own instructions, and there are none within this one: it runs in C.
            self._done.extend(map(operator.call, *columns))
        except BaseException:
            if not self.committed:
                for holder, key, old, _ in self.scalars:
                    _setter(holder)(key, old)
            raise
        self._synchronize()

    @property
    def nbytes(self) -> int:
        return sum(live.numel() for live, _ in self.pairs)

    def swap(self) -> None:
        """Put the staged content live. If that is interrupted or fails, everything is back as it was."""
        self._chunks = [
            (live[start : start + CHUNK], staged[start : start + CHUNK])
            for live, staged in self.pairs
            for start in range(0, live.numel(), CHUNK)
        ]
        self._swapped = [False] * len(self._chunks)
        try:
            self._move(True)
        except BaseException:
            self.unswap()
            raise

    def unswap(self) -> None:
        """Put the old content live again, however often this is interrupted; an interrupt is raised at the end."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._move(False)
                break
            except Exception:
                raise
            except BaseException as error:  # a second Ctrl-C must not leave a mixture serving
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _move(self, new: bool) -> None:
        if self._journal is not None:
            at, direction, before, live_done = self._journal
            live, staged = self._chunks[at]
            if live_done:
                staged.copy_(before)
                self._swapped[at] = direction
            else:
                live.copy_(before)
            self._journal = None
        for at, (live, staged) in enumerate(self._chunks):
            if self._swapped[at] is not new:
                before = live.clone()
                self._journal = (at, new, before, False)
                live.copy_(staged)
                self._journal = (at, new, before, True)
                staged.copy_(before)
                self._swapped[at] = new
                self._journal = None
        for holder, key, old_value, new_value in self.scalars:
            _setter(holder)(key, new_value if new else old_value)
        self._synchronize()

    def _synchronize(self) -> None:
        for device in {live.device for live, _ in self.pairs if live.device.type != "cpu"}:  # GPU only
            torch.accelerator.synchronize(device)


def _setter(holder: Any) -> Callable[[Any, Any], None]:
    return holder.__setitem__ if isinstance(holder, (dict, list)) else functools.partial(object.__setattr__, holder)


def _byte_pairs(pairs: list[tuple[str, torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Flat byte views of the memory to swap, every byte once, however many tensors look at it."""
    groups: dict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for path, live, staged in pairs:
        if not same_layout(live, staged):
            raise UnsupportedLayer(f"{path}: the processed weight is {layout(staged)}, the live one {layout(live)}")
        if live.numel():
            groups.setdefault(storage_key(live), []).append((path, live, staged))
    out: list[tuple[torch.Tensor, torch.Tensor]] = []
    used: dict[int, str] = {}
    for group in groups.values():
        first_path, first_live, first_staged = group[0]
        same = first_live.untyped_storage().nbytes() == first_staged.untyped_storage().nbytes()
        for _, live, staged in group:
            same &= staged.storage_offset() == live.storage_offset()
            same &= staged is first_staged or storage_key(staged) == storage_key(first_staged)
        if same:
            members = [(first_path, _storage_bytes(first_live), _storage_bytes(first_staged))]
        else:
            members = _disjoint(group)
        for path, live, staged in members:
            key = staged.data_ptr()
            if key in used:
                raise UnsupportedLayer(f"{path} and {used[key]} are two live tensors, but one after processing")
            used[key] = path
            out.append((live, staged))
    return out


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return out.set_(tensor.untyped_storage())


def _disjoint(
    group: list[tuple[str, torch.Tensor, torch.Tensor]],
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Tensors on one live storage, staged apart: equal views once, other overlaps refused."""
    spans: dict[tuple[int, int], tuple[str, torch.Tensor, torch.Tensor]] = {}
    for path, live, staged in group:
        span = (int(live.storage_offset()) * live.element_size(), _extent(live))
        if span in spans:
            _, _, other = spans[span]
            if storage_key(other) != storage_key(staged) and not torch.equal(_bytes(other, path), _bytes(staged, path)):
                raise UnsupportedLayer(f"{path} and {spans[span][0]} share memory, but got different new weights")
            continue
        spans[span] = (path, live, staged)
    ordered = sorted(spans)
    for (start, length), (after, _) in itertools.pairwise(ordered):
        if start + length > after:
            raise UnsupportedLayer(f"{spans[(start, length)][0]} overlaps another live tensor of the same storage")
    return [(path, _bytes(live, path), _bytes(staged, path)) for path, live, staged in spans.values()]


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """A flat byte view of a tensor that fills its extent (in any order of dimensions)."""
    if _extent(tensor) != tensor.numel() * tensor.element_size():
        raise UnsupportedLayer(f"{path}: a strided view {tuple(tensor.stride())} of shared memory cannot be swapped")
    start = int(tensor.storage_offset()) * tensor.element_size()
    return _storage_bytes(tensor)[start : start + _extent(tensor)]
