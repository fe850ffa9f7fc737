"""Fake quantisation: linear layers compute with the values that NVFP4 leaves of their weights, and train straight through.

One edit per linear layer. The weights themselves are untouched: leaving the scope is full precision again, and what is
packed for a rollout engine are the same weights, with the same codes.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine import Edit, Patch, Session, Support
from ..engine.errors import BadOptionError, SeamNotReachedError, UnsupportedError
from ..models.modules import changed_linear, counting_edit, forward_edit, is_plain_linear, refuse_replaced_forward, runs_past
from ..models.placement import Placement
from ..models.spec import describe
from ..models.unwrap import unwrap
from ..ops.group_devices import largest_in_group
from ..ops.nvfp4 import BLOCK, FUSED, fake_quantize, largest, tensor_scale

RANK = 5  # innermost: what is patched around a linear layer sees the layer that it is now

SCHEMES = ("w4a16", "w4a4")

#: what NVFP4 checkpoints leave in full precision: heads, routers, and everything that looks at images
DEFAULT_IGNORE = ("*lm_head", "*score", "*.gate", "*router*", "*shared_expert_gate", "*vision*", "*visual*", "*projector*")


@dataclass(frozen=True, eq=False)
class FakeQuant(Patch):
    """`fake_quant=`: train through NVFP4 with a straight-through estimator.

    Inside the scope every linear layer that is not ignored multiplies by what NVFP4 leaves of its weight (blocks of 16 input
    features; layers that rollout engines fuse, q/k/v and gate/up, share one scale per tensor); gradients go to the weight as
    if it had not been rounded. With `"w4a4"` the layer's input is rounded the same way, by one scale per layer. Weights are
    rounded anew in every call, so optimizers, FSDP and casts may come before or after.

    Args:
        scheme: `"w4a16"`: weights. `"w4a4"`: weights and inputs.
        ignore: layers that stay as they are, by name in the unwrapped model: globs (`"*lm_head"`), or regular expressions
            that match a whole name (`"re:.*mlp\\.gate"`). The default is `DEFAULT_IGNORE`.
        input_global_scales: for `"w4a4"`: 448 * 6 / (largest input), by layer name or one number for all. By default each
            layer takes the largest input that it has seen in training mode, this call included; in evaluation mode a layer
            that has seen none takes the call's own.

    Raises (when entering):
        UnsupportedError: there is no such linear layer, or one of them computes in a way of its own; says which.
    """

    scheme: Literal["w4a16", "w4a4"] = "w4a16"
    ignore: Sequence[str] = DEFAULT_IGNORE
    input_global_scales: Mapping[str, Tensor | float] | float | None = None
    name: str = field(default="fake_quant", init=False, repr=False)
    #: the largest input that each layer has seen, float32 []
    _seen: weakref.WeakKeyDictionary[nn.Module, Tensor] = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if not (isinstance(self.scheme, str) and self.scheme in SCHEMES):
            raise BadOptionError(f"fake_quant must be 'w4a16', 'w4a4' or a FakeQuant, got {self.scheme!r}")
        patterns: Any = self.ignore
        if not isinstance(patterns, (tuple, list, set, frozenset)) or not all(isinstance(one, str) for one in patterns):
            raise BadOptionError(f"fake_quant: ignore must be a list of patterns, got {patterns!r}")
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise BadOptionError(f"fake_quant: the pattern {pattern!r} is no regular expression: {error}") from None
        object.__setattr__(self, "ignore", tuple(patterns))
        given = self.input_global_scales
        if given is None:
            return
        if self.scheme != "w4a4":
            raise BadOptionError("fake_quant: input_global_scales belong to scheme 'w4a4'; 'w4a16' leaves inputs as they are")
        if isinstance(given, Mapping) and not all(isinstance(name, str) for name in given):
            raise BadOptionError(f"fake_quant: input_global_scales must be by layer name, got the keys {list(given)!r}")
        for value in given.values() if isinstance(given, Mapping) else (given,):
            if not _is_scale(value):
                raise BadOptionError(f"fake_quant: an input_global_scale must be a number > 0, got {value!r}")

    @property
    def options(self) -> Hashable:
        given = self.input_global_scales
        observes = self.scheme == "w4a4" and given is None
        scales = tuple(sorted((k, float(v)) for k, v in given.items())) if isinstance(given, Mapping) else given
        return (self.scheme, self.ignore, scales, id(self) if observes else None)

    # ------------------------------------------------------------------------------------------------- what it edits
    def layers(self, target: Any) -> dict[str, nn.Linear]:
        """The linear layers that are quantised, by name in the unwrapped model."""
        return self._look(target)[0]

    def _look(self, target: Any) -> tuple[dict[str, nn.Linear], list[str]]:
        found: dict[str, nn.Linear] = {}
        skipped: list[str] = []
        experts = 0
        for name, module in unwrap(target).model.named_modules():
            if not isinstance(module, nn.Linear):
                experts += any(p is not None and p.ndim == 3 for p in module._parameters.values())
            elif self._ignores(name):
                pass
            elif module.in_features % BLOCK:
                skipped.append(f"{name} has {module.in_features} input features, no multiple of {BLOCK}")
            else:
                found[name] = module
        if experts:
            skipped.append(f"{experts} blocks of experts are 3-D parameters and no linear layers: they stay as they are")
        return found, skipped

    def _ignores(self, name: str) -> bool:
        return any(_matches(pattern, name) for pattern in self.ignore)

    def supports(self, target: Any) -> Support:
        model = unwrap(target).model
        found, skipped = self._look(target)
        if not found:
            why = f": {'; '.join(skipped)}" if skipped else " that is not ignored"
            return Support(False, f"{describe(model)} has no linear layer that can be quantised{why}")
        for name, module in found.items():
            if changed := changed_linear(module):
                return Support(False, f"{name} of {describe(model)}: {changed}")
            if not is_plain_linear(module):
                return Support(
                    False, f"{name} of {describe(model)} is a {type(module).__name__} with a forward of its own: ignore it"
                )
            if name.endswith(".base_layer"):
                why = "which is not packed with it: merge the adapter first, or ignore the layer"
                return Support(False, f"{name} of {describe(model)} has an adapter beside it, {why}")
            cut = [other for other in siblings(name) if other not in found and _is_linear(model, other)]
            if cut:
                return Support(False, f"{name} and {cut[0]} are fused by rollout engines: ignore both or none")
        given = self.input_global_scales
        if isinstance(given, Mapping):
            absent = [name for name in found if name not in given]
            if absent:
                return Support(False, f"input_global_scales has none for {absent[0]} ({len(absent)} are missing)")
        return Support(True, skipped=tuple(skipped), notes=tuple(self._idle_patterns(model)))

    def _idle_patterns(self, model: nn.Module) -> Iterable[str]:
        """Patterns that ignore nothing, other than those of the default, which are for every model."""
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for pattern in self.ignore:
            if pattern not in DEFAULT_IGNORE and not any(_matches(pattern, name) for name in names):
                yield f"the pattern {pattern!r} matches no linear layer"

    def fingerprint(self, target: Any) -> Hashable:
        return tuple((name, id(module)) for name, module in self.layers(target).items())

    def plan(self, target: Any) -> Iterable[Edit]:
        model = unwrap(target).model
        found = self.layers(target)
        common: dict[str, Any] = {"rank": RANK, "exclusive": self.name}
        for name, module in found.items():
            together = [found[other] for other in siblings(name) if other in found]
            yield forward_edit(
                module,
                name,
                functools.partial(self._forward, name, together),
                name="fake_quant_forward",
                reason="compute with what NVFP4 leaves of the weight" + (" and the input" if self.scheme == "w4a4" else ""),
                to=f"NVFP4 {self.scheme}, straight-through gradient",
                token=(self.name, self.options, id(module)),
                check=functools.partial(
                    refuse_replaced_forward, module, f"{self.name}: the forward of {name}", "ignore the layer"
                ),
                **common,
            )
        yield counting_edit(
            model,
            type(model).__name__,
            Placement(self.name, model, found.values(), adapters=False).forward,
            name="fake_quant_model_forward",
            reason="see whether the model ran",
            token=(self.name, self.options, id(model)),
            **common,
        )

    def audit(self, session: Session) -> None:
        runs = runs_past(session, self)
        if runs:
            layers = sum(record.planned.patch is self and not record.edit.hidden for record in session.records)
            raise SeamNotReachedError(
                f"{self.name}: the model ran {runs} times in the scope entered at {session.location}, and called none of its "
                f"{layers} linear layers: something reads their weights directly, so nothing was quantised"
            )

    # ------------------------------------------------------------------------------------------------- what runs
    def _forward(self, name: str, together: list[nn.Linear], prior: Callable[..., Any], module: nn.Module, x: Tensor) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]
        if hasattr(weight, "full_tensor") or weight.ndim != 2:
            raise UnsupportedError(
                f"fake_quant: the weight of {name} is a {type(weight).__name__} {list(weight.shape)} where it is used; a layer "
                f"that is split over ranks (tensor parallelism) cannot be rounded here: ignore it"
            )
        if not is_plain_linear(module):
            raise UnsupportedError(f"fake_quant: {name}: {changed_linear(module) or 'it has got a forward of its own'}")
        weights: list[Tensor] = [one.weight for one in together]
        rounded = fake_quantize(weight, tensor_scale(largest(weights)).to(weight.device))
        if self.scheme == "w4a4":
            x = fake_quantize(x, self._input_scale(name, together, module, x))
        return F.linear(x, rounded, module.bias)  # type: ignore[arg-type]

    def _input_scale(self, name: str, together: list[nn.Linear], module: nn.Module, x: Tensor) -> Tensor:
        given = self.input_global_scales
        if given is not None:
            value = given[name] if isinstance(given, Mapping) else given
            return torch.as_tensor(value, dtype=torch.float32, device=x.device).reshape(())
        owner = together[0]  # layers that are fused read one input
        seen = self._seen.get(owner)
        if seen is None or module.training:
            now = largest([x]).to(x.device)
            seen = now if seen is None else torch.maximum(seen.to(x.device), now)
            if module.training:
                self._seen[owner] = seen
        return tensor_scale(seen.to(x.device))

    # ------------------------------------------------------------------------------------------------- packing
    def packing(self, target: Any, process_group: torch.distributed.ProcessGroup | None = None) -> dict[str, Any]:
        """What `scoped_patch.vllm.quantize_state_dict` has to be told to pack what was trained: its keyword arguments.

        Args:
            process_group: ranks whose largest inputs are taken together (data parallel ones); all must call this.

        Raises:
            BadOptionError: "w4a4", and a layer has seen no input in training mode.
        """
        names = self.layers(target)
        made: dict[str, Any] = {"scheme": self.scheme, "select": frozenset(names).__contains__}
        if self.scheme == "w4a16":
            return made
        given = self.input_global_scales
        if given is None:
            scales = {}
            for name in names:
                owner = names[next(one for one in siblings(name) if one in names)]
                seen = self._seen.get(owner)
                if seen is None:
                    raise BadOptionError(f"fake_quant: {name} has seen no input in training mode, so its scale is not known")
                if process_group is not None:
                    seen = largest_in_group(seen, process_group)
                scales[name] = tensor_scale(seen)
            given = scales
        return {**made, "input_global_scales": given}


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern[3:], name) is not None if pattern.startswith("re:") else fnmatch.fnmatchcase(name, pattern)


def _is_scale(value: Any) -> bool:
    """A finite number > 0, or a tensor that holds one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point() and not value.is_meta and 0 < value.item() < math.inf
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def siblings(name: str) -> list[str]:
    """A layer and those that rollout engines fuse with it, by name."""
    parent, _, leaf = name.rpartition(".")
    fused = next((names for names in FUSED if leaf in names), (leaf,))
    return [f"{parent}.{other}" if parent else other for other in fused]


def _is_linear(model: nn.Module, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    try:
        return isinstance(model.get_submodule(parent)._modules.get(leaf), nn.Linear)
    except AttributeError:
        return False
