"""Sequence parallelism around and inside what people wrap models in, and other heads than a language model's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from scoped_patch import Ulysses, UnsupportedError, patched
from tests.support import models as odd_models
from tests.support.checks import run_checks
from tests.support.ranks import spawn
from tests.support.scores import objective, unpatched
from tests.support.ulysses import reduced_gradients, snapshot, take
from tests.support.ulysses_cases import FAMILIES, RECURRENT
from tests.tiny_models import build

IDS = torch.randint(3, 100, (2, 11), generator=torch.Generator().manual_seed(1))


def _close(found: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance)


def _same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    largest = max(g.abs().max().item() for g in wanted.values())
    for name, right in wanted.items():
        scale = max(right.abs().max().item(), 1e-3 * largest)
        off = (found[name].double() - right.double()).abs().max().item() / scale
        assert off <= rtol, f"the gradient of {name} is off by {off:.1e}"


def _one_process(model: nn.Module, ids: Tensor = IDS) -> tuple[Any, dict[str, Tensor]]:
    scores = unpatched(model, {"input_ids": ids, "use_cache": False})
    objective(scores).backward()
    return scores, take(model)


# ---------------------------------------------------------------------------------------------------- sharded models


def check_fsdp2_on_a_mesh(rank: int, world: int) -> None:
    _fsdp2_on_a_mesh(rank, world, ("llama", "gpt_oss", "qwen3_5_text"))


def _fsdp2_on_a_mesh(rank: int, world: int, families: tuple[str, ...]) -> None:
    """Parameters over all four ranks, rows over dp, tokens over sp; the head is a unit of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    for family in families:
        for sharded in (False, True):
            model, _ = build(family)
            wanted = [unpatched(model, {"input_ids": row[None], "use_cache": False}) for row in IDS]
            (sum(objective(one) for one in wanted) / 2).backward()
            gradients = take(model)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh._flatten())
            if model.lm_head.weight is not model.model.embed_tokens.weight:  # tied ones must be of one unit
                fully_shard(model.lm_head, mesh=mesh._flatten())
            fully_shard(model, mesh=mesh._flatten())
            dp, sp = rank // 2, rank % 2
            mine = {"input_ids": IDS[dp : dp + 1]}
            with patched(model, sp=Ulysses(mesh["sp"], inputs="sharded" if sharded else "full"), fused="torch") as scope:
                out = model(**(scope.shard(mine) if sharded else mine))
                if sharded:
                    size = out.log_probs.shape[1]
                    _share(out, size, sp).backward()
                    found = scope.gather(out.log_probs.detach())
                else:
                    objective(out).backward()
                    found = out.log_probs
            _close(found, wanted[dp].log_probs)
            assert out.log_probs._base is None  # FSDP2 warns of views: changed in place they lose its backward hook
            full = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
            _same_gradients(full, gradients)


def _share(out: Any, size: int, rank: int) -> Tensor:
    """This rank's part of `objective`."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for values in (out.log_probs, out.entropy):
        weights = torch.randn(1, IDS.shape[1], generator=generator, dtype=torch.float64)[:, rank * size : (rank + 1) * size]
        total = total + (values.double()[:, : weights.shape[1]] * weights).sum()
    return total


def check_fsdp2_mixed_precision(rank: int, world: int) -> None:
    """bf16 copies of the parameters: as exact as FSDP2 without sequence parallelism."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for sp in (None, 2):
        model, _ = build("llama")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.model.layers, model.lm_head, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        with patched(model, sp=sp, fused="torch"):
            out = model(input_ids=IDS, use_cache=False)
            objective(out).backward()
        assert out.log_probs.dtype == torch.float32
        full = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found.append((out.log_probs.detach(), full))
    _close(found[1][0], found[0][0], 0.05)
    _same_gradients(found[1][1], found[0][1], 0.1)


def check_ddp_averages_to_one_process(rank: int, world: int) -> None:
    model, _ = build("qwen3_moe")
    scores, gradients = _one_process(model)
    wrapped = DistributedDataParallel(model, static_graph=True)
    with patched(wrapped, sp=world, fused="torch"):
        out = wrapped(input_ids=IDS)
        _close(out.log_probs, scores.log_probs)
        objective(out).backward()
    _same_gradients(take(model), gradients)


# ---------------------------------------------------------------------------------------------------- precision, recompute


