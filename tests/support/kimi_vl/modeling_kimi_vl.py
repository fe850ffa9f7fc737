"""A vision-language model as a folder with remote code has it: nothing of it is written against transformers' interfaces.

The decoder's attention classes are its own and compute multi-head latent attention themselves; they look nothing up in a
registry, make their masks from the length of their own input, and call a flash function of their own on CUDA.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_kimi_vl import DeepseekV3Config, KimiVLConfig

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None


@dataclass
class KimiVLCausalLMOutputWithPast(ModelOutput):
    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    past_key_values: list | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None
    image_hidden_states: tuple | None = None


# ---------------------------------------------------------------------------------------------- vision
class MoonVisionPatchEmbed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size)
        grid = (config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)
        self.pos_emb = nn.Parameter(torch.empty(grid))
        nn.init.normal_(self.pos_emb)

    def forward(self, pixel_values, grid_hws):
        x = self.proj(pixel_values).view(len(pixel_values), -1)
        grid = self.pos_emb.permute(2, 0, 1)[None]
        places = [
            F.interpolate(grid, size=(h, w), mode="bilinear", align_corners=False)[0].permute(1, 2, 0).flatten(0, 1)
            for h, w in grid_hws.tolist()
        ]
        return x + torch.cat(places)


class MoonVitEncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.norm0 = nn.LayerNorm(config.hidden_size)
        self.norm1 = nn.LayerNorm(config.hidden_size)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x, lengths):
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        parts = [part.split(lengths, 1) for part in (q, k, v)]
        mixed = [F.scaled_dot_product_attention(*one) for one in zip(*parts, strict=True)]
        x = x + self.wo(torch.cat(mixed, 1).transpose(0, 1).flatten(1))
        return x + self.fc1(F.gelu(self.fc0(self.norm1(x))))


class MoonVitPretrainedModel(PreTrainedModel):
    config_class = None
    base_model_prefix = "vision_tower"
    _no_split_modules = ["MoonVitEncoderLayer"]

    def __init__(self, config):
        super().__init__(config)
        self.merge_kernel_size = tuple(config.merge_kernel_size)
        self.patch_embed = MoonVisionPatchEmbed(config)
        self.blocks = nn.ModuleList([MoonVitEncoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, pixel_values, grid_hws):
        """[patches, 3, P, P] -> one [tokens, kernel, hidden] for each image."""
        x = self.patch_embed(pixel_values, grid_hws)
        lengths = (grid_hws[:, 0] * grid_hws[:, 1]).tolist()
        for block in self.blocks:
            x = block(x, lengths)
        x = self.final_layernorm(x)
        kernel_h, kernel_w = self.merge_kernel_size
        merged = []
        for part, (h, w) in zip(x.split(lengths), grid_hws.tolist(), strict=True):
            part = part.view(h // kernel_h, kernel_h, w // kernel_w, kernel_w, -1).permute(0, 2, 1, 3, 4)
            merged.append(part.reshape(h * w // (kernel_h * kernel_w), kernel_h * kernel_w, -1))
        return merged


class KimiVLMultiModalProjector(nn.Module):
    def __init__(self, config):
        super().__init__()
        kernel = config.vision_config.merge_kernel_size
        self.hidden_size = config.vision_config.hidden_size * kernel[0] * kernel[1]
        self.pre_norm = nn.LayerNorm(config.vision_config.hidden_size)
        self.linear_1 = nn.Linear(self.hidden_size, self.hidden_size)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(self.hidden_size, config.text_config.hidden_size)

    def forward(self, image_features):
        x = self.pre_norm(torch.cat(image_features)).view(-1, self.hidden_size)
        return self.linear_2(self.act(self.linear_1(x)))


# ---------------------------------------------------------------------------------------------- text
class DeepseekV3RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class DeepseekV3RotaryEmbedding(nn.Module):
    """Tables of as many rows as the sequence is long; rows are picked by position."""

    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, seq_len):
        steps = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32) / self.dim
        angles = torch.outer(torch.arange(seq_len, device=x.device, dtype=torch.float32), self.base**-steps)
        table = torch.cat([angles, angles], -1)
        return table.cos().to(x.dtype), table.sin().to(x.dtype)


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class DeepseekV3MLP(nn.Module):
    def __init__(self, config, intermediate_size=None):
        super().__init__()
        size = intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MoEGate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, hidden_states):
        scores = F.linear(hidden_states.flatten(0, 1).float(), self.weight.float()).sigmoid()
        weight, index = scores.topk(self.top_k, -1)
        return index, weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor


class DeepseekV3MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.moe_intermediate_size
        self.experts = nn.ModuleList([DeepseekV3MLP(config, size) for _ in range(config.n_routed_experts)])
        self.gate = MoEGate(config)
        self.shared_experts = DeepseekV3MLP(config, size * config.n_shared_experts)

    def forward(self, hidden_states):
        index, weight = self.gate(hidden_states)
        flat = hidden_states.flatten(0, 1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (index == number).nonzero(as_tuple=True)
            if len(token):
                mixed = mixed.index_add(0, token, (expert(flat[token]) * weight[token, place, None]).to(flat.dtype))
        return mixed.view_as(hidden_states) + self.shared_experts(hidden_states)


class DeepseekV3Attention(nn.Module):
    """Multi-head latent attention, softmax and all."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.rope_dim, self.nope_dim = config.qk_rope_head_dim, config.qk_nope_head_dim
        self.q_head_dim = self.rope_dim + self.nope_dim
        self.v_head_dim = config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.softmax_scale = self.q_head_dim**-0.5
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = DeepseekV3RMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.q_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = DeepseekV3RMSNorm(self.kv_lora_rank)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, config.hidden_size, bias=False)
        self.rotary_emb = DeepseekV3RotaryEmbedding(self.rope_dim, config.rope_theta)

    def _project(self, hidden_states, position_ids, past_key_value):
        """[B, heads, S, D] queries, keys and values; keys and values of the past in front."""
        batch, length, _ = hidden_states.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(batch, length, self.num_heads, self.q_head_dim).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.rope_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope_dim, self.v_head_dim], -1)
        seen = length if past_key_value is None else length + past_key_value.get_seq_length(self.layer_idx)
        cos, sin = self.rotary_emb(v, seq_len=seen)
        cos, sin = cos[position_ids][:, None], sin[position_ids][:, None]
        k_rope = rotate(k_rope.view(batch, 1, length, self.rope_dim), cos, sin).expand(-1, self.num_heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, cos, sin)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        if past_key_value is not None:
            k, v = past_key_value.update(k, v, self.layer_idx)
        return q, k, v

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
        **kwargs,
    ):
        batch, length, _ = hidden_states.shape
        q, k, v = self._project(hidden_states, position_ids, past_key_value)
        weights = q @ k.transpose(2, 3) * self.softmax_scale
        if attention_mask is not None:
            if attention_mask.shape != (batch, 1, length, k.shape[2]):
                raise ValueError(f"attention mask should be {(batch, 1, length, k.shape[2])}, is {tuple(attention_mask.shape)}")
            weights = weights + attention_mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, p=self.config.attention_dropout, training=self.training)
        out = self.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        return out, weights if output_attentions else None, past_key_value


