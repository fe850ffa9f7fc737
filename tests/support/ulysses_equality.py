"""Sequence parallelism against one process, as numbers, on whatever the default group runs on: gloo or NCCL, CPU or GPU.

The tests over NCCL and the benchmark run this same code. With more ranks than share a sequence, the rest is data parallel.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from scoped_patch import Ulysses, patched
from scoped_patch.ops.sequence_parallel import count_collectives
from tests.support.scores import objective, unpatched
from tests.support.ulysses_cases import packed_positions, sample_lengths, told_lengths
from tests.tiny_models import build

#: of the largest entry of an output, and of the norm of a gradient; both sides in float32
EXACT = 1e-5
#: in bfloat16, distances from float32: ours is at most this many times that of one process, plus the second
FACTOR, MARGIN = 1.5, 2e-3

LAYERS, HEADS, HEAD_DIM = 2, 8, 64


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        family: a tiny model of that architecture, of `HEADS` heads.
        kv_heads: its key-value heads.
        rows: `plain`: two rows; `packed`: one row of three samples.
        attention: its implementation.
        dtype: `float32` or `bfloat16`.
        fsdp: FSDP2 over all ranks, with the fused head, tiles and activation checkpointing.
        length: tokens of a row; by default no multiple of any number of ranks.
    """

    family: str
    kv_heads: int
    rows: str = "plain"
    attention: str = "sdpa"
    dtype: str = "float32"
    fsdp: bool = False
    length: int = 61

    def __str__(self) -> str:
        parts = (self.family, f"{self.kv_heads} of {HEADS} KV heads", self.rows, self.attention, self.dtype)
        return ", ".join((*parts, *(("FSDP2, fused head, tiles, checkpoints",) if self.fsdp else ())))


@dataclass(frozen=True)
class Found:
    """What came of one setting on this rank.

    Attributes:
        outputs, gradients: the largest relative distance of any; in bfloat16 from float32.
        usual_outputs, usual_gradients: in bfloat16 those of one process; otherwise 0.
        problems: what is further off than it may be.
        bytes, formula: handed to the all-to-alls of a layer, forward and backward, as counted and as documented; None where
            layers are recomputed.
    """

    outputs: float
    gradients: float
    usual_outputs: float
    usual_gradients: float
    problems: tuple[str, ...]
    bytes: float | None
    formula: int | None


