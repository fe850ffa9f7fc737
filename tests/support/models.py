"""Tiny models beside `tests.tiny_models`: other heads, other tasks, and ones that do what no library model should."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.tiny_models import build

VOCAB = 128
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def token_ids(batch: int = 2, length: int = 10, seed: int = 3) -> Tensor:
    """[batch, length] int64, in 3..99."""
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def _drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Weights of std 0.3, biases too; dropout off where the config has any."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim >= 2 or not parameter.any():
                parameter.normal_(0, 0.3)
    return model


def cohere(**options: Any) -> PreTrainedModel:
    """The model multiplies its logits by `logit_scale`; tied."""
    return _drawn(CohereForCausalLM(CohereConfig(**{**SMALL, "logit_scale": 0.25, **options})))


def granite(**options: Any) -> PreTrainedModel:
    """The model divides its logits by `logits_scaling`; tied."""
    return _drawn(GraniteForCausalLM(GraniteConfig(**{**SMALL, "logits_scaling": 3.0, **options})))


def phi(**options: Any) -> PreTrainedModel:
    """The head has a bias."""
    return _drawn(PhiForCausalLM(PhiConfig(**{**SMALL, "attention_dropout": 0.0, **options})))


def gpt2(**options: Any) -> PreTrainedModel:
    """No module of its own type for linear layers, and tied."""
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, **options
    )
    config.attn_pdrop = 0.0
    return _drawn(GPT2LMHeadModel(config))


def sequence_classifier() -> PreTrainedModel:
    return _drawn(LlamaForSequenceClassification(build("llama")[0].config))


def token_classifier() -> PreTrainedModel:
    return _drawn(LlamaForTokenClassification(build("llama")[0].config))


def question_answerer() -> PreTrainedModel:
    return _drawn(LlamaForQuestionAnswering(build("llama")[0].config))


def encoder_decoder() -> PreTrainedModel:
    config = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    return _drawn(T5ForConditionalGeneration(config))


def masked_lm() -> PreTrainedModel:
    config = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    return _drawn(BertForMaskedLM(config))


class ValueHeadModel(nn.Module):
    """A language model and a value head beside it, as the old trainer classes build them."""

    def __init__(self, pretrained_model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        self.v_head = nn.Linear(pretrained_model.config.hidden_size, 1)
        self.is_peft_model = False

    def forward(self, **kwargs: Any) -> tuple[Any, ...]:
        out = self.pretrained_model(output_hidden_states=True, **kwargs)
        return out.logits, out.loss, self.v_head(out.hidden_states[-1]).squeeze(-1)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The language model's names stay plain, the value head's get a prefix."""
        plain = self.pretrained_model.state_dict(*args, **kwargs)
        plain.update({f"v_head.{name}": value for name, value in self.v_head.state_dict(*args, **kwargs).items()})
        return plain


class OwnLossLlama(LlamaForCausalLM):
    """As remote code often is: the loss is made in the forward, with no `loss_function`."""

    def forward(self, input_ids=None, labels=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)[0]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1))
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class OddTransformLlama(LlamaForCausalLM):
    """Changes its logits after the head in a way that no config tells."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits * 1.5
        return out


class BypassingLlama(LlamaForCausalLM):
    """Reads the head's weight and never calls the head."""

    def forward(self, input_ids=None, labels=None, use_cache=None, **kwargs):
        hidden = self.model(input_ids=input_ids, use_cache=False)[0]
        return CausalLMOutputWithPast(logits=F.linear(hidden, self.lm_head.weight))


class TwiceLlama(LlamaForCausalLM):
    """Calls its head twice per forward."""

    def forward(self, input_ids=None, labels=None, use_cache=None, **kwargs):
        hidden = self.model(input_ids=input_ids, use_cache=False)[0]
        return CausalLMOutputWithPast(logits=self.lm_head(hidden) + self.lm_head(hidden))


class TransposingLlama(LlamaForCausalLM):
    """Hands its head hidden states that are not contiguous, and a slice of a larger batch."""

    def forward(self, input_ids=None, labels=None, use_cache=None, **kwargs):
        hidden = self.model(input_ids=input_ids, use_cache=False)[0]
        doubled = torch.cat([hidden, hidden]).transpose(0, 1).contiguous().transpose(0, 1)
        logits = self.lm_head(doubled[: len(hidden)])
        assert not doubled[: len(hidden)].is_contiguous()
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class OddLinear(nn.Linear):
    """A linear layer with a product of its own, as quantised ones have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).round()


def of_class(cls: type[PreTrainedModel], **options: Any) -> PreTrainedModel:
    """A model of that class with the weights of the tiny llama."""
    plain, _ = build("llama", **options)
    made = cls(plain.config)
    made.load_state_dict(plain.state_dict())
    return made.train(plain.training)
