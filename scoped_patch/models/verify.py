"""`scope.verify(batch)`: the user's own model with and without a scope, side by side."""

from __future__ import annotations

import contextlib
import html
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..engine import LIVE, Session
from ..engine.errors import BadTargetError
from ..ops.linear_cross_entropy.vocab_parallel import is_dtensor
from .packing import IGNORE_INDEX, aligned_targets
from .unwrap import unwrap

_COLUMNS = ("what", "unpatched", "patched", "max abs diff", "relative")


class Spread(Protocol):
    """How one rank's part is compared with one process; a patch that spreads calls over ranks gives one out.

    The batch is whole, and the same on every rank.
    """

    def local(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The arguments of this rank's call."""

    def scored(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What says which tokens this rank's outputs are scored against."""

    def own(self, x: Tensor) -> Tensor:
        """An output without the padding of this rank's part."""

    def whole(self, x: Tensor, of_layer: bool = False) -> Tensor:
        """All ranks' tokens of an output, or of a layer's."""

    def reduce(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The gradients of all ranks, reduced as a trainer does."""


@dataclass
class Comparison:
    """One quantity of both runs.

    Attributes:
        what: `loss`, `log_probs`, `entropy`, `logits`, `gradient of <parameter>`, `output of <layer>`.
        unpatched, patched: the value, or the root mean square of a tensor.
        max_abs: largest absolute difference.
        relative: that, over the largest absolute unpatched value.
    """

    what: str
    unpatched: float
    patched: float
    max_abs: float
    relative: float

    def cells(self) -> tuple[str, ...]:
        return (self.what, f"{self.unpatched:.6g}", f"{self.patched:.6g}", f"{self.max_abs:.2e}", f"{self.relative:.2e}")


@dataclass
class VerifyReport:
    """Outputs, loss and gradients with and without a scope.

    Attributes:
        comparisons: outputs and loss, then the worst gradients.
        worst_gradient: the gradient with the largest relative difference, or None.
        first_difference: the first decoder layer whose output differs by more than `tolerance` (relative), or None.
        tolerance: what `ok` allows, relative.
        missing: parameters that have a gradient in one run only.
    """

    comparisons: list[Comparison]
    worst_gradient: Comparison | None
    first_difference: Comparison | None
    tolerance: float
    missing: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Everything agrees within the tolerance, and the same parameters have gradients."""
        return not self.missing and all(one.relative <= self.tolerance for one in self.comparisons)

    def _remarks(self) -> list[str]:
        verdict = "equal" if self.ok else "DIFFERENT"
        remarks = [f"{verdict} at a relative tolerance of {self.tolerance:g}"]
        if self.first_difference is not None:
            one = self.first_difference
            remarks.append(f"first layer that differs: {one.what} ({one.relative:.2e})")
        else:
            remarks.append("no decoder layer differs")
        if self.missing:
            remarks.append(f"gradient in one run only: {', '.join(self.missing[:8])}")
        return remarks

    def __str__(self) -> str:
        cells = [_COLUMNS, *(one.cells() for one in self.comparisons)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(["verify: unpatched against patched", *lines, *(f"- {text}" for text in self._remarks())])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title="verify: unpatched against patched", title_justify="left", title_style="bold")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "what" else "right", overflow="fold")
        for one in self.comparisons:
            table.add_row(*map(Text, one.cells()), style=None if one.relative <= self.tolerance else "yellow")
        return Group(table, *(Text(f"- {text}") for text in self._remarks()))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in one.cells()) + "</tr>" for one in self.comparisons
        )
        remarks = "".join(f"<li>{html.escape(text)}</li>" for text in self._remarks())
        return f"<table><tr>{head}</tr>{body}</table><ul>{remarks}</ul>"