class DeepseekV3FlashAttention2(DeepseekV3Attention):
    """The same through a flash function of its own, which wants the 2-D padding mask; plain math where there is no CUDA."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
        **kwargs,
    ):
        batch, length, _ = hidden_states.shape
        q, k, v = (x.transpose(1, 2) for x in self._project(hidden_states, position_ids, past_key_value))
        if self.q_head_dim != self.v_head_dim:
            v = F.pad(v, [0, self.q_head_dim - self.v_head_dim])
        dropout = self.config.attention_dropout if self.training else 0.0
        out = self._flash_attention_forward(q, k, v, attention_mask, length, dropout=dropout, softmax_scale=self.softmax_scale)
        if self.q_head_dim != self.v_head_dim:
            out = out[..., : self.v_head_dim]
        return self.o_proj(out.reshape(batch, length, -1)), None, past_key_value

    def _flash_attention_forward(
        self, query_states, key_states, value_states, attention_mask, query_length, dropout=0.0, softmax_scale=None
    ):
        """[B, S, heads, D] each; the padding mask [B, keys] or None."""
        if flash_attn_func is not None and query_states.is_cuda and attention_mask is None:
            return flash_attn_func(query_states, key_states, value_states, dropout, softmax_scale=softmax_scale, causal=True)
        keys = key_states.shape[1]
        seen = torch.ones(query_length, keys, dtype=torch.bool, device=query_states.device).tril(keys - query_length)[
            None, None
        ]
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None, :]
        q, k, v = (x.transpose(1, 2) for x in (query_states, key_states, value_states))
        weights = (q @ k.transpose(2, 3) * softmax_scale).masked_fill(~seen, torch.finfo(q.dtype).min)
        weights = F.dropout(F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), p=dropout)
        return (weights @ v).transpose(1, 2)


ATTENTION_CLASSES = {"eager": DeepseekV3Attention, "flash_attention_2": DeepseekV3FlashAttention2}


class DeepseekV3DecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = ATTENTION_CLASSES[config.attention_class](config, layer_idx)
        self.mlp = DeepseekV3MLP(config) if layer_idx < config.first_k_dense_replace else DeepseekV3MoE(config)
        self.input_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
        **kwargs,
    ):
        mixed, weights, past_key_value = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            output_attentions=output_attentions,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = hidden_states + mixed
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states, *((weights,) if output_attentions else ()), *((past_key_value,) if use_cache else ()))


class DeepseekV3PreTrainedModel(PreTrainedModel):
    config_class = DeepseekV3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepseekV3DecoderLayer"]

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0, 0.02)


class DeepseekV3Model(DeepseekV3PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([DeepseekV3DecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def _mask(self, attention_mask, batch, length, past, x):
        """What the attention class wants: the padding mask, or an additive [B, 1, S, keys] one."""
        if self.config.attention_class == "flash_attention_2":
            return attention_mask if attention_mask is not None and not bool(attention_mask.all()) else None
        keys = length + past
        seen = torch.ones(length, keys, dtype=torch.bool, device=x.device).tril(past)[None, None].expand(batch, 1, -1, -1)
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None, :]
        return torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch, length, _ = inputs_embeds.shape
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=inputs_embeds.device)[None]
        mask = self._mask(attention_mask, batch, length, past, inputs_embeds)
        hidden_states = inputs_embeds
        every = [hidden_states]
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                outputs = self._gradient_checkpointing_func(
                    layer.__call__, hidden_states, mask, position_ids, None, False, False
                )
            else:
                outputs = layer(
                    hidden_states,
                    attention_mask=mask,
                    position_ids=position_ids,
                    past_key_value=past_key_values,
                    output_attentions=bool(output_attentions),
                    use_cache=bool(use_cache),
                )
            hidden_states = outputs[0]
            every.append(hidden_states)
        hidden_states = self.norm(hidden_states)
        every[-1] = hidden_states
        states = tuple(every) if output_hidden_states else None
        if return_dict is False:
            return tuple(x for x in (hidden_states, past_key_values, states) if x is not None)
        return BaseModelOutputWithPast(hidden_states, past_key_values, states, None)


class DeepseekV3ForCausalLM(DeepseekV3PreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = DeepseekV3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def get_decoder(self):
        return self.model

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, None)


class KimiVLPreTrainedModel(PreTrainedModel):
    config_class = KimiVLConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoonVitEncoderLayer", "DeepseekV3DecoderLayer"]

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding)):
            module.weight.data.normal_(0, 0.02)


class KimiVLForConditionalGeneration(KimiVLPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.language_model.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def get_decoder(self):
        return self.language_model.get_decoder()

    def _extract_image_features(self, pixel_values, image_grid_hws):
        return self.multi_modal_projector(self.vision_tower(pixel_values, image_grid_hws))

    def _merge_with_image_features(self, inputs_embeds, input_ids, image_features):
        places = input_ids == self.config.media_placeholder_token_id
        if int(places.sum()) != len(image_features):
            raise ValueError(f"{int(places.sum())} placeholders and {len(image_features)} image features do not match")
        return inputs_embeds.masked_scatter(places[..., None], image_features.to(inputs_embeds.dtype))

    def forward(
        self,
        input_ids=None,
        pixel_values=None,
        image_grid_hws=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        past_key_values = kwargs.pop("cache", past_key_values)  # what the newest generate() calls it
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if pixel_values is not None and len(pixel_values) > 0 and input_ids.shape[1] != 1:
                image_features = self._extract_image_features(pixel_values.to(self.dtype), image_grid_hws)
                inputs_embeds = self._merge_with_image_features(inputs_embeds, input_ids, image_features)
        outputs = self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = outputs.logits
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=self.config.ignore_index)
        if return_dict is False:
            return tuple(x for x in (loss, logits, outputs.past_key_values) if x is not None)
        return KimiVLCausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)
