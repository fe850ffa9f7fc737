"""Which devices a process group's collectives take tensors on: gloo's those of a CPU and of a GPU, NCCL's a GPU's only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.errors import BadOptionError


def devices_of(group: Any) -> list[torch.device]:
    """The devices that the group has a backend for, without their numbers; empty where it does not say."""
    return list(getattr(group, "_device_types", ()))


def device_for(group: Any, x: Tensor) -> torch.device:
    """Where `x` must be for a collective of `group`: where it is, or, if the group takes none there, on its own device."""
    devices = devices_of(group)
    if not devices or x.device.type in {device.type for device in devices}:
        return x.device
    return devices[0]


def largest_in_group(x: Tensor, group: Any) -> Tensor:
    """The largest of every rank's `x`, element by element, in a new tensor that is where `x` is."""
    out = x.to(device_for(group, x), copy=True)
    dist.all_reduce(out, dist.ReduceOp.MAX, group)
    return out.to(x.device)


def check_device(group: Any, x: Tensor, what: str) -> None:
    """Refuse a tensor that the group has no backend for.

    Raises:
        BadOptionError: says where the tensor is, and where it should be.
    """
    if torch.compiler.is_compiling():
        return
    if device_for(group, x).type != x.device.type:
        raise BadOptionError(
            f"{what} of a tensor on {x.device.type}, {list(x.shape)} {x.dtype}: this process group has a backend for "
            f"{', '.join(device.type for device in devices_of(group))} only. Move the tensor (the model, the batch) there, or "
            f'make the group with a backend for both: init_process_group("cpu:gloo,cuda:nccl")'
        )
