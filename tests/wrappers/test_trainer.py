"""transformers' Trainer, with gradient checkpointing on: the same steps as without us."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from scoped_patch import assert_clean, patched
from tests.support.models import token_ids
from tests.support.wrapped import VARIANTS
from tests.tiny_models import build

ROWS = [{"input_ids": ids, "labels": ids} for ids in token_ids(batch=8, length=9)]
CHECKPOINTING = {
    "off": {},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert_clean()


def trainer(folder, name="llama", **options):
    model, _ = build(name)
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_steps": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }
    return Trainer(model=model, args=TrainingArguments(**settings), train_dataset=ROWS, eval_dataset=ROWS)


def result(made):
    logs = [(e["loss"], e["grad_norm"]) for e in made.state.log_history if "loss" in e]
    return logs, {n: p.detach().clone() for n, p in made.model.named_parameters()}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("right"))
    made.train()
    return result(made)


def assert_same(found, wanted):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-4, atol=1e-5)
    for name, parameter in wanted[1].items():
        torch.testing.assert_close(found[1][name], parameter, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


class EachStep(TrainerCallback):
    def __init__(self, scope):
        self.scope, self.session = scope, None

    def on_step_begin(self, *args, **kwargs):
        self.session = self.scope.apply()

    def on_step_end(self, *args, **kwargs):
        self.session.restore()


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("variant", VARIANTS)
def test_around_training(tmp_path, right, variant, checkpointing):
    """Checkpointing is switched on by `train()`, when the scope is live already."""
    made = trainer(tmp_path, **CHECKPOINTING[checkpointing])
    with patched(made.model, **VARIANTS[variant]) as scope:
        made.train()
    assert all(row["calls"] is None or row["calls"] >= 4 for row in scope.diff())
    assert_same(result(made), right)
    assert made.model(input_ids=ROWS[0]["input_ids"][None]).logits is not None


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_step(tmp_path, right, variant, checkpointing):
    made = trainer(tmp_path, **CHECKPOINTING[checkpointing])
    made.add_callback(EachStep(patched(made.model, **VARIANTS[variant])))
    made.train()
    assert_same(result(made), right)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compute_loss_in_a_scope_and_backward_after(tmp_path, right, variant):
    """The scope around the forward only, as a trainer subclass would write it."""

    class Mine(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            with patched(model, **VARIANTS[variant]):
                return super().compute_loss(model, inputs, **kwargs)

    made = trainer(tmp_path, **CHECKPOINTING["non-reentrant"])
    made.__class__ = Mine
    made.train()
    assert_same(result(made), right)


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation(tmp_path, variant):
    made = trainer(tmp_path)
    wanted = made.evaluate()["eval_loss"]
    with patched(made.model, **VARIANTS[variant]):
        assert made.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("prepared", [False, True], ids=["", "preprocessed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_metrics_get_logits(tmp_path, variant, prepared):
    """`prediction_step` reads outputs by position: what is collected for metrics is logits, as without us."""
    made = trainer(tmp_path, per_device_eval_batch_size=3)
    seen = []

    def metrics(prediction):
        seen.append(torch.as_tensor(prediction.predictions))
        return {"mean": float(prediction.predictions.mean())}

    made.compute_metrics = metrics
    if prepared:
        made.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    wanted = made.evaluate()
    predictions = made.predict(ROWS)
    with patched(made.model, **VARIANTS[variant]) as scope:
        found = made.evaluate()
        ours = made.predict(ROWS)
        assert all(row["calls"] for row in scope.diff() if row["calls"] is not None)
    for name in ("eval_loss", "eval_mean"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4)
    assert seen[0].shape == ((8, 9) if prepared else (8, 9, made.model.config.vocab_size))
    torch.testing.assert_close(seen[2], seen[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch.as_tensor(ours.predictions), torch.as_tensor(predictions.predictions), rtol=1e-4, atol=1e-4
    )


def test_evaluation_of_the_loss_alone_keeps_no_logits(tmp_path):
    made = trainer(tmp_path)
    outputs = []
    made.model.register_forward_hook(lambda module, args, out: outputs.append(out))
    with patched(made.model, fused="torch"):
        made.evaluate()
    assert outputs
    assert all(out.logits is None and out.log_probs is not None for out in outputs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_checkpoint_is_the_plain_model(tmp_path, variant):
    made = trainer(tmp_path, save_strategy="steps", save_steps=2)
    with patched(made.model, **VARIANTS[variant]):
        made.train()
    loaded = type(made.model).from_pretrained(tmp_path / "checkpoint-2", attn_implementation="sdpa")
    ids = ROWS[0]["input_ids"][None]
    assert torch.equal(loaded(input_ids=ids).logits, made.model.eval()(input_ids=ids).logits)
