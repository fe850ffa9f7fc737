"""One sequence-parallel run against one process: outputs, loss and the gradient of every parameter, on every rank."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scoped_patch import Ulysses, assert_clean, patched
from scoped_patch.ops.sequence_parallel import count_collectives
from tests.support import fake_flash
from tests.support.scores import reference, shifted
from tests.tiny_models import build

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "deepseek_v3",
    "apertus",
)
#: families with a recurrence; upstream it runs on through packed samples, so their reference is sample by sample
RECURRENT = ("qwen3_5_text", "kimi_linear")
#: families without router logits of their own are not asked for an auxiliary loss
WITH_ROUTER = ("qwen3_moe", "gpt_oss")
NO_SDPA = ("gpt_oss",)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        ranks: how many share a sequence.
        family, attention: a tiny model and its attention implementation (`flash` is the stand-in).
        batch, length: of the input ids.
        rows: `plain`; `padded` on the left in the last row; `packed` position ids; `masked` by a custom 4-D mask.
        call: `logits`; `fused`; `sharded` (cut inputs and outputs); `sharded_fused`; with `tiled` also in tiles.
        reduction: what is done with the gradients of all ranks.
        checkpoint: None, `reentrant` or `nonreentrant` activation checkpointing.
        nesting: `one` call of patched(), or two scopes: `sp_outer`, `sp_inner`.
    """

    family: str
    attention: str = "sdpa"
    batch: int = 1
    length: int = 32
    rows: str = "plain"
    call: str = "logits"
    reduction: str = "mean"
    checkpoint: str | None = None
    nesting: str = "one"
    ranks: int = 2

    def __str__(self) -> str:
        parts = [self.family, self.attention, f"{self.batch}x{self.length}", self.rows, self.call, self.reduction]
        parts += [f"{self.checkpoint} checkpoints"] if self.checkpoint else []
        return " ".join([*parts, self.nesting])

    @property
    def fused(self) -> bool:
        return "fused" in self.call or "tiled" in self.call

    @property
    def sharded(self) -> bool:
        return self.call.startswith("sharded")


def possible(case: Case) -> bool:
    """Is there such a run? transformers, or the layout, rules some combinations out."""
    if case.attention == "sdpa" and case.family in NO_SDPA:
        return False
    if case.attention == "flash" and (case.rows == "masked" or case.family in ("gemma4_text", *RECURRENT)):
        return False
    if case.rows == "masked" and case.family in (*RECURRENT, *WITH_ROUTER):
        return False  # no padding to tell a recurrence or an auxiliary loss of
    if case.rows == "packed" and (case.length < 8 or case.family in NO_SDPA):
        return False  # this eager family leaks across packed samples upstream
    if case.attention == "flash" and case.rows == "packed" and case.batch != 1:
        return False
    if case.rows == "padded" and case.length < 8:
        return False
    if case.call == "sharded" and case.nesting != "one":
        return False
    return not (case.call == "logits" and case.nesting != "one")


def run_cases(rank: int, world: int, cases: Iterable[Case]) -> list[str]:
    """Run every case; one line per failure. Ranks stay in step: a case that raises on one is not waited for."""
    import transformers

    transformers.logging.set_verbosity_error()
    failures = []
    for case in cases:
        try:
            run_case(case, rank, world)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().splitlines()
            failures.append(f"rank {rank} of {world}: {case}: {type(error).__name__}: {text[0] if text else ''} ({where.name})")
            dist.barrier()
            continue
        dist.barrier()
    return failures


def run_case(case: Case, rank: int, world: int, **limits: float) -> Counter[str]:
    """Raise unless the case equals one process; returns how many collectives of each kind its forward made."""
    model, _ = build(case.family, attn="eager" if case.attention == "flash" else case.attention)
    with contextlib.ExitStack() as stack:
        if case.attention == "flash":
            fake_flash.use_flash(model)
            stack.enter_context(fake_flash.installed())
        return _compare(case, model, rank, world, **limits)


