"""TRL's trainers: a step of SFT and of GRPO with our patches, and their own fused head answered in its terms."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from scoped_patch import BadOptionError, ForeignOverwriteError, FusedHead, UnsupportedError, assert_clean, patched
from tests.support.groups import count, text_groups
from tests.support.models import cohere, phi, token_ids
from tests.support.scores import assert_gradients, gradients, unpatched
from tests.support.wrapped import VARIANTS, assert_close_scores
from tests.tiny_models import build

IDS = token_ids()
LABELS = IDS.clone()
LABELS[:, :3] = -100
EVERYTHING = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


def compare(ours, theirs, shape):
    assert type(ours) is FusedCausalLMOutput
    for name in (*EVERYTHING, "label_mask"):
        mine, wanted = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (wanted is None), name
        if wanted is not None:
            assert mine.shape == wanted.shape == shape, name
            assert mine.dtype == wanted.dtype, name
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    assert (ours.aux_loss is None) == (theirs.aux_loss is None)
    if theirs.aux_loss is not None:
        torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)


# ------------------------------------------------------------------------------------------------- their head, our op
@pytest.mark.parametrize("wrap", ["bare", "peft", "accelerate"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: build("llama")[0], {"outputs": EVERYTHING}),
        (lambda: build("llama")[0], {"temperature": 0.7, "outputs": ("log_probs", "entropy")}),
        (lambda: build("llama")[0], {"outputs": ()}),
        (lambda: build("llama")[0], {"cast_lm_head_to_fp32": True, "outputs": ("is_top1",)}),
        (lambda: build("gemma3_text", final_logit_softcapping=3.0)[0], {"outputs": ("entropy", "log_sum_sq_probs")}),
        (cohere, {"outputs": EVERYTHING, "temperature": 1.5}),
        (phi, {"outputs": EVERYTHING}),
    ],
    ids=["llama", "temperature", "log_probs only", "fp32", "softcap", "scale", "bias"],
)
def test_their_fields_shapes_and_gradients(make, options, wrap):
    model = make()
    add_fused_lm_head(model, **options)
    call = {"input_ids": IDS, "labels": LABELS, "fused_lm_head": True, "attention_mask": torch.ones_like(IDS)}
    if wrap == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    elif wrap == "accelerate":
        from accelerate.utils import convert_outputs_to_fp32

        model.forward = convert_outputs_to_fp32(model.forward)

    def objective(out):
        return out.loss + (0 if out.entropy is None else out.entropy.square().mean())

    theirs = model(**call)
    wanted = gradients(model, lambda: objective(theirs))
    with patched(model, fused="torch") as scope:
        ours = model(**call)
        compare(ours, theirs, (2, 9))
        assert_gradients(gradients(model, lambda: objective(ours)), wanted)
        assert next(row for row in scope.diff() if "lm_head" in row["where"])["calls"] == 1
    again = model(**call)
    assert torch.equal(again.log_probs, theirs.log_probs)


@pytest.mark.parametrize("options", [{}, {"fused": "torch"}, {"fused": "torch", "tiled_mlp": 3}], ids=str)
@pytest.mark.parametrize("by", ["labels", "shift_labels"])
def test_shared_prefixes_are_scored_in_their_terms(options, by):
    """TRL's head knows one target per token; the last token of a shared prefix has one per response."""
    groups = text_groups(side="both")  # prompts padded on the left, completions on the right, as TRL makes them
    model, _ = build("qwen3", train=False)
    add_fused_lm_head(model, outputs=EVERYTHING, temperature=0.9)
    labels = groups.batch["labels"]
    if by == "shift_labels":
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    call = {**{k: groups.batch[k] for k in ("input_ids", "attention_mask")}, by: labels, "fused_lm_head": True}

    def objective(out):
        return out.loss + out.entropy.square().mean()

    theirs = model(**call)
    wanted = gradients(model, lambda: objective(theirs))
    logits = model(groups.batch["input_ids"], attention_mask=groups.batch["attention_mask"]).logits
    with patched(model, prefix_grouper=True, **options) as scope:
        ours = model(**call)
        counted = count(model, lambda: model(**call))
        compare(ours, theirs, tuple(theirs.log_probs.shape))
        assert_gradients(gradients(model, lambda: objective(ours)), wanted)
        real = groups.real
        again = model(groups.batch["input_ids"], attention_mask=groups.batch["attention_mask"]).logits
        torch.testing.assert_close(again[real], logits[real], rtol=1e-4, atol=1e-4)  # no flag: logits
        assert "fused_head" in str(scope.explain())
    assert counted.embedded == [groups.tokens]


def test_prefixes_under_a_head_that_nobody_scores_for():
    """The head came after the scope was made: named, with what to do."""
    model, _ = build("llama")
    groups = text_groups()
    scope = patched(model, prefix_grouper=True)
    add_fused_lm_head(model)
    with scope, pytest.raises(UnsupportedError, match="add fused= to the scope"):
        model(**groups.batch, fused_lm_head=True)