def verify(
    session: Session,
    batch: dict[str, Any],
    *,
    gradients: bool = True,
    temperature: float | Tensor | None = None,
    tolerance: float | None = None,
    worst: int = 5,
) -> VerifyReport:
    """Compare a session's model with and without its edits; see `ModelSession.verify`.

    Args:
        tolerance: relative; by default 1e-4 for fp32 and fp64 models and 5e-2 below that.
        worst: how many gradients to list.
    """
    if not isinstance(session.target, nn.Module):
        raise BadTargetError(f"verify() needs a scope on a model; this one is on {type(session.target).__name__}")
    if not isinstance(batch, dict):
        raise BadTargetError(f"verify() takes the keyword arguments of the model's call as a dict, got {type(batch).__name__}")
    model, inner = session.target, unwrap(session.target).model
    batch = dict(batch)
    in_batch = batch.pop("temperature", None)
    scores: list[Any] = [patch for patch in session.plan.patches if patch.name == "fused_head"]
    if temperature is None:
        temperature = in_batch if in_batch is not None else next((patch.temperature for patch in scores), 1.0)
    patched_batch = {**batch, "temperature": temperature} if scores else batch
    if tolerance is None:
        floats = {p.dtype for p in inner.parameters() if p.is_floating_point()}
        tolerance = 5e-2 if floats & {torch.bfloat16, torch.float16} else 1e-4
    spread = next((patch.spread_check(model, batch) for patch in session.plan.patches if hasattr(patch, "spread_check")), None)
    with _quiet(inner) as parameters:
        plain = _run(model, inner, batch, gradients, temperature, _without(session), parameters)
        changed = _run(model, inner, patched_batch, gradients, temperature, _within(session), parameters, spread)
    comparisons = [
        _compare(what, plain.values[what], changed.values[what])
        for what in plain.values
        if what in changed.values and plain.values[what].shape == changed.values[what].shape
    ]
    grads = [
        _compare(f"gradient of {n}", g, changed.gradients[n]) for n, g in plain.gradients.items() if n in changed.gradients
    ]
    grads.sort(key=lambda one: -one.relative)
    # A layer that is run on other rows (a packed row, say) has an output that cannot be compared.
    both = [(n, v, changed.layers[n]) for n, v in plain.layers.items() if n in changed.layers]
    layers = [_compare(f"output of {n}", v, w) for n, v, w in both if v.shape == w.shape]
    first = next((one for one in layers if one.relative > tolerance), None)
    missing = sorted(plain.gradients.keys() ^ changed.gradients.keys())
    return VerifyReport(comparisons + grads[:worst], grads[0] if grads else None, first, tolerance, missing)


@dataclass
class _Run:
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    layers: dict[str, Tensor]


def _run(
    model: nn.Module,
    inner: nn.Module,
    batch: dict[str, Any],
    gradients: bool,
    temperature: float | Tensor,
    scope: contextlib.AbstractContextManager[None],
    parameters: dict[str, nn.Parameter],
    spread: Spread | None = None,
) -> _Run:
    call, scored, heat = batch, batch, temperature
    if spread is not None:
        call, scored = spread.local(batch), spread.scored(batch)
        heat = spread.local({**batch, "temperature": temperature})["temperature"]
    layers: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda _m, _a, out, name=name: layers.__setitem__(name, _first_tensor(out)))
        for name, layer in _decoder_layers(inner)
    ]
    try:
        with scope, _seeded(model), torch.set_grad_enabled(gradients):
            out = model(**call)
            values = _scores(out, scored, heat)
            if gradients:
                own = values if spread is None else {name: spread.own(x) for name, x in values.items()}
                _scalar(own).backward()  # type: ignore[no-untyped-call]
            if spread is not None:
                values = {name: spread.whole(x) for name, x in values.items()}
                layers = {name: spread.whole(x, of_layer=True) for name, x in layers.items()}
                taken = spread.reduce(parameters)
            else:
                taken = {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None}
    finally:
        for handle in handles:
            handle.remove()
    found = {name: (g.full_tensor() if is_dtensor(g) else g).float().cpu() for name, g in taken.items()}
    for p in parameters.values():
        p.grad = None
    return _Run({k: v.detach() for k, v in values.items()}, found, layers)


