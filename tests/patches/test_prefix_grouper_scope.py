"""Prefix sharing as a scope: with the other patches, under wrappers, recomputation, compilation, and undone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from scoped_patch import ConflictError, FusedHead, PrefixGrouper, SeamNotReachedError, UnsupportedError, patched
from tests import tiny_models
from tests.support.groups import count, image_groups, text_groups
from tests.support.ranks import spawn
from tests.support.scores import (
    assert_gradients,
    gradients,
    objective,
    reference,
    shifted,
    take_gradients,
    unpatched,
    worst_difference,
)


def build(name="qwen3", **options):
    return tiny_models.build(name, **{"train": False, **options})[0]


def wanted_of(model, batch):
    wanted = unpatched(model, batch)
    return wanted, gradients(model, lambda: objective(unpatched(model, batch)))


def assert_log_probs(found, wanted):
    scale = float(wanted.log_probs.abs().max())
    torch.testing.assert_close(found.log_probs.double(), wanted.log_probs, rtol=0, atol=1e-5 * scale)


# --- with the other patches, in any order


@pytest.mark.parametrize("order", list(itertools.permutations(("fused", "prefix_grouper", "tiled_mlp"))))
def test_nested_in_any_order(order):
    model, groups = build(), text_groups()
    wanted, right = wanted_of(model, groups.batch)
    values = {"fused": "torch", "prefix_grouper": True, "tiled_mlp": 3}
    first, second, third = ({name: values[name]} for name in order)
    with patched(model, **first), patched(model, **second), patched(model, **third):
        found = model(**groups.batch, group_ids=groups.group_ids)
        counted = count(model, lambda: model(**groups.batch, group_ids=groups.group_ids))
        model.zero_grad()
        objective(found).backward()
    assert_log_probs(found, wanted)
    assert_gradients(take_gradients(model), right)
    assert counted.embedded == [groups.tokens]
    assert counted.head_rows == [groups.scored]


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant", "wrapper"])
@pytest.mark.parametrize("after", [False, True], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("extra", [{}, {"tiled_mlp": 3}], ids=["", "tiled"])
def test_activation_checkpointing(recompute, after, extra):
    """What is recomputed in backward shares prefixes too, also when the scope is left by then."""
    model, groups = build(train=True), text_groups()
    wanted, right = wanted_of(model, groups.batch)
    if recompute == "wrapper":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    ran = []
    for module in model.modules():
        if type(module).__name__ == "Qwen3Attention":
            module.q_proj.register_forward_hook(lambda *_: ran.append(1))
    with patched(model, prefix_grouper=True, fused="torch", **extra):
        found = model(**groups.batch, group_ids=groups.group_ids)
        before = len(ran)
        if not after:
            objective(found).backward()
    if after:
        objective(found).backward()
    assert len(ran) > before, "nothing was recomputed"
    assert_log_probs(found, wanted)
    left = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in take_gradients(model).items()}
    assert_gradients(left, right)


def test_lora_on_attention_and_head():
    from peft import LoraConfig, get_peft_model

    groups = text_groups()
    model = get_peft_model(build(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    wanted, right = wanted_of(model, groups.batch)
    with patched(model, prefix_grouper=True, fused="torch"):
        found = model(**groups.batch, group_ids=groups.group_ids)
        left = gradients(model, lambda: objective(model(**groups.batch, group_ids=groups.group_ids)))
    assert_log_probs(found, wanted)
    assert_gradients(left, right)


@pytest.mark.slow
def test_torch_compile():
    """The packing runs outside of graphs and the model inside, whose graphs serve every layout once shapes are dynamic."""
    model = build()
    compiled = torch.compile(model, backend="eager")
    shapes = ((9, 6), ((5, 7, 3), (4, 6))), ((12, 3), ((4, 4, 9), (2, 2))), ((5, 11, 4), ((3, 3), (8, 2, 7), (5, 9)))
    many = [text_groups(*shape) for shape in shapes]
    right = [unpatched(model, groups.batch) for groups in many]
    torch.compiler.reset()
    graphs = []
    with patched(compiled, prefix_grouper=True, fused="torch"):
        for groups, wanted in zip(many, right, strict=True):
            assert_log_probs(compiled(**groups.batch, group_ids=groups.group_ids), wanted)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[2] - graphs[1] <= 2 < graphs[1] - graphs[0], graphs


# --- undone, and only here


def test_nothing_is_left_behind_and_no_other_model_is_touched():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, other, groups = build(), build(), text_groups()
    before = [dict(vars(module)) for module in model.modules()]
    entries = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    plain = other(**groups.batch).logits
    with patched(model, prefix_grouper=True, fused="torch"):
        model(**groups.batch, group_ids=groups.group_ids)
        assert torch.equal(other(**groups.batch).logits, plain)
        assert not any("config" in vars(type(module)) for module in model.modules())
        assert model.config._attn_implementation == "sdpa"
        twin = copy.deepcopy(model)
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == entries
    assert torch.equal(model(**groups.batch).logits, plain)
    assert torch.equal(twin(**groups.batch).logits, plain)


def test_two_models_at_once_share_the_entry():
    one, two, groups = build(), build("llama"), text_groups()
    right = [unpatched(model, groups.batch) for model in (one, two)]
    first, second = (patched(model, prefix_grouper=True, fused="torch").apply() for model in (one, two))
    for model, wanted in zip((one, two), right, strict=True):
        assert_log_probs(model(**groups.batch, group_ids=groups.group_ids), wanted)
    first.restore()
    assert_log_probs(two(**groups.batch, group_ids=groups.group_ids), right[1])
    second.restore()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_ungrouped_calls_and_generation_use_the_models_own_attention(attn):
    model, groups = build(attn=attn), text_groups()
    prompt = groups.batch["input_ids"][:2, :5]
    plain = model(input_ids=prompt[:1]).logits
    cached = model(input_ids=prompt, use_cache=True)
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    beams = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, num_beams=2)
    with patched(model, prefix_grouper=True):
        assert torch.equal(model(input_ids=prompt[:1]).logits, plain)
        inside = model(input_ids=prompt, use_cache=True)
        assert torch.equal(inside.logits, cached.logits)
        assert inside.get("cache", inside.get("past_key_values")) is not None  # the older name of it
        mask = torch.ones_like(prompt)
        assert torch.equal(model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False), text)
        assert torch.equal(model.generate(prompt, attention_mask=mask, max_new_tokens=4, num_beams=2), beams)
        model(**groups.batch)


def test_the_same_options_nest_and_others_conflict():
    model, groups = build(), text_groups()
    with patched(model, prefix_grouper=True, fused="torch"):
        with patched(model, prefix_grouper=True):
            model(**groups.batch, group_ids=groups.group_ids)
        model(**groups.batch, group_ids=groups.group_ids)
        with pytest.raises(ConflictError, match="already on this model with other options"):
            patched(model, prefix_grouper=PrefixGrouper(find=False)).apply()


def test_an_option_set_on_the_config_inside_the_scope_is_seen():
    """Attention modules read a copy of their config; what is set on the model's own reaches it with the next call."""
    model, groups = build("mistral"), text_groups((20,), ((5, 6),))
    scope = patched(model, prefix_grouper=True, fused="torch")
    with scope:
        model(**groups.batch, group_ids=groups.group_ids)
        model.config.sliding_window = 4
        found = model(**groups.batch, group_ids=groups.group_ids)
    assert_log_probs(found, unpatched(model, groups.batch))


