"""What the fused head refuses: by name, before anything is patched, or at the first call that would be wrong."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import nn

from scoped_patch import (
    BadOptionError,
    BadTargetError,
    FusedHead,
    SeamNotReachedError,
    UnsupportedError,
    active,
    assert_clean,
    patched,
    replace_attribute,
    wrap_call,
)
from scoped_patch.engine.errors import PatchErrorGroup
from tests.support import models
from tests.support.models import of_class, token_ids
from tests.tiny_models import build

IDS = token_ids()


def state(model):
    return [(module, dict(module.__dict__)) for module in model.modules()]


def assert_untouched(before):
    for module, own in before:
        assert module.__dict__.keys() == own.keys()
        assert all(module.__dict__[key] is value for key, value in own.items())
    assert_clean()


def quantised_like():
    """A head as a quantisation library leaves it: a Linear subclass from its own module, with a state of its own."""
    model, _ = build("llama")
    cls = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules", "forward": lambda self, x: x})
    model.lm_head = cls(64, 128, bias=False)
    return model


def with_odd_head():
    model, _ = build("llama")
    model.lm_head = models.OddLinear(64, 128, bias=False)
    return model


def with_convolution():
    model, _ = build("llama")
    model.lm_head = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 128))
    return model


def dynamically_quantised():
    model, _ = build("llama")
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear(64, 128)
    return model


REFUSED = {
    "sequence classification": (models.sequence_classifier, r"LlamaForSequenceClassification.*no language-model head.*`score`"),
    "token classification": (models.token_classifier, r"LlamaForTokenClassification.*no language-model head.*`score`"),
    "encoder-decoder": (models.encoder_decoder, r"T5ForConditionalGeneration.*encoder-decoder"),
    "masked LM": (models.masked_lm, r"BertForMaskedLM.*'ForMaskedLM'"),
    "bitsandbytes": (quantised_like, r"bitsandbytes\.nn\.modules\.Linear4bit.*llm_int8_skip_modules"),
    "torch.ao": (dynamically_quantised, r"torch\.ao.*Linear.*leave the head out"),
    "own product": (with_odd_head, r"OddLinear.*no plain linear layer"),
    "no linear layer": (with_convolution, r"Sequential.*no plain linear layer"),
    "value head": (lambda: models.ValueHeadModel(build("llama")[0]), r"ValueHeadModel has a value head.*pretrained_model"),
    "no head at all": (lambda: build("llama")[0].model, r"LlamaModel.*no language-model head"),
    "not of transformers": (lambda: nn.Linear(3, 4), r"Linear .*has no language-model head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_before_anything_is_patched(case):
    make, message = REFUSED[case]
    model = make()
    before = state(model)
    scope = patched(model, fused="torch")
    with pytest.raises(UnsupportedError, match="fused_head: ") as error:
        scope.__enter__()
    assert str(error.value).startswith("fused_head: ")
    assert re.search(message, str(error.value)), str(error.value)
    with pytest.raises(NotImplementedError):
        scope.plan()
    assert_untouched(before)


def test_messages_name_the_version_and_the_model_type():
    import transformers

    with pytest.raises(UnsupportedError) as error:
        patched(models.sequence_classifier(), fused="torch").plan()
    assert f"model type 'llama', transformers {transformers.__version__}" in str(error.value)


def test_all_refusals_come_together():
    model = models.sequence_classifier()

    with pytest.raises(PatchErrorGroup, match="2 problems") as error:
        patched(model, FusedHead("torch"), fused="torch").plan()
    assert len(error.value.exceptions) == 2


def test_an_unknown_change_of_logits_is_found_at_the_first_call():
    model = of_class(models.OddTransformLlama)
    before = state(model)
    with pytest.raises(UnsupportedError, match=r"changes its logits after the head in a way that is not known"):
        with patched(model, fused="torch"):
            model(input_ids=IDS)
    assert_untouched(before)


def test_a_config_that_promises_a_transform_the_forward_does_not_do():
    """llama has no softcap: a stray setting in its config changes nothing."""
    model, _ = build("llama")
    model.config.final_logit_softcapping = 3.0
    assert patched(model, fused="torch").plan().supports
    logits = model(input_ids=IDS).logits
    with patched(model, fused="torch"):
        out = model(input_ids=IDS)
    wanted = logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(out.log_probs[:, :-1], wanted, rtol=1e-5, atol=1e-5)


def test_a_head_that_is_never_called():
    model = of_class(models.BypassingLlama)
    before = state(model)
    with pytest.raises(SeamNotReachedError, match=r"never called its head"):
        with patched(model, fused="torch"):
            model(input_ids=IDS)
    assert_untouched(before)


def test_a_head_called_twice():
    with patched(of_class(models.TwiceLlama), fused="torch") as scope, pytest.raises(UnsupportedError, match="more than once"):
        scope.target(input_ids=IDS)


def test_a_head_that_moved_after_planning_is_seen():
    """The plan is checked again at every entry: a head that was replaced is the one that is patched."""
    model, _ = build("llama")
    scope = patched(model, fused="torch")
    with scope:
        before = model(input_ids=IDS).log_probs
    model.lm_head = nn.Linear(64, 128, bias=False)
    with scope:
        after = model(input_ids=IDS).log_probs
    wanted = model(input_ids=IDS).logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(after[:, :-1], wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, after)
    model.lm_head = models.OddLinear(64, 128, bias=False)
    with pytest.raises(UnsupportedError, match="OddLinear"):
        scope.__enter__()


def test_a_head_that_changed_inside_the_scope():
    model, _ = build("llama")
    with patched(model, fused="torch"):
        model.lm_head.__class__ = models.OddLinear
        with pytest.raises(UnsupportedError, match="OddLinear"):
            model(input_ids=IDS)


def test_a_flattened_head_weight_is_named():
    """As ZeRO-3 leaves it outside its own gather: an empty weight."""
    model, _ = build("llama")
    with patched(model, fused="torch"):
        model.lm_head.weight.data = torch.empty(0)
        model.lm_head.weight.ds_id = 0
        with pytest.raises(UnsupportedError, match=r"shape \[0\].*ZeRO-3 has not gathered it"):
            model(input_ids=IDS)


# ------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=["bf16", "fp16", "int64", "bool"]
)
def test_temperature_tensors_below_fp32(dtype):
    model, _ = build("llama")
    tensor = torch.ones(2, dtype=dtype)
    with pytest.raises(BadOptionError, match=rf"temperature: got a {re.escape(str(dtype))} tensor.*FusedHead\(temperature"):
        FusedHead("torch", temperature=tensor)
    with patched(model, fused="torch"), pytest.raises(ValueError, match="temperature: got a"):
        model(input_ids=IDS, temperature=tensor)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "warm", [1.0], torch.ones(2, 3, 4)])
def test_temperatures_that_cannot_divide(value):
    model, _ = build("llama")
    with pytest.raises(BadOptionError, match="temperature"):
        FusedHead("torch", temperature=value)
    with patched(model, fused="torch"), pytest.raises(BadOptionError, match="temperature"):
        model(input_ids=IDS, temperature=value)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (10,), (10, 2)])
def test_temperature_of_another_shape(shape):
    model, _ = build("llama")
    with patched(model, fused="torch"), pytest.raises(ValueError, match="temperature"):
        model(input_ids=IDS, temperature=torch.ones(shape))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cuda", r"backend must be 'auto', 'torch' or 'triton', got 'cuda'"),
        (True, r"fused must be 'torch', 'triton', 'auto' or a FusedHead, got True"),
        (3, r"fused must be .* got 3"),
        ({"backend": "torch"}, r"fused must be"),
        (FusedHead, r"fused must be"),
    ],
)
def test_bad_values_of_the_keyword(value, message):
    model, _ = build("llama")
    with pytest.raises(BadOptionError, match=message):
        patched(model, fused=value)


@pytest.mark.parametrize(
    "options",
    [
        {"outputs": ()},
        {"outputs": ("logits",)},
        {"outputs": "perplexity"},
        {"memory": "huge"},
        {"memory": 0},
        {"memory": -5},
        {"memory": True},
        {"memory": 1.5},
    ],
    ids=str,
)
def test_bad_options(options):
    with pytest.raises(BadOptionError, match=rf"{next(iter(options))}"):
        FusedHead("torch", **options)


@pytest.mark.parametrize("off", [None, False])
def test_switched_off(off):
    model, _ = build("llama")
    with patched(model, fused=off):
        assert model(input_ids=IDS).logits is not None


@pytest.mark.parametrize("target", [None, 3, "llama", build])
def test_targets_that_are_no_model(target):
    with pytest.raises(BadTargetError, match=r"fused_head acts on a model, and the target is .*: pass the model first"):
        patched(target, fused="torch")
    assert not active()


def test_a_replaced_forward_of_the_model_and_fused_meet_in_one_scope():
    """Replaces come first, so the fused head wraps what the user put there; that never reaches the head: an error."""
    model, _ = build("llama")
    before = state(model)
    mine = replace_attribute(model, "forward", lambda **kwargs: None)
    with pytest.raises(SeamNotReachedError):
        with patched(model, mine, fused="torch"):
            model(input_ids=IDS)
    assert_untouched(before)


def times_two(x):
    return x * 2


@pytest.mark.parametrize("how", ["by hand", "same scope", "outer scope"])
def test_a_replaced_forward_of_the_head_is_refused(how):
    """It would never run: the op stands in for the head's own product."""
    model, _ = build("llama")
    mine = replace_attribute(model.lm_head, "forward", times_two)
    with contextlib.ExitStack() as stack:
        if how == "by hand":
            model.lm_head.forward = times_two
        elif how == "outer scope":
            stack.enter_context(patched(mine))
        before = state(model)
        with pytest.raises(
            UnsupportedError, match=r"the head of LlamaForCausalLM.* was replaced on this instance by times_two"
        ):
            patched(model, *([mine] if how == "same scope" else []), fused="torch").__enter__()
        assert all(module.__dict__.keys() == own.keys() for module, own in before)
    assert_clean()


