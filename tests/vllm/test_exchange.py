"""The swap and the bookkeeping under it; needs no vLLM."""

from __future__ import annotations

import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoped_patch.vllm import UnsupportedLayer, weights_digest
from scoped_patch.vllm import exchange as module
from scoped_patch.vllm.coverage import Coverage, box_of_view, show
from scoped_patch.vllm.exchange import Exchange


def test_exchange_swaps_views_once_and_refuses_what_it_cannot() -> None:
    live, staged = torch.arange(12.0), torch.arange(12.0) + 100
    exchange = Exchange([("a", live, staged), ("b", live[:6], staged[:6]), ("c", live.view(3, 4), staged.view(3, 4))])
    assert exchange.nbytes == 48
    exchange.swap()
    assert live.tolist() == [100.0 + i for i in range(12)]
    assert staged.tolist() == list(range(12))
    exchange.unswap()
    exchange.unswap()
    assert live.tolist() == list(range(12))
    with pytest.raises(UnsupportedLayer, match="live one"):
        Exchange([("a", live, staged.double())])
    with pytest.raises(UnsupportedLayer, match="two live tensors"):
        Exchange([("a", torch.zeros(12), staged), ("b", torch.zeros(12), staged)])
    with pytest.raises(UnsupportedLayer, match="share memory"):
        Exchange([("a", live, torch.zeros(12)), ("b", live[:], torch.ones(12))])


def test_a_commit_is_whole_whenever_a_signal_comes() -> None:
    """Real signals at random moments around it: all old or all new, small ones (which may be handles) having changed places."""

    def interrupt(*_: Any) -> None:
        arrived.append(True)
        raise KeyboardInterrupt

    def send(thread: int, after: float) -> None:
        time.sleep(after)
        signal.pthread_kill(thread, signal.SIGUSR2)

    size, count = 1 << 18, 40
    main, random_moment = threading.get_ident(), random.Random(0)
    before = signal.signal(signal.SIGUSR2, interrupt)
    outcomes = set()
    try:
        for _ in range(80):
            arrived: list[bool] = []
            live = [torch.zeros(size) for _ in range(count)] + [torch.zeros(1) for _ in range(count)]
            staged = [torch.ones_like(t) for t in live]
            numbers = {"scale": 0.0}
            exchange = Exchange(
                [(str(i), a, b) for i, (a, b) in enumerate(zip(live, staged, strict=True))], [(numbers, "scale", 0.0, 1.0)]
            )
            sender = threading.Thread(target=send, args=(main, random_moment.uniform(0, 0.03)))
            try:
                sender.start()
                exchange.commit()
                while not arrived:
                    time.sleep(0.0005)
            except KeyboardInterrupt:
                pass
            sender.join()
            new = float(exchange.committed)
            assert {float(v) for t in live for v in (t.min(), t.max())} == {new}
            assert {float(t) for t in staged[count:]} == {1 - new}
            assert numbers["scale"] == new
            outcomes.add(exchange.committed)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert True in outcomes


def test_a_commit_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    live, staged, numbers = torch.zeros(100), torch.ones(100), {"scale": 0.0}
    exchange = Exchange([("a", live, staged)], [(numbers, "scale", 0.0, 1.0)])
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        exchange.commit()
    assert not exchange.committed
    assert numbers == {"scale": 0.0}
    assert live.max() == 0
    monkeypatch.undo()
    exchange = Exchange([], [])
    exchange.commit()
    assert exchange.committed


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("again", [0, 1, 2, 3, 7])
def test_an_interrupt_at_any_point_leaves_all_old_or_all_new(monkeypatch: pytest.MonkeyPatch, how: str, again: int) -> None:
    """Interrupted before, in the middle of or after every copy, and once more while it is being taken back."""
    monkeypatch.setattr(module, "CHUNK", 16)
    copy = torch.Tensor.copy_
    outcomes = set()
    for first in range(1, 62):
        calls = 0

        def interrupted(
            self: torch.Tensor, source: torch.Tensor, *args: Any, points: tuple[int, ...] = (first, first + again)
        ) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls in points:
                if how != "before":
                    end = self.numel() if how == "after" else self.numel() // 2
                    copy(self[:end], source[:end])
                raise KeyboardInterrupt
            return copy(self, source, *args)

        live = [torch.arange(40.0) + 100 * i for i in range(3)]
        staged = [tensor + 0.5 for tensor in live]
        old, new = [t.clone() for t in live], [t.clone() for t in staged]
        exchange = Exchange((str(i), *pair) for i, pair in enumerate(zip(live, staged, strict=True)))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", interrupted)
            try:
                exchange.swap()
                done = True
            except KeyboardInterrupt:
                done = False
        outcomes.add(done)
        assert all(map(torch.equal, live, new if done else old))
        if done:
            exchange.unswap()
            assert all(map(torch.equal, live, old))
    assert outcomes == {True, False}


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_coverage_agrees_with_a_mask(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    base = torch.zeros(shape)
    if len(shape) == 2 and data.draw(st.booleans()):
        base = torch.zeros(shape[::-1]).t()
    coverage = Coverage(tuple(shape))
    for _ in range(data.draw(st.integers(0, 5))):
        view = base
        for d, size in enumerate(shape):
            start = data.draw(st.integers(0, size - 1))
            view = view.narrow(d, start, data.draw(st.integers(1, size - start)))
        if view.dim() == 2 and data.draw(st.booleans()):
            view = view.t()
        if view.is_contiguous() and data.draw(st.booleans()):
            view = view.reshape(-1)
        box = box_of_view(tuple(base.shape), base.stride(), tuple(view.shape), view.stride(), int(view.storage_offset()))
        if box is None:
            continue
        mask = torch.zeros_like(base)
        mask[tuple(slice(*span) for span in box)] = 1
        want = torch.zeros_like(base)
        want.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
        assert torch.equal(mask, want)
        view.fill_(1)
        coverage.add(box)
    assert coverage.complete() == bool(base.all())
    rest = torch.zeros_like(base)
    for box in coverage.missing():
        rest[tuple(slice(*span) for span in box)] += 1
    assert torch.equal(rest, 1 - base)


def test_a_strided_view_is_no_box_and_boxes_read_well() -> None:
    base = torch.zeros(6, 4)
    step = base[:, ::2]
    assert box_of_view((6, 4), (4, 1), tuple(step.shape), step.stride(), 0) is None
    assert show(((2, 4), (0, 4)), (6, 4)) == "[2:4, :]"
    assert show(((0, 6), (0, 4)), (6, 4)) == ""


def test_a_digest_sees_names_bytes_and_order_within_a_tensor_only() -> None:
    a, b = torch.arange(70_000, dtype=torch.bfloat16), torch.tensor([1, 2, 3], dtype=torch.uint8)
    digest = weights_digest([("a", a), ("b", b)])
    assert digest == weights_digest([("b", b.clone()), ("a", a.clone())])
    others = (
        [("a", b), ("b", a)],
        [("a", a.flip(0)), ("b", b)],
        [("a", a), ("b", b.flip(0))],
        [("a", a)],
        [("a", a), ("b", b.view(torch.int8))],
    )
    assert len({digest, *map(weights_digest, others)}) == 6
