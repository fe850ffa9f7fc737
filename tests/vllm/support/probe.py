"""Run one vLLM version, as far as a CPU lets it: are the targets found, is a layer-level reload exact and in place?

Run by `tests/vllm/probe_versions.py`, in a process that has that version on its path. The real model class is built without
an engine, which works even where the version's C extension does not load under the installed torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import checkpoints, engine
from .addresses import addresses
from .kernels import cpu_kernels, version
from .protocol import moved, process, without_router

import torch  # isort: skip  (after the environment is set)


def build(path: Path) -> torch.nn.Module:
    return build_with_config(path)[0]


def build_with_config(path: Path) -> tuple[torch.nn.Module, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    for name in ("silu_and_mul", "rotary_embedding", "rms_norm", "fused_add_rms_norm"):
        if not hasattr(torch.ops._C, name):
            setattr(torch.ops._C, name, None)  # never called here
    config = EngineArgs(
        model=str(path), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16"
    ).create_engine_config()
    stack = contextlib.ExitStack()
    stack.enter_context(set_current_vllm_config(config))
    _stacks.append(stack)
    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
    ensure_model_parallel_initialized(1, 1, backend="gloo")
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = initialize_model(vllm_config=config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_weights(iter(checkpoints.read(path).items()))
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model, config


_stacks: list[contextlib.ExitStack] = []


def references(state: checkpoints.State) -> Iterator[tuple[str, torch.Tensor]]:
    """float32 weights of vLLM's linear layers, fused as it fuses them."""
    plain = checkpoints.dequantize(state)
    for name in plain:
        base, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf == "q_proj":
            yield f"{base}.qkv_proj", torch.cat([plain[f"{base}.{n}.weight"] for n in ("q_proj", "k_proj", "v_proj")])
        elif leaf == "gate_proj" and ".experts." not in name:
            yield f"{base}.gate_up_proj", torch.cat([plain[f"{base}.{n}.weight"] for n in ("gate_proj", "up_proj")])
        elif leaf in ("o_proj", "down_proj") and ".experts." not in name:
            yield f"{base}.{leaf}", plain[name]


def error(model: torch.nn.Module, state: checkpoints.State) -> float:
    worst = 0.0
    for name, weight in references(state):
        x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        out = model.get_submodule(name)(x)
        out = (out[0] if isinstance(out, tuple) else out).float()
        want = x.float() @ weight.t()
        worst = max(worst, float((out - want).norm() / want.norm()))
    return worst


def kernel_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from .addresses import contents_of

    skipped = ("workspace", "handler_tensor")  # scratch, and a pointer
    return {k: t.clone() for k, t in contents_of(model).items() if not t.is_meta and not k.endswith(skipped)}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return [k for k in a if k not in b or not torch.equal(raw(a[k]), raw(b[k]))]


def _unread(path: str) -> bool:
    """Activation scales, which a weight-only scheme never reads, are whatever was in memory."""
    return "input" in path or "a13" in path or "a2_" in path


def probe(kind: str, scheme: str, root: Path) -> dict[str, Any]:
    from scoped_patch.vllm import IncompleteReload, reload_weights

    made = [checkpoints.write(root, kind, scheme, seed) for seed in (0, 1)]
    model = build(made[0][0])
    fresh = kernel_state(build(made[1][0]))
    first, before = kernel_state(model), addresses(model)
    out: dict[str, Any] = {"load": round(error(model, made[0][1]), 4)}
    for atomic in ("model", "layer"):
        for seed in (1, 0):
            with reload_weights(model, atomic=atomic) as update:
                update.load(made[seed][1].items())
            want = fresh if seed else first
            wrong = [k for k in differing(want, kernel_state(model)) if not _unread(k)]
            out[f"{atomic}-{seed}"] = {"error": round(error(model, made[seed][1]), 4), "unlike a fresh load": wrong[:3]}
    part = [(n, t) for n, t in made[1][1].items() if "layers.0.self_attn.k_proj" not in n]
    try:
        with reload_weights(model) as update:
            update.load(part)
    except IncompleteReload as caught:
        out["incomplete"] = sorted(caught.missing)
    out["changed by a refused update"] = [k for k in differing(first, kernel_state(model)) if "input" not in k][:3]
    after = addresses(model)
    out["moved"] = [k for k, v in before.items() if after.get(k) != v][:3]
    return out


def probe_targets(kind: str, scheme: str, root: Path) -> dict[str, Any]:
    """The older protocol under the target patches: prepare, load, process, three times."""
    from scoped_patch import patched
    from scoped_patch.vllm import ParamMeta

    (path, first), (other, second) = (checkpoints.write(root, kind, scheme, seed) for seed in (0, 1))
    routers = {n: t for n, t in first.items() if n.endswith("mlp.gate.weight")}
    checkpoints.replace(other, second | routers)
    states = [first, second | routers]
    out: dict[str, Any] = {"unlike a fresh load": [], "moved": []}
    with patched(qat="nvfp4"):
        model = build(path)
        fresh = [kernel_state(model), kernel_state(build(other))]
        before = addresses(model)
        for seed in (1, 0, 1):
            ParamMeta(model).prepare()
            model.load_weights(without_router(states[seed]))  # type: ignore[operator]
            process(model)
            wrong = [k for k in differing(fresh[seed], kernel_state(model)) if not _unread(k)]
            out["unlike a fresh load"] += wrong[:3]
            out["moved"] += moved(before, addresses(model))[:3]
            out[f"error-{seed}"] = round(error(model, states[seed]), 4)
    return out


def main(kinds: list[str]) -> None:
    from scoped_patch.vllm import qat_targets

    if version() < (0, 20):
        os.environ["VLLM_USE_FLASHINFER_MOE_FP4"] = "0"  # it would import flashinfer only to find that it is not for CPUs
    result: dict[str, Any] = {"version": ".".join(map(str, version())), "targets": {}}
    for patch in qat_targets("nvfp4"):
        found = patch._find()  # type: ignore[attr-defined]
        result["targets"][patch.name] = found if isinstance(found, str) else f"{found.path.partition(':')[2]} ({found.mode})"
    with cpu_kernels(), tempfile.TemporaryDirectory() as root:
        for kind in kinds:
            try:
                result[kind] = probe(*kind.split("-"), Path(root))
            except Exception as problem:
                result[kind] = f"{type(problem).__name__}: {str(problem)[:400]}"
            try:
                result[f"targets {kind}"] = probe_targets(*kind.split("-"), Path(root))
            except Exception as problem:
                result[f"targets {kind}"] = f"{type(problem).__name__}: {str(problem)[:400]}"
    sys.stdout.write("PROBE " + json.dumps(result) + "\n")


if __name__ == "__main__":
    assert engine.PROMPT
    main(sys.argv[1:] or ["moe-w4a16", "dense-w4a16", "dense-w4a4"])
