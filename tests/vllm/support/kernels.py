"""CPU stand-ins for the operators that vLLM's NVFP4 kernels have on CUDA only. The classes around them are the real ones.

Marlin's weight and scale layouts are kept bit for bit (the repack and its inverse are written out here), so that a reload
has the same work to do as on a GPU: tensors change name, shape and dtype when a layer is processed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6.0])
NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)
MISSING = object()
_libraries: list[torch.library.Library] = []


@functools.cache
def weight_order() -> tuple[torch.Tensor, torch.Tensor]:
    """Marlin's order of the 1024 values of a tile of 16 x 64, and its inverse."""
    order: list[int] = []
    for lane in range(32):
        rows = [2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1]
        first = [16 * row + lane // 4 + 8 * half for half in (0, 1) for row in rows]
        for block in range(4):
            order += [at + 256 * block for at in first]
    out = torch.tensor(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    return out, torch.argsort(out)


def repack(
    b_q_weight: torch.Tensor,
    perm: torch.Tensor | None = None,
    size_k: int = 0,
    size_n: int = 0,
    num_bits: int = 4,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    """`gptq_marlin_repack` for 4 bits without act-order: int32 [K/8, N] -> int32 [K/16, 2N]."""
    assert num_bits == 4
    assert not is_a_8bit
    codes = ((b_q_weight.unsqueeze(1) >> NIBBLES[None, :, None]) & 15).reshape(size_k, size_n)
    tiles = codes.reshape(size_k // 16, 16, size_n // 16, 16).permute(0, 2, 1, 3).reshape(-1, 1024)
    words = tiles[:, weight_order()[0]].reshape(size_k // 16, size_n * 2, 8).long() << NIBBLES
    total = words.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def unpack(packed: torch.Tensor, size_k: int, size_n: int) -> torch.Tensor:
    codes = ((packed.unsqueeze(-1) >> NIBBLES) & 15).reshape(-1, 1024)[:, weight_order()[1]]
    return codes.reshape(size_k // 16, size_n // 16, 16, 16).permute(0, 2, 1, 3).reshape(size_k, size_n)


def unpack_scale(scale: torch.Tensor, size_k: int, size_n: int) -> torch.Tensor:
    """The inverse of Marlin's permutation and S0E5M3 coding: [K/16, N], times 2**7 and the layer's own factor."""
    half = (scale.view(torch.uint8).to(torch.int32) << 7).to(torch.int16).view(torch.half)
    half = half.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(half.shape[0], -1)
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = torch.tensor(grouped if size_k > 16 else single)
    return half.reshape(-1, len(order))[:, torch.argsort(order)].reshape(-1, size_n)


def dequantized(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, size_k: int, size_n: int, dtype: torch.dtype
) -> torch.Tensor:
    """float32 [K, N]."""
    bias = 126 if dtype == torch.bfloat16 else 14
    steps = unpack_scale(scale, size_k, size_n).float().repeat_interleave(16, 0)
    return E2M1[unpack(packed, size_k, size_n).long()] * steps * (global_scale.float() * 2.0**-bias)


def marlin_gemm(
    a: torch.Tensor,
    c: Any = None,
    b_q_weight: Any = None,
    b_bias: Any = None,
    b_scales: Any = None,
    a_scales: Any = None,
    global_scale: Any = None,
    *rest: Any,
    **sizes: Any,
) -> torch.Tensor:
    weight = dequantized(b_q_weight, b_scales, global_scale, sizes["size_k"], sizes["size_n"], a.dtype)
    out = a.float() @ weight
    return (out if b_bias is None else out + b_bias.float()).to(a.dtype)


def marlin_experts_apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: Any,
    *rest: Any,
    **more: Any,
) -> None:
    size, inner = hidden_states.shape[-1], w1.shape[2] // 2
    x, out = hidden_states.float(), torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        chosen = topk_ids == expert
        rows = chosen.any(-1).nonzero()[:, 0]
        if not len(rows):
            continue
        args = self.w1_scale[expert], self.g1_alphas[expert]
        gate, up = (x[rows] @ dequantized(w1[expert], *args, size, inner, hidden_states.dtype)).chunk(2, -1)
        args = self.w2_scale[expert], self.g2_alphas[expert]
        down = dequantized(w2[expert], *args, inner // 2, size, hidden_states.dtype)
        share = (topk_weights * chosen)[rows].sum(-1, keepdim=True).float()
        out[rows] += (torch.nn.functional.silu(gate) * up) @ down * share
    output.copy_(out.to(output.dtype))


@contextlib.contextmanager
def cpu_kernels(w4a4: str = "emulation") -> Iterator[None]:
    """Let NVFP4 layers be built and run on CPU, in any version from 0.18 to 0.32.

    Args:
        w4a4: the kernel that W4A4 linear layers get, "emulation" or "marlin". W4A16 and MoE layers get Marlin.
    """
    log: list[tuple[Any, Any, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        if isinstance(owner, str):
            try:
                owner = importlib.import_module(owner)
            except ImportError:
                return
        if hasattr(owner, name):
            log.append((owner, name, vars(owner).get(name, MISSING)))
            setattr(owner, name, value)

    def always(*args: Any, **kwargs: Any) -> bool:
        return True

    def never(*args: Any, **kwargs: Any) -> bool:
        return False

    def workspace(device: Any, max_blocks_per_sm: int = 1, existing: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.int32, device=device) if existing is None else existing

    utils = "vllm.model_executor.layers.quantization.utils."
    for name, value in (("gptq_marlin_repack", repack), ("marlin_gemm", marlin_gemm), ("gptq_marlin_gemm", marlin_gemm)):
        put("vllm._custom_ops", name, value)
    for module in ("marlin_utils_fp4", "nvfp4_utils"):
        put(utils + module, "is_fp4_marlin_supported", always)
    put("vllm.model_executor.kernels.linear.nvfp4.marlin", "is_fp4_marlin_supported", always)
    for module in ("marlin_utils", "marlin_utils_fp4"):
        put(utils + module, "marlin_make_workspace_new", workspace)
    put(utils + "marlin_utils_fp4", "should_use_atomic_add_reduce", never)
    put(utils + "humming.priority", "prefers_humming", never)
    if version() >= (0, 31):
        _define_marlin_operator()
    experts = _experts_class()
    if experts is not None:
        put(experts, "_supports_current_device", staticmethod(always))
        put(experts, "apply", marlin_experts_apply)
    table, before = _kernel_table(w4a4)
    try:
        yield
    finally:
        for owner, name, value in reversed(log):
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for platform, kernels in before:
            table[platform] = kernels


def version() -> tuple[int, int]:
    import vllm

    major, minor = vllm.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _experts_class() -> Any:
    for path in (
        "vllm.model_executor.layers.fused_moe.experts.marlin_moe",
        "vllm.model_executor.layers.fused_moe.fused_marlin_moe",
    ):
        with contextlib.suppress(ImportError):
            return importlib.import_module(path).MarlinExperts
    return None


def _kernel_table(w4a4: str) -> tuple[dict[Any, Any], list[tuple[Any, Any]]]:
    try:
        from vllm.model_executor.kernels.linear import _POSSIBLE_NVFP4_KERNELS as table
        from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
        from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
        from vllm.platforms import PlatformEnum
    except ImportError:  # before 0.20 the scheme itself chooses
        return {}, []
    before = [(PlatformEnum.CPU, table.get(PlatformEnum.CPU))]
    kernels: list[Callable[..., Any]] = [EmulationNvFp4LinearKernel, MarlinNvFp4LinearKernel]
    table[PlatformEnum.CPU] = kernels if w4a4 == "emulation" else kernels[::-1]
    return table, before


def _define_marlin_operator() -> None:
    """From 0.31 layers call `torch.ops._C.marlin_gemm`; an operator cannot be undefined, so this one stays."""
    if hasattr(torch.ops._C, "marlin_gemm"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "marlin_gemm(Tensor a, Tensor? c, Tensor w, Tensor? bias, Tensor s, Tensor? as_, Tensor? g, Tensor? z, Tensor ws, "
        "int tid, int m, int n, int k, bool aa, bool fr, bool zf) -> Tensor"
    )

    def run(*args: Any) -> torch.Tensor:
        a, _, w, bias, s, _, g = args[:7]
        return marlin_gemm(a, None, w, bias, s, None, g, size_n=args[11], size_k=args[12])

    library.impl("marlin_gemm", run, "CompositeExplicitAutograd")
    _libraries.append(library)
