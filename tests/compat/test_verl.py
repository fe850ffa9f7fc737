"""verl's functions, called as its FSDP engine calls them: patched first and never left, or left by `restore()`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

from scoped_patch import (
    BadOptionError,
    BadTargetError,
    ConflictError,
    PatchErrorGroup,
    UnsupportedError,
    active,
    assert_clean,
)
from scoped_patch.compat.verl import (
    apply_monkey_patch,
    apply_qat_patches,
    manual_process_weights_after_loading,
    prepare_qat_for_load_weights,
    ulysses_pad,
    validate_ulysses_config,
)
from tests.support import stub_packages
from tests.support.checks import run_checks
from tests.support.groups import text_groups
from tests.support.scores import assert_gradients, gradients, unpatched
from tests.support.verl_engine import Engine, assert_scored, loss_of, make_batch, truth
from tests.tiny_models import build

FUSED = {"use_fused_kernels": True, "fused_kernels_backend": "torch"}


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    "temperature", [0.7, torch.tensor(1.3), torch.tensor([0.5, 2.0, 1.0])], ids=["float", "0-d", "samples"]
)
def test_the_engines_steps_equal_the_unpatched_model(temperature, tiled):
    """Patched before the cast and before checkpointing; entropy is asked for in one batch and not in the next."""
    twin, _ = build("qwen3")
    model, _ = build("qwen3", dtype=torch.float64)
    session = apply_monkey_patch(model=model, use_tiled_mlp=tiled, tiled_mlp_shards=3, **FUSED)
    engine = Engine(model)
    assert engine.pass_packed_cu_seqlens
    model.to(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for seed, calculate_entropy in ((1, True), (2, False), (3, True)):
        batch = make_batch((9, 5, 7), temperature, seed)
        wanted = truth(twin, batch)
        found = engine.step(batch, calculate_entropy)
        assert_scored(found, wanted, batch)
        right = {name: getattr(wanted, name) for name in found}
        ours = gradients(model, functools.partial(loss_of, found, batch))
        assert_gradients(ours, gradients(twin, functools.partial(loss_of, right, batch)))
    session.restore()
    assert model(input_ids=batch.rows[0][None]).logits is not None


def test_lora_after_patching():
    torch.manual_seed(1)
    twin, _ = build("llama")
    model, _ = build("llama")
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    session = apply_monkey_patch(model, use_tiled_mlp=True, **FUSED)
    engine = Engine(model)
    model.enable_input_require_grads()
    engine.module = get_peft_model(model, config)
    twin = get_peft_model(twin, config)
    twin.load_state_dict(engine.module.state_dict())
    batch = make_batch((8, 6), 0.9)
    found, wanted = engine.step(batch, True), truth(twin, batch)
    assert_scored(found, wanted, batch)
    assert_gradients(gradients(engine.module, lambda: loss_of(found, batch)), gradients(twin, lambda: loss_of(wanted, batch)))
    session.restore()


def test_only_this_model_and_all_of_it_back():
    model, _ = build("qwen2")
    other, inputs = build("qwen2")
    forward, logits = type(model).forward, other(**inputs).logits
    entries = {path: list(module.__dict__) for path, module in model.named_modules()}
    first = apply_monkey_patch(model, **FUSED)
    second = apply_monkey_patch(model, **FUSED)
    assert model(**inputs).logits is None
    assert torch.equal(other(**inputs).logits, logits)
    assert type(model).forward is forward
    assert "verl_calls" in str(first.explain())
    first.restore()
    assert model(**inputs).logits is None, "the second session still holds the edits"
    second.restore()
    assert torch.equal(model(**inputs).logits, logits)
    assert {path: list(module.__dict__) for path, module in model.named_modules()} == entries


def test_the_signature_keeps_what_the_model_shows():
    model, _ = build("qwen3")
    before = inspect.signature(model.forward)
    session = apply_monkey_patch(model)
    shown = inspect.signature(model.forward)
    assert next(iter(before.parameters)) == next(iter(shown.parameters)) == "input_ids"
    assert set(shown.parameters) == {*before.parameters, "cu_seqlens", "cu_seqlens_cpu"}
    session.restore()
    assert inspect.signature(model.forward) == before


def test_without_fused_kernels_logits_are_those_of_the_samples():
    model, _ = build("qwen3")
    batch = make_batch((6, 4, 5))
    wanted = torch.cat([model(input_ids=row[None]).logits[0] for row in batch.rows])
    session = apply_monkey_patch(model, use_tiled_mlp=True)
    inputs, _ = Engine(model).inputs(batch)
    del inputs["temperature"]
    torch.testing.assert_close(model(**inputs, use_cache=False).logits[0], wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(BadOptionError, match="without fused kernels"):
        model(**inputs, temperature=0.5, use_cache=False)
    session.restore()


def test_recurrent_layers_start_anew_at_each_sample():
    """Packed rows leak from sample to sample in this family upstream."""
    model, _ = build("qwen3_5_text")
    batch = make_batch((7, 5))
    wanted = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in batch.rows])
    session = apply_monkey_patch(model)
    inputs, _ = Engine(model).inputs(batch)
    del inputs["temperature"]
    torch.testing.assert_close(model(**inputs, use_cache=False).logits[0], wanted, rtol=1e-4, atol=1e-4)
    session.restore()


def test_prefix_grouper():
    model, _ = build("llama")
    groups = text_groups()
    wanted = unpatched(model, groups.batch)
    session = apply_monkey_patch(model, use_prefix_grouper=True, **FUSED)
    out = model(**groups.batch, group_ids=groups.group_ids, use_cache=False)
    counted = groups.batch["labels"].roll(-1, 1) != -100
    counted[:, -1] = False
    torch.testing.assert_close(out.log_probs.double()[counted], wanted.log_probs[counted], rtol=0, atol=2e-5)
    session.restore()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"use_fused_kernels": True, "fused_kernels_backend": "cuda"}, BadOptionError, "fused_kernels_backend must be 'torch'"),
        (
            {"use_fused_kernels": True, "fused_kernels_backend": ["torch"]},
            BadOptionError,
            "fused_kernels_backend must be 'torch'",
        ),
        ({"ulysses_sp_size": 0}, BadOptionError, "ulysses_sp_size must be a number of ranks"),
        ({"ulysses_sp_size": True}, BadOptionError, "ulysses_sp_size must be a number of ranks"),
        ({"use_tiled_mlp": True, "tiled_mlp_shards": 0}, BadOptionError, "number of tiles"),
        ({"ulysses_sp_size": 2}, (UnsupportedError, RuntimeError), "torch.distributed"),
    ],
)
def test_what_cannot_work_is_refused_and_changes_nothing(options, error, message):
    model, _ = build("llama")
    with pytest.raises(error, match=message):
        apply_monkey_patch(model, **options)
    assert not active()


def test_other_options_on_a_patched_model_are_a_conflict():
    model, _ = build("llama")
    session = apply_monkey_patch(model, use_tiled_mlp=True, tiled_mlp_shards=2)
    with pytest.raises(ConflictError):
        apply_monkey_patch(model, use_tiled_mlp=True, tiled_mlp_shards=4)
    session.restore()


def test_temperatures_that_fit_nothing():
    model, _ = build("llama")
    session = apply_monkey_patch(model, **FUSED)
    batch = make_batch((4, 3), torch.ones(3))
    inputs, _ = Engine(model).inputs(batch)
    for changes in ({}, {"cu_seqlens": None}):
        with pytest.raises(BadOptionError, match="temperature has 3 values for 1 rows"):
            model(**{**inputs, **changes}, use_cache=False)
    session.restore()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cu_seqlens": [0, 4, 7]}, "cu_seqlens: got \\[0, 4, 7\\], wanted an int32 or int64 tensor"),
        ({"cu_seqlens": torch.tensor([])}, "cu_seqlens: got a torch.float32 tensor \\[0\\]"),
        ({"cu_seqlens": torch.tensor([7])}, "cu_seqlens: got a torch.int64 tensor \\[1\\]"),
        ({"cu_seqlens": torch.tensor([[0, 4, 7]])}, "cu_seqlens: got a torch.int64 tensor \\[1, 3\\]"),
        ({"cu_seqlens": torch.tensor([0, 7, 4])}, "cu_seqlens goes down"),
        ({"cu_seqlens_cpu": "cpu"}, "cu_seqlens_cpu: got 'cpu'"),
        ({"cu_seqlens_cpu": torch.tensor([0, 7])}, "cu_seqlens has 3 boundaries, and cu_seqlens_cpu has 2"),
    ],
    ids=str,
)
def test_boundaries_that_are_none(changes, said):
    model, _ = build("llama")
    session = apply_monkey_patch(model, **FUSED)
    inputs, _ = Engine(model).inputs(make_batch((4, 3), 0.7))
    given = {"cu_seqlens": torch.tensor([0, 4, 7]), "cu_seqlens_cpu": None, **changes}
    with pytest.raises(BadOptionError, match=said):
        model(**{**inputs, **given}, use_cache=False)
    session.restore()


def test_qat_patches_need_vllm():
    if importlib.util.find_spec("vllm") is not None:
        session = apply_qat_patches()
        assert {record.patch for record in session.records} == {"nvfp4_dense_w4a16", "nvfp4_dense_w4a4", "nvfp4_moe"}
        session.restore()
    else:
        with pytest.raises(PatchErrorGroup) as caught:
            apply_qat_patches()
        assert ["vLLM is not installed" in str(error) for error in caught.value.exceptions] == [True] * 3
    assert not active()


def test_weights_are_loaded_again_and_again():
    """On a stand-in for vLLM's model: what processing deletes comes back for loading, and the live storage stays."""
    with stub_packages.installed():
        patches = apply_qat_patches()
        again = apply_qat_patches()
        model = stub_packages.EngineModel()
        live = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
        assert not any(name.endswith("weight_packed") for name in live)
        for seed in (1, 2, 1):
            meta = prepare_qat_for_load_weights(model, device="cpu")
            assert "layers.0.weight_packed" in meta
            assert all(hasattr(p, "weight_loader") for p in meta.values())
            model.load_weights(stub_packages.weights(seed))
            assert manual_process_weights_after_loading(model) == 2
            assert manual_process_weights_after_loading(model) == 2  # nothing new: left alone
            wanted = dict(stub_packages.weights(seed))
            for index, layer in enumerate(model.layers):
                assert torch.equal(layer.weight, wanted[f"layers.{index}.weight_packed"])
                assert layer.weight_global_scale == 1 / wanted[f"layers.{index}.weight_global_scale"]
            assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == live
        with pytest.raises(BadOptionError, match="loaded where the live ones are, on cpu"):
            prepare_qat_for_load_weights(model, device="cuda:0")
        with pytest.raises(BadOptionError, match="device='gpu' is no device; the live weights are on cpu"):
            prepare_qat_for_load_weights(model, device="gpu")
        holder = torch.nn.Module()
        holder.model = model
        assert prepare_qat_for_load_weights(holder)["layers.1.weight_packed"] is model.layers[1].weight_packed
        model.load_weights(stub_packages.weights(2))
        assert manual_process_weights_after_loading(holder) == 2
        for session in (patches, again):
            session.restore()
        with pytest.raises(RuntimeError, match="before vLLM loads the first weights"):
            prepare_qat_for_load_weights(torch.nn.Linear(1, 1))