def test_explain_and_verify():
    model, groups = build(), text_groups()
    with patched(model, prefix_grouper=True, fused="torch") as scope:
        model(**groups.batch, group_ids=groups.group_ids)
        report = scope.verify(groups.batch)
    assert report.ok, str(report)
    text = str(scope.explain())
    for words in ("prefix_grouper", "self_attn.config (x2)", "runs one packed row", "2 attention modules of Qwen3ForCausalLM"):
        assert words in text


def test_attention_that_nobody_sees_is_an_error():
    """A layer whose attention was replaced on the instance would mix tokens of different answers."""
    model, groups = build(), text_groups()
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with (
        patched(model, prefix_grouper=True) as scope,
        pytest.raises(SeamNotReachedError, match=r"layer 1 of .* Qwen3Attention never came past"),
    ):
        model(**groups.batch, group_ids=groups.group_ids)
    assert "found a forward put on the instance by somebody else" in str(scope.explain())


def test_a_backend_that_cannot_run_here_says_why():
    model, groups = build(), text_groups()
    with (
        patched(model, prefix_grouper=PrefixGrouper(backend="flash")),
        pytest.raises(ValueError, match="backend='flash' cannot do this: the tensors are on cpu"),
    ):
        model(**groups.batch, group_ids=groups.group_ids)


