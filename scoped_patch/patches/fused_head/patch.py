"""The patch `fused=`: what it edits and what it refuses. What runs then is in `seam`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ...engine import MISSING, Edit, Patch, Session, Support, attribute_slot
from ...engine.errors import BadOptionError, ScopedPatchError, SeamNotReachedError, UnsupportedError
from ...models.head import head_problem
from ...models.modules import foreign_forward, forward_edit, module_paths, refuse_replaced_forward
from ...models.outputs import declare_for
from ...models.spec import anatomy, describe
from ...models.unwrap import unwrap
from ..trl_head import find_trl_head
from .frame import check_temperature
from .seam import Seam

RANK = 10  # innermost of the shipped patches

OUTPUTS = ("log_probs", "entropy")


@dataclass(frozen=True, eq=False)
class FusedHead(Patch):
    """`fused=`: log-probs, entropy and loss without keeping logits.

    Inside the scope the model's output has `log_probs` and `entropy`, fp32, [batch, sequence]: position t scores token
    t+1, and is 0 at the last position and wherever the label is -100. `logits` is None, `loss` is the model's own when
    `labels` are given. The call takes `labels`, `shift_labels` and `temperature`; `generate()` works as outside.

    Args:
        backend: `"torch"`, `"triton"`, or `"auto"` (triton on CUDA where it is installed).
        memory: bytes for a block of logits, or `"auto"` or `"low"`.
        outputs: which of `"log_probs"` and `"entropy"` to compute; what is left out is None and costs nothing.
        temperature: divides the logits; a float, or a tensor [B] or [B, S] aligned with logit rows (fp32). The call's own
            `temperature=` wins.
        entropy_grad: False makes the entropy a metric without gradient.

    Raises (when entering):
        UnsupportedError: the model has no language-model head, or one that cannot be taken apart; says which and why.
    """

    backend: Literal["auto", "torch", "triton"] = "auto"
    memory: Literal["auto", "low"] | int = "auto"
    outputs: Sequence[str] = OUTPUTS
    temperature: float | Tensor = 1.0
    entropy_grad: bool = True
    name: str = field(default="fused_head", init=False, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.backend, str) and self.backend in ("auto", "torch", "triton")):
            raise BadOptionError(f"fused: the backend must be 'auto', 'torch' or 'triton', got {self.backend!r}")
        given: Any = (self.outputs,) if isinstance(self.outputs, str) else self.outputs
        wanted = tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else ()
        if not wanted or not all(isinstance(one, str) and one in OUTPUTS for one in wanted):
            raise BadOptionError(f"fused: outputs must be one or more of {', '.join(OUTPUTS)}, got {self.outputs!r}")
        object.__setattr__(self, "outputs", wanted)
        memory: Any = self.memory
        is_bytes = isinstance(memory, int) and not isinstance(memory, bool) and memory > 0
        if not is_bytes and not (isinstance(memory, str) and memory in ("auto", "low")):
            raise BadOptionError(f"fused: memory must be 'auto', 'low' or a number of bytes > 0, got {memory!r}")
        if not isinstance(self.entropy_grad, bool):
            raise BadOptionError(f"fused: entropy_grad must be True or False, got {self.entropy_grad!r}")
        check_temperature(self.temperature)

    @property
    def options(self) -> Hashable:
        temperature = id(self.temperature) if isinstance(self.temperature, Tensor) else self.temperature
        return (self.backend, self.memory, tuple(self.outputs), temperature, self.entropy_grad)

    def supports(self, target: Any) -> Support:
        found = unwrap(target)
        if found.value_head is not None:
            return Support(
                False,
                f"{type(found.value_head).__name__} has a value head, and its forward needs the logits of its language model. "
                f"Patch that one where you call it yourself: patched(model.pretrained_model, fused=...)",
            )
        try:
            parts = anatomy(found.model)
        except ScopedPatchError as error:
            return Support(False, str(error))
        if self.backend == "triton" and importlib.util.find_spec("triton") is None:
            return Support(
                False, "the triton backend needs the package triton, which is not installed; use fused='torch' or 'auto'"
            )
        for leaf in parts.head_leaves:
            problem = head_problem(leaf)
            if problem is not None:
                return Support(False, f"the head of {describe(parts.model)} cannot be fused: {problem}")
        notes = list(parts.notes)
        if parts.transform:
            notes.append(f"the model changes its logits after the head ({parts.transform}); applied inside the op")
        try:
            trl = find_trl_head(parts.model.forward)
        except UnsupportedError as error:
            return Support(False, str(error))
        if trl is not None:
            notes.append("TRL's fused head is on this model: calls with its flag are answered in its terms, others give logits")
        foreign = [kind for module in (parts.model, *parts.head_leaves) if (kind := foreign_forward(module))]
        notes += [f"found a forward put on the instance by somebody else and wrapped it: {kind}" for kind in foreign]
        return Support(True, notes=tuple(notes))

    def fingerprint(self, target: Any) -> Hashable:
        # The config's transforms are part of it: somebody may set a softcap between two steps.
        model = unwrap(target).model
        try:
            parts = anatomy(model)
        except ScopedPatchError as error:
            return str(error)  # `supports` says it in the name of this patch, together with what others have to say
        places = [(id(m), "_old_forward" in m.__dict__) for m in (model, *parts.head_leaves)]
        return (tuple(places), parts.transform, parts.own_loss)

    def plan(self, target: Any) -> Iterable[Edit]:
        parts = anatomy(unwrap(target).model)
        model = parts.model
        seam = Seam(self, parts)
        paths = module_paths(model)
        declare_for(type(model).forward)
        token = (self.name, self.options, id(model))
        for leaf in parts.head_leaves:
            yield forward_edit(
                leaf,
                paths.get(id(leaf), "lm_head"),
                seam.head_forward,
                name="fused_head_forward",
                rank=RANK,
                reason="score tokens inside the head, keep no logits",
                to=f"linear cross entropy ({self.backend})",
                token=token,
                exclusive=self.name,
                check=functools.partial(
                    refuse_replaced_forward, leaf, f"{self.name}: the forward of the head of {seam.what}", "leave out `fused`"
                ),
            )
        yield forward_edit(
            model,
            type(model).__name__,
            seam.model_forward,
            name="fused_model_forward",
            rank=RANK,
            reason="say what to score, declare the outputs",
            to="adds log_probs and entropy",
            token=token,
            exclusive=self.name,
            check=seam.look_at,
        )
        if not parts.own_loss:
            yield Edit(
                attribute_slot(model, "_loss_function", f"{type(model).__name__}._loss_function"),
                lambda prior: seam.loss_function(getattr(model, "loss_function", None) if prior is MISSING else prior),
                "wrap",
                "the model's own loss, from the log-probs",
                RANK,
                commutes=True,
                token=token,
                exclusive=self.name,
                to="causal LM loss from log-probs",
            )
        if hasattr(model, "generate"):
            yield Edit(
                attribute_slot(model, "generate", f"{type(model).__name__}.generate"),
                seam.generate,
                "wrap",
                "decoding needs logits",
                RANK,
                commutes=True,
                token=token,
                exclusive=self.name,
                to="logits as outside the scope",
            )

    def audit(self, session: Session) -> None:
        calls = {"head": 0, "model": 0}
        for record in session.records:
            if record.planned.patch is self and record.calls:
                calls["head" if record.edit.to.startswith("linear cross entropy") else "model"] += record.calls
        if calls["head"] and not calls["model"]:
            raise SeamNotReachedError(
                f"fused_head: the head of {describe(unwrap(session.target).model)} ran {calls['head']} times in the scope "
                f"entered at {session.location}, and never through the model's own forward, so nothing was scored: call the "
                f"model itself, not its head or a forward that was taken off it before"
            )
