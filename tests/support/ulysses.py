"""One sequence-parallel run against one process: outputs, loss and the gradient of every parameter, on every rank."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scoped_patch import Ulysses, assert_clean, patched
from scoped_patch.ops.sequence_parallel import count_collectives
from tests.support import fake_flash
from tests.support.scores import reference, shifted
from tests.support.ulysses_cases import RECURRENT, WITH_ROUTER, Case, make_batch, sample_lengths
from tests.tiny_models import build


def run_cases(rank: int, world: int, cases: Iterable[Case]) -> list[str]:
    """Run every case; one line per failure.

    What these comparisons exchange goes through a group of their own, and only where all ranks have come to the same point:
    a case that fails on one rank, or breaks its group, is a line for every rank and not a wait.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    own = dist.new_group(list(range(world)))
    failures = []
    for case in cases:
        try:
            run_case(case, rank, world, own=own)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().splitlines()
            failures.append(f"rank {rank} of {world}: {case}: {type(error).__name__}: {text[0] if text else ''} ({where.name})")
    return failures


def run_case(case: Case, rank: int, world: int, **options: Any) -> Counter[str]:
    """Raise unless the case equals one process; returns how many collectives of each kind its forward made."""
    try:
        return _run_case(case, rank, world, torch.float32, **options)
    except _Rounding:  # on every rank
        # a recurrence computes in float32 whatever it is given
        rtol = 5e-5 if case.family in RECURRENT else 1e-5
        return _run_case(case, rank, world, torch.float64, **{**options, "rtol": rtol})


class _Rounding(AssertionError):
    """Off by little: some gradients (of a number that scales a whole layer, say) are small sums of large terms."""


def _run_case(case: Case, rank: int, world: int, dtype: torch.dtype, **options: Any) -> Counter[str]:
    model, _ = build(case.family, attn="eager" if case.attention == "flash" else case.attention)
    model.to(case.device, dtype)
    with contextlib.ExitStack() as stack:
        if case.attention == "eager" and dtype == torch.float64:
            stack.enter_context(_masks_for_float32())
        if case.attention == "flash":
            fake_flash.use_flash(model)
            stack.enter_context(fake_flash.installed())
        return _compare(case, model, rank, world, **options)


@contextlib.contextmanager
def _masks_for_float32() -> Iterator[None]:
    """Eager attention takes its softmax in float32, where the least float64 is -inf, and rows that are all masked are NaN."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as registry

    own = registry["eager"]

    def bounded(*args: Any, **kwargs: Any) -> Any:
        mask = own(*args, **kwargs)
        return None if mask is None else mask.clamp(min=torch.finfo(torch.float32).min)

    registry["eager"] = bounded
    try:
        yield
    finally:
        del registry["eager"]


@dataclass
class _Wanted:
    """What one process computes: outputs by name, loss, gradients by parameter."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass
class _Found:
    """What this rank computed: whole outputs by name, loss, collectives of the forward."""

    outputs: dict[str, Tensor]
    loss: Tensor | None
    forward: Counter[str]


def _compare(
    case: Case, model: nn.Module, rank: int, world: int, rtol: float = 1e-4, own: dist.ProcessGroup | None = None
) -> Counter[str]:
    batch = {name: x.to(case.device) for name, x in make_batch(case).items()}
    temperature = torch.rand(case.batch, case.length, generator=torch.Generator().manual_seed(9)).to(case.device) + 0.5
    found: _Found | None = None
    problem: Exception | None = None
    try:
        if case.checkpoint:
            _enable_checkpointing(model, case.checkpoint == "reentrant")
            model.enable_input_require_grads()
        wanted = _Wanted(*one_process(case, model, batch, temperature))
        before = snapshot(model)
        found = _spread(case, model, rank, world, batch, temperature, wanted.outputs)
        assert_clean()
        assert snapshot(model) == before, "the model is not as it was"
        names = {name for name, p in model.named_parameters() if p.grad is not None}
        assert names == wanted.gradients.keys(), f"gradients in one run only: {sorted(names ^ wanted.gradients.keys())}"
    except Exception as error:
        problem = error
    together(problem, own)
    assert found is not None
    gradients = reduced_gradients(model, world, case.reduction, own)
    off = _differences(case, wanted, found, gradients, world, rtol)
    much = off and _differences(case, wanted, found, gradients, world, 10 * rtol)
    kind = AssertionError if much or next(model.parameters()).dtype == torch.float64 else _Rounding
    together(kind(off[0]) if off else None, own)
    return found.forward


