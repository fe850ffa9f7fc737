"""A call that compiled code leaves to Python. A module of its own: importing this loads torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[no-untyped-call,untyped-decorator]
    reason="tiled_mlp recomputes this block tile by tile, which cannot be traced into one graph; compile without fullgraph"
)
def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, and all that it calls, run as they are."""
    return function(*args, **kwargs)
