"""Entering, leaving, nesting, groups, failures: what a sequence-parallel scope does to everything around it."""

from __future__ import annotations

import copy
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from scoped_patch import ConflictError, ScopeStateError, Ulysses, UnsupportedError, assert_clean, patched
from scoped_patch.ops.sequence_parallel import RankFailedError, count_collectives, failures
from tests.support.checks import run_checks
from tests.support.ranks import spawn
from tests.support.scores import objective, unpatched
from tests.support.ulysses import reduced_gradients, snapshot, take
from tests.tiny_models import build

IDS = torch.randint(3, 100, (2, 11), generator=torch.Generator().manual_seed(1))


def _close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- nesting


def check_scopes_nest_and_leave_in_any_order(rank: int, world: int) -> None:
    """sp with fused and with tiled: whichever is entered first and whichever is left first, the gather is never lost."""
    model, _ = build("qwen3")
    before = snapshot(model)
    wanted = unpatched(model, {"input_ids": IDS, "use_cache": False})
    objective(wanted).backward()
    gradients = take(model)
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits
    others = {"fused": "torch"}, {"tiled_mlp": 3}
    for other in others:
        for first in ("sp", "other"):
            for leaves_first in ("inner", "outer"):
                scopes = {"sp": patched(model, sp=world), "other": patched(model, **other)}
                outer = scopes.pop(first).apply()
                inner = next(iter(scopes.values())).apply()
                out = model(input_ids=IDS)
                if "fused" in other:
                    _close(out.log_probs, wanted.log_probs)
                    objective(out).backward()
                    for name, g in reduced_gradients(model, world, "mean").items():
                        torch.testing.assert_close(g, gradients[name], rtol=1e-4, atol=2e-4)
                else:
                    _close(out.logits, logits)
                left, kept = (inner, outer) if leaves_first == "inner" else (outer, inner)
                left.restore()
                with torch.no_grad():
                    out = model(input_ids=IDS)
                fused_alone = "fused" in other and kept is (outer if first == "other" else inner)
                if fused_alone:
                    _close(out.log_probs, wanted.log_probs.detach())
                else:
                    _close(out.logits, logits)
                kept.restore()
                assert snapshot(model) == before


def check_prefix_sharing_nests_with_it_in_any_order(rank: int, world: int) -> None:
    """The packed row is what is spread, whichever scope is the inner one."""
    model, _ = build("qwen3")
    before = snapshot(model)
    rows = IDS[:1].repeat(3, 1)
    rows[1, 6:], rows[2, 8:] = IDS[1, 6:], 5
    logits = model(input_ids=rows, use_cache=False).logits
    logits.square().sum().backward()
    gradients = take(model)
    for first in ("sp", "prefix_grouper"):
        for leaves_first in ("inner", "outer"):
            scopes = {"sp": patched(model, sp=world), "prefix_grouper": patched(model, prefix_grouper=True)}
            outer = scopes.pop(first).apply()
            inner = next(iter(scopes.values())).apply()
            with count_collectives() as log:
                found = model(input_ids=rows).logits
            assert log.count("all_to_all") == 4
            exchanged = log.bytes("all_to_all")
            _close(found, logits)
            found.square().sum().backward()
            for name, g in reduced_gradients(model, world, "mean").items():
                torch.testing.assert_close(g, gradients[name], rtol=1e-4, atol=1e-4 * gradients[name].abs().max().item())
            left, kept = (inner, outer) if leaves_first == "inner" else (outer, inner)
            left.restore()
            with torch.no_grad(), count_collectives() as log:
                _close(model(input_ids=rows).logits, logits)
            if "ulysses" in {patch.name for patch in kept.plan.patches}:
                assert log.bytes("all_to_all") > 1.3 * exchanged  # 3 x 11 tokens, and not 11 + 5 + 3
            else:
                assert not log.calls
            kept.restore()
            assert snapshot(model) == before


