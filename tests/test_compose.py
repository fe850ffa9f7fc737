"""`patched(...)`: what its arguments mean, whom it acts on, and class scope beside compiled code."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch import nn

import scoped_patch
from scoped_patch import (
    BadOptionError,
    BadTargetError,
    ConflictError,
    Edit,
    FusedHead,
    ModelSession,
    Patch,
    PatchedScope,
    TargetError,
    assert_clean,
    attribute_slot,
    patched,
    replace_attribute,
    wrap_call,
)
from scoped_patch.engine.errors import PatchErrorGroup
from tests.support.models import token_ids
from tests.tiny_models import build

IDS = token_ids()


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


class Doubling(Patch):
    """A patch as a user writes one: edits of every MLP of the target."""

    name = "doubling"

    def plan(self, target):
        for path, module in target.named_modules():
            if path.endswith("mlp"):
                slot = attribute_slot(module, "forward", f"{path}.forward")
                yield Edit(slot, lambda prior: lambda hidden: prior(hidden) * 2, reason="test", to="twice")


def test_what_it_returns():
    model, _ = build("llama")
    scope = patched(model, fused="torch")
    assert isinstance(scope, PatchedScope)
    with scope as session:
        assert isinstance(session, ModelSession)
        assert session.target is model


def test_a_patch_subclass_composes_with_shipped_ones():
    model, _ = build("llama")
    plain = model(input_ids=IDS).logits
    with patched(model, Doubling()):
        doubled = model(input_ids=IDS).logits
    with patched(model, Doubling(), fused="torch") as scope:
        out = model(input_ids=IDS)
    wanted = doubled.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(out.log_probs[:, :-1], wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, doubled, atol=0.1)
    text = str(scope.explain())
    assert "doubling" in text
    assert "model.layers.*.mlp.forward" in text


def test_patches_without_a_target():
    first = replace_attribute(torch.nn.functional, "relu", torch.tanh)
    with patched(first, replace_attribute("json:dumps", lambda *a, **k: "mine")):
        import json

        assert json.dumps({}) == "mine"
        assert torch.nn.functional.relu(torch.tensor(-1.0)) < 0
    with patched(None, first):
        assert torch.nn.functional.relu(torch.tensor(-1.0)) < 0
    assert torch.nn.functional.relu(torch.tensor(-1.0)) == 0


def test_a_target_that_is_no_model_for_patches_of_ones_own():
    class Thing:
        value = 1

    class Set(Patch):
        name = "set"

        def plan(self, target):
            yield Edit(attribute_slot(target, "value"), lambda prior: prior + 1)

    for target in (Thing(), Thing):
        with patched(target, Set()):
            assert target.value == 2
        assert target.value == 1


def test_nothing_to_do_is_a_scope_too():
    model, _ = build("llama")
    with patched(model) as scope:
        assert model(input_ids=IDS).logits is not None
    assert scope.state == "closed"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on_foreign": "ignore"}, BadOptionError, "on_foreign must be 'error', 'keep' or 'restore', got 'ignore'"),
        ({"on_compiled": "ignore"}, BadOptionError, "on_compiled must be 'error' or 'reset', got 'ignore'"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        patched(build("llama")[0], **options)
    with pytest.raises(TypeError, match="unexpected keyword"):
        patched(build("llama")[0], fuse="torch")


def test_qat_names_its_own_targets():
    """What it does to vLLM's classes is tested where vLLM is installed."""
    with pytest.raises(BadTargetError, match=r"qat= patches vLLM's own classes.*target is LlamaForCausalLM: pass no target"):
        patched(build("llama")[0], qat="nvfp4")
    with pytest.raises(BadOptionError, match="qat='int4': must be \"nvfp4\""):
        patched(qat="int4")
    with pytest.raises(BadTargetError, match="tiled_mlp acts on a model"):
        patched(qat="nvfp4", tiled_mlp=2)
    scope = patched(qat="nvfp4")
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(PatchErrorGroup) as caught:
            scope.apply()
        assert [str(error).split(":")[0] for error in caught.value.exceptions] == [
            "nvfp4_dense_w4a16",
            "nvfp4_dense_w4a4",
            "nvfp4_moe",
        ]
        assert "vLLM is not installed in this process" in str(caught.value.exceptions[0])


def test_a_class_in_place_of_a_patch():
    model, _ = build("llama")
    with pytest.raises(BadTargetError, match="an instance is needed, not the class"):
        patched(model, FusedHead)
    with pytest.raises(BadTargetError, match="every patch must be"):
        patched(model, "torch")


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrapped_and_bare_are_one_target(wrap):
    """The scope of a wrapper and the scope of the model in it are on the same places, and share them."""
    model, _ = build("llama")
    wrapper = wrap(model)
    with patched(wrapper, fused="torch"):
        assert model(input_ids=IDS).logits is None
        with patched(model, fused="torch"):
            assert model(input_ids=IDS).logits is None
        with pytest.raises(ConflictError):
            patched(model, fused=FusedHead("torch", temperature=2.0)).__enter__()


def test_import_is_light():
    """Importing compose brings no model library in; it is looked up where it is there already."""
    module = importlib.import_module("scoped_patch.compose")
    assert not hasattr(module, "transformers")
    assert scoped_patch.patched is module.patched


# ------------------------------------------------------------------------------------------------- class scope
class Small(nn.Module):
    def forward(self, x):
        return x + 1


def double_forward():
    return wrap_call(Small, "forward", lambda original, x: original(x) * 10)


@pytest.fixture
def compiled():
    torch.compiler.reset()
    fast = torch.compile(Small(), backend="eager")
    fast(torch.zeros(1))
    yield fast
    torch.compiler.reset()


def test_a_class_edit_beside_compiled_code_is_refused(compiled):
    with pytest.raises(ConflictError, match=r"Small\.forward is patched on a class, and torch\.compile has compiled code"):
        patched(double_forward()).__enter__()
    assert compiled(torch.zeros(1)).item() == 1


def test_or_the_compiler_is_reset_both_ways(compiled):
    scope = patched(double_forward(), on_compiled="reset")
    for _ in range(2):
        with scope:
            assert compiled(torch.zeros(1)).item() == 10
        assert compiled(torch.zeros(1)).item() == 1


def test_a_class_edit_without_compiled_code():
    """What is only marked for compilation is none yet."""
    torch.compiler.reset()
    torch.compile(Small(), backend="eager")
    with patched(double_forward()):
        assert Small()(torch.zeros(1)).item() == 10
    assert Small()(torch.zeros(1)).item() == 1


# ------------------------------------------------------------------------------------------------- drift
def test_a_renamed_symbol_is_named_with_its_version():
    import transformers

    wanted = rf"FlashAttention2.*transformers {transformers.__version__}"
    with pytest.raises(TargetError, match=wanted):
        patched(replace_attribute("transformers.models.llama.modeling_llama:LlamaFlashAttention2", None)).plan()


def test_a_missing_module_is_named():
    with pytest.raises(TargetError, match=r"importing 'transformers\.models\.kimi_vl' failed"):
        patched(replace_attribute("transformers.models.kimi_vl:KimiVLModel", None)).plan()


def test_a_stub_without_a_head_symbol():
    """A model class whose accessor was renamed: refused by name, not half patched."""
    model, _ = build("llama")
    model.get_output_embeddings = lambda: None
    with pytest.raises(
        NotImplementedError, match=r"LlamaForCausalLM .*model type 'llama', transformers .*get_output_embeddings"
    ):
        patched(model, fused="torch").plan()
