"""Stand-ins for packages that the migration page shows and tests do not install: verl, Liger and vLLM, by their signatures.

What they do is the least that their callers see: verl's and Liger's functions change the model's *class*, and cannot undo
it; vLLM's NVFP4 scheme renames a parameter when it processes a layer, and loses its loader.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.scores import reference, shifted

_VLLM = "vllm.model_executor.layers.quantization.compressed_tensors"


# ------------------------------------------------------------------------------------------------- verl, Liger
def apply_monkey_patch(
    model: Any,
    ulysses_sp_size: int = 1,
    use_remove_padding: bool = True,
    use_fused_kernels: bool = False,
    fused_kernels_backend: str | None = None,
    use_prefix_grouper: bool = False,
    use_tiled_mlp: bool = False,
    tiled_mlp_shards: int = 4,
) -> None:
    """verl's: the class of the model is given another forward, for good."""
    original = type(model).forward

    def forward_with_torch_backend(
        self: Any, input_ids: Any = None, temperature: float = 1.0, shift_labels: Any = None, **kwargs: Any
    ) -> Any:
        out = original(self, input_ids=input_ids, **{k: v for k, v in kwargs.items() if k != "return_dict"})
        scores = reference(out.logits, shifted(input_ids) if shift_labels is None else shift_labels, temperature)
        return types.SimpleNamespace(log_probs=scores.log_probs.float(), entropy=scores.entropy.float(), logits=None)

    if use_fused_kernels:
        type(model).forward = forward_with_torch_backend


def apply_qat_patches() -> list[Any]:
    """verl's: a list of started `mock.patch` objects."""
    return []


def prepare_qat_for_load_weights(model: Any, device: Any = None) -> dict[str, Any]:
    return {}


def manual_process_weights_after_loading(model: Any) -> int:
    return 0


def apply_liger_kernel_to_qwen3(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Any = None,
) -> None:
    """Liger's: without a model the classes of the family are changed."""
    from transformers.models.qwen3 import modeling_qwen3

    original = modeling_qwen3.Qwen3MLP.forward

    def liger_forward(self: Any, x: Tensor) -> Tensor:
        return original(self, x)

    if swiglu:
        modeling_qwen3.Qwen3MLP.forward = liger_forward


# ------------------------------------------------------------------------------------------------- vLLM
class CompressedTensorsW4A4Fp4:
    def __init__(self, use_a16: bool = False) -> None:
        self.use_a16 = use_a16

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed = layer.weight_packed
        layer.weight = nn.Parameter(packed.data.clone(), requires_grad=False)
        layer.weight_global_scale = nn.Parameter(1 / layer.weight_global_scale.data.max(), requires_grad=False)
        del layer.weight_packed


class CompressedTensorsW4A4Nvfp4MoEMethod:
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise NotImplementedError


def weight_loader(parameter: Tensor, loaded: Tensor) -> None:
    parameter.data.copy_(loaded)


class EngineLayer(nn.Module):
    """A quantised linear layer of an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = CompressedTensorsW4A4Fp4(use_a16=True)
        for name, value in (
            ("weight_packed", torch.zeros(4, 8, dtype=torch.uint8)),
            ("weight_scale", torch.zeros(4, 1, dtype=torch.float8_e4m3fn)),
            ("weight_global_scale", torch.ones(1)),
        ):
            parameter = nn.Parameter(value, requires_grad=False)
            parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)


class EngineModel(nn.Module):
    """What vLLM's worker holds: loaded and processed once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EngineLayer() for _ in range(2))
        self.load_weights(weights(0))
        for layer in self.layers:
            layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, pairs: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in pairs:
            parameters[name].weight_loader(parameters[name], tensor)  # type: ignore[attr-defined]


def weights(seed: int) -> list[tuple[str, Tensor]]:
    """Named NVFP4 tensors for an `EngineModel`."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for layer in range(2):
        at = f"layers.{layer}."
        made += [
            (at + "weight_packed", torch.randint(0, 255, (4, 8), generator=generator, dtype=torch.uint8)),
            (at + "weight_scale", torch.rand(4, 1, generator=generator).to(torch.float8_e4m3fn)),
            (at + "weight_global_scale", torch.rand(1, generator=generator) + 1),
        ]
    return made


# ------------------------------------------------------------------------------------------------- installing them
@contextlib.contextmanager
def installed() -> Iterator[Callable[[], None]]:
    """Have all of them in `sys.modules`.

    Yields:
        What puts the classes back that they have changed; also called at the end.
    """
    from transformers.models.qwen3 import modeling_qwen3

    kept = [(cls, cls.__dict__["forward"]) for cls in (modeling_qwen3.Qwen3ForCausalLM, modeling_qwen3.Qwen3MLP)]

    def put_back() -> None:
        for cls, forward in kept:
            cls.forward = forward

    contents: dict[str, dict[str, Any]] = {
        "verl.models.transformers.monkey_patch": {"apply_monkey_patch": apply_monkey_patch},
        "verl.utils.qat": {
            "apply_qat_patches": apply_qat_patches,
            "prepare_qat_for_load_weights": prepare_qat_for_load_weights,
            "manual_process_weights_after_loading": manual_process_weights_after_loading,
        },
        "liger_kernel.transformers": {"apply_liger_kernel_to_qwen3": apply_liger_kernel_to_qwen3},
        f"{_VLLM}.schemes.compressed_tensors_w4a4_nvfp4": {"CompressedTensorsW4A4Fp4": CompressedTensorsW4A4Fp4},
        f"{_VLLM}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4": {
            "CompressedTensorsW4A4Nvfp4MoEMethod": CompressedTensorsW4A4Nvfp4MoEMethod
        },
        "vllm.model_executor.model_loader.reload.sanitize": {
            "sanitize_layer_refs": lambda tensor, layer: tensor,
            "layer_ref_sentinel": object(),
        },
        "vllm": {"__version__": "0.30.0"},
    }
    made: dict[str, types.ModuleType] = {}
    for name in contents:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            module = made.setdefault(path, types.ModuleType(path))
            module.__path__ = []  # type: ignore[attr-defined]
            if end > 1:
                setattr(made[".".join(parts[: end - 1])], parts[end - 1], module)
    for name, attributes in contents.items():
        vars(made[name]).update(attributes)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield put_back
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        put_back()