def check_an_equal_scope_is_shared_and_another_refused(rank: int, world: int) -> None:
    model, _ = build("llama")
    before = snapshot(model)
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits
        first, second = patched(model, sp=world).apply(), patched(model, sp=world).apply()
        _close(model(input_ids=IDS).logits, wanted)
        first.restore()
        _close(model(input_ids=IDS).logits, wanted)
        with pytest.raises((ConflictError, ExceptionGroup), match="ulysses"):
            patched(model, sp=Ulysses(world, inputs="sharded")).apply()
        _close(model(input_ids=IDS).logits, wanted)
        second.restore()
    assert snapshot(model) == before


def check_a_scope_used_again_sees_the_model_as_it_is(rank: int, world: int) -> None:
    model, _ = build("mistral")
    step = patched(model, sp=world, fused="torch")
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        wanted = unpatched(model, {"input_ids": IDS, "use_cache": False}).log_probs.detach()
        for _ in range(2):
            with step, torch.no_grad():
                _close(model(input_ids=IDS).log_probs, wanted)


# ---------------------------------------------------------------------------------------------------- others


def check_another_model_and_a_copy_are_never_touched(rank: int, world: int) -> None:
    model, _ = build("gemma3_text")
    other, _ = build("gemma3_text", seed=1)
    classes = {cls: dict(vars(cls)) for m in (model, other) for module in m.modules() for cls in type(module).__mro__[:-1]}
    with torch.no_grad():
        logits = other(input_ids=IDS, use_cache=False).logits
        wanted = model(input_ids=IDS, use_cache=False).logits
        with patched(model, sp=world):
            assert torch.equal(other(input_ids=IDS, use_cache=False).logits, logits)
            twin = copy.deepcopy(model)
            _close(model(input_ids=IDS).logits, wanted)
            if rank == 0:  # unpatched from birth, so no other rank is waited for
                assert torch.equal(twin(input_ids=IDS, use_cache=False).logits, wanted)
        assert torch.equal(other(input_ids=IDS, use_cache=False).logits, logits)
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, wanted)
    assert all(dict(vars(cls)) == entries for cls, entries in classes.items())


def check_generate_is_as_outside(rank: int, world: int) -> None:
    for family in ("llama", "gemma3_text", "qwen3_5_text"):
        model, _ = build(family, train=False)
        wanted = model.generate(IDS, max_new_tokens=4, do_sample=False)
        with patched(model, sp=world, fused="torch"):
            assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), wanted)
            assert model(input_ids=IDS).log_probs.shape == IDS.shape


def check_caches_and_weights_are_refused(rank: int, world: int) -> None:
    model, _ = build("llama")
    with patched(model, sp=world):
        with pytest.raises(UnsupportedError, match=r"use_cache=True was passed.*generate"):
            model(input_ids=IDS, use_cache=True)
        from transformers import DynamicCache

        with pytest.raises(UnsupportedError, match="past_key_values was passed"):
            model(input_ids=IDS, past_key_values=DynamicCache(config=model.config))
        with pytest.raises(UnsupportedError, match="output_attentions is not supported"):
            model(input_ids=IDS, output_attentions=True)
        with pytest.raises(ScopeStateError, match="outside a call of its patched model"):
            model.model.layers[0].self_attn(
                torch.zeros(1, 4, 64), position_embeddings=(torch.ones(1, 4, 16),) * 2, attention_mask=None
            )


def check_heads_that_cannot_be_shared_are_refused(rank: int, world: int) -> None:
    model, _ = build("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    before = snapshot(model)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*3 attention heads cannot be shared by 2 ranks.*1, 3"):
        patched(model, sp=world).apply()
    assert snapshot(model) == before


def check_explain_says_what_was_done(rank: int, world: int) -> None:
    model, _ = build("qwen3_5_text")
    with patched(model, sp=world) as scope:
        model(input_ids=IDS)
        text = str(scope.explain())
    for part in ("ulysses", "self_attn.config", "gather, run, keep this rank's tokens", "Qwen3_5GatedDeltaNet", "all-to-all"):
        assert part in text, text


# ---------------------------------------------------------------------------------------------------- groups