def together(problem: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise this rank's problem, or say whose it is; every rank is past this point, or none.

    Rounding is raised if it is all that any rank has to say.
    """
    said: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, None if problem is None else f"{type(problem).__name__}: {problem}", group=group)
    others = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    if others and all(text is None or text.startswith(_Rounding.__name__) for text in said):
        raise _Rounding(others[0])
    if problem is not None:
        raise problem
    assert not others, f"it failed elsewhere: {others[0]}"


def _spread(
    case: Case,
    model: nn.Module,
    rank: int,
    world: int,
    batch: dict[str, Tensor],
    temperature: Tensor,
    wanted: Iterable[str],
) -> _Found:
    """Forward and backward over the ranks; gradients are left on the model, this rank's part of them."""
    with count_collectives() as log, contextlib.ExitStack() as stack:
        scope = enter(case, model, world, stack)
        inputs = scope.shard({**batch, "temperature": temperature}) if case.sharded else {**batch, "temperature": temperature}
        if not case.fused:
            inputs.pop("temperature")
        if case.family in WITH_ROUTER:
            inputs["output_router_logits"] = True
        out = model(**inputs)
        forward = Counter(kind for kind, _ in log.calls)
        found = outputs_of(case, out)
        objective(found, wanted, world if case.sharded else 1, rank, case, out.loss).backward()
        found = {name: x.detach() for name, x in found.items()}
        if case.sharded:
            found = {name: scope.gather(x, 1, case.length) for name, x in found.items()}
    return _Found(found, out.loss, forward)


def _differences(
    case: Case, wanted: _Wanted, found: _Found, gradients: dict[str, Tensor], world: int, rtol: float
) -> list[str]:
    """What is not as it is in one process."""
    wrong = []
    for name, right in wanted.outputs.items():
        whole, right = found.outputs[name].cpu(), right.detach().cpu()
        if whole.shape != right.shape:
            wrong.append(f"{name} is {list(whole.shape)}, wanted {list(right.shape)}")
            continue
        counted = _counted(case, whole.ndim)
        off = relative(whole * counted, right * counted)
        if not off <= rtol:
            wrong.append(f"{name} is off by {off:.1e}")
    if found.loss is not None:
        padding_counts = case.sharded and case.family in WITH_ROUTER and case.length % world
        rtol = 1e-2 if padding_counts else rtol
        if not relative(found.loss, wanted.loss) <= rtol:
            wrong.append(f"loss {found.loss} and not {wanted.loss}")
    return wrong + _different_gradients(gradients, wanted.gradients, rtol)


def _different_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float) -> list[str]:
    """Each against its own largest entry; one that is next to nothing against a thousandth of the largest of all."""
    wrong = []
    largest = max(g.abs().max().item() for g in wanted.values())
    for name, right in wanted.items():
        scale = max(right.abs().max().item(), 1e-3 * largest)
        off = (found[name] - right).abs().max().item() / scale if scale else 0.0
        if not off <= rtol:
            wrong.append(f"the gradient of {name} is off by {off:.1e}")
    return wrong


