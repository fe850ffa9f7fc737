"""DDP, FSDP2 and FSDP1 on two ranks: log-probs and gradients of the plain model, whichever patches are on.

All cases run in one group of ranks (importing takes longer than they do); each is a test that reports its own outcome.
"""

from __future__ import annotations

import copy
import functools
import traceback
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from scoped_patch import FusedHead, assert_clean, patched
from tests.support.models import token_ids
from tests.support.ranks import spawn
from tests.support.scores import assert_gradients, gradients, objective, take_gradients, unpatched
from tests.support.wrapped import VARIANTS, assert_close_scores, scores_of, unchanged
from tests.tiny_models import build

WORLD = 2


def batch_of(rank: int) -> dict[str, Any]:
    """Each rank has tokens of its own."""
    ids = token_ids(seed=20 + rank)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def right(**options: Any) -> tuple[Any, list[Any], dict[str, torch.Tensor]]:
    """A plain model, its scores for every rank's batch, and gradients averaged over the ranks."""
    model, _ = build("llama", **options)
    scores = [unpatched(model, batch_of(rank)) for rank in range(WORLD)]
    found = [gradients(model, lambda s=s: objective(s)) for s in scores]
    mean = {name: torch.stack([f[name] for f in found]).mean(0) for name in found[0]}
    return model, scores, mean


def full(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def plain_names(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): g for name, g in found.items()}


def check_steps(
    wrapper: Any, rank: int, variant: str, scores: list[Any], mean: dict[str, torch.Tensor], steps: int = 2
) -> None:
    """Enter, run, go backward inside and after; twice, so that what one step leaves behind shows in the next."""
    step = patched(wrapper, **VARIANTS[variant])
    batch = batch_of(rank)
    for index in range(steps):
        with unchanged(wrapper):
            with step:
                out = wrapper(**batch)
                found = scores_of(out, batch)
                assert_close_scores(found, scores[rank])
                if index == 0:
                    objective(found).backward()
            if index == 1:
                objective(found).backward()
        grads = plain_names(full({n: p.grad.detach().clone() for n, p in wrapper.named_parameters() if p.grad is not None}))
        assert_gradients(grads, mean)
        wrapper.zero_grad(set_to_none=True)
    out = wrapper(**batch)
    assert out.logits is not None
    assert_clean()


# ------------------------------------------------------------------------------------------------- DDP
def ddp(rank: int, variant: str, **options: Any) -> None:
    model, scores, mean = right()
    check_steps(DistributedDataParallel(model, **options), rank, variant, scores, mean)


def ddp_static_graph(rank: int, variant: str) -> None:
    """With a static graph outputs are rebuilt from their declared fields; the graph must not change between steps."""
    model, scores, mean = right()
    wrapper = DistributedDataParallel(model, static_graph=True)
    batch = batch_of(rank)
    with patched(wrapper, **VARIANTS[variant]).apply():
        for _ in range(3):
            found = scores_of(wrapper(**batch), batch)
            assert_close_scores(found, scores[rank])
            objective(found).backward()
            assert_gradients(plain_names(take_gradients(wrapper)), mean)


def ddp_wrapped_inside(rank: int, variant: str) -> None:
    """Wrapped after entering: the bare model is the target."""
    model, scores, mean = right()
    batch = batch_of(rank)
    with patched(model, **VARIANTS[variant]):
        wrapper = DistributedDataParallel(model)
        found = scores_of(wrapper(**batch), batch)
        assert_close_scores(found, scores[rank])
        objective(found).backward()
    assert_gradients(plain_names(take_gradients(wrapper)), mean)
    assert wrapper(**batch).logits is not None


def ddp_checkpointed(rank: int, variant: str) -> None:
    model, scores, mean = right()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_steps(DistributedDataParallel(model), rank, variant, scores, mean)


def ddp_optimizer(rank: int, variant: str) -> None:
    """An optimizer made before works inside and after; its parameters are the model's."""
    model, _, mean = right()
    twin = copy.deepcopy(model)
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    batch = batch_of(rank)
    with patched(wrapper, **VARIANTS[variant]):
        objective(scores_of(wrapper(**batch), batch)).backward()
        optimizer.step()
        state = wrapper.state_dict()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter - 0.1 * mean[name], rtol=1e-4, atol=1e-5)
    wrapper.load_state_dict(state)