@pytest.mark.parametrize(
    "extra", [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}], ids=["", "int", "tensor"]
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_loss_and_auxiliary_loss(name, extra):
    model, _ = build(name)
    add_fused_lm_head(model)
    call = {"input_ids": IDS, "labels": LABELS, "fused_lm_head": True, **extra}
    if name != "llama":
        call["output_router_logits"] = True
    theirs = model(**call)
    wanted = gradients(model, lambda: theirs.loss)
    with patched(model, fused="torch"):
        ours = model(**call)
        compare(ours, theirs, (2, 9))
        assert_gradients(gradients(model, lambda: ours.loss), wanted)


def test_shift_labels_are_not_shifted():
    model, _ = build("llama")
    add_fused_lm_head(model, outputs=EVERYTHING)
    call = {"input_ids": IDS, "shift_labels": LABELS, "fused_lm_head": True}
    theirs = model(**call)
    with patched(model, fused="torch"):
        compare(model(**call), theirs, (2, 10))


def test_without_the_flag_logits_are_logits():
    """As in TRL: generation, evaluation and losses of the user's own ask without it."""
    model, _ = build("llama")
    add_fused_lm_head(model)
    logits = model(input_ids=IDS).logits
    tokens = model.eval().generate(IDS, max_new_tokens=4, do_sample=False)
    with patched(model, fused="torch") as scope:
        assert torch.equal(model(input_ids=IDS).logits, logits)
        assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), tokens)
        assert_close_scores(model(input_ids=IDS, temperature=1.0), unpatched(build("llama")[0], {"input_ids": IDS}))
        text = str(scope.explain())
    assert "TRL's fused head" in text


def test_no_labels_and_all_ignored():
    model, _ = build("llama")
    add_fused_lm_head(model, outputs=EVERYTHING)
    with patched(model, fused="torch"):
        with pytest.raises(BadOptionError, match="needs labels or shift_labels"):
            model(input_ids=IDS, fused_lm_head=True)
        out = model(input_ids=IDS, labels=torch.full_like(IDS, -100), fused_lm_head=True)
        assert out.loss == 0
        out.loss.backward()
        assert not out.is_top1.any()
        assert not out.log_sum_sq_probs.any()


def test_two_temperatures_are_refused():
    model, _ = build("llama")
    add_fused_lm_head(model, temperature=0.7)
    with patched(model, fused=FusedHead("torch", temperature=0.5)), pytest.raises(BadOptionError, match=r"0\.5.*0\.7"):
        model(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    with patched(model, fused=FusedHead("torch", temperature=0.7)):
        model(input_ids=IDS, labels=LABELS, fused_lm_head=True)


def test_what_is_not_known_is_refused_by_name():
    model, _ = build("llama")
    add_fused_lm_head(model, outputs=("log_probs", "surprise"))
    with pytest.raises(UnsupportedError, match=r"TRL 1\.\d+.* computes surprise, which is not known here"):
        patched(model, fused="torch").__enter__()
    capped, _ = build("gemma3_text", final_logit_softcapping=3.0)
    add_fused_lm_head(capped, outputs=("mean_logits",))
    with patched(capped, fused="torch"), pytest.raises(UnsupportedError, match="mean of the logits"):
        capped(input_ids=IDS, labels=LABELS, fused_lm_head=True)


def test_put_on_inside_the_scope_it_is_an_error_not_a_no_op():
    """Their head, put on top of ours, never calls the head: leaving says who is in the way."""
    model, _ = build("llama")
    scope = patched(model, fused="torch")
    scope.__enter__()
    add_fused_lm_head(model)
    model(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    with pytest.raises(ForeignOverwriteError, match=r"LlamaForCausalLM\.forward was changed by somebody else"):
        scope.__exit__(None, None, None)
    # what is there works as TRL's does without us, and a scope entered now answers in its terms
    theirs = model(input_ids=IDS, labels=LABELS, fused_lm_head=True)
    with patched(model, fused="torch"):
        compare(model(input_ids=IDS, labels=LABELS, fused_lm_head=True), theirs, (2, 9))
    assert model(input_ids=IDS).logits is not None


# ------------------------------------------------------------------------------------------------- trainers
def tokenizer():
    words = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(96))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def quiet(tmp_path, **options):
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
        **options,
    }


TEXTS = Dataset.from_dict({"text": [" ".join(f"w{(7 * i + j) % 96}" for j in range(9)) for i in range(8)]})


def sft(tmp_path, model, **options):
    config = SFTConfig(**quiet(tmp_path, max_length=16, per_device_eval_batch_size=2, **options))
    return SFTTrainer(model=model, args=config, train_dataset=TEXTS, eval_dataset=TEXTS, processing_class=tokenizer())


class Scope(TrainerCallback):
    """Every step in a scope of its own, as a user's callback does it."""

    def __init__(self, make):
        self.make, self.session = make, None

    def on_step_begin(self, args, state, control, **kwargs):
        self.session = self.make().apply()

    def on_step_end(self, args, state, control, **kwargs):
        self.session.restore()