def _enable_checkpointing(model: Any, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in the newest transformers
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def one_process(
    case: Case, model: nn.Module, batch: dict[str, Tensor], temperature: Tensor
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Outputs, loss and gradients of the unpatched model."""
    model.zero_grad(set_to_none=True)
    extra = {"output_router_logits": True} if case.family in WITH_ROUTER else {}
    if case.rows == "packed" and case.family in RECURRENT:
        parts = [
            model(input_ids=ids, use_cache=False).logits for ids in batch["input_ids"].split(sample_lengths(case.length), 1)
        ]
        logits = torch.cat(parts, 1)
        targets = shifted(batch["labels"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    else:
        out = model(**batch, use_cache=False, **extra)
        logits, loss = out.logits, out.loss
    if case.fused:
        scores = reference(logits, shifted(batch["labels"]), temperature)
        wanted = {"log_probs": scores.log_probs, "entropy": scores.entropy}
        # transformers' own loss does not know of the temperature
        count = (shifted(batch["labels"]) != -100).sum().clamp(min=1)
        aux = loss - _plain_loss(logits, batch["labels"]) if extra else 0.0
        loss = -scores.log_probs.sum() / count + aux
    else:
        wanted = {"logits": logits}
    objective(wanted, wanted.keys(), 1, 0, case, loss).backward()
    return wanted, loss.detach(), take(model)


def _plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted(labels).flatten())


def enter(case: Case, model: nn.Module, world: int, stack: contextlib.ExitStack) -> Any:
    sp = Ulysses(world, inputs="sharded" if case.sharded else "full", grad_reduction=case.reduction)
    others: dict[str, Any] = {"fused": "torch"} if case.fused else {}
    if "tiled" in case.call:
        others["tiled_mlp"] = 3
    if case.nesting == "one":
        return stack.enter_context(patched(model, sp=sp, **others))
    if case.nesting == "sp_outer":
        scope = stack.enter_context(patched(model, sp=sp))
        stack.enter_context(patched(model, **others))
        return scope
    stack.enter_context(patched(model, **others))
    return stack.enter_context(patched(model, sp=sp))


def outputs_of(case: Case, out: Any) -> dict[str, Tensor]:
    if case.fused:
        assert out.logits is None
        return {"log_probs": out.log_probs, "entropy": out.entropy}
    return {"logits": out.logits}


def objective(
    values: dict[str, Tensor], names: Iterable[str], world: int, rank: int, case: Case, loss: Tensor | None
) -> Tensor:
    """Every output enters with a weight of its own, and the loss. In a cut layout: this rank's share of it."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for name in names:
        x = values[name]
        shape = (case.batch, case.length, *x.shape[2:])
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights = weights * _counted(case, len(shape))
        if world > 1:
            size = x.shape[1]
            weights = weights[:, rank * size : (rank + 1) * size]
            x = x[:, : weights.shape[1]]
        total = total + (x.double().cpu() * weights).sum()
    return total if loss is None else total + 10 * loss.double().cpu()


def _counted(case: Case, ndim: int) -> Tensor:
    """[B, S, ..]: 0 at masked tokens of a cut layout. They see every token alike, and there padding counts among these."""
    mask = make_batch(case).get("attention_mask") if case.sharded and case.rows == "padded" else None
    counted = torch.ones(case.batch, case.length) if mask is None else mask
    return counted.reshape(case.batch, case.length, *(1,) * (ndim - 2))


def take(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.detach().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def reduced_gradients(model: nn.Module, world: int, how: str, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """As a trainer reduces them over the ranks."""
    found = take(model)
    device = group_device(group)
    for name, g in found.items():
        total = g.to(device)
        dist.all_reduce(total, group=group)
        found[name] = (total / world if how == "mean" else total).cpu()
    return found


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must be for the collectives of a group: NCCL takes none of the CPU's."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def relative(found: Tensor, right: Tensor) -> float:
    scale = right.abs().max().item()
    return (found.double() - right.double()).abs().max().item() / (scale or 1.0)


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """Which attribute of which module is which object, and what transformers' registries hold."""
    from transformers import masking_utils, modeling_utils

    registries = (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, modeling_utils.ALL_ATTENTION_FUNCTIONS)
    entries = [sorted((k, id(v)) for k, v in {**r._local_mapping}.items()) for r in registries]
    entries += [sorted((k, id(v)) for k, v in r._global_mapping.items()) for r in registries]
    # some multimodal models keep the last batch's rope_deltas
    attributes = [{k: id(v) for k, v in vars(m).items() if k != "rope_deltas"} for m in model.modules()]
    configs = [getattr(getattr(m, "config", None), "_attn_implementation", None) for m in model.modules()]
    return entries, attributes, configs
