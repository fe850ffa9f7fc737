"""Reference log-probs and entropy from logits, in float64, and comparison of outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IGNORE = -100


@dataclass
class Scores:
    """[B, S] each, float64, differentiable."""

    log_probs: Tensor
    entropy: Tensor


def shifted(labels: Tensor) -> Tensor:
    """Labels as logit rows are scored: row t against label t+1, the last row against none."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], dim=1)


def reference(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> Scores:
    """Log-prob of each aligned target and entropy of each row, 0 where the target is -100.

    Args:
        logits: [B, S, V].
        targets: [B, S], aligned.
        temperature: a number, [B] or [B, S].
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.double()
        temperature = temperature.reshape(*temperature.shape, *(1,) * (3 - temperature.ndim))
    log_softmax = (logits.double() / temperature).log_softmax(-1)
    counted = targets != IGNORE
    log_probs = log_softmax.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    # entr() gives 0 for a probability of 0, and with xlogy's rules a gradient that is no NaN
    probabilities = log_softmax.exp()
    entropy = -(probabilities * log_softmax.masked_fill(probabilities == 0, 0.0)).sum(-1)
    zero = torch.zeros((), dtype=torch.float64)
    return Scores(torch.where(counted, log_probs, zero), torch.where(counted, entropy, zero))


def unpatched(model: nn.Module, batch: dict[str, Any], temperature: float | Tensor = 1.0) -> Scores:
    """The reference from the model's own logits. `batch` has input_ids, and labels or shift_labels where wanted."""
    rest = {k: v for k, v in batch.items() if k not in ("labels", "shift_labels")}
    logits = model(**rest).logits
    if batch.get("shift_labels") is not None:
        targets = batch["shift_labels"]
    else:
        targets = shifted(batch["labels"] if batch.get("labels") is not None else batch["input_ids"])
    return reference(logits, targets, temperature)


def objective(scores: Any, seed: int = 7) -> Tensor:
    """A scalar that every log-prob and every entropy enters with a weight of its own."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for values in (scores.log_probs, scores.entropy):
        if values is not None:
            weights = torch.randn(values.shape, generator=generator, dtype=torch.float64)
            total = total.to(values.device) + (values.double() * weights.to(values.device)).sum()
    return total


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Go backward from `run()`, and take (and clear) all gradients, by parameter name."""
    model.zero_grad(set_to_none=True)
    run().backward()
    return take_gradients(model)


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_scores(found: Any, wanted: Scores, atol: float = 1e-5) -> None:
    """fp32 outputs of the wanted shapes, equal to `atol`."""
    for name in ("log_probs", "entropy"):
        ours, right = getattr(found, name), getattr(wanted, name).detach()
        assert ours is not None, f"{name} is None"
        assert ours.dtype == torch.float32, f"{name} is {ours.dtype}"
        assert ours.shape == right.shape, f"{name} is {list(ours.shape)}, wanted {list(right.shape)}"
        worst = (ours.detach().double() - right).abs().max().item() if right.numel() else 0.0
        assert worst <= atol, f"{name} is off by {worst:.2e}"


def assert_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-4) -> None:
    """The same parameters have gradients, and each is equal to `rtol` of its own largest entry.

    A gradient that is zero but for rounding (a key bias, say) is measured against the model's largest one.
    """
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    assert wanted, "no parameter has a gradient"
    largest = max(g.abs().max().item() for g in wanted.values())
    assert largest > 0, "every gradient is zero"
    errors = {}
    for name, right in wanted.items():
        scale = max(right.abs().max().item(), 1e-3 * largest)
        errors[name] = (found[name].double() - right.double()).abs().max().item() / scale
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= rtol, f"the gradient of {worst} is off by {errors[worst]:.2e} of its size"


def worst_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest |difference| of any gradient, relative to the largest gradient of all."""
    largest = max(g.abs().max().item() for g in wanted.values())
    return max((found[name].double() - g.double()).abs().max().item() for name, g in wanted.items()) / largest