@pytest.mark.parametrize("backend", ["blockwise", "plain"])
def test_backends_agree(backend):
    model, groups = build("gpt_oss"), text_groups()
    wanted, right = wanted_of(model, groups.batch)
    with patched(model, prefix_grouper=PrefixGrouper(backend=backend), fused=FusedHead("torch")):
        found = model(**groups.batch, group_ids=groups.group_ids)
        left = gradients(model, lambda: objective(model(**groups.batch, group_ids=groups.group_ids)))
    assert_log_probs(found, wanted)
    assert_gradients(left, right)


# --- on several ranks


def _groups_for(name):
    return image_groups(side="left") if name in tiny_models.VLMS else text_groups(side="left")


def _sharded_by_fsdp(rank, world, name, how):
    model, groups = build(name), _groups_for(name)
    wanted, right = wanted_of(model, groups.batch)
    target: nn.Module = model
    if "fsdp" in how:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(cast_forward_inputs=True)
        for layer in tiny_models.text_decoder(model).layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model.get_output_embeddings(), mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        target = nn.parallel.DistributedDataParallel(model)
    if "checkpointing" in how:
        model.train()
        model.gradient_checkpointing_enable()
    with patched(target, prefix_grouper=True, fused="torch"):
        found = target(**groups.batch, group_ids=groups.group_ids)
    objective(found).backward()
    left = {n: p.grad.full_tensor() if "fsdp" in how else p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_log_probs(found, wanted)
    assert left.keys() == right.keys()
    return worst_difference(left, right)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3", "fsdp checkpointing"),
        ("qwen2_vl", "fsdp"),
        ("llama", "ddp"),
        pytest.param("qwen3", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_fsdp2_and_ddp(name, how):
    for worst in spawn(2, _sharded_by_fsdp, name, how):
        assert worst < 2e-5


def _spread_over_ranks(rank, world, name, how):
    import torch.distributed as dist

    model = build(name)
    groups = _groups_for(name)
    wanted, right = wanted_of(model, groups.batch)
    if "checkpointing" in how:
        model.train()
        model.gradient_checkpointing_enable()
    fused = None if how == "logits" else "torch"
    with patched(model, prefix_grouper=True, sp=world, fused=fused) as scope:
        out = []
        counted = count(model, lambda: out.append(model(**groups.batch, group_ids=groups.group_ids)))
    found = out[0] if fused else reference(out[0].logits, shifted(groups.batch["labels"]))
    objective(found).backward()
    if fused:
        # Each scored row is computed by the rank that has its token; they are as many on each rank as on the fullest.
        assert groups.scored / world <= counted.head_rows[0] < groups.scored
    assert_log_probs(found, wanted)
    left = take_gradients(model)
    for gradient in left.values():
        dist.all_reduce(gradient)
        gradient /= world
    assert left.keys() == right.keys()
    assert "all-to-all" in str(scope.explain())
    return worst_difference(left, right)


@pytest.mark.parametrize(
    ("name", "world", "how"),
    [
        ("qwen3", 2, "fused checkpointing"),
        ("qwen3", 2, "logits"),
        ("qwen2_vl", 2, "fused"),
        *(pytest.param(name, 2, "fused", marks=pytest.mark.slow) for name in ("mistral", "gpt_oss", "deepseek_v3")),
        *(pytest.param(name, 4, "fused", marks=pytest.mark.slow) for name in ("qwen3", "gpt_oss")),
    ],
)
def test_sequence_parallel(name, world, how):
    """The packed row is spread over ranks; each scores the rows of its own tokens, the last of a prefix several times."""
    for worst in spawn(world, _spread_over_ranks, name, how):
        assert worst < 2e-5


def test_rows_cut_over_ranks_are_refused():
    from scoped_patch import Ulysses

    model, groups = build(), text_groups()
    with (
        patched(model, sp=Ulysses(1, inputs="sharded"), prefix_grouper=True),
        pytest.raises(UnsupportedError, match="use inputs='full'"),
    ):
        model(**groups.batch, group_ids=groups.group_ids)


@pytest.mark.parametrize("labels", ["responses", "none"])
def test_one_rank(labels):
    """`sp=1` changes nothing, with a temperature per token and nothing to score as well."""
    model, groups = build(), text_groups()
    heat = 0.5 + torch.rand(groups.real.shape)
    if labels == "none":
        groups.batch["labels"][:] = -100
    wanted = unpatched(model, groups.batch, heat)
    with patched(model, sp=1, fused="torch", prefix_grouper=True):
        found = model(**groups.batch, group_ids=groups.group_ids, temperature=heat)
        found.log_probs.sum().backward()
    torch.testing.assert_close(found.log_probs.double(), wanted.log_probs, rtol=0, atol=1e-4)
