"""`reload_weights` through the real engine: what it serves after, during and between updates."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scoped_patch.engine.errors import BadOptionError, BadTargetError, ConflictError, ScopeStateError
from scoped_patch.vllm import (
    EngineNotReady,
    IncompleteReload,
    RejectedWeight,
    UnsupportedLayer,
    reload_weights,
    weights_digest,
    weights_version,
)
from scoped_patch.vllm import update as update_module

from .support.addresses import addresses

# One expert-parallel group per process, made with the first engine: a MoE model must come first.
KINDS = [("moe", "w4a16"), ("moe", "w4a4"), ("dense", "w4a16"), ("dense", "w4a4"), ("dense", "bf16")]


@pytest.fixture(params=KINDS, ids=["-".join(kind) for kind in KINDS])
def engine(request: pytest.FixtureRequest, engines: Any) -> Iterator[Any]:
    yield from restored(engines(*request.param))


@pytest.fixture
def dense(engines: Any) -> Iterator[Any]:
    yield from restored(engines("dense", "w4a16"))


def restored(engine: Any) -> Iterator[Any]:
    yield engine
    restore(engine)


def restore(engine: Any) -> None:
    if engine.generate() != engine.fresh[0]:
        with reload_weights(engine.llm) as update:
            update.load(engine.state[0].items())
        assert engine.generate() == engine.fresh[0]


def buckets(state: dict[str, torch.Tensor], count: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    items = list(state.items())
    size = -(-len(items) // count)
    for start in range(0, len(items), size):
        yield items[start : start + size]


@pytest.mark.parametrize("keep", [False, True])
def test_an_interrupt_after_the_commit_leaves_the_model_free(dense: Any, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    """The new weights serve, are counted, and the next update need not wait until this one is forgotten."""

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    before = weights_version(dense.model)
    first = reload_weights(dense.llm, keep_previous=keep)
    first.__enter__()
    first.load(dense.state[1].items())
    monkeypatch.setattr(update_module.StagedModel, "moved", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.__exit__(None, None, None)
    monkeypatch.undo()
    assert first.state == "committed"
    assert weights_version(dense.model) == before + 1
    assert dense.generate() == dense.fresh[1]
    if keep:
        first.rollback_to_previous()
        assert dense.generate() == dense.fresh[0]
    with reload_weights(dense.llm) as update:
        update.load(dense.state[1].items())
    assert dense.generate() == dense.fresh[1]


def test_three_reloads_answer_like_fresh_engines(engine: Any) -> None:
    before = addresses(engine.model)
    assert engine.fresh[0] != engine.fresh[1]
    for seed in (1, 0, 1):
        with reload_weights(engine.llm) as update:
            update.load(engine.state[seed].items())
        assert engine.generate() == engine.fresh[seed]
        assert update.report.moved == 0
        assert addresses(engine.model) == before


def test_old_outputs_between_buckets(engine: Any) -> None:
    with reload_weights(engine.worker) as update:
        for bucket in buckets(engine.state[1], 3):
            update.load(bucket)
            assert engine.generate() == engine.fresh[0]
    assert engine.generate() == engine.fresh[1]


@pytest.mark.parametrize("atomic", ["model", "layer"])
def test_any_order_and_bucket_size(engine: Any, atomic: Any) -> None:
    before = addresses(engine.model)
    items = list(engine.state[1].items())
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(3)).tolist()
    with reload_weights(engine.worker.model_runner, atomic=atomic) as update:
        for at in range(0, len(order), 7):
            update.load(items[i] for i in order[at : at + 7])
    assert engine.generate() == engine.fresh[1]
    assert addresses(engine.model) == before


def test_a_reused_transport_buffer(engine: Any) -> None:
    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def through_the_buffer(items: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in items:
            data = tensor.contiguous().view(-1).view(torch.uint8)
            buffer[: data.numel()].copy_(data)
            yield name, buffer[: data.numel()].view(tensor.dtype).view(tensor.shape)

    with reload_weights(engine.model) as update:
        for bucket in buckets(engine.state[1], 4):
            update.load(through_the_buffer(bucket))
            buffer.random_()
    assert engine.generate() == engine.fresh[1]


def test_five_updates_keep_loaders_classes_and_membership(engine: Any) -> None:
    def facts() -> dict[str, Any]:
        return {
            name: (id(p), type(p), p.data_ptr(), sorted(p.__dict__), getattr(p, "weight_loader", None))
            for name, p in engine.model.named_parameters()
        }

    before = facts()
    for seed in (1, 0, 1, 0, 1):
        with reload_weights(engine.llm) as update:
            update.load(engine.state[seed].items())
        assert facts() == before
    assert engine.generate() == engine.fresh[1]


def test_report_version_and_digest(dense: Any) -> None:
    version = weights_version(dense.model)
    with reload_weights(dense.llm, digest=True) as update:
        for bucket in buckets(dense.state[1], 3):
            update.load(bucket)
        done, total = update.progress
        assert done == total > 10
    report = update.report
    assert report.layers == total
    assert report.tensors == len(dense.state[1])
    assert report.received_bytes == sum(t.nbytes for t in dense.state[1].values())
    assert report.committed_bytes >= report.received_bytes * 0.9
    assert report.version == weights_version(dense.model) == version + 1
    assert report.digest == weights_digest(reversed(list(dense.state[1].items())))
    changed = dict(dense.state[1])
    changed["model.norm.weight"] = changed["model.norm.weight"].flip(0)
    assert report.digest != weights_digest(changed.items())


def test_names_that_the_model_ignores_are_reported(dense: Any) -> None:
    state = dict(dense.state[1])
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    with reload_weights(dense.llm) as update:
        update.load(state.items())
    assert update.report.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert dense.generate() == dense.fresh[1]


def test_a_partial_update_changes_what_came_and_nothing_else(dense: Any) -> None:
    names = ["model.norm.weight", "model.layers.1.input_layernorm.weight"]
    names += [n for n in dense.state[1] if n.startswith("model.layers.0.mlp.down_proj.")]
    part = {n: dense.state[1][n] for n in names}
    with reload_weights(dense.llm, expect="partial") as update:
        update.load(part.items())
    assert update.report.layers == 3
    partly = dense.generate()
    assert partly not in dense.fresh
    rest = {n: t for n, t in dense.state[0].items() if n in part}
    with reload_weights(dense.llm, expect=names) as update:
        update.load(rest.items())
    assert dense.generate() == dense.fresh[0]
    with pytest.raises(IncompleteReload, match=r"down_proj\.weight_scale") as caught:
        with reload_weights(dense.llm, expect="partial") as update:
            update.load((n, t) for n, t in part.items() if not n.endswith("down_proj.weight_scale"))
    assert list(caught.value.missing) == ["model.layers.0.mlp.down_proj"]
    assert dense.generate() == dense.fresh[0]


def test_a_part_of_a_fused_unquantised_layer(engines: Any) -> None:
    """On a GPU the rest of the layer is carried over; on CPU vLLM drops the plain weight, so the whole layer is asked for."""
    engine = engines("dense", "bf16")
    with pytest.raises(IncompleteReload, match=r"k_proj|\[128:256"):
        with reload_weights(engine.llm, expect="partial") as update:
            update.load([("model.layers.0.self_attn.q_proj.weight", engine.state[1]["model.layers.0.self_attn.q_proj.weight"])])
    assert engine.generate() == engine.fresh[0]


def test_names_that_were_promised_must_come(dense: Any) -> None:
    with pytest.raises(IncompleteReload, match=r"model\.norm\.weight"):
        with reload_weights(dense.llm, expect=["model.norm.weight", "lm_head.weight"]) as update:
            update.load([("lm_head.weight", dense.state[1]["lm_head.weight"])])
    with pytest.raises(RejectedWeight, match="not among the names"):
        with reload_weights(dense.llm, expect=["lm_head.weight"]) as update:
            update.load(dense.state[1].items())
    assert dense.generate() == dense.fresh[0]


def test_back_to_the_previous_weights(engine: Any) -> None:
    before = addresses(engine.model)
    with reload_weights(engine.llm, keep_previous=True) as update:
        update.load(engine.state[1].items())
    assert engine.generate() == engine.fresh[1]
    gc.collect()  # kernel objects that own C++ handles must outlive the possibility of going back
    update.rollback_to_previous()
    assert engine.generate() == engine.fresh[0]
    gc.collect()
    assert engine.generate() == engine.fresh[0]
    assert addresses(engine.model) == before
    with pytest.raises(ScopeStateError, match="nothing to go back to"):
        update.rollback_to_previous()


def test_discarded_weights_stream_in_and_nothing_runs_meanwhile(engine: Any) -> None:
    before = addresses(engine.model)
    names = {n for n, _ in engine.model.named_parameters()}
    for parameter in engine.model.parameters():  # what sleep level 2 leaves
        parameter.data.view(torch.uint8).random_() if parameter.numel() and parameter.dim() else parameter.data.fill_(7)
    with pytest.raises(IncompleteReload, match="refuses to run"):  # noqa: PT012
        with reload_weights(engine.llm, baseline="discarded") as update:
            update.load(list(engine.state[1].items())[:-1])
            with pytest.raises(EngineNotReady):
                engine.generate()
    with pytest.raises(EngineNotReady):
        engine.generate()
    with reload_weights(engine.llm, baseline="discarded") as update:
        update.load(engine.state[1].items())
    assert engine.generate() == engine.fresh[1]
    assert addresses(engine.model) == before
    assert {n for n, _ in engine.model.named_parameters()} == names


def test_two_phases_by_hand(dense: Any) -> None:
    with reload_weights(dense.llm) as update:
        update.load(dense.state[1].items())
        update.prepare()
        assert dense.generate() == dense.fresh[0]
        update.commit()
        assert dense.generate() == dense.fresh[1]


def test_only_one_update_at_a_time(dense: Any) -> None:
    with reload_weights(dense.llm, expect="partial"):
        with pytest.raises(ConflictError, match=r"test_reload\.py:\d+"):
            reload_weights(dense.model).__enter__()
    with reload_weights(dense.llm, expect="partial") as update:
        pass
    assert update.report.layers == 0
    with pytest.raises(ScopeStateError, match="entered once"):
        update.__enter__()
    with pytest.raises(ScopeStateError, match="committed"):
        update.load([])


def test_a_target_and_its_drafter_share_one_stream(engines: Any) -> None:
    """Here the drafter is a second engine's model of the same architecture."""
    from .support import engine as support

    first = engines("dense", "w4a16")
    second = support.start(first.path)
    with reload_weights([first.llm, support.model(second)]) as update:
        update.load(first.state[1].items())
    assert update.report.layers > 30
    assert first.generate() == support.generate(second) == first.fresh[1]
    with pytest.raises(RejectedWeight, match="bogus"):
        with reload_weights([first.llm, support.model(second)], expect="partial") as update:
            update.load([("model.layers.0.self_attn.bogus", torch.ones(3))])
    with reload_weights(first.llm) as update:
        update.load(first.state[0].items())