def check_autocast_computes_in_its_dtype(rank: int, world: int) -> None:
    model, _ = build("llama")
    found = []
    for sp in (None, world):
        with patched(model, sp=sp, fused="torch"), torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(input_ids=IDS, use_cache=False)
        objective(out).backward()
        found.append((out.log_probs.detach(), take(model) if sp is None else reduced_gradients(model, world, "mean")))
    _close(found[1][0], found[0][0], 0.05)
    _same_gradients(found[1][1], found[0][1], 0.1)


def _checkpoint_calls(model: nn.Module) -> None:
    """As transformers did up to 5.5: the checkpoint goes around a layer's call, and the patched forward is inside it."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def run(*inner: Any) -> Any:
            self.gradient_checkpointing = False  # not around the class's forward as well
            try:
                return nn.Module.__call__(self, *inner, **kwargs)
            finally:
                self.gradient_checkpointing = True

        return self._gradient_checkpointing_func(run, *args)

    for layer in model.model.layers:
        layer.__class__ = type(layer.__class__.__name__, (layer.__class__,), {"__call__": call})


def check_backward_after_the_block_recomputes_what_ran(rank: int, world: int) -> None:
    for kind in ("reentrant", "nonreentrant", "wrapper", "call"):
        for family in ("mistral", "qwen3_5_text"):
            model, _ = build(family)
            scores, gradients = _one_process(model)
            if kind == "wrapper":
                layers = model.model.layers
                for i, layer in enumerate(layers):
                    layers[i] = checkpoint_wrapper(layer)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)
                    model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
                model.enable_input_require_grads()
                if kind == "call":
                    _checkpoint_calls(model)
            before = snapshot(model)
            with patched(model, sp=world, fused="torch"):
                out = model(input_ids=IDS)
                _close(out.log_probs, scores.log_probs)
            assert snapshot(model) == before
            objective(out).backward()
            found = {
                k.replace("_checkpoint_wrapped_module.", ""): g for k, g in reduced_gradients(model, world, "mean").items()
            }
            _same_gradients(found, gradients)


# ---------------------------------------------------------------------------------------------------- other heads


def check_lora_and_its_head(rank: int, world: int) -> None:
    from peft import LoraConfig, get_peft_model

    model, _ = build("llama")
    config = LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], r=4, init_lora_weights=False)
    torch.manual_seed(3)
    peft_model = get_peft_model(model, config)
    scores, gradients = _one_process(peft_model)
    with patched(peft_model, sp=world, fused="torch"):
        out = peft_model(input_ids=IDS)
        _close(out.log_probs, scores.log_probs)
        objective(out).backward()
    _same_gradients(reduced_gradients(peft_model, world, "mean"), gradients)


def check_classifiers_and_bare_decoders(rank: int, world: int) -> None:
    mask = torch.ones_like(IDS)
    mask[1, -3:] = 0
    for make in (odd_models.sequence_classifier, odd_models.token_classifier, lambda: build("qwen2")[0].model):
        for how in ("mean", "sum"):
            model = make().eval()  # the token classifier drops out
            before = snapshot(model)
            call = {"input_ids": IDS, "attention_mask": mask}
            out = model(**call, use_cache=False)
            wanted = out.logits if hasattr(out, "logits") else out.last_hidden_state
            # weights of its own for each: the sum of squares of a normed vector has no gradient to speak of
            weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
            (wanted * weights).sum().backward()
            gradients = take(model)
            with patched(model, sp=Ulysses(world, grad_reduction=how)):
                out = model(**call)
                found = out.logits if hasattr(out, "logits") else out.last_hidden_state
                _close(found, wanted)
                (found * weights).sum().backward()
            _same_gradients(reduced_gradients(model, world, how), gradients)
            assert snapshot(model) == before


def check_value_heads_beside_the_model(rank: int, world: int) -> None:
    torch.manual_seed(5)
    model = odd_models.ValueHeadModel(build("llama")[0])
    *_, values = model(input_ids=IDS, use_cache=False)
    values.square().sum().backward()
    gradients = take(model)
    with patched(model, sp=world):
        *_, found = model(input_ids=IDS)
        _close(found, values)
        found.square().sum().backward()
    _same_gradients(reduced_gradients(model, world, "mean"), gradients)
    with pytest.raises(UnsupportedError, match="value head of ValueHeadModel lies outside"):
        patched(model, sp=Ulysses(world, grad_reduction="sum")).apply()


def check_every_other_output_is_whole(rank: int, world: int) -> None:
    model, _ = build("qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[])
    call = {"input_ids": IDS, "labels": IDS, "output_hidden_states": True, "output_router_logits": True}
    wanted = model(**call, use_cache=False)
    for fused in (None, "torch"):
        with patched(model, sp=world, fused=fused):
            found = model(**call)
            as_tuple = model(**call, return_dict=False)
        for name in ("loss", "aux_loss"):
            _close(getattr(found, name), getattr(wanted, name))
        for name in ("hidden_states", "router_logits"):
            ours, right = getattr(found, name), getattr(wanted, name)
            assert len(ours) == len(right)
            for x, y in zip(ours, right, strict=True):
                _close(x, y)
        assert isinstance(as_tuple, tuple)
        _close(as_tuple[0], wanted.loss)
    with patched(model, sp=world):
        for keep in (3, torch.tensor([1, 4, 10])):
            kept = model(input_ids=IDS, use_cache=False, logits_to_keep=keep).logits
            _close(kept, wanted.logits[:, -3:] if keep is not None and isinstance(keep, int) else wanted.logits[:, keep])


def check_gathered_outputs_go_backward_together(rank: int, world: int) -> None:
    """On a GPU, a loss put together on the CPU would otherwise start their collectives in an order of its own on each rank."""
    model, _ = build("qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[])
    with patched(model, sp=world):
        out = model(input_ids=IDS, output_hidden_states=True, output_router_logits=True)
    (way,) = {x.grad_fn for x in (*out.hidden_states, *out.router_logits)}
    assert len(way.next_functions) == len(out.hidden_states) + len(out.router_logits)


def check_an_auxiliary_loss_alone_in_both_layouts(rank: int, world: int) -> None:
    """Beside a loss of tokens its gradient is too small to be seen."""
    ids = IDS[:, :10]  # padding would count in it
    for family in ("qwen3_moe", "gpt_oss"):
        options = {"decoder_sparse_step": 1, "mlp_only_layers": []} if family == "qwen3_moe" else {}
        model, _ = build(family, **options)
        call = {"input_ids": ids, "labels": ids, "output_router_logits": True}
        wanted = model(**call, use_cache=False).aux_loss
        wanted.backward()
        gradients = take(model)
        for inputs in ("full", "sharded"):
            for how in ("mean", "sum"):
                with patched(model, sp=Ulysses(world, inputs=inputs, grad_reduction=how)) as scope:
                    found = model(**(scope.shard(call) if inputs == "sharded" else call)).aux_loss
                    _close(found, wanted)
                    found.backward()
                ours = reduced_gradients(model, world, how)
                assert gradients
                _same_gradients({name: ours[name] for name in gradients}, gradients, 1e-3)


def check_embeddings_as_input(rank: int, world: int) -> None:
    """Their gradient is that of this rank's tokens; over all ranks it is averaged as a parameter's."""
    model, _ = build("llama")
    embeds = model.model.embed_tokens(IDS).detach()
    whole = embeds.clone().requires_grad_()
    wanted = model(inputs_embeds=whole, use_cache=False).logits
    wanted.square().sum().backward()
    mine = embeds.clone().requires_grad_()
    with patched(model, sp=world):
        found = model(inputs_embeds=mine).logits
        found.square().sum().backward()
    _close(found, wanted)
    dist.all_reduce(mine.grad)
    _close(mine.grad / world, whole.grad, 1e-3)


def check_positional_arguments(rank: int, world: int) -> None:
    model, _ = build("llama")
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        wanted = model(IDS, mask, use_cache=False).logits
        with patched(model, sp=world):
            _close(model(IDS, mask).logits, wanted)


FOUR = ["check_fsdp2_on_a_mesh", "check_fsdp2_mixed_precision"]
TWO = [name for name in dir() if name.startswith("check_") and name not in FOUR]


def test_wrapped_models_on_two_ranks():
    run_checks(__name__, TWO, 2)


def test_fully_sharded_models_on_four_ranks():
    run_checks(__name__, FOUR, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_family_fully_sharded_on_a_mesh():
    spawn(4, _fsdp2_on_a_mesh, FAMILIES + RECURRENT, timeout=850)
