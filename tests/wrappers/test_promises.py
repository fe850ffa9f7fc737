"""Every promise under every library that holds a model in this process. Several ranks: `test_distributed.py`."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from scoped_patch import assert_clean
from tests.support.models import ValueHeadModel
from tests.support.promises import PROMISES, Party, plain_step, seven
from tests.support.wrapped import VARIANTS


@pytest.fixture(autouse=True)
def _clean():
    AcceleratorState._reset_state(reset_partial_state=True)  # it is one per process, mixed precision included
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_clean()


def with_peft(model: nn.Module, folder: str, bf16: bool = False) -> Party:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "down_proj", "lm_head"], task_type="CAUSAL_LM")
    made = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.01)
    return Party(made, model, plain_step(made, seven(), bf16), optimizer)


def with_accelerate(model: nn.Module, folder: str, bf16: bool = False) -> Party:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if bf16 else "no")
    made, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return Party(made, model, plain_step(made, seven(), bf16=False), optimizer)


def with_value_head(model: nn.Module, folder: str, bf16: bool = False) -> Party:
    made = ValueHeadModel(model)
    nn.init.normal_(made.v_head.weight, 0, 0.3, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(made.v_head.bias)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    return Party(made, model, plain_step(made, seven(), bf16), optimizer, renames=True)


def settings(folder: str, bf16: bool, rows: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": rows,
        "learning_rate": 0.01,
        "optim": "sgd",
        "max_steps": 1,
        "disable_tqdm": True,
        "bf16": bf16,
        "gradient_checkpointing": False,
        "seed": 3,
    }


def trained_by(trainer: Any, inputs: Any) -> Party:
    """As `train()` sets it up: the optimizer made, both prepared, then one `training_step`."""
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
    trainer.model_wrapped, trainer.current_gradient_accumulation_steps = model, 1

    def step() -> None:
        if hasattr(trainer, "_buffered_inputs"):
            trainer._step, trainer._buffered_inputs = 0, None  # GRPO: generate again
        trainer.training_step(model, inputs(), None)

    return Party(model, trainer.model, step, optimizer)


def with_trainer(model: nn.Module, folder: str, bf16: bool = False) -> Party:
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = Trainer(model=model, args=TrainingArguments(**settings(folder, bf16, 1)))
    return trained_by(trainer, lambda: dict(seven()))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(96))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


TEXTS = [" ".join(f"w{(7 * i + j) % 96}" for j in range(6)) for i in range(4)]


def with_sft(model: nn.Module, folder: str, bf16: bool = False) -> Party:
    AcceleratorState._reset_state(reset_partial_state=True)
    config = SFTConfig(**settings(folder, bf16, 1), max_length=16)
    data = Dataset.from_dict({"text": TEXTS})
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer())
    batch = next(iter(trainer.get_train_dataloader()))
    return trained_by(trainer, lambda: dict(batch))


def rewards(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(text.split()))) + 0.1 * i for i, text in enumerate(completions)]


def with_grpo(model: nn.Module, folder: str, bf16: bool = False) -> Party:
    AcceleratorState._reset_state(reset_partial_state=True)
    config = GRPOConfig(**settings(folder, bf16, 2), num_generations=2, max_completion_length=5, temperature=0.9)
    data = Dataset.from_dict({"prompt": TEXTS})
    trainer = GRPOTrainer(model=model, reward_funcs=rewards, args=config, train_dataset=data, processing_class=tokenizer())
    batch = next(iter(trainer.get_train_dataloader()))
    return trained_by(trainer, lambda: list(batch))


PARTIES = {
    "peft": with_peft,
    "accelerate": with_accelerate,
    "value head": with_value_head,
    "trainer": with_trainer,
    "sft": with_sft,
    "grpo": with_grpo,
}
#: a value-head model needs its language model's logits, so that the fused head is refused on it (test_value_head.py)
CASES = [
    (party, promise, variant)
    for party in PARTIES
    for promise in PROMISES
    for variant in VARIANTS
    if not (party == "value head" and "fused" in VARIANTS[variant])
]


@pytest.mark.parametrize(("party", "promise", "variant"), CASES, ids=["-".join(case) for case in CASES])
def test_promise(tmp_path: Any, party: str, promise: str, variant: str) -> None:
    def make(model: nn.Module, bf16: bool = False) -> Party:
        return PARTIES[party](model, str(tmp_path), bf16)

    PROMISES[promise](make, VARIANTS[variant])
