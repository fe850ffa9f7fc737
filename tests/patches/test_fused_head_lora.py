"""LoRA on the head, and PEFT's other ways with it: the same terms as PEFT's own forward."""

from __future__ import annotations

import itertools

import peft
import pytest
import torch

from scoped_patch import UnsupportedError, patched
from tests.support.models import phi, token_ids
from tests.support.scores import assert_gradients, assert_scores, gradients, objective, unpatched
from tests.tiny_models import build

BATCH = {"input_ids": token_ids(), "labels": token_ids()}


def lora(model=None, *, targets=("q_proj", "lm_head"), draw=True, **options):
    model = build("llama")[0] if model is None else model
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(model, config)
    if draw:
        draw_adapters(adapted)
    return adapted


def draw_adapters(model, seed=0):
    """B starts out as zeros, where an adapter does nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def check(model, seed=5):
    """Values and gradients against PEFT's own forward; dropout draws the same numbers under one seed."""
    torch.manual_seed(seed)
    wanted = unpatched(model, BATCH)
    right = gradients(model, lambda: objective(wanted))
    with patched(model, fused="torch"):
        torch.manual_seed(seed)
        out = model(**BATCH)
        assert_scores(out, wanted)
        assert_gradients(gradients(model, lambda: objective(out)), right)
    return out


def test_vanilla():
    model = lora()
    out = check(model)
    with model.disable_adapter():
        assert (unpatched(model, BATCH).log_probs - out.log_probs).abs().max() > 0.1
    assert [n for n, p in model.named_parameters() if p.requires_grad and "lm_head" in n]


def test_base_layer_with_bias_and_adapter_with_bias():
    check(lora(phi(), lora_bias=True))


def test_dropout_under_a_fixed_seed():
    model = lora(lora_dropout=0.4).train()
    first = check(model, seed=1)
    second = check(model, seed=2)
    assert (first.log_probs - second.log_probs).abs().max() > 0.1


@pytest.mark.parametrize(
    "option", [{"use_rslora": True}, {"init_lora_weights": "gaussian"}, {"rank_pattern": {"lm_head": 2}}], ids=str
)
def test_other_kinds_of_low_rank_terms(option):
    check(lora(**option))


def test_two_adapters_at_once_and_one_after_the_other():
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=16, target_modules=["lm_head"], lora_dropout=0.0))
    draw_adapters(model, seed=3)
    seen = []
    for names in ("default", "second", ["default", "second"]):
        model.base_model.set_adapter(names)
        seen.append(check(model).log_probs)
    assert all((a - b).abs().max() > 0.01 for a, b in itertools.pairwise(seen))


def test_adapter_switched_inside_the_scope():
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=16, target_modules=["lm_head"]))
    draw_adapters(model, seed=3)
    wanted = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        wanted[name] = unpatched(model, BATCH)
    with patched(model, fused="torch"):
        for name in ("default", "second", "default"):
            model.set_adapter(name)
            assert_scores(model(**BATCH), wanted[name])


def test_disable_adapter():
    model = lora()
    with model.disable_adapter():
        wanted = unpatched(model, BATCH)
        with patched(model, fused="torch"):
            assert_scores(model(**BATCH), wanted)
    adapted = unpatched(model, BATCH)
    with patched(model, fused="torch"):
        with model.disable_adapter():
            assert_scores(model(**BATCH), wanted)
        assert_scores(model(**BATCH), adapted)


def test_merged_and_unmerged():
    model = lora()
    model.merge_adapter()
    wanted = unpatched(model, BATCH)
    with patched(model, fused="torch"):
        assert_scores(model(**BATCH), wanted)
    model.unmerge_adapter()
    check(model)


def test_merged_inside_the_scope():
    model = lora()
    wanted = unpatched(model, BATCH)
    with patched(model, fused="torch"):
        model.merge_adapter()
        assert_scores(model(**BATCH), wanted, atol=1e-4)
        model.unmerge_adapter()
        assert_scores(model(**BATCH), wanted, atol=1e-4)


def test_merged_then_disabled():
    """PEFT unmerges when it runs disabled; so does the fused head."""
    model = lora()
    with model.disable_adapter():
        wanted = unpatched(model, BATCH)
    model.merge_adapter()
    with patched(model, fused="torch"), model.disable_adapter():
        assert_scores(model(**BATCH), wanted, atol=1e-4)


def test_merge_and_unload():
    model = lora().merge_and_unload().requires_grad_(True)
    check(model)


def test_adapters_named_per_row_are_refused():
    model = lora().eval()
    with patched(model, fused="torch"), pytest.raises(UnsupportedError, match="adapter_names"):
        model(input_ids=BATCH["input_ids"], adapter_names=["default", "__base__"])


def test_modules_to_save():
    model = lora(targets=("q_proj",), modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.normal_(0, 0.3)
    out = check(model)
    with model.disable_adapter():
        original = unpatched(model, BATCH)
        assert (original.log_probs - out.log_probs).abs().max() > 0.1
        with patched(model, fused="torch"):
            assert_scores(model(**BATCH), original)
    with patched(model, fused="torch"), model.disable_adapter():
        assert_scores(model(**BATCH), original)


def test_two_saved_heads():
    model = lora(targets=("q_proj",), modules_to_save=["lm_head"])
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        for head in model.base_model.model.lm_head.modules_to_save.values():
            head.weight.normal_(0, 0.3)
    for name in ("default", "second"):
        model.set_adapter(name)
        check(model)


def test_prompt_learning():
    """Virtual tokens come before the row: logits are longer than the ids, and what is scored is said by labels."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(build("llama")[0], config)
    plain = model(input_ids=BATCH["input_ids"], labels=BATCH["labels"])
    with patched(model, fused="torch"):
        out = model(input_ids=BATCH["input_ids"], labels=BATCH["labels"])
    torch.testing.assert_close(out.loss, plain.loss)
    assert out.log_probs.shape == plain.logits.shape[:2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lora(use_dora=True), "DoraLinearVariant"),
        (
            lambda: peft.get_peft_model(build("llama")[0], peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])),
            "ia3",
        ),
        (
            lambda: peft.get_peft_model(build("llama")[0], peft.OFTConfig(target_modules=["lm_head"], r=0, oft_block_size=4)),
            "oft",
        ),
    ],
    ids=["dora", "ia3", "oft"],
)
def test_other_adapters_on_the_head_are_refused_by_name(make, message):
    model = make()
    with pytest.raises(UnsupportedError, match=f"the head of .*LlamaForCausalLM.* cannot be fused: .*{message}"):
        patched(model, fused="torch").__enter__()


def test_adapter_added_by_injection_after_planning():
    """A plan made before the head got an adapter is made again."""
    model, _ = build("llama")
    scope = patched(model, fused="torch")
    with scope:
        model(**BATCH)
    adapted = lora(model)
    wanted = unpatched(adapted, BATCH)
    with scope:
        assert_scores(model(**BATCH), wanted)


def test_dora_added_after_planning_is_refused():
    model, _ = build("llama")
    scope = patched(model, fused="torch")
    with scope:
        model(**BATCH)
    lora(model, use_dora=True)
    with pytest.raises(UnsupportedError, match="DoraLinearVariant"):
        scope.__enter__()
