"""Every fault leaves the old outputs bit-equal, and a complete update after it is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from scoped_patch.engine.errors import ConflictError
from scoped_patch.vllm import EngineNotReady, IncompleteReload, RejectedWeight, reload_weights, weights_version
from scoped_patch.vllm.exchange import Exchange
from scoped_patch.vllm.staging import StagedModel

from .support.addresses import addresses
from .test_reload import KINDS, buckets, restore, restored

Items = list[tuple[str, torch.Tensor]]


@pytest.fixture(params=KINDS, ids=["-".join(kind) for kind in KINDS])
def engine(request: pytest.FixtureRequest, engines: Any) -> Iterator[Any]:
    yield from restored(engines(*request.param))


@pytest.fixture
def dense(engines: Any) -> Iterator[Any]:
    yield from restored(engines("dense", "w4a16"))


def without(*ends: str) -> Callable[[Items], Items]:
    return lambda items: [(n, t) for n, t in items if not ("layers.0." in n and any(end in n for end in ends))]


def replaced(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Items], Items]:
    def edit(items: Items) -> Items:
        out = [(n, change(t) if n.endswith(end) else t) for n, t in items]
        assert any(n.endswith(end) for n, _ in items), end
        return out

    return edit


def nan_at_last(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out.view(-1).view(torch.uint8)[-1:] = 0x7F  # e4m3's NaN
    return out


def attempt(engine: Any, items: Any, error: type[BaseException], match: str, **options: Any) -> pytest.ExceptionInfo[Any]:
    before = addresses(engine.model)
    with pytest.raises(error, match=match) as caught:
        with reload_weights(engine.llm, **options) as update:
            update.load(items)
    assert engine.generate() == engine.fresh[0]
    assert addresses(engine.model) == before
    with reload_weights(engine.llm) as update:
        update.load(engine.state[1].items())
    assert engine.generate() == engine.fresh[1]
    return caught


def test_missing_k_and_v(engine: Any) -> None:
    caught = attempt(
        engine,
        without("k_proj", "v_proj")(list(engine.state[1].items())),
        IncompleteReload,
        "the old weights serve on",
    )
    missing = caught.value.missing
    assert list(missing) == ["model.layers.0.self_attn.qkv_proj"]
    wanted = {n for n in engine.state[1] if "layers.0." in n and ("k_proj" in n or "v_proj" in n)}
    assert set(missing["model.layers.0.self_attn.qkv_proj"]) == wanted


def test_missing_expert(engines: Any) -> None:
    engine = engines("moe", "w4a16")
    caught = attempt(engine, without("experts.2.up_proj")(list(engine.state[1].items())), IncompleteReload, "experts")
    wanted = {n for n in engine.state[1] if "layers.0." in n and "experts.2.up_proj" in n}
    assert set(*caught.value.missing.values()) == wanted
    restore(engine)


def test_missing_norm(engine: Any) -> None:
    attempt(engine, without("input_layernorm")(list(engine.state[1].items())), IncompleteReload, "input_layernorm")


def test_nothing_at_all(engine: Any) -> None:
    attempt(engine, [], IncompleteReload, "layers incomplete")


def test_missing_input_global_scale(engines: Any) -> None:
    engine = engines("dense", "w4a4")
    items = [(n, t) for n, t in engine.state[1].items() if not n.endswith("input_global_scale")]
    attempt(engine, items, IncompleteReload, "input_global_scale")
    restore(engine)


@pytest.mark.parametrize("error", [RuntimeError("trainer died"), KeyboardInterrupt("^C")])
def test_the_iterator_raises_midway(engine: Any, error: BaseException) -> None:
    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        for at, pair in enumerate(engine.state[1].items()):
            if at == 12:
                raise error
            yield pair

    caught = attempt(engine, dying(), type(error), str(error).replace("^", r"\^"))
    assert caught.value is error


def test_the_body_raises_after_all_arrived(dense: Any) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        with reload_weights(dense.llm) as update:
            update.load(dense.state[1].items())
            _ = 1 / 0
    assert dense.generate() == dense.fresh[0]


@pytest.mark.parametrize(
    ("end", "change"),
    [
        ("layers.0.mlp.down_proj.weight_packed", lambda t: t[: t.shape[0] // 2]),
        ("layers.0.mlp.down_proj.weight_packed", lambda t: torch.cat((t, t))),
        ("layers.1.self_attn.q_proj.weight_scale", lambda t: torch.cat((t, t), 1)),
        ("layers.1.self_attn.q_proj.weight_scale", lambda t: torch.cat((t, t), 0)),
        ("layers.0.input_layernorm.weight", lambda t: t[:-1]),
        ("model.embed_tokens.weight", lambda t: torch.cat((t, t))),
    ],
)
def test_wrong_shape(dense: Any, end: str, change: Any) -> None:
    items = replaced(end, change)(list(dense.state[1].items()))
    caught = attempt(dense, items, RejectedWeight, end.replace(".", r"\."))
    assert caught.value.weight.endswith(end)
    assert caught.value.reason in ("shape", "loader")


def test_wrong_dtype(dense: Any) -> None:
    items = replaced("layers.0.mlp.down_proj.weight_packed", lambda t: t.float())(list(dense.state[1].items()))
    caught = attempt(dense, items, RejectedWeight, "float32")
    assert caught.value.reason == "dtype"


def test_unknown_name(engine: Any) -> None:
    items = [*list(engine.state[1].items())[:9], ("model.layers.0.self_attn.q_proj.bogus", torch.ones(1))]
    caught = attempt(engine, items, RejectedWeight, "q_proj.bogus")
    assert caught.value.reason == "unknown"


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_global_scale"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_scales_that_are_not_finite(engines: Any, kind: str, leaf: str) -> None:
    engine = engines(kind, "w4a16")
    name = next(n for n in engine.state[1] if n.endswith(f"down_proj.{leaf}"))
    bad = nan_at_last if leaf == "weight_scale" else (lambda t: t * float("nan"))
    caught = attempt(engine, replaced(name, bad)(list(engine.state[1].items())), RejectedWeight, "NaN")
    assert (caught.value.weight, caught.value.reason) == (name, "non-finite")
    restore(engine)


def test_duplicate_names(engine: Any) -> None:
    items = list(engine.state[1].items())
    caught = attempt(engine, [*items[:5], items[2]], RejectedWeight, "arrived twice")
    assert (caught.value.weight, caught.value.reason) == (items[2][0], "duplicate")


def test_an_update_that_failed_takes_no_more(dense: Any) -> None:
    items = list(dense.state[1].items())
    with pytest.raises(RejectedWeight, match="bogus"):  # noqa: PT012
        with reload_weights(dense.llm) as update:
            with pytest.raises(RejectedWeight):
                update.load([("model.bogus", torch.ones(1))])
            with pytest.raises(RuntimeError, match="has failed"):
                update.load(items)
    assert dense.generate() == dense.fresh[0]


def test_drain_empties_every_stream_before_it_raises(dense: Any) -> None:
    taken = []

    def sender(items: Items) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in items:
            taken.append(pair[0])
            yield pair

    parts = list(buckets(dense.state[1], 3))
    with pytest.raises(RejectedWeight, match="bogus"):  # noqa: PT012
        with reload_weights(dense.llm, on_error="drain") as update:
            update.load(sender([("model.bogus", torch.ones(1)), *parts[0]]))
            update.load(sender(parts[1]))
            update.load(sender(parts[2]))
    assert len(taken) == len(dense.state[1]) + 1
    assert dense.generate() == dense.fresh[0]


@pytest.mark.parametrize("at", [0, 1, 2, 5, 6, 17, 18])
def test_interrupted_commit(dense: Any, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C in the middle of a swap that can be rolled back, and again in the middle of taking it back."""
    calls = 0
    copy = torch.Tensor.copy_

    def interrupted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (at + 1, at + 3):
            raise KeyboardInterrupt
        return copy(self, *args, **kwargs)

    before = addresses(dense.model)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with reload_weights(dense.llm, keep_previous=True) as update:
            update.load(dense.state[1].items())
            update.prepare()
            monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
            update.commit()
    monkeypatch.undo()
    assert calls >= at + 2
    assert dense.generate() == dense.fresh[0]
    assert addresses(dense.model) == before


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_before_or_after_the_commit(dense: Any, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Before it the old weights serve, after it the new ones do, and `state` says which."""
    commit = Exchange.commit

    def interrupted(self: Exchange) -> None:
        if late:
            commit(self)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with reload_weights(dense.llm) as update:
            update.load(dense.state[1].items())
            monkeypatch.setattr(Exchange, "commit", interrupted)
    monkeypatch.undo()
    assert update.state == ("committed" if late else "closed")
    assert dense.generate() == dense.fresh[late]
    assert weights_version(dense.model) == update.version


def test_layer_by_layer_a_failure_names_what_is_new(dense: Any) -> None:
    items = without("k_proj")(list(dense.state[1].items()))
    with pytest.raises(IncompleteReload, match="complete layers have new weights") as caught:
        with reload_weights(dense.llm, atomic="layer") as update:
            update.load(items)
    assert "model.layers.1.mlp.down_proj" in caught.value.committed
    assert list(caught.value.missing) == ["model.layers.0.self_attn.qkv_proj"]
    rest = {n: t for n, t in dense.state[1].items() if "layers.0.self_attn" in n and ("_proj" in n) and "o_proj" not in n}
    with reload_weights(dense.llm, expect="partial") as update:
        update.load(rest.items())
    assert dense.generate() == dense.fresh[1]


def test_a_stream_that_is_no_pairs_is_not_blamed_on_a_weight(dense: Any) -> None:
    attempt(dense, dense.state[1], TypeError, "got str")
    restore(dense)
    attempt(dense, [*list(dense.state[1].items())[:3], ("model.norm.weight", 1.0)], TypeError, r"got \(str, float\)")
    restore(dense)


@pytest.mark.parametrize("within", ["release", "close"])
def test_an_interrupted_rollback_is_done_again(dense: Any, monkeypatch: pytest.MonkeyPatch, within: str) -> None:
    """An update that is over, but not let go of, refuses no other; and its rollback does the rest when called again."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with reload_weights(dense.llm) as update:
            update.load(dense.state[1].items())
            if within == "release":
                monkeypatch.setattr("scoped_patch.vllm.update.release", interrupted)
            else:
                monkeypatch.setattr(StagedModel, "close", interrupted)
            raise RuntimeError("trainer died")
    monkeypatch.undo()
    assert update.state == "closed"
    assert update._models  # what was staged is still held
    with reload_weights(dense.llm) as other:
        other.load(dense.state[1].items())
        update.rollback()
        assert not update._models
        with pytest.raises(ConflictError, match="rollback"), reload_weights(dense.llm):
            pass
    assert dense.generate() == dense.fresh[1]


@pytest.mark.parametrize(
    ("within", "options"),
    [("release", {}), ("release", {"keep_previous": True}), ("close", {}), ("lift", {"baseline": "discarded"})],
)
def test_an_interrupt_behind_a_commit_leaves_what_rollback_lets_go_of(
    dense: Any, monkeypatch: pytest.MonkeyPatch, within: str, options: dict[str, Any]
) -> None:
    """The new weights serve; the update claims the model no longer, and the engine runs."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    places = {"release": "update.release", "close": "staging.StagedModel.close", "lift": "guard.GenerateGuard.lift"}
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with reload_weights(dense.llm, **options) as update:
            update.load(dense.state[1].items())
            monkeypatch.setattr(f"scoped_patch.vllm.{places[within]}", interrupted)
    monkeypatch.undo()
    assert update.state == "committed"
    if within != "close":  # of the claim it has let go then
        with pytest.raises(ConflictError, match="rollback"), reload_weights(dense.llm):
            pass
    update.rollback()
    assert dense.generate() == dense.fresh[1]
    assert not update._models
    with reload_weights(dense.llm, baseline="discarded") as other:
        update.rollback()  # touches nothing of another's
        with pytest.raises(EngineNotReady):
            dense.generate()
        other.load(dense.state[0].items())
    assert dense.generate() == dense.fresh[0]
    if options.get("keep_previous"):
        assert update._kept
        update.discard_previous()


def test_a_whole_update_ends_the_refusal_that_one_over_discarded_weights_left(dense: Any) -> None:
    with pytest.raises(RuntimeError, match="trainer died"), reload_weights(dense.llm, baseline="discarded"):
        raise RuntimeError("trainer died")
    items = list(dense.state[1].items())
    with reload_weights(dense.llm, expect="partial") as update:  # the rest may be gone
        update.load(items[:3])
    with pytest.raises(RuntimeError, match="trainer died"), reload_weights(dense.llm) as update:  # noqa: PT012
        update.load(items)
        raise RuntimeError("trainer died")
    with pytest.raises(EngineNotReady):
        dense.generate()
    with reload_weights(dense.llm) as update:
        update.load(items)
    assert dense.generate() == dense.fresh[1]
