"""A walk of the object graph of its own, apart from the library's: every tensor, by path and address."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch

LEAVES = (str, bytes, int, float, type(None), type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, torch.dtype)


def addresses(model: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    out: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    tensors = contents_of(model)
    for path, tensor in tensors.items():
        out[path] = (-1 if tensor.is_meta else tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
    return out


def contents_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        seen: set[int] = set()
        members = {**module._parameters, **module._buffers}
        members |= {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        stack: list[tuple[str, Any, int]] = [(f"{name}.{k}", v, 0) for k, v in members.items()]
        while stack:
            path, value, depth = stack.pop()
            if isinstance(value, torch.Tensor):
                out[path] = value
                continue
            if isinstance(value, (*LEAVES, torch.nn.Module)) or id(value) in seen or depth > 8:
                continue
            seen.add(id(value))
            if isinstance(value, dict):
                inner = [(f"[{k!r}]", v) for k, v in value.items()]
            elif isinstance(value, (list, tuple)):
                inner = [(f"[{i}]", v) for i, v in enumerate(value)]
            elif isinstance(value, types.FunctionType):
                names = value.__code__.co_freevars
                inner = [(f"<{n}>", c.cell_contents) for n, c in zip(names, value.__closure__ or (), strict=True)]
            elif type(value).__module__.startswith(("torch", "transformers", "vllm.config", "vllm.distributed")):
                continue
            elif hasattr(value, "__dict__"):
                inner = [(f".{k}", v) for k, v in vars(value).items()]
            else:
                continue
            stack += [(path + k, v, depth + 1) for k, v in inner]
    return out
