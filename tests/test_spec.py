"""Scopes as text: the way there and back, what is refused, and processes that put the same scope on their own model."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch
import torch.multiprocessing as mp

from scoped_patch import (
    BadOptionError,
    BadTargetError,
    FakeQuant,
    FusedHead,
    PatchErrorGroup,
    PrefixGrouper,
    ScopeStateError,
    TiledMLP,
    Ulysses,
    active,
    assert_clean,
    patched,
    wrap_call,
)
from scoped_patch.spec import VARIABLE, VERSION, exported, from_spec, to_spec
from tests.support.models import token_ids
from tests.tiny_models import build

IDS = token_ids()


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    assert_clean()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    "options",
    [
        {"fused": "torch"},
        {"fused": FusedHead("torch", memory=1 << 20, outputs=("log_probs",), temperature=0.5, entropy_grad=False)},
        {"tiled_mlp": 4, "prefix_grouper": True, "on_foreign": "keep", "on_compiled": "reset"},
        {"tiled_mlp": TiledMLP(3), "prefix_grouper": PrefixGrouper(find=False, backend="plain")},
        {"sp": Ulysses(1, inputs="sharded", grad_reduction="sum")},
        {"fake_quant": FakeQuant("w4a4", ignore=["*lm_head"], input_global_scales=torch.tensor(12.0))},
        {"fake_quant": FakeQuant("w4a16", ignore={"b", "a"}), "fused": "auto"},
    ],
    ids=lambda options: "+".join(options),
)
def test_there_and_back(options):
    model, other = build("llama")[0], build("llama")[0]
    scope = patched(model, **options)
    spec = to_spec(scope)
    again = from_spec(other, spec)
    assert to_spec(again) == spec
    assert json.loads(spec)["scoped_patch"] == 1
    assert again.target is other
    assert (again.on_foreign, again.on_compiled) == (scope.on_foreign, scope.on_compiled)
    rows = [[(row.patch, row.why) for row in one.plan().explain(full=True).rows] for one in (scope, again)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("given", "spread"), [(None, False), (None, True), (True, False), (True, True), (False, True)])
def test_whether_batches_without_images_run_the_tower(given, spread):
    model, _ = build("qwen2_vl")
    scope = patched(model, fused="torch", sp=1 if spread else None, vlm_mixed_batch=given)
    again = from_spec(build("qwen2_vl")[0], to_spec(scope))
    assert to_spec(again) == to_spec(scope)
    wanted = spread if given is None else given
    for one in (scope, again):
        assert any(patch.name == "vlm_mixed_batch" for patch in one.patches) == wanted
        assert ("vlm_mixed_batch" in str(one.plan().explain(full=True))) == wanted


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_of_a_scope_that_is_entered(family):
    """What `with patched(...) as scope` gives is as good as the scope."""
    model, _ = build(family)
    options = {
        "fused": FusedHead("torch", temperature=0.5),
        "tiled_mlp": 2,
        "sp": 1,
        "on_foreign": "keep",
        "on_compiled": "reset",
    }
    for given in (None, False):
        step = patched(model, **options, vlm_mixed_batch=given)
        with step as scope:
            assert to_spec(scope) == to_spec(step)
            with exported(scope) as spec:
                assert os.environ[VARIABLE] == spec
        assert to_spec(scope) == to_spec(step)


@pytest.mark.parametrize("thing", [None, "fused", {"fused": "torch"}, torch.nn.Linear(1, 1)], ids=repr)
def test_what_is_no_scope_has_no_spec(thing):
    with pytest.raises(BadTargetError, match="a spec is made of a scope"):
        to_spec(thing)
    with pytest.raises(BadTargetError, match="a spec is made of a scope"), exported(thing):
        pass


def test_written_by_hand():
    model, _ = build("llama")
    scope = from_spec(model, {"scoped_patch": 1, "fused": "torch", "tiled_mlp": 2})
    with scope:
        assert model(input_ids=IDS).log_probs is not None


def test_target_patches_travel_by_name():
    scope = patched(qat="nvfp4")
    spec = json.loads(to_spec(scope))
    assert spec["qat"] == ["nvfp4_dense_w4a16", "nvfp4_dense_w4a4", "nvfp4_moe"]
    assert [p.name for p in from_spec(None, to_spec(scope)).patches] == spec["qat"]
    assert [p.name for p in from_spec(None, {"scoped_patch": 1, "qat": ["nvfp4_moe"]}).patches] == ["nvfp4_moe"]


def test_what_has_no_form_as_text_is_named():
    model, _ = build("llama")
    for scope, said in (
        (patched(model, fused=FusedHead("torch", temperature=torch.ones(2))), "fused: temperature is a Tensor"),
        (patched(model, wrap_call(model, "forward", lambda original, *a, **k: original(*a, **k))), "a patch of your own"),
    ):
        with pytest.raises(BadOptionError, match=said):
            to_spec(scope)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "there is no spec"),
        (None, "there is no spec"),
        ("not json", "this is no spec"),
        ("[1]", "this is no spec"),
        ("3", "this is no spec"),
        ("{}", "of version None"),
        ({"scoped_patch": 2}, "of version 2"),
        ({"scoped_patch": 1, "fusd": "torch"}, "'fusd', which is not known here; known are sp, fused"),
        ({"scoped_patch": 1, "fused": {"backnd": "torch"}}, "fused has 'backnd'; FusedHead takes backend, memory"),
        ({"scoped_patch": 1, "fused": {"backend": "torhc"}}, "the backend must be"),
        ({"scoped_patch": 1, "tiled_mlp": "many"}, "tiled_mlp must be a number"),
        ({"scoped_patch": 1, "qat": ["nvfp5"]}, "must be .nvfp4. or some of nvfp4_dense_w4a16"),
        ({"scoped_patch": 1, "on_foreign": "x"}, "on_foreign must be"),
        ({"scoped_patch": 1, "sp": {}}, "sp has no 'group', without which there is no Ulysses"),
        ({"scoped_patch": 1, "sp": {"inputs": "sharded"}}, "sp has no 'group'"),
        ({"scoped_patch": True, "fused": "torch"}, "of version True"),
        ({"scoped_patch": "1", "fused": "torch"}, "of version '1'"),
        ("[" * 100_000, "this is no spec"),
    ],
)
def test_what_is_no_spec_is_refused(spec, said):
    model = build("llama")[0] if not isinstance(spec, dict) or "qat" not in spec else None
    with pytest.raises((BadOptionError, ScopeStateError), match=said):
        from_spec(model, spec or None)


def test_the_environment_is_put_back(monkeypatch):
    scope = patched(build("llama")[0], fused="torch")
    with exported(scope) as spec:
        assert os.environ[VARIABLE] == spec
        with exported(patched(build("llama")[0], tiled_mlp=2)) as inner:
            assert os.environ[VARIABLE] == inner
        assert os.environ[VARIABLE] == spec
    assert VARIABLE not in os.environ


def test_the_plugin_reads_the_qat_part(monkeypatch):
    from scoped_patch.vllm import plugin

    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.setattr(plugin, "_session", None)
    monkeypatch.setenv(VARIABLE, json.dumps({"scoped_patch": 1, "fused": "torch"}))
    plugin.register()
    assert not active()
    assert (plugin.SPEC_VARIABLE, plugin.SPEC_VERSION) == (VARIABLE, VERSION)
    other_version = json.dumps({"scoped_patch": VERSION + 1, "qat": ["nvfp4_moe"]})
    for held in ("nonsense", "[]", "[" * 100_000, "{}", other_version, json.dumps({"scoped_patch": 1, "qat": ["nvfp5"]})):
        monkeypatch.setenv(VARIABLE, held)
        with pytest.raises(BadOptionError):
            plugin.register()
    monkeypatch.setenv(VARIABLE, to_spec(patched(qat="nvfp4")))
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(PatchErrorGroup, match="3 problems"):
            plugin.register()
    else:
        plugin.register()
        (session,) = active()
        assert len(session.records) == 3
        session.restore()
    monkeypatch.delenv(VARIABLE)


# ------------------------------------------------------------------------------------------------- processes
def scores_here(spec: str | None = None) -> dict:
    """What a process makes of its own model: under the scope that it was started in, and after it."""
    model, _ = build("llama")
    plain = model(input_ids=IDS, use_cache=False).logits
    with from_spec(model, spec) as scope:
        out = model(input_ids=IDS, use_cache=False)
        out.log_probs.sum().backward()
    after = model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(after, plain)
    assert_clean()
    return {
        "log_probs": out.log_probs.detach().tolist(),
        "gradient": model.lm_head.weight.grad.norm().item(),
        "patches": sorted({record["patch"] for record in scope.diff()}),
    }


def child(rank: int, folder: str, spec: str | None) -> None:
    torch.set_num_threads(1)
    found = scores_here(spec)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)


def test_spawned_processes_put_the_same_scope_on_their_model(tmp_path):
    model, _ = build("llama")
    scope = patched(model, fused=FusedHead("torch", temperature=0.7), tiled_mlp=3)
    wanted = scores_here(to_spec(scope))
    with exported(scope):
        mp.spawn(child, args=(str(tmp_path), None), nprocs=2, join=True)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == wanted
    assert wanted["patches"] == ["checkpoint_replay", "fused_head", "saves_unpatched", "tiled_mlp"]


def forked(write: int, model, spec: str) -> None:
    """In a child that was forked inside a live scope: the model is patched as its parent's, and can be left here too."""
    code = 1
    try:
        found = {"inside": model(input_ids=IDS, use_cache=False).log_probs.detach().tolist()}
        for session in reversed(active()):
            session.restore()
        assert_clean()
        found["after"] = model(input_ids=IDS, use_cache=False).logits.detach().tolist()
        with from_spec(model, spec):
            found["again"] = model(input_ids=IDS, use_cache=False).log_probs.detach().tolist()
        assert_clean()
        os.write(write, json.dumps(found).encode())
        code = 0
    finally:
        os._exit(code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_the_scope_it_was_forked_in():
    model, _ = build("llama", train=False)
    plain = model(input_ids=IDS, use_cache=False).logits.tolist()
    scope = patched(model, fused="torch", tiled_mlp=2)
    with scope:
        wanted = model(input_ids=IDS, use_cache=False).log_probs.tolist()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            forked(write, model, to_spec(scope))
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        assert os.waitpid(pid, 0)[1] == 0
        assert model(input_ids=IDS, use_cache=False).log_probs.tolist() == wanted, "the parent's scope is its own"
    assert json.loads(text) == {"inside": wanted, "after": plain, "again": wanted}


def test_forked_by_torch_multiprocessing(tmp_path):
    """The fork start method, with a model that each child makes for itself."""
    scope = patched(build("llama")[0], fused="torch")
    wanted = scores_here(to_spec(scope))
    context = mp.get_context("fork")
    with exported(scope):
        processes = [context.Process(target=child, args=(rank, str(tmp_path), None)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == wanted