@pytest.mark.parametrize("outer", [True, False], ids=["outer scope", "same scope"])
def test_a_wrapped_head_is_kept_and_what_it_changes_is_found(outer):
    """A wrap stays around the fused head; one that changes what comes out is an error, not a wrong log-prob."""
    model, _ = build("llama")
    seen = []

    def watch(original, hidden):
        seen.append(hidden.shape)
        return original(hidden)

    for wrapper, fine in ((watch, True), (lambda original, hidden: original(hidden) * 2, False)):
        mine = wrap_call(model.lm_head, "forward", wrapper)
        with contextlib.ExitStack() as stack:
            if outer:
                stack.enter_context(patched(mine))
            stack.enter_context(patched(model, *([] if outer else [mine]), fused="torch"))
            if fine:
                model(input_ids=IDS)
                assert seen == [(2, 10, 64)]
            else:
                with pytest.raises(UnsupportedError, match="changes its logits after the head"):
                    model(input_ids=IDS)
    assert_clean()


@pytest.mark.parametrize("change", [True, False])
def test_a_forward_hook_on_the_head(change):
    model, _ = build("llama")
    handle = model.lm_head.register_forward_hook(lambda module, args, out: out + 1 if change else None)
    with patched(model, fused="torch"):
        if change:
            with pytest.raises(UnsupportedError, match="changes its logits after the head"):
                model(input_ids=IDS)
        else:
            model(input_ids=IDS)
    handle.remove()