def _compare(case: Case, model: nn.Module, rank: int, world: int, rtol: float = 1e-4) -> Counter[str]:
    batch = make_batch(case)
    temperature = torch.rand(case.batch, case.length, generator=torch.Generator().manual_seed(9)) + 0.5
    if case.checkpoint:
        _enable_checkpointing(model, case.checkpoint == "reentrant")
        model.enable_input_require_grads()

    wanted, wanted_loss, wanted_gradients = one_process(case, model, batch, temperature)
    before = snapshot(model)
    with count_collectives() as log, contextlib.ExitStack() as stack:
        scope = enter(case, model, world, stack)
        inputs = scope.shard({**batch, "temperature": temperature}) if case.sharded else {**batch, "temperature": temperature}
        if not case.fused:
            inputs.pop("temperature")
        if case.family in WITH_ROUTER:
            inputs["output_router_logits"] = True
        out = model(**inputs)
        forward = Counter(kind for kind, _ in log.calls)
        found = outputs_of(case, out, inputs, temperature, scope)
        objective(found, wanted.keys(), world if case.sharded else 1, rank, case, out.loss).backward()
    assert_clean()
    assert snapshot(model) == before, "the model is not as it was"

    for name, right in wanted.items():
        ours = found[name].detach()
        whole = scope_gather(scope, ours, case) if case.sharded else ours
        assert whole.shape == right.shape, f"{name} is {list(whole.shape)}, wanted {list(right.shape)}"
        counted = _counted(case, whole.ndim)
        off = relative(whole * counted, right.detach() * counted)
        assert off <= rtol, f"{name} is off by {off:.1e}"
    if out.loss is not None:
        padding_counts = case.sharded and case.family in WITH_ROUTER and case.length % world
        assert relative(out.loss, wanted_loss) <= (1e-2 if padding_counts else rtol), f"loss {out.loss} and not {wanted_loss}"
        rtol = 1e-2 if padding_counts else rtol
    gradients = reduced_gradients(model, world, case.reduction)
    assert gradients.keys() == wanted_gradients.keys(), sorted(gradients.keys() ^ wanted_gradients.keys())
    largest = max(g.abs().max().item() for g in wanted_gradients.values())
    for name, right in wanted_gradients.items():
        scale = max(right.abs().max().item(), 1e-3 * largest)
        off = (gradients[name] - right).abs().max().item() / scale if scale else 0.0
        assert off <= rtol, f"the gradient of {name} is off by {off:.1e}"
    return forward


def _enable_checkpointing(model: Any, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in the newest transformers
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def make_batch(case: Case) -> dict[str, Tensor]:
    """The same on every rank; labels leave out the first third."""
    generator = torch.Generator().manual_seed(case.length + case.batch)
    ids = torch.randint(3, 100, (case.batch, case.length), generator=generator)
    labels = ids.clone()
    labels[:, : case.length // 3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if case.rows == "padded":
        mask = torch.ones_like(ids)
        mask[-1, : case.length // 5] = 0
        batch["attention_mask"] = mask
        batch["labels"] = labels.masked_fill(mask == 0, -100)
    elif case.rows == "packed":
        batch["position_ids"] = packed_positions(case.length).expand(case.batch, -1).contiguous()
    elif case.rows == "masked":
        seen = torch.ones(case.length, case.length, dtype=torch.bool).tril()
        seen[:, 1] = False  # nobody but itself looks at the second token
        seen.fill_diagonal_(True)
        seen = seen.expand(case.batch, 1, -1, -1)
        additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        batch["attention_mask"] = seen if case.attention == "sdpa" else additive
    return batch


def sample_lengths(length: int) -> list[int]:
    return [length // 3, length - length // 3 - 2, 2]


def packed_positions(length: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in sample_lengths(length)])[None]


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


def outputs_of(case: Case, out: Any, inputs: dict[str, Any], temperature: Tensor, scope: Any) -> dict[str, Tensor]:
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
        total = total + (x.double() * weights).sum()
    return total if loss is None else total + 10 * loss.double()


def _counted(case: Case, ndim: int) -> Tensor:
    """[B, S, ..]: 0 at masked tokens of a cut layout. They see every token alike, and there padding counts among these."""
    mask = make_batch(case).get("attention_mask") if case.sharded and case.rows == "padded" else None
    counted = torch.ones(case.batch, case.length) if mask is None else mask
    return counted.reshape(case.batch, case.length, *(1,) * (ndim - 2))


def scope_gather(scope: Any, x: Tensor, case: Case) -> Tensor:
    return scope.gather(x, 1, case.length)


def take(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def reduced_gradients(model: nn.Module, world: int, how: str) -> dict[str, Tensor]:
    """As a trainer reduces them over the ranks."""
    found = take(model)
    for g in found.values():
        dist.all_reduce(g)
        if how == "mean":
            g /= world
    return found


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


def pairwise(axes: dict[str, tuple[Any, ...]], base: Case) -> list[Case]:
    """Cases in which every possible pair of two axes' values occurs at least once. Greedy and deterministic."""
    import itertools
    import random

    names = list(axes)
    pairs: set[tuple[tuple[str, Any], tuple[str, Any]]] = set()
    for a, b in itertools.combinations(names, 2):
        pairs |= {((a, x), (b, y)) for x in axes[a] for y in axes[b]}
    generator = random.Random(0)
    chosen: list[Case] = []
    missed: set[Any] = set()
    while pairs:
        first = min(pairs, key=repr)
        best: Case | None = None
        best_gain: set[Any] = set()
        for _ in range(120):
            values = {name: generator.choice(axes[name]) for name in names}
            values |= dict(first)
            case = replace(base, **values)
            if not possible(case):
                continue
            gain = {p for p in pairs if all(values[name] == value for name, value in p)}
            if len(gain) > len(best_gain):
                best, best_gain = case, gain
        if best is None:
            missed.add(first)
            pairs.discard(first)
            continue
        chosen.append(best)
        pairs -= best_gain
    return chosen
