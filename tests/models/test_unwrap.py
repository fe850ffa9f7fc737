"""The real model under its wrappers, its parts, and what is known of them."""

from __future__ import annotations

import inspect
import pickle

import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from scoped_patch import BadTargetError, UnsupportedError
from scoped_patch.models import anatomy, unwrap
from scoped_patch.models.modules import foreign_forward, is_class_forward, walk
from scoped_patch.models.outputs import fused_output_class
from scoped_patch.models.spec import find_decoder
from tests.support import models
from tests.tiny_models import BUILDERS, build, text_decoder


@pytest.fixture(scope="module")
def llama():
    return build("llama")[0]


def stub(name, attribute, inner, **attributes):
    """A wrapper known by its class's name only: what is looked at is structure, no package need be there."""
    wrapper = type(name, (nn.Module,), {})()
    setattr(wrapper, attribute, inner)
    for key, value in attributes.items():
        setattr(wrapper, key, value)
    return wrapper


def test_a_plain_model_is_itself(llama):
    found = unwrap(llama)
    assert found.model is llama
    assert found.wrappers == ()
    assert not found.compiled
    assert found.value_head is None


def test_each_wrapper(llama):
    lora = peft.get_peft_model(build("llama")[0], peft.LoraConfig(target_modules=["q_proj"]))
    prompt = peft.get_peft_model(build("llama")[0], peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    value = models.ValueHeadModel(llama)
    cases = [
        (torch.compile(llama), ("OptimizedModule",)),
        (nn.DataParallel(llama), ("DataParallel",)),
        (stub("DistributedDataParallel", "module", llama), ("DistributedDataParallel",)),
        (stub("DeepSpeedEngine", "module", llama), ("DeepSpeedEngine",)),
        (stub("FullyShardedDataParallel", "_fsdp_wrapped_module", llama), ("FullyShardedDataParallel",)),
        (checkpoint_wrapper(llama), ("CheckpointWrapper",)),
        (lora, ("PeftModel",)),
        (lora.base_model, ("LoraModel",)),
        (value, ("ValueHeadModel",)),
        (prompt, ("PeftModelForCausalLM",)),
    ]
    for wrapper, names in cases:
        found = unwrap(wrapper)
        assert type(found.model).__name__ == "LlamaForCausalLM"
        assert found.outer is wrapper
        assert found.wrappers == names
    assert unwrap(value).value_head is value


def test_wrappers_in_wrappers(llama):
    value = models.ValueHeadModel(llama)
    found = unwrap(stub("DistributedDataParallel", "module", torch.compile(value)))
    assert found.model is llama
    assert found.wrappers == ("DistributedDataParallel", "OptimizedModule", "ValueHeadModel")
    assert found.compiled
    assert found.value_head is value


def test_compiled_in_place():
    model, _ = build("llama")
    model.compile()
    assert unwrap(model).compiled


def test_no_model():
    with pytest.raises(BadTargetError, match=r"needs a model \(an nn.Module\), got str"):
        unwrap("llama")


# ------------------------------------------------------------------------------------------------- anatomy
@pytest.mark.parametrize("name", BUILDERS)
def test_the_parts_of_every_family(name):
    model, _ = build(name)
    parts = anatomy(model)
    assert find_decoder(model) is text_decoder(model)
    assert parts.head is model.get_output_embeddings()
    assert parts.head_leaves == (parts.head,)
    assert parts.own_loss == (".loss_function(" not in inspect.getsource(type(model).forward))
    assert parts.own_loss or name != "kimi_vl"  # remote code
    assert not parts.transform


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_families_with_an_entry(name):
    assert anatomy(build(name)[0]).notes == ()


def test_a_family_without_an_entry_says_that_it_was_inferred():
    assert anatomy(models.phi()).notes == ("structure of 'phi' inferred (no entry of its own)",)


def test_transforms():
    assert anatomy(models.cohere()).transform.scale == 0.25
    assert anatomy(models.granite()).transform.scale == pytest.approx(1 / 3)
    assert anatomy(build("gemma3_text", final_logit_softcapping=5.0)[0]).transform.softcap == 5.0
    # the vision model of that family has the setting and does not use it
    assert not anatomy(build("gemma3", final_logit_softcapping=5.0)[0]).transform
    assert anatomy(build("gemma4", final_logit_softcapping=5.0)[0]).transform.softcap == 5.0
    both = anatomy(models.cohere()).transform
    logits = torch.tensor([4.0])
    assert both(logits).item() == 1.0


def test_a_model_without_layers():
    class Headed(nn.Module):
        config = None

        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(2, 3)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, input_ids=None):
            return self.lm_head(input_ids)

    with pytest.raises(UnsupportedError, match=r"Headed.* has no text decoder"):
        find_decoder(Headed())


def test_heads_under_modules_to_save():
    model = peft.get_peft_model(
        build("llama")[0], peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    )
    leaves = anatomy(unwrap(model).model).head_leaves
    assert len(leaves) == 2
    assert all(isinstance(leaf, nn.Linear) for leaf in leaves)


# ------------------------------------------------------------------------------------------------- modules, outputs
def test_walk_sees_each_module_once(llama):
    assert {id(m) for m in walk(llama)} == {id(m) for m in llama.modules()}
    assert len(list(walk(llama))) == len(list(llama.modules()))


def test_foreign_forwards():
    module = nn.Linear(2, 2)
    assert foreign_forward(module) is None
    assert is_class_forward(module, module.forward)
    module.forward = lambda x: x
    assert "Linear.forward" in foreign_forward(module)
    assert not is_class_forward(module, module.forward)
    assert not is_class_forward(module, nn.Linear(2, 2).forward)


def test_output_classes_are_declared_once_and_carry_their_fields():
    cls = fused_output_class(CausalLMOutputWithPast)
    assert cls is fused_output_class(CausalLMOutputWithPast)
    assert issubclass(cls, CausalLMOutputWithPast)
    assert {"log_probs", "entropy"} <= set(cls.__dataclass_fields__)
    out = cls(loss=torch.ones(()), log_probs=torch.zeros(1, 2), entropy=torch.ones(1, 2))
    assert isinstance(out, ModelOutput)
    assert list(out.keys()) == ["loss", "log_probs", "entropy"]
    again = pickle.loads(pickle.dumps(out))
    assert type(again) is cls
    assert torch.equal(again["entropy"], out.entropy)
    flat, spec = torch.utils._pytree.tree_flatten(out)
    rebuilt = torch.utils._pytree.tree_unflatten(flat, spec)
    assert len(flat) == 3
    assert torch.equal(rebuilt.log_probs, out.log_probs)
