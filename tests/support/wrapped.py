"""What every wrapper must stand: the same numbers as the unpatched model, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tests.support.scores import Scores, reference, shifted

#: the patches of the matrix, by what a test calls them
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": "torch"},
    "tiled": {"tiled_mlp": 4},
    "both": {"fused": "torch", "tiled_mlp": 4},
}


def scores_of(out: Any, batch: dict[str, Any]) -> Any:
    """An output's log-probs and entropy, from its logits where it has them."""
    if getattr(out, "log_probs", None) is not None:
        assert out.logits is None
        return out
    return reference(out.logits, shifted(batch["labels"]))


def assert_close_scores(found: Any, wanted: Scores, atol: float = 1e-5) -> None:
    for name in ("log_probs", "entropy"):
        worst = (getattr(found, name).detach().double() - getattr(wanted, name).detach()).abs().max().item()
        assert worst <= atol, f"{name} is off by {worst:.2e}"


@contextlib.contextmanager
def unchanged(*roots: nn.Module) -> Iterator[None]:
    """Inside and after: the same parameters at the same addresses, names in the same order. After: the same attributes."""
    modules = {id(m): m for root in roots for m in root.modules()}
    before = {key: dict(module.__dict__) for key, module in modules.items()}
    places = [(name, id(p), _address(p)) for root in roots for name, p in root.named_parameters()]
    names = [list(root.state_dict()) for root in roots]
    yield
    assert [(name, id(p), _address(p)) for root in roots for name, p in root.named_parameters()] == places
    assert [list(root.state_dict()) for root in roots] == names
    for key, module in modules.items():
        own = {k for k in module.__dict__ if k not in _MOVING}
        had = {k for k in before[key] if k not in _MOVING}
        assert own == had, f"{type(module).__name__}: {sorted(own ^ had)}"
        for name in ("forward", "generate", "_loss_function", "_gradient_checkpointing_func", "_old_forward"):
            assert module.__dict__.get(name) is before[key].get(name), name


#: attributes that wrappers come and go with in any forward
_MOVING = {"_is_root", "__getstate__"}


def _address(parameter: Tensor) -> int:
    local = getattr(parameter, "_local_tensor", parameter)
    return local.data_ptr()