def check_many_entries_leave_no_group_behind(rank: int, world: int) -> None:
    model, _ = build("llama")
    degree = world // 2 or 1
    step = patched(model, sp=degree)
    with step, torch.no_grad():
        model(input_ids=IDS)

    def open_things() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(dist.distributed_c10d._world.pg_map)

    before = open_things()
    for i in range(50):
        scope = step if i % 2 else patched(model, sp=degree)
        with scope, torch.no_grad():
            if i % 10 == 0:
                model(input_ids=IDS)
    assert open_things() == before


def check_groups_and_meshes(rank: int, world: int) -> None:
    """Data parallel pairs of sequence parallel pairs: each row of ranks has a batch of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    model, _ = build("llama")
    mine = IDS[rank // 2 : rank // 2 + 1]
    with torch.no_grad():
        wanted = model(input_ids=mine, use_cache=False).logits
        for group in (2, mesh["sp"], mesh["sp"].get_group()):
            with patched(model, sp=group):
                _close(model(input_ids=mine).logits, wanted)
    with pytest.raises(ValueError, match="must have one dimension, got 2"):
        patched(model, sp=mesh)


def check_two_models_with_two_groups(rank: int, world: int) -> None:
    """Actor and critic: one spread over pairs, one over all."""
    actor, _ = build("llama")
    critic, _ = build("qwen3", seed=1)
    with torch.no_grad():
        wanted = [m(input_ids=IDS, use_cache=False).logits for m in (actor, critic)]
        with patched(actor, sp=2), patched(critic, sp=4):
            for _ in range(2):
                _close(actor(input_ids=IDS).logits, wanted[0])
                _close(critic(input_ids=IDS).logits, wanted[1])


# ---------------------------------------------------------------------------------------------------- failures


def check_a_rank_that_fails_ends_all(rank: int, world: int) -> None:
    """Inside a layer, on one rank: the others hear of it, by name, and everything is put back; a new scope works."""
    failures.POLL_SECONDS = 0.2
    model, _ = build("llama")
    before = snapshot(model)
    victim = 1
    pair = dist.get_rank() // 2 * 2

    def fail(*_: object) -> None:
        if dist.get_rank() - pair == victim:
            raise MemoryError("the needle")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    started = time.monotonic()
    error: BaseException
    try:
        with patched(model, sp=2, fused="torch"):
            model(input_ids=IDS)
        raise AssertionError("nothing was raised")
    except (MemoryError, RankFailedError) as caught:
        error = caught
    handle.remove()
    assert time.monotonic() - started < 20
    assert isinstance(error, MemoryError if rank - pair == victim else RankFailedError)
    if rank - pair != victim:
        assert f"rank {pair + victim} failed with MemoryError: the needle" in str(error)
    assert snapshot(model) == before
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits
        with patched(model, sp=2):  # every rank knows that the old group is out of step, and makes another
            _close(model(input_ids=IDS).logits, wanted)
    assert snapshot(model) == before


def check_a_failure_in_backward_is_told_too(rank: int, world: int) -> None:
    failures.POLL_SECONDS = 0.2
    model, _ = build("llama")

    def fail(gradient: Tensor) -> Tensor:
        if rank % 2:
            raise KeyError("the needle in backward")
        return gradient

    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    started = time.monotonic()
    with pytest.raises((KeyError, RankFailedError), match="the needle in backward"), patched(model, sp=2, fused="torch"):
        model(input_ids=IDS).log_probs.sum().backward()
    handle.remove()
    assert time.monotonic() - started < 20
    model.zero_grad(set_to_none=True)


def check_failures_that_leave_nobody_behind_cost_no_group(rank: int, world: int) -> None:
    """All ranks at once; and one rank after its last collective."""
    failures.POLL_SECONDS = 0.2
    model, _ = build("llama")
    step = patched(model, sp=2)
    with step, torch.no_grad():
        wanted = model(input_ids=IDS).logits
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ValueError, match="attention_mask has 3 tokens"), step:
        model(input_ids=IDS, attention_mask=torch.ones(2, 3))
    try:
        with step, torch.no_grad():
            _close(model(input_ids=IDS).logits, wanted)
            if rank % 2:
                raise OSError("the log is full")
    except OSError:
        assert rank % 2
    with step, torch.no_grad():
        _close(model(input_ids=IDS).logits, wanted)
    assert len(dist.distributed_c10d._world.pg_map) == groups


def check_threads_are_told_apart(rank: int, world: int) -> None:
    model, _ = build("llama")
    caught: list[BaseException] = []
    with patched(model, sp=1):

        def inside(*_: object) -> None:
            def run() -> None:
                try:
                    model.model(input_ids=IDS)
                except BaseException as error:
                    caught.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        handle = model.model.embed_tokens.register_forward_hook(inside)
        try:
            model(input_ids=IDS)
        finally:
            handle.remove()
    assert "two threads" in str(caught[0])


TWO = [name for name in dir() if name.startswith("check_")]
FOUR = [
    "check_a_failure_in_backward_is_told_too",
    "check_a_rank_that_fails_ends_all",
    "check_failures_that_leave_nobody_behind_cost_no_group",
    "check_groups_and_meshes",
    "check_many_entries_leave_no_group_behind",
    "check_two_models_with_two_groups",
]


def test_scopes_on_two_ranks():
    run_checks(__name__, [name for name in TWO if name not in FOUR], 2)


def test_groups_on_four_ranks():
    run_checks(__name__, FOUR, 4)


# ---------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("option", [0, -1, 2.5, "two", True, object()])
def test_options_that_name_no_group(option):
    model, _ = build("llama")
    with pytest.raises(ValueError, match="sp must be a number of ranks"):
        patched(model, sp=option)


def test_other_bad_options():
    with pytest.raises(ValueError, match="inputs must be 'full' or 'sharded'"):
        Ulysses(1, inputs="cut")
    with pytest.raises(ValueError, match="grad_reduction must be 'mean' or 'sum'"):
        Ulysses(1, grad_reduction="max")


def test_without_distributed():
    model, _ = build("llama")
    with pytest.raises(UnsupportedError, match=r"sp=2 needs torch.distributed to be initialised"):
        patched(model, sp=2).apply()
    with patched(model, fused="torch") as scope, pytest.raises(ScopeStateError, match="belong to a scope with sp="):
        scope.shard({"input_ids": IDS})


def _edits(model: Any, explanation: Any) -> list[tuple[str, ...]]:
    """(patch, where, to, why) of each: where two edits meet, only a live scope can name what the second one came upon."""
    cells = [row.cells(True) for row in explanation.rows]
    return [tuple(row[i].replace(f"{id(model):x}", "ID") for i in (0, 1, 3, 4)) for row in cells]


def _entered(rank: int, world: int) -> list[tuple[str, ...]]:
    model, _ = build("qwen3")
    with patched(model, sp=world, fused="torch", tiled_mlp=8) as scope:
        model(input_ids=IDS)
        return _edits(model, scope.explain(full=True))


def test_a_plan_needs_no_group_and_lists_what_entering_does():
    """On the meta device, in a process that knows of no other; two ranks then make these very edits."""
    assert not dist.is_initialized()
    model, _ = build("qwen3")
    model.to("meta")
    planned = _edits(model, patched(model, sp=2, fused="torch", tiled_mlp=8).plan().explain(full=True))
    assert len(planned) > 10
    assert spawn(2, _entered) == [planned] * 2


def test_one_scope_planned_before_there_is_a_group_and_entered_after(tmp_path):
    model, _ = build("llama")
    scope = patched(model, sp=2)
    edits = len(scope.plan())
    with pytest.raises(UnsupportedError, match=r"sp=2 needs torch.distributed to be initialised"):
        scope.apply()
    assert len(scope.plan()) == edits
    assert_clean()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        with pytest.raises(UnsupportedError, match="sp=2 does not divide the 1 ranks"):
            scope.apply()
        with patched(model, sp=dist.group.WORLD):
            model(input_ids=IDS)
    finally:
        dist.destroy_process_group()
    assert_clean()
