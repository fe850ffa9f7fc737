"""Ways to call a model under the fused head, what its output carries, and what the logits went through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scoped_patch import BadOptionError, FusedHead, patched
from tests.support import models
from tests.support.models import of_class, token_ids
from tests.support.scores import assert_gradients, assert_scores, gradients, objective, reference, shifted, unpatched
from tests.tiny_models import build, packed_position_ids

IDS = token_ids()


@pytest.fixture(scope="module")
def llama():
    return build("llama")[0]


def check(model, batch, temperature=0.7, **scope):
    wanted = unpatched(model, batch, temperature)
    right = gradients(model, lambda: objective(wanted))
    with patched(model, fused=FusedHead("torch", **scope)):
        out = model(**batch, temperature=temperature)
        assert_scores(out, wanted)
        assert_gradients(gradients(model, lambda: objective(out)), right)
    return out


# ------------------------------------------------------------------------------------------------- what is scored
def test_packed_row_ends_where_a_sample_ends(llama):
    """10,11,12 then 20,21 scores 11,12,x,21,x."""
    ids = torch.tensor([[10, 11, 12, 20, 21]])
    positions = packed_position_ids([3, 2])
    logits = llama(input_ids=ids, position_ids=positions, use_cache=False).logits
    wanted = reference(logits, torch.tensor([[11, 12, -100, 21, -100]]))
    with patched(llama, fused="torch"):
        out = llama(input_ids=ids, position_ids=positions, use_cache=False)
        assert_scores(out, wanted)
        by_lengths = llama(
            input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=torch.tensor([0, 3, 5]), cu_seq_lens_k=None
        )
        assert torch.equal(by_lengths.log_probs, out.log_probs)
        given = llama(input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
    # given labels mean what they mean to the model: the caller masks the boundaries
    assert given.log_probs[0, 2] != 0


def test_positions_that_do_not_restart_pack_nothing(llama):
    positions = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5]])
    ids = token_ids(1, 8)
    with patched(llama, fused="torch"):
        out = llama(input_ids=ids, position_ids=positions, use_cache=False)
    assert (out.log_probs[0, :-1] != 0).all()


@pytest.mark.parametrize("axes", [3, 4])
def test_multi_axis_positions_of_one_row(axes):
    """[axes, 1, 4] ids are one row of 4 tokens, not `axes` rows."""
    model, _ = build("qwen3_5_text")
    ids = token_ids(1, 4)
    positions = torch.arange(4).expand(axes, 1, 4)
    with patched(model, fused="torch"):
        out = model(input_ids=ids, position_ids=positions, use_cache=False)
    assert (out.log_probs[0, :3] != 0).all()


def test_no_tokens_named_is_an_error(llama):
    embeds = llama.get_input_embeddings()(IDS).detach()
    with patched(llama, fused="torch"), pytest.raises(BadOptionError, match=r"pass input_ids, labels= or shift_labels="):
        llama(inputs_embeds=embeds)


def test_labels_of_another_length_are_an_error(llama):
    with patched(llama, fused="torch"), pytest.raises(BadOptionError, match=r"\[2, 10, 64\].*\[2, 5\]"):
        llama(input_ids=IDS, labels=IDS[:, :5])


def test_own_ignore_index_is_passed_on(llama):
    labels = IDS.clone()
    labels[:, 4] = 7
    loss = llama(input_ids=IDS, labels=labels, ignore_index=7).loss
    with patched(llama, fused="torch"):
        out = llama(input_ids=IDS, labels=labels, ignore_index=7)
    assert (out.log_probs[:, 3] == 0).all()
    torch.testing.assert_close(out.loss, loss)


# ------------------------------------------------------------------------------------------------- forms of call
def test_positional_arguments(llama):
    mask = torch.ones_like(IDS)
    with patched(llama, fused="torch"):
        named = llama(input_ids=IDS, attention_mask=mask)
        placed = llama(IDS, mask)
        assert torch.equal(named.log_probs, placed.log_probs)
        with pytest.raises(TypeError, match="positional"):
            llama(*[None] * 40)
        with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
            llama(IDS, input_ids=IDS)


def test_return_dict_false_gives_a_tuple(llama):
    labels = IDS.clone()
    plain = llama(input_ids=IDS, labels=labels, return_dict=False, use_cache=False)
    with patched(llama, fused="torch"):
        out = llama(input_ids=IDS, labels=labels, return_dict=False, use_cache=False)
        whole = llama(input_ids=IDS, labels=labels, use_cache=False)
    assert isinstance(out, tuple)
    torch.testing.assert_close(out[0], plain[0])
    assert torch.equal(out[-2], whole.log_probs)
    assert torch.equal(out[-1], whole.entropy)


def test_other_fields_stay(llama):
    eager, _ = build("llama", attn="eager")
    plain = eager(input_ids=IDS, output_hidden_states=True, output_attentions=True, use_cache=True)
    with patched(eager, fused="torch"):
        out = eager(input_ids=IDS, output_hidden_states=True, output_attentions=True, use_cache=True)
    assert isinstance(out, type(plain))
    assert set(plain.keys()) - {"logits"} | {"log_probs", "entropy"} == set(out.keys())
    for field in ("hidden_states", "attentions"):
        for ours, theirs in zip(out[field], plain[field], strict=True):
            assert torch.equal(ours, theirs)
    cache = next(out[name] for name in ("cache", "past_key_values") if name in out.keys())  # noqa: SIM118
    assert cache.get_seq_length() == IDS.shape[1]


def test_old_name_of_the_cache_is_understood(llama):
    """`past_key_values` became `cache`; both reach the model as they do outside."""
    from transformers import DynamicCache

    for name in ("past_key_values", "cache"):
        first, plain = DynamicCache(config=llama.config), DynamicCache(config=llama.config)
        with torch.no_grad():
            llama(input_ids=IDS[:, :6], use_cache=True, **{name: plain})
            wanted = reference(llama(input_ids=IDS[:, 6:], use_cache=True, **{name: plain}).logits, shifted(IDS[:, 6:]))
            with patched(llama, fused="torch"):
                llama(input_ids=IDS[:, :6], use_cache=True, **{name: first})
                out = llama(input_ids=IDS[:, 6:], use_cache=True, **{name: first})
        assert_scores(out, wanted)


def test_signature_and_docs_stay(llama):
    import inspect

    signature, doc = inspect.signature(llama.forward), llama.forward.__doc__
    with patched(llama, fused="torch"):
        assert list(inspect.signature(llama.forward).parameters) == list(signature.parameters)
        assert llama.forward.__doc__ == doc
        assert not hasattr(llama.forward, "__wrapped__")


@pytest.mark.parametrize(("outputs", "missing"), [("log_probs", "entropy"), (("entropy",), "log_probs")])
def test_outputs_left_out_are_none_and_the_loss_stays(llama, outputs, missing):
    loss = llama(input_ids=IDS, labels=IDS).loss
    with patched(llama, fused=FusedHead("torch", outputs=outputs)):
        out = llama(input_ids=IDS, labels=IDS)
    assert out[missing] is None if missing in out.keys() else getattr(out, missing) is None  # noqa: SIM118
    torch.testing.assert_close(out.loss, loss)


def test_entropy_without_gradient(llama):
    with patched(llama, fused=FusedHead("torch", entropy_grad=False)):
        out = llama(input_ids=IDS)
        whole = gradients(llama, lambda: out.log_probs.sum() + out.entropy.sum())
        again = llama(input_ids=IDS)
        part = gradients(llama, lambda: again.log_probs.sum())
    assert_gradients(whole, part, rtol=0)


@pytest.mark.parametrize("memory", ["low", 4096])
def test_memory_settings_change_no_value(llama, memory):
    check(llama, {"input_ids": IDS}, memory=memory)


# ------------------------------------------------------------------------------------------------- transforms of logits
@pytest.mark.parametrize(
    ("name", "make", "transform"),
    [
        ("gemma3_text", lambda: build("gemma3_text", final_logit_softcapping=3.0)[0], "softcap 3"),
        ("gemma4_text", lambda: build("gemma4_text", final_logit_softcapping=3.0)[0], "softcap 3"),
        ("cohere", models.cohere, "scale 0.25"),
        ("granite", models.granite, "scale 0.333333"),
    ],
)
def test_what_the_model_does_to_its_logits_is_applied(name, make, transform):
    model = make()
    check(model, {"input_ids": IDS, "labels": IDS})
    loss = model(input_ids=IDS, labels=IDS).loss
    with patched(model, fused="torch") as scope:
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, loss, rtol=1e-5, atol=1e-5)
    assert transform in str(scope.explain())


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_softcap_of_a_vision_model_is_applied_only_where_its_forward_does(name):
    """The config has the setting for both families; only one of them uses it."""
    model, inputs = build(name, final_logit_softcapping=3.0)
    inputs.pop("labels")
    check(model, {**inputs, "labels": inputs["input_ids"]})


def test_softcap_set_between_two_entries_of_one_scope():
    model, _ = build("gemma3_text")
    scope = patched(model, fused="torch")
    with scope:
        plain = model(input_ids=IDS).log_probs
    model.config.final_logit_softcapping = 2.0
    wanted = unpatched(model, {"input_ids": IDS})
    with scope:
        out = model(input_ids=IDS)
    assert_scores(out, wanted)
    assert not torch.allclose(plain, out.log_probs, atol=0.1)


# ------------------------------------------------------------------------------------------------- heads
def test_bias_on_the_head():
    model = models.phi()
    assert model.lm_head.bias.std() > 0.1
    check(model, {"input_ids": IDS, "labels": IDS})


def test_a_class_of_probability_zero():
    """A bias of -inf on some rows: entropy is finite, and those rows get no gradient."""
    model = models.phi()
    with torch.no_grad():
        model.lm_head.bias[100:] = float("-inf")
    with patched(model, fused="torch"):
        out = model(input_ids=IDS)
        wanted = unpatched(build_twin(model), {"input_ids": IDS})
        assert_scores(out, wanted)
        found = gradients(model, lambda: objective(out))
    assert all(torch.isfinite(g).all() for g in found.values())
    assert not found["lm_head.weight"][100:].any()
    assert not found["lm_head.bias"][100:].any()


def build_twin(model):
    import copy

    return copy.deepcopy(model)


@pytest.mark.parametrize("make", [lambda: build("llama", tie_word_embeddings=True)[0], models.gpt2], ids=["llama", "gpt2"])
def test_tied_weights(make):
    model = make()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    check(model, {"input_ids": IDS})


def test_hidden_states_that_are_no_contiguous_block():
    check(of_class(models.TransposingLlama), {"input_ids": IDS, "labels": IDS})


def test_frozen_head(llama):
    model = build_twin(llama)
    model.lm_head.requires_grad_(False)
    out = check(model, {"input_ids": IDS})
    assert out.log_probs.requires_grad
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    """log_probs are fp32 for bf16 weights, computed from the same bf16 hidden states; fp64 stays fp64."""
    model, _ = build("llama", dtype=dtype)
    hidden = model.model(input_ids=IDS, use_cache=False)[0]
    wanted = reference(hidden.double() @ model.lm_head.weight.double().T, shifted(IDS))
    with patched(model, fused="torch"):
        out = model(input_ids=IDS)
    if dtype == torch.float64:
        assert out.log_probs.dtype == torch.float64
        torch.testing.assert_close(out.log_probs, wanted.log_probs, rtol=1e-12, atol=1e-12)
    else:
        assert_scores(out, wanted, atol=5e-5)


def test_autocast(llama):
    with torch.autocast("cpu", torch.bfloat16):
        wanted = unpatched(llama, {"input_ids": IDS})
        with patched(llama, fused="torch"):
            out = llama(input_ids=IDS)
    assert out.log_probs.dtype == torch.float32
    # the unpatched logits are rounded to bf16, ours are not
    torch.testing.assert_close(out.log_probs.double(), wanted.log_probs, rtol=0, atol=0.08)


def test_inference_mode_and_no_grad(llama):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            wanted = unpatched(llama, {"input_ids": IDS})
            with patched(llama, fused="torch"):
                out = llama(input_ids=IDS)
        assert not out.log_probs.requires_grad
        assert_scores(out, wanted)


def test_head_used_directly_is_the_head(llama):
    """Outside a call of the model nothing says what to score, so the head gives logits."""
    hidden = torch.randn(2, 3, 64)
    wanted = nn.functional.linear(hidden, llama.lm_head.weight)
    with patched(llama, fused="torch") as scope:
        torch.testing.assert_close(llama.lm_head(hidden), wanted)
        llama(input_ids=IDS)
    assert scope.state == "closed"


def test_bf16_weight_gradients_do_not_get_worse_with_more_blocks():
    """They are summed in fp32 over all tokens and blocks, and rounded to bf16 once."""
    model, _ = build("llama", dtype=torch.bfloat16)
    ids = token_ids(8, 64)
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    weight = model.lm_head.weight.detach().double().requires_grad_()
    hidden = model.model(input_ids=ids, use_cache=False)[0].detach().double()
    (reference(hidden @ weight.T, shifted(ids)).log_probs * weights).sum().backward()
    errors = []
    for memory in ("auto", 64 * 1024, 4096):
        with patched(model, fused=FusedHead("torch", memory=memory)):
            found = gradients(model, lambda: (model(input_ids=ids).log_probs * weights).sum())["lm_head.weight"]
        errors.append(((found.double() - weight.grad).abs().max() / weight.grad.abs().max()).item())
    assert max(errors) < 5e-3
    assert max(errors) <= 1.5 * errors[0]
