"""Checks for ranks: the helpers by value, and the engine's steps with the sequence spread over two ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from scoped_patch import BadOptionError
from scoped_patch.compat import verl
from tests.support.scores import assert_gradients, gradients
from tests.support.verl_engine import Engine, assert_scored, loss_of, make_batch, truth
from tests.tiny_models import build

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def helpers(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    assert verl.get_ulysses_sequence_parallel_group() is None
    assert verl.get_ulysses_sequence_parallel_world_size() == 1
    whole = torch.arange(2 * 6 * 4 * 3, dtype=torch.float64).reshape(2, 6, 4, 3)
    x = whole.clone().requires_grad_()
    assert verl.gather_seq_scatter_heads(x, 1, 2) is x
    assert verl.gather_outputs_and_unpad(x, 1) is x
    assert torch.equal(verl.slice_input_tensor(whole, 1), whole)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "sp"))
    with verl.FSDPUlyssesShardingManager(mesh):
        assert verl.get_ulysses_sequence_parallel_world_size() == world
        assert verl.get_ulysses_sequence_parallel_rank() == rank
        local = verl.slice_input_tensor(x, 1)
        assert torch.equal(local, whole[:, rank * 3 : rank * 3 + 3])
        heads = verl.gather_seq_scatter_heads(local, seq_dim=1, head_dim=2)
        assert torch.equal(heads, whole[:, :, rank * 2 : rank * 2 + 2])
        back = verl.gather_heads_scatter_seq(heads, head_dim=2, seq_dim=1)
        assert torch.equal(back, local)
        again = verl.gather_outputs_and_unpad(back, 1, unpad_dim=1, padding_size=1)
        assert torch.equal(again, whole[:, :5])
        (again * whole[:, :5]).sum().backward()
        wanted = torch.zeros_like(whole)
        wanted[:, rank * 3 : rank * 3 + 3] = whole[:, rank * 3 : rank * 3 + 3] * world
        wanted[:, 5] = 0
        assert torch.equal(x.grad, wanted)
        plain = verl.gather_outputs_and_unpad(local.detach().requires_grad_(), 1, grad_scaler=False)
        assert torch.equal(plain, whole)
        cut = verl.gather_seq_scatter_heads(verl.slice_input_tensor(whole[:, :5], 1), 1, 2, unpadded_dim_size=5)
        assert torch.equal(cut, whole[:, :5, rank * 2 : rank * 2 + 2])
        padded = verl.gather_heads_scatter_seq(whole[:, :5, :2], 2, 1)
        assert padded.shape == (2, 3, 4, 3)
        assert torch.equal(verl.all_gather_tensor(local), torch.cat(whole.split(3, 1)))
        wait = verl.all_to_all_tensor(local, 2, 1, async_op=True)
        assert callable(wait)
        assert torch.equal(wait(), heads)
        ids, positions, added = verl.ulysses_pad_and_slice_inputs(torch.arange(5)[None], torch.arange(5)[None], world)
        assert added == 1
        assert ids.tolist() == [[[0, 1, 2], [3, 4, 0]][rank]]
        assert positions is not None
        assert positions.tolist() == [[[0, 1, 2], [3, 4, 0]][rank]]
        with pytest.raises(BadOptionError, match=r"dimension 1 of \[1, 5\] cannot be shared by"):  # padded for one rank only
            verl.ulysses_pad_and_slice_inputs(torch.arange(5)[None])
        _, kept, _ = verl.ulysses_pad_and_slice_inputs(ids, positions, world, skip_position_ids_rmpad=True)
        assert kept is not None
        assert kept.shape == (1, 4)
    assert verl.get_ulysses_sequence_parallel_group() is None
    with pytest.raises(RuntimeError, match="there is no Ulysses group"):
        verl.all_gather_tensor(whole)


def group_of_another_size(rank: int, world: int) -> None:
    model, _ = build("qwen3")
    alone = [dist.new_group([one]) for one in range(world)][rank]
    verl.set_ulysses_sequence_parallel_group(alone)
    try:
        with pytest.raises(BadOptionError, match="has 1 ranks"):
            verl.apply_monkey_patch(model, ulysses_sp_size=world)
    finally:
        verl.set_ulysses_sequence_parallel_group(None)


def _engine(world: int, wrap: Callable[[nn.Module], nn.Module], lora: bool = False) -> None:
    """Patched before the group is set, then cast, checkpointed, wrapped; three batches, entropy on and off."""
    torch.manual_seed(4)
    twin, _ = build("qwen3")
    model, _ = build("qwen3", dtype=torch.float64)
    session = verl.apply_monkey_patch(
        model,
        ulysses_sp_size=world,
        use_fused_kernels=True,
        fused_kernels_backend="torch",
        use_tiled_mlp=not lora,
        tiled_mlp_shards=2,
    )
    engine = Engine(model, world)
    assert engine.pass_packed_cu_seqlens
    model.to(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        model.enable_input_require_grads()
        engine.module = get_peft_model(model, LORA)
        twin = get_peft_model(twin, LORA)
        twin.load_state_dict(engine.module.state_dict())
    engine.module = wrap(engine.module)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "sp"))
    for seed, calculate_entropy, temperature in ((1, True, 0.8), (2, False, torch.tensor([0.5, 2.0, 1.0])), (3, True, 1.0)):
        batch = make_batch((9, 5, 7), temperature, seed)
        wanted = truth(twin, batch)
        right = {name: getattr(wanted, name) for name in ("log_probs", "entropy") if calculate_entropy or name == "log_probs"}
        with verl.FSDPUlyssesShardingManager(mesh):
            found = engine.step(batch, calculate_entropy)
            assert found.keys() == right.keys()
            assert_scored(found, wanted, batch)
            loss_of(found, batch).backward()
        with _whole_gradients(engine.module):
            grads = {
                name.replace("_fsdp_wrapped_module.", ""): _mean(p.grad, world)
                for name, p in engine.module.named_parameters()
                if p.grad is not None
            }
        engine.module.zero_grad(set_to_none=True)
        assert_gradients(grads, gradients(twin, functools.partial(loss_of, right, batch)))
    session.restore()


def _whole_gradients(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    if isinstance(module, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(module, with_grads=True)
    return contextlib.nullcontext()


def _mean(g: Any, world: int) -> torch.Tensor:
    """What a trainer's reduction makes of it: FSDP has averaged already; otherwise all ranks are averaged here."""
    if hasattr(g, "full_tensor"):
        return g.full_tensor()
    g = g.clone()
    dist.all_reduce(g)
    return g / world


def engine_plain(rank: int, world: int) -> None:
    _engine(world, lambda module: module)


def engine_lora(rank: int, world: int) -> None:
    _engine(world, lambda module: module, lora=True)


def engine_fsdp2(rank: int, world: int) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        for layer in module.model.layers:  # type: ignore[attr-defined]
            fully_shard(layer)
        return fully_shard(module)

    _engine(world, wrap)


def engine_fsdp1(rank: int, world: int) -> None:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen3DecoderLayer})
    _engine(
        world,
        lambda module: FullyShardedDataParallel(
            module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        ),
    )