@contextlib.contextmanager
def _seeded(model: nn.Module) -> Iterator[None]:
    """Random numbers from one seed on the CPU and on the model's own devices, and as before afterwards.

    Other cards are not touched: they are other ranks', and asking for their state would take memory there.
    """
    found = {x.device for x in itertools.chain(model.parameters(), model.buffers()) if x.device.type == "cuda"}
    cards = sorted({torch.cuda.current_device() if device.index is None else device.index for device in found})
    with torch.random.fork_rng(cards):
        torch.default_generator.manual_seed(0)
        for card in cards:  # GPU only
            torch.cuda.default_generators[card].manual_seed(0)
        yield


def _scalar(values: dict[str, Tensor]) -> Tensor:
    """What to run backward from: the loss, else the log-probs, else anything that both runs have."""
    for name in ("loss", "log_probs"):
        if name in values:
            return values[name] if name == "loss" else -values[name].sum()
    return next(iter(values.values())).float().square().sum()


def _scores(out: Any, batch: dict[str, Any], temperature: float | Tensor) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    # A model's own loss knows no temperature, so with one the log-probs are compared, and gone backward from.
    if getattr(out, "loss", None) is not None and not isinstance(temperature, Tensor) and temperature == 1.0:
        values["loss"] = out.loss
    if getattr(out, "log_probs", None) is not None:
        values["log_probs"] = out.log_probs
        if out.entropy is not None:
            values["entropy"] = out.entropy
    elif getattr(out, "logits", None) is not None:
        values["logits"] = out.logits
        targets = aligned_targets(batch)
        if targets is not None and out.logits.shape[:-1] == targets.shape:
            logits = out.logits.double() if out.logits.dtype == torch.float64 else out.logits.float()
            if isinstance(temperature, Tensor):  # one per row or per token
                temperature = temperature.reshape(*temperature.shape, *(1,) * (logits.ndim - temperature.ndim))
            logits = logits / temperature
            lse = logits.log_softmax(-1)
            ignored = targets == IGNORE_INDEX
            values["log_probs"] = lse.gather(-1, targets.clamp(min=0)[..., None])[..., 0].masked_fill(ignored, 0.0)
            values["entropy"] = torch.special.entr(lse.exp()).sum(-1).masked_fill(ignored, 0.0)
    if not values:
        raise BadTargetError(f"the model returned a {type(out).__name__} without loss, logits or log_probs: nothing to compare")
    return values


@contextlib.contextmanager
def _quiet(inner: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Eval mode, no gradients of earlier steps; both as before afterwards."""
    training = [(module, module.training) for module in inner.modules()]
    parameters = dict(inner.named_parameters())
    kept = {name: p.grad for name, p in parameters.items()}
    inner.eval()
    for p in parameters.values():
        p.grad = None
    try:
        yield parameters
    finally:
        for module, flag in training:
            module.training = flag
        for name, p in parameters.items():
            p.grad = kept[name]


def _within(session: Session) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if session.state == "live" else session.replay()


def _without(session: Session) -> contextlib.AbstractContextManager[None]:
    if session.state != "live":
        return contextlib.nullcontext()
    return LIVE.replay(LIVE.freeze_without(session))


def _decoder_layers(inner: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for path, module in inner.named_modules():
        layers = module._modules.get("layers")
        if isinstance(layers, nn.ModuleList):
            found += [(f"{path}.layers.{i}".lstrip("."), layer) for i, layer in enumerate(layers)]
    return found


def _first_tensor(out: Any) -> Tensor:
    while isinstance(out, (tuple, list)):
        out = out[0]
    return out.detach() if isinstance(out, Tensor) else torch.zeros(())


def _compare(what: str, plain: Tensor, changed: Tensor) -> Comparison:
    left, right = plain.detach().double().cpu(), changed.detach().double().cpu()
    if left.shape != right.shape:
        return Comparison(what, float("nan"), float("nan"), float("inf"), float("inf"))
    difference = float((left - right).abs().max()) if left.numel() else 0.0
    scale = float(left.abs().max()) if left.numel() else 0.0
    size = [float(x.square().mean().sqrt()) if x.ndim else float(x) for x in (left, right)]
    relative = difference / scale if scale else (0.0 if difference == 0 else float("inf"))
    if difference != difference:
        relative = float("inf")
    return Comparison(what, size[0], size[1], difference, relative)
