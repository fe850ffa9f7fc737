"""Stacks of shipped patches on one model: what each option is, and what a model has to give under any of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scoped_patch import FakeQuant, Ulysses
from scoped_patch.ops.nvfp4 import largest, quantize_dequantize, tensor_scale
from scoped_patch.patches.fake_quant import siblings
from tests.support.groups import Groups
from tests.support.scores import IGNORE, gradients, shifted
from tests.tiny_models import build


def options(ranks: int = 1) -> dict[str, dict[str, Any]]:
    """One keyword for each shipped patch that acts on a text model."""
    return {
        "fused": {"fused": "torch"},
        "tiled": {"tiled_mlp": 3},
        "prefix": {"prefix_grouper": True},
        "sp": {"sp": Ulysses(ranks) if ranks == 1 else ranks},
        "fake": {"fake_quant": "w4a16"},
    }


def rounded(model: nn.Module, patch: FakeQuant | None = None) -> nn.Module:
    """A copy with the weights that NVFP4 leaves: what a fake-quantised model has to compute with."""
    names = (patch or FakeQuant()).layers(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in names.items():
            together = [names[other].weight for other in siblings(name) if other in names]
            twin.get_submodule(name).weight.copy_(quantize_dequantize(module.weight, tensor_scale(largest(together))))
    return twin


def picture(model: nn.Module) -> list[Any]:
    """Every entry of every module and its storages, by identity and in order; the registries' too."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: list[Any] = [
        (id(module), type(module), [(k, id(v)) for k, v in storage.items()])
        for module in model.modules()
        for storage in (module.__dict__, module._modules, module._parameters, module._buffers)
    ]
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        found.append(list(registry._local_mapping.items()))
    found.append([(cls, dict(cls.__dict__)) for cls in {type(module) for module in model.modules()}])
    return found


class Subject:
    """A tiny model, a batch of rows that begin alike, and what the unpatched model makes of it."""

    def __init__(self, groups: Groups, family: str = "llama") -> None:
        self.groups = groups
        self.model, _ = build(family, train=False)
        self.before = picture(self.model)
        self.counted = shifted(groups.batch["labels"]) != IGNORE
        self._right: dict[bool, tuple[Tensor, dict[str, Tensor]]] = {}
        for fake in (False, True):
            twin = rounded(self.model) if fake else copy.deepcopy(self.model)
            found = self.scores(twin(**groups.batch, use_cache=False))
            self._right[fake] = (found.detach(), gradients(twin, lambda f=found: self.objective(f)))  # type: ignore[misc]

    def right(self, live: Iterable[str]) -> tuple[Tensor, dict[str, Tensor]]:
        return self._right["fake" in live]

    def scores(self, out: Any) -> Tensor:
        """Log-probs of the tokens that are labelled, float64 [tokens]."""
        if getattr(out, "log_probs", None) is not None:
            return out.log_probs[self.counted].double()
        targets = shifted(self.groups.batch["labels"])[self.counted]
        return out.logits[self.counted].double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def objective(self, scores: Tensor) -> Tensor:
        return (scores * torch.linspace(-1, 1, len(scores), dtype=torch.float64)).mean()

    def call(self, live: Iterable[str]) -> Any:
        live = list(live)
        extra = {"group_ids": self.groups.group_ids} if "prefix" in live else {}
        out = self.model(**self.groups.batch, **extra, use_cache=False)
        assert (getattr(out, "log_probs", None) is not None) == ("fused" in live), f"under {live}"
        return out

    def check(self, live: Iterable[str], backward: bool = True) -> None:
        """The model under these patches gives what the unpatched one gives."""
        live = list(live)
        wanted, right = self.right(live)
        if not backward:
            with torch.no_grad():
                found = self.scores(self.call(live))
        else:
            found = self.scores(self.call(live))
        worst = (found.detach() - wanted).abs().max().item()
        assert worst <= 2e-5 * wanted.abs().max().item(), f"under {live} log-probs are off by {worst:.2e}"
        if not backward:
            return
        grads = gradients(self.model, lambda: self.objective(found))
        assert grads.keys() == right.keys(), f"under {live}: {sorted(grads.keys() ^ right.keys())}"
        for name, g in grads.items():
            scale = max(right[name].abs().max().item(), 1e-3)
            off = (g - right[name]).abs().max().item() / scale
            assert off <= 1e-4, f"under {live} the gradient of {name} is off by {off:.2e}"

    def check_untouched(self) -> None:
        from scoped_patch import assert_clean
        from scoped_patch.engine import LIVE

        assert_clean()
        assert not LIVE.states
        assert picture(self.model) == self.before


def orders(names: Iterable[str]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Every order of entering with every order of leaving."""
    from itertools import permutations

    names = list(names)
    for entering in permutations(names):
        for leaving in permutations(names):
            yield entering, leaving
