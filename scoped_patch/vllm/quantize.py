"""bf16 training weights to NVFP4 checkpoint tensors, one layer at a time: what a rollout engine is updated with.

The numbers are those of the compressed-tensors package (`nvfp4-pack-quantized`), which vLLM reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from ..engine.errors import BadOptionError, UnsupportedError
from ..ops.group_devices import largest_in_group
from ..ops.nvfp4 import BLOCK, FUSED

_ROWS = 1024  # packed at a time: packing needs 36 bytes for every weight
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")

Pairs = Iterator[tuple[str, torch.Tensor]]


def quantize_state_dict(
    model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor],
    scheme: Literal["w4a16", "w4a4"] = "w4a16",
    *,
    select: Callable[[str], bool] | None = None,
    input_global_scales: Mapping[str, torch.Tensor | float] | float | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Pairs:
    """Yield named NVFP4 tensors, ready for `update.load`, holding one layer's worth at a time.

    A selected weight [out, in] becomes `weight_packed` uint8 [out, in / 2], `weight_scale` float8_e4m3fn [out, in / 16],
    `weight_global_scale` float32 [1] and, with "w4a4", `input_global_scale` float32 [1]. Shards that vLLM fuses (q, k, v;
    gate, up) share a global scale. Experts stored as one 3-D parameter come out one by one, as checkpoints name them.
    Everything else is handed through.

    Args:
        model_or_state_dict: whole (gathered) weights, by checkpoint name.
        scheme: "w4a16" or "w4a4".
        select: which weights to quantise, by module name; by default every linear layer named `*_proj`.
        input_global_scales: for "w4a4": 448 * 6 / (largest activation), by module name or one for all. Fused shards read
            the same input and must have the same one.
        process_group: for weights that are shards of a tensor-parallel layer: the global scale is agreed over this group,
            so that the codes are those of the unsharded weight.

    Raises:
        BadOptionError: an input scale is missing or not positive, or an input size is no multiple of 16.
        UnsupportedError: compressed-tensors is not installed.
    """
    if scheme not in ("w4a16", "w4a4"):
        raise BadOptionError(f'scheme={scheme!r}: must be "w4a16" or "w4a4"')
    state = model_or_state_dict.state_dict() if isinstance(model_or_state_dict, torch.nn.Module) else model_or_state_dict
    chosen = select or (lambda name: name.rpartition(".")[2].endswith("_proj"))
    return _Quantizer(state, scheme, chosen, input_global_scales, process_group).run()


class _Quantizer:
    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        scheme: str,
        chosen: Callable[[str], bool],
        input_scales: Mapping[str, torch.Tensor | float] | float | None,
        group: torch.distributed.ProcessGroup | None,
    ) -> None:
        try:
            from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
            from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
        except ImportError as error:
            raise UnsupportedError(
                'quantize_state_dict needs compressed-tensors 0.15 or later: pip install "scoped-patch[qat]" '
                f"({error.name or error} was not found)"
            ) from error
        self._compressor: Any = NVFP4PackedCompressor
        self._preset: Any = preset_name_to_scheme("NVFP4A16" if scheme == "w4a16" else "NVFP4", ["Linear"])
        self._state, self._scheme, self._chosen = state, scheme, chosen
        self._input_scales, self._group = input_scales, group

    @torch.no_grad()
    def run(self) -> Pairs:
        done: set[str] = set()
        for name in self._state:
            if name in done:
                continue
            experts = _EXPERTS.match(name)
            if experts and self._state[name].dim() == 3 and self._chosen(name):
                done.update((f"{experts[1]}.gate_up_proj", f"{experts[1]}.down_proj"))
                yield from self._experts(experts[1])
                continue
            base = name.removesuffix(".weight")
            if base == name or not self._chosen(base) or self._state[name].dim() != 2:
                yield name, self._state[name].detach()
                continue
            group = [n for n in self._siblings(base) if f"{n}.weight" in self._state]
            done.update(f"{n}.weight" for n in group)
            yield from self._together({n: self._state[f"{n}.weight"] for n in group})

    def _siblings(self, base: str) -> list[str]:
        parent, _, leaf = base.rpartition(".")
        fused = next((names for names in FUSED if leaf in names), (leaf,))
        return [f"{parent}.{other}" if parent else other for other in fused]

    def _experts(self, prefix: str) -> Pairs:
        """[experts, 2 * inner, hidden] and [experts, hidden, inner], or both transposed, to one name per expert."""
        for name in (f"{prefix}.gate_up_proj", f"{prefix}.down_proj"):
            if name not in self._state:
                raise BadOptionError(f"{prefix}: {name} is not in the state dict; experts are split with both of their weights")
        gate_up, down = self._state[f"{prefix}.gate_up_proj"], self._state[f"{prefix}.down_proj"]
        if gate_up.shape[1] != 2 * down.shape[2]:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        if gate_up.shape[1] != 2 * down.shape[2] or gate_up.shape[2] != down.shape[1]:
            raise BadOptionError(
                f"{prefix}: gate_up_proj {tuple(gate_up.shape)} and down_proj {tuple(down.shape)} do not fit together"
            )
        for expert in range(gate_up.shape[0]):
            gate, up = gate_up[expert].chunk(2)
            yield from self._together({f"{prefix}.{expert}.gate_proj": gate, f"{prefix}.{expert}.up_proj": up})
            yield from self._together({f"{prefix}.{expert}.down_proj": down[expert]})

    def _together(self, weights: dict[str, torch.Tensor]) -> Pairs:
        """Quantise weights that share a global scale."""
        from compressed_tensors.quantization.utils import generate_gparam

        for name, weight in weights.items():
            if weight.shape[1] % BLOCK:
                raise BadOptionError(f"{name}: its input size {weight.shape[1]} is no multiple of {BLOCK}; do not select it")
        top = torch.stack(
            [w.detach().abs().amax().float() if w.numel() else w.new_zeros((), dtype=torch.float32) for w in weights.values()]
        ).amax()
        if self._group is not None:
            top = largest_in_group(top, self._group)
        global_scale = generate_gparam(-top, top)
        input_scale = self._input_scale(list(weights)) if self._scheme == "w4a4" else None
        for name, weight in weights.items():
            packed, scale = self._pack(weight.detach(), global_scale)
            yield f"{name}.weight_packed", packed
            yield f"{name}.weight_scale", scale
            yield f"{name}.weight_global_scale", global_scale.clone()
            if input_scale is not None:
                yield f"{name}.input_global_scale", input_scale.clone()

    def _pack(self, weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from compressed_tensors.quantization.utils import calculate_qparams

        parts = []
        for start in range(0, weight.shape[0], _ROWS):
            rows = weight[start : start + _ROWS]
            values = rows.float()
            blocks = values.unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
            low, high = blocks.amin(-1), blocks.amax(-1)
            scale, _ = calculate_qparams(low, high, self._preset.weights, global_scale)
            # Its cast is marked for torch.compile: that wants a C++ compiler on CPU, takes seconds, and leaves compiled
            # code behind in a training process.
            with torch.compiler.set_stance("force_eager"):
                out = self._compressor.compress(
                    {"weight": values, "weight_scale": scale.float(), "weight_global_scale": global_scale}, self._preset
                )
            parts.append((out["weight_packed"], out["weight_scale"].to(torch.float8_e4m3fn)))
        packed, scales = zip(*parts, strict=True)
        return torch.cat(packed), torch.cat([s.view(torch.uint8) for s in scales]).view(torch.float8_e4m3fn)

    def _input_scale(self, names: list[str]) -> torch.Tensor:
        given = self._input_scales
        found: dict[str, torch.Tensor | float | None] = {
            name: given.get(name) if isinstance(given, Mapping) else given for name in names
        }
        absent = [name for name, value in found.items() if value is None]
        if absent:
            raise BadOptionError(
                f"{absent[0]}: scheme='w4a4' needs its input_global_scale (448 * 6 / largest activation); pass "
                "input_global_scales={module name: scale} or one number for all layers"
            )
        values = [torch.as_tensor(value, dtype=torch.float32).reshape(1) for value in found.values()]
        if any(not torch.equal(value, values[0]) for value in values):
            raise BadOptionError(f"{', '.join(names)} read the same input, but have different input_global_scales")
        if not bool(values[0].isfinite().all() and (values[0] > 0).all()):
            raise BadOptionError(f"{names[0]}: input_global_scale {values[0].item()} must be positive and finite")
        return values[0]