# ------------------------------------------------------------------------------------------------- FSDP2
def shard(model: Any, head: bool = True, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if head:
        fully_shard(model.lm_head, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(rank: int, variant: str, head: bool = True) -> None:
    model, scores, mean = right()
    check_steps(shard(model, head), rank, variant, scores, mean)


def fsdp2_tied(rank: int, variant: str) -> None:
    model, scores, mean = right(tie_word_embeddings=True)
    check_steps(shard(model, head=False), rank, variant, scores, mean)


def fsdp2_inside(rank: int, variant: str) -> None:
    """Sharded after entering, used inside, and after leaving."""
    model, scores, mean = right()
    batch = batch_of(rank)
    scope = patched(model, **VARIANTS[variant])
    with scope:
        shard(model)
        found = scores_of(model(**batch), batch)
        assert_close_scores(found, scores[rank])
        objective(found).backward()
    assert_gradients(full(take_gradients(model)), mean)
    found = scores_of(model(**batch), batch)
    assert_close_scores(found, scores[rank])
    assert_gradients(full(gradients(model, lambda: objective(found))), mean)
    check_steps(model, rank, variant, scores, mean)


def fsdp2_checkpointed(rank: int, variant: str) -> None:
    model, scores, mean = right()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_steps(shard(model), rank, variant, scores, mean)


def fsdp2_mixed_precision(rank: int, variant: str) -> None:
    """bf16 inside: against the same wrapper unpatched, whose logits come out in bf16 and are scored in float64."""
    model, _, _ = right()
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    batch = batch_of(rank)
    wanted = scores_of(model(**batch), batch)
    objective(wanted).backward()
    wanted_gradients = full(take_gradients(model))
    with patched(model, **VARIANTS[variant]):
        out = model(**batch)
        if "fused" in VARIANTS[variant]:
            assert out.log_probs.dtype == torch.float32
        found = scores_of(out, batch)
        assert_close_scores(found, wanted, atol=0.08)
        objective(found).backward()
    assert_gradients(full(take_gradients(model)), wanted_gradients, rtol=0.1)


def fsdp2_temperature_is_not_cast(rank: int, variant: str) -> None:
    """Mixed precision casts float tensors among the arguments: refused by name. On the scope none is cast."""
    model, _, _ = right()
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    batch = batch_of(rank)
    temperature = torch.tensor([0.7001, 1.3001])
    plain = scores_of(model(**batch), batch)
    with patched(model, fused="torch"):
        with pytest.raises(ValueError, match=r"got a torch\.bfloat16 tensor(.|\n)*cast_forward_inputs"):
            model(**batch, temperature=temperature)
    with patched(model, fused=FusedHead("torch", temperature=temperature)):
        out = model(**batch)
    assert not torch.allclose(out.log_probs.double(), plain.log_probs, atol=0.2)


def fsdp2_class_matches(rank: int, variant: str) -> None:
    """`fully_shard` puts a class in front: a second sharded model of that class stays bit-equal."""
    model, _, _ = right()
    other, _ = build("llama", seed=1)
    shard(model)
    shard(other)
    assert type(model) is type(other)
    batch = batch_of(rank)
    logits = other(**batch).logits
    names = dict(vars(type(model)))
    with patched(model, **VARIANTS[variant]):
        model(**batch)
        assert torch.equal(other(**batch).logits, logits)
        assert dict(vars(type(model))) == names


# ------------------------------------------------------------------------------------------------- FSDP1
def fsdp1(rank: int, variant: str, original: bool = True, head: bool = False) -> None:
    model, scores, mean = right()
    kinds = {LlamaDecoderLayer, torch.nn.Linear} if head else {LlamaDecoderLayer}
    policy = ModuleWrapPolicy(kinds)
    if head:
        policy = _LayersAndHead(model)
    wrapper = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu"))
    step = patched(wrapper, **VARIANTS[variant])
    batch = batch_of(rank)
    plain, _ = build("llama")
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)  # made before entering
    for inside in (True, False):
        with step:
            found = scores_of(wrapper(**batch), batch)
            assert_close_scores(found, scores[rank])
            if inside:
                objective(found).backward()
        if not inside:
            objective(found).backward()
        optimizer.step()
        optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(wrapper), torch.no_grad():
            now = plain_names(dict(wrapper.module.named_parameters()))
            assert_gradients({n: before - now[n] for n, before in plain.named_parameters()}, mean, rtol=1e-3)
            for name, before in plain.named_parameters():
                now[name].copy_(before)
    assert wrapper(**batch).logits is not None


class _LayersAndHead:
    """Wraps every decoder layer, and the head as a unit of its own."""

    def __init__(self, model: Any) -> None:
        self.wanted = [*model.model.layers, model.lm_head]

    def __call__(self, module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or any(module is one for one in self.wanted)


CASES = {
    "ddp": ddp,
    "ddp find_unused_parameters": functools.partial(ddp, find_unused_parameters=True),
    "ddp gradient_as_bucket_view": functools.partial(ddp, gradient_as_bucket_view=True),
    "ddp static_graph": ddp_static_graph,
    "ddp wrapped inside": ddp_wrapped_inside,
    "ddp checkpointed": ddp_checkpointed,
    "ddp optimizer and state": ddp_optimizer,
    "fsdp2, head a unit": fsdp2,
    "fsdp2, head in the root": functools.partial(fsdp2, head=False),
    "fsdp2, tied": fsdp2_tied,
    "fsdp2 sharded inside": fsdp2_inside,
    "fsdp2 checkpointed": fsdp2_checkpointed,
    "fsdp2 mixed precision": fsdp2_mixed_precision,
    "fsdp2 second model of the class": fsdp2_class_matches,
    "fsdp1": fsdp1,
    "fsdp1, head a unit": functools.partial(fsdp1, head=True),
    "fsdp1, flat parameters": functools.partial(fsdp1, original=False),
}
FUSED_ONLY = {"fsdp2 temperature": fsdp2_temperature_is_not_cast}


def run_all(rank: int, world: int, names: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Every case on this rank; the traceback of those that fail."""
    outcomes = {}
    for name, variant in names:
        torch.manual_seed(0)
        try:
            {**CASES, **FUSED_ONLY}[name](rank, variant)
            outcomes[name, variant] = ""
        except BaseException:
            outcomes[name, variant] = traceback.format_exc()
        torch.distributed.barrier()
    return outcomes


WANTED = [(name, variant) for name in CASES for variant in VARIANTS] + [(name, "fused") for name in FUSED_ONLY]


@pytest.fixture(scope="module")
def outcomes(request):
    """Runs what is selected, so that `-k` saves the rest."""
    chosen = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}
    return spawn(WORLD, run_all, [case for case in WANTED if case in chosen], timeout=280)


@pytest.mark.parametrize("case", WANTED, ids=" / ".join)
def test_every_rank(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert not outcome[case], f"rank {rank}:\n{outcome[case]}"