def result(trainer):
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    return losses, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def plain_sft(tmp_path_factory):
    trainer = sft(tmp_path_factory.mktemp("sft"), build("llama")[0])
    trainer.train()
    return result(trainer)


def assert_same_training(found, wanted):
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        for key in ("loss", "entropy", "mean_token_accuracy", "num_tokens", "reward", "kl"):
            assert (key in ours) == (key in theirs)
            assert key not in ours or ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), key
    for name, parameter in wanted[1].items():
        torch.testing.assert_close(found[1][name], parameter, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("how", ["around train()", "each step"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sft_steps(tmp_path, plain_sft, variant, how):
    model, _ = build("llama")
    trainer = sft(tmp_path, model)
    options = VARIANTS[variant]
    if how == "each step":
        trainer.add_callback(Scope(lambda: patched(model, **options)))
        trainer.train()
    else:
        with patched(model, **options) as scope:
            trainer.train()
        for row in scope.diff():
            assert row["calls"] is None or row["calls"] >= 2, row["where"]
    assert_same_training(result(trainer), plain_sft)
    assert model(input_ids=IDS).logits is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_sft_with_checkpointing(tmp_path, plain_sft, variant):
    model, _ = build("llama")
    trainer = sft(tmp_path, model, gradient_checkpointing=True)
    with patched(model, **VARIANTS[variant]):
        trainer.train()
    assert_same_training(result(trainer), plain_sft)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sft_evaluation_reads_logits(tmp_path, variant):
    model, _ = build("llama")
    trainer = sft(tmp_path, model)
    batch = next(iter(trainer.get_eval_dataloader()))
    loss, logits, labels = trainer.prediction_step(model, copy.copy(batch), prediction_loss_only=False)
    with patched(model, **VARIANTS[variant]):
        ours = trainer.prediction_step(model, copy.copy(batch), prediction_loss_only=False)
        metrics = trainer.evaluate()
    torch.testing.assert_close(ours[0], loss)
    torch.testing.assert_close(ours[1], logits)
    assert torch.equal(ours[2], labels)
    assert metrics["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)


def test_sft_with_lora_everywhere(tmp_path):
    def run(options):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
        trainer = SFTTrainer(
            model=build("llama")[0],
            args=SFTConfig(**quiet(tmp_path, max_length=16)),
            train_dataset=TEXTS,
            processing_class=tokenizer(),
            peft_config=config,
        )
        with patched(trainer.model, **options):
            trainer.train()
        return result(trainer)

    assert_same_training(run(VARIANTS["both"]), run({}))


def rewards(completions, **kwargs):
    return [float(len(set(text.split()))) + 0.1 * i for i, text in enumerate(completions)]


def grpo(tmp_path, model, peft_config=None, **options):
    config = GRPOConfig(
        **quiet(tmp_path, num_generations=2, max_completion_length=6, temperature=0.9, per_device_train_batch_size=4),
        **options,
    )
    prompts = Dataset.from_dict({"prompt": TEXTS["text"]})
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


@pytest.fixture(scope="module")
def plain_grpo(tmp_path_factory):
    torch.manual_seed(0)
    trainer = grpo(tmp_path_factory.mktemp("grpo"), build("llama")[0])
    trainer.train()
    return result(trainer)


@pytest.mark.parametrize("variant", VARIANTS)
def test_grpo_steps(tmp_path, plain_grpo, variant):
    """Generation, reference log-probs, loss: the same tokens and the same training."""
    torch.manual_seed(0)
    model, _ = build("llama")
    trainer = grpo(tmp_path, model)
    with patched(model, **VARIANTS[variant]) as scope:
        trainer.train()
    for row in scope.diff():
        assert row["calls"] is None or row["calls"] >= 2, row["where"]
    assert_same_training(result(trainer), plain_grpo)


def test_grpo_with_shared_prefixes_around_its_step(tmp_path, plain_grpo):
    """A stock trainer whose `training_step` runs in a scope, and nothing else is changed."""
    torch.manual_seed(0)
    model, _ = build("llama")
    trainer = grpo(tmp_path, model)
    shared = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: shared.append(tuple(args[0].shape)) if torch.is_grad_enabled() else None
    )
    trainer.training_step = patched(model, prefix_grouper=True, tiled_mlp=4)(trainer.training_step)
    trainer.train()
    hook.remove()
    assert shared
    assert all(rows == 1 for rows, _ in shared), shared
    assert_same_training(result(trainer), plain_grpo)


def test_grpo_with_lora_and_a_reference(tmp_path):
    """The reference log-probs come from the same model with its adapter off, inside the scope."""

    def run(options):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        trainer = grpo(tmp_path, build("llama")[0], peft_config=config, beta=0.1)
        with patched(trainer.model, **options):
            trainer.train()
        return result(trainer)

    found, wanted = run(VARIANTS["both"]), run({})
    assert wanted[0][-1]["kl"] > 0
    assert_same_training(found, wanted)