def test_different_global_scales_of_a_fused_layer_are_told(dense: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = dict(dense.state[1])
    name = "model.layers.0.self_attn.k_proj.weight_global_scale"
    state[name] = state[name] * 4
    with caplog.at_level(logging.WARNING, "scoped_patch"):
        with reload_weights(dense.llm, keep_previous=True) as update:
            update.load(state.items())
    assert "model.layers.0.self_attn.qkv_proj" in caplog.text
    assert "factor 4" in caplog.text
    update.rollback_to_previous()


def test_what_is_no_target() -> None:
    class Handle:
        def collective_rpc(self) -> None: ...

    for target in (Handle(), object(), []):
        with pytest.raises(BadTargetError, match=r"WorkerExtension|empty list"):
            reload_weights(target).__enter__()
    with pytest.raises(BadOptionError, match="atomic"):
        reload_weights(object(), atomic="row")  # type: ignore[arg-type]
    with pytest.raises(BadOptionError, match="keep_previous"):
        reload_weights(object(), atomic="layer", keep_previous=True)


def test_state_that_processing_does_not_make_anew_is_refused_by_name(dense: Any) -> None:
    """A kernel that keeps something derived from the weights, beyond what vLLM's processing writes, would go stale."""
    layer = dense.model.model.layers[0].mlp.down_proj
    for owner in (layer, layer.quant_method, layer.scheme.kernel):
        owner.cached_transpose = torch.ones(4)
        try:
            with pytest.raises(UnsupportedLayer, match=r"layers\.0\.mlp\.down_proj.*cached_transpose"):
                reload(dense.llm, dense.state[1])
        finally:
            del owner.cached_transpose
        assert dense.generate() == dense.fresh[0]


def reload(target: Any, state: dict[str, torch.Tensor], **options: Any) -> Any:
    with reload_weights(target, **options) as update:
        update.load(state.items())
    return update.report