def test_what_is_no_model_or_no_device():
    for function in (prepare_qat_for_load_weights, manual_process_weights_after_loading):
        for thing in (None, "model", types.SimpleNamespace(model=None)):
            with pytest.raises(BadTargetError, match=r"needs vLLM's model \(an nn.Module\), got"):
                function(thing)


def test_padding_helpers():
    ids, positions = torch.arange(5)[None], torch.tensor([[0, 1, 2, 0, 1]])
    padded, at, added = ulysses_pad(ids, positions, 4, pad_value=9)
    assert padded.tolist() == [[0, 1, 2, 3, 4, 9, 9, 9]]
    assert at.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert added == 3
    _, axes, _ = ulysses_pad(ids, positions.expand(3, 1, -1), 2)
    assert axes.shape == (3, 1, 6)
    assert ulysses_pad(ids, positions, 5) == (ids, positions, 0)
    with pytest.raises(BadOptionError, match="one packed row of 5"):
        ulysses_pad(ids, positions[:, :4], 2)
    with pytest.raises(BadOptionError, match=r"input_ids \[5\] are no packed row"):
        ulysses_pad(ids[0], positions, 2)
    with pytest.raises(BadOptionError, match=r"position_ids \[5\] do not belong"):
        ulysses_pad(ids, positions[0], 2)
    validate_ulysses_config(8, 4)
    with pytest.raises(ValueError, match="6 heads cannot be shared by 4"):
        validate_ulysses_config(6, 4)


def test_two_ranks():
    run_checks(
        "tests.compat.verl_ranks",
        ["helpers", "engine_plain", "engine_fsdp2", "engine_fsdp1", "engine_lora", "group_of_another_size"],
        world=2,
    )