def settings(sp: int, device: torch.device, fsdp: bool = False) -> list[Setting]:
    """Llama and Qwen3, key-value heads below and above the ranks, plain and packed rows, every attention that can run."""
    kv_heads = sorted({max(1, sp // 2), min(HEADS, 2 * sp)})
    made = [
        Setting(family, kv, rows, "sdpa", dtype)
        for family, kv, rows, dtype in itertools.product(
            ("llama", "qwen3"), kv_heads, ("plain", "packed"), ("float32", "bfloat16")
        )
    ]
    if why_no_flash(device) is None:
        flash = [one for one in made if one.dtype == "bfloat16"]
        made += [replace(one, attention="flash_attention_4", length=301) for one in flash]
    if fsdp:
        sharded = [one for one in made if one.dtype == "float32" or one.attention != "sdpa"]
        made += [replace(one, fsdp=True) for one in sharded if one.kv_heads == kv_heads[0]]
    return made


def why_no_flash(device: torch.device) -> str | None:
    """Why flash_attention_4 cannot run here, or None."""
    if device.type != "cuda":
        return "flash_attention_4 needs a CUDA device"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "flash-attn-4 is not installed"
    return None


def make_mesh(sp: int, device: torch.device) -> DeviceMesh:
    """(dp, sp) over all ranks of the default group."""
    return init_device_mesh(device.type, (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp"))


def measure(setting: Setting, mesh: DeviceMesh, device: torch.device) -> Found:
    """Run one process's whole batch and this rank's part of it, and compare. Every rank calls this alike."""
    dp = mesh.size(0)
    batches = [_batch(setting, index, device) for index in range(dp)]
    usual = _plain(_model(setting, device), batches)
    right = usual
    if setting.dtype != "float32":
        exact = replace(setting, attention="sdpa")
        right = _plain(_model(exact, device).float(), [_without_lengths(batch) for batch in batches])
    found, sent = _spread(setting, _model(setting, device), mesh, batches[mesh.get_local_rank("dp")])
    mine = mesh.get_local_rank("dp")
    ours = _off(found, right, mine)
    theirs = _off(usual, right, mine) if right is not usual else dict.fromkeys(ours, 0.0)
    allowed = {name: EXACT if right is usual else FACTOR * far + MARGIN for name, far in theirs.items()}
    problems = tuple(
        f"{name} is off by {far:.1e}, allowed {allowed[name]:.1e}" for name, far in ours.items() if not far <= allowed[name]
    )
    formula = None if setting.fsdp else _formula(setting, mesh.size(1))
    return Found(*_worst(ours), *_worst(theirs), problems, None if setting.fsdp else sent, formula)


def problems(mesh: DeviceMesh, device: torch.device, chosen: Iterable[Setting]) -> list[str]:
    """One line for each setting that is off on this rank."""
    lines = []
    for setting in chosen:
        found = measure(setting, mesh, device)
        lines += [f"rank {dist.get_rank()}: {setting}: {problem}" for problem in found.problems]
        if found.bytes != found.formula:
            lines.append(f"rank {dist.get_rank()}: {setting}: {found.bytes} bytes a layer and not {found.formula}")
    return lines


@dataclass
class _Whole:
    """What one process computes of every data parallel rank's rows, and the gradients of their mean."""

    log_probs: list[Tensor]
    entropy: list[Tensor]
    gradients: dict[str, Tensor]


def _model(setting: Setting, device: torch.device) -> Any:
    model, _ = build(
        setting.family,
        attn=setting.attention,
        dtype=getattr(torch, setting.dtype),
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=setting.kv_heads,
        head_dim=HEAD_DIM,
        initializer_range=0.1,
    )
    return model.to(device)


def _batch(setting: Setting, index: int, device: torch.device) -> dict[str, Any]:
    rows = 1 if setting.rows == "packed" else 2
    generator = torch.Generator().manual_seed(17 + index)
    batch: dict[str, Any] = {"input_ids": torch.randint(3, 100, (rows, setting.length), generator=generator).to(device)}
    if setting.rows == "packed":
        batch["position_ids"] = packed_positions(setting.length).to(device)
        if "flash" in setting.attention:
            batch |= told_lengths(setting.length, device)
    targets = batch["input_ids"].roll(-1, 1)
    targets[:, -1] = -100
    if setting.rows == "packed":
        for end in itertools.accumulate(sample_lengths(setting.length)):
            targets[:, end - 1] = -100
    return {**batch, "shift_labels": targets}


def _without_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in batch.items() if name in ("input_ids", "position_ids", "shift_labels")}


def _plain(model: Any, batches: list[dict[str, Any]]) -> _Whole:
    scores = [unpatched(model, {**batch, "use_cache": False}) for batch in batches]
    torch.stack([objective(one) for one in scores]).mean().backward()
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters()}
    return _Whole([s.log_probs.detach().cpu() for s in scores], [s.entropy.detach().cpu() for s in scores], gradients)


def _spread(setting: Setting, model: Any, mesh: DeviceMesh, batch: dict[str, Any]) -> tuple[_Whole, float]:
    """This rank's outputs, the gradients of all ranks together, and the bytes of one layer's all-to-alls."""
    if setting.fsdp:
        everyone = init_device_mesh(mesh.device_type, (mesh.size(),))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in (*model.model.layers, model.lm_head, model):
            fully_shard(module, mesh=everyone)
    tiles = {"tiled_mlp": 3} if setting.fsdp else {}
    with patched(model, sp=Ulysses(mesh["sp"]), fused="torch", **tiles), count_collectives() as log:
        out = model(**batch, use_cache=False)
        objective(out).backward()
    gradients = {name: _averaged(p, setting.fsdp) for name, p in model.named_parameters()}
    sent = log.bytes("all_to_all") / LAYERS
    return _Whole([out.log_probs.detach().cpu()], [out.entropy.detach().cpu()], gradients), sent


def _averaged(parameter: nn.Parameter, sharded: bool) -> Tensor:
    grad: Any = parameter.grad
    if sharded:
        whole: Tensor = grad.full_tensor()
        return whole.float().cpu()
    total = grad.float()
    dist.all_reduce(total)
    return total.cpu() / dist.get_world_size()


def _off(found: _Whole, right: _Whole, mine: int) -> dict[str, float]:
    """Of outputs the largest difference; of gradients the norm of it, for small ones against the largest of all."""
    made = {}
    for name in ("log_probs", "entropy"):
        ours, wanted = getattr(found, name), getattr(right, name)[mine].double()
        ours = ours[mine if len(ours) > mine else 0].double()
        made[name] = float((ours - wanted).abs().max() / wanted.abs().max())
    assert found.gradients.keys() == right.gradients.keys()
    largest = max(float(g.norm()) for g in right.gradients.values())
    for name, wanted in right.gradients.items():
        difference = float((found.gradients[name].double() - wanted.double()).norm())
        made[name] = difference / max(float(wanted.norm()), 1e-3 * largest)
    return made


def _worst(off: dict[str, float]) -> tuple[float, float]:
    outputs = ("log_probs", "entropy")
    return max(off[name] for name in outputs), max(far for name, far in off.items() if name not in outputs)


def _formula(setting: Setting, sp: int) -> int:
    """As docs/ulysses.md has it: twice `B * ceil(S/n) * (H + 2 * n * k) * D` and `B * ceil(S/n) * H * D` elements."""
    if sp == 1:
        return 0
    k = setting.kv_heads // sp if setting.kv_heads % sp == 0 else 1
    tokens = (1 if setting.rows == "packed" else 2) * -(-setting.length // sp)
    elements = tokens * HEAD_DIM * ((HEADS + 2 * sp * k) + HEADS)
    return 2 * elements * getattr(torch, setting.dtype).itemsize
