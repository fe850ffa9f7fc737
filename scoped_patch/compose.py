"""`patched(...)`: keywords to patches."""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import nn

from .engine import Patch, Plan, Scope, Session
from .engine.errors import BadOptionError, BadTargetError, ConflictError, ScopeStateError, UnsupportedError
from .engine.session import OnForeign
from .engine.slots import ClassSlot
from .models.checkpointing import RecomputeAsRun
from .models.saving import SavesUnpatched
from .models.spec import is_multimodal
from .models.unwrap import unwrap
from .models.verify import VerifyReport, verify
from .patches.fake_quant import FakeQuant
from .patches.fused_head import FusedHead
from .patches.prefix_grouper import PrefixGrouper
from .patches.tiled_mlp import TiledMLP
from .patches.trl_head import find_trl_head
from .patches.ulysses import Ulysses
from .patches.value_head import ValueHead
from .patches.vlm_mixed_batch import VLMMixedBatch

OnCompiled = Literal["error", "reset"]


class ModelSession(Session):
    """What `with patched(...) as scope` gives."""

    #: compiled code must be dropped when this session ends, as it was when it began
    resets_compiler = False
    #: of the scope that was entered
    on_compiled: OnCompiled = "error"

    def leave(self, body: BaseException | None) -> None:
        if body is not None:
            for patch in self.plan.patches:
                if isinstance(patch, Ulysses):
                    patch.abandoned(body)
        try:
            super().leave(body)
        finally:
            if self.resets_compiler and self.state == "closed":
                self.resets_compiler = False
                reset_compiler()

    def verify(self, batch: dict[str, Any], *, gradients: bool = True, temperature: Any = None) -> VerifyReport:
        """Run the model on a batch with and without this scope and compare.

        Dropout is off (the model runs in eval mode), seeds are fixed, and gradients and training flags are as before
        afterwards. Works while the scope is live and after it was left.

        With `sp=`, every rank of the group calls it with the same whole batch, in either layout: the cut one is made here.
        Gradients are reduced over the group as `grad_reduction` says (DDP and FSDP have done so already), so every rank
        reports on all of them.

        Args:
            batch: keyword arguments of the model's call; with `labels` the loss is compared too.
            gradients: also run backward both ways and compare every parameter's gradient (takes one more copy of them).
            temperature: divides the logits on both sides: a number, or a tensor [B] or [B, S]. By default that of the batch,
                or of the scope.

        Returns:
            VerifyReport: outputs, loss and gradients side by side, the worst parameter, the first layer that differs.
        """
        return verify(self, batch, gradients=gradients, temperature=temperature)

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole batch, for `sp=Ulysses(..., inputs="sharded")`.

        Tensors [B, S, ...] are cut in dimension 1 and `position_ids` in the last one, into equal parts: padding repeats
        the last token, is labelled -100, masked where there is a mask, and continues the last positions. A multimodal model's
        own arguments (ids, positions, masks, labels, pixels) stay whole; `shift_labels`, `temperature` and others are cut.

        Raises:
            ScopeStateError: this scope has no `sp=`.
        """
        return self._ulysses().shard(self.target, batch)

    def gather(
        self, x: torch.Tensor, dim: int = 1, length: int | None = None, backward: Literal["slice", "sum"] = "slice"
    ) -> torch.Tensor:
        """The whole of a cut tensor on every rank: [.., S/n, ..] -> [.., S, ..].

        Args:
            dim: the dimension of the tokens.
            length: S; by default that of the last batch given to `shard()`, or everything that the ranks have.
            backward: what a rank's tokens get of the gradients of the whole: `"slice"`, this rank's own, for a loss that
                every rank computes alike; or `"sum"`, those of all ranks, where each computes another part of the loss.

        Raises:
            ScopeStateError: this scope has no `sp=`.
        """
        return self._ulysses().gather(x, dim, length, backward)

    def _ulysses(self) -> Ulysses:
        for patch in self.plan.patches:
            if isinstance(patch, Ulysses):
                return patch
        raise ScopeStateError("shard() and gather() belong to a scope with sp=...; this one has none")


class PatchedScope(Scope[ModelSession]):
    """What `patched(...)` returns; enter it with `with`, use it as a decorator, or `.apply()` it. Reusable."""

    session_class = ModelSession

    def __init__(
        self, target: Any, patches: tuple[Patch, ...], *, root: Any, on_foreign: OnForeign, on_compiled: OnCompiled
    ) -> None:
        super().__init__(target, patches, root=root, on_foreign=on_foreign)
        self.on_compiled = on_compiled

    def check_enter(self, plan: Plan) -> None:
        """Compiled code does not see edits of classes: refuse them, or reset the compiler's caches."""
        super().check_enter(plan)
        touched = class_slots(plan)
        if not touched or not compiled_code_exists():
            return
        if self.on_compiled == "error":
            raise ConflictError(
                f"{touched[0].label} is patched on a class, and torch.compile has compiled code in this process that would "
                f"go on running the old one. Patch an instance, enter before compiling, or pass on_compiled='reset' to drop "
                f"the compiled code"
            )

    def apply(self) -> ModelSession:
        session = super().apply()
        session.on_compiled = self.on_compiled
        if self.on_compiled == "reset" and class_slots(session.plan) and compiled_code_exists():
            session.resets_compiler = True
            reset_compiler()
        return session


def patched(
    target: Any = None,
    *patches: Patch,
    sp: Any = None,
    fused: Any = None,
    tiled_mlp: Any = None,
    prefix_grouper: Any = None,
    fake_quant: Any = None,
    qat: Any = None,
    vlm_mixed_batch: bool | None = None,
    on_foreign: OnForeign = "error",
    on_compiled: OnCompiled = "error",
) -> PatchedScope:
    """A scope of reversible patches on one model.

    Usage::

        with patched(model, fused="torch") as scope:
            out = model(input_ids=ids, labels=labels)
        print(scope.explain())

        step = patched(model, fused="torch")  # planned once, entered every step
        with step:
            ...

    Args:
        target: the model, wrapped or not (DDP, FSDP, torch.compile, PEFT, accelerate, value heads); any object, class or
            module for patches of your own; None when they name their targets themselves. Only this instance changes.
        *patches: your own `Patch` objects, `replace_attribute(...)`, `wrap_call(...)`.
        sp: each sequence spread over ranks: how many (consecutive ranks of the default group), a `ProcessGroup`, a
            `DeviceMesh` dimension, or a `Ulysses`. Every rank enters the same scope and makes the same calls.
        fused: log-probs and entropy without keeping logits: `"torch"`, `"triton"`, `"auto"`, or a `FusedHead`.
        tiled_mlp: feed-forward blocks in tiles of tokens, keeping the activations of one: how many tiles, or a `TiledMLP`.
        prefix_grouper: rows that begin alike compute their common prefix once: True, or a `PrefixGrouper`.
        fake_quant: train through NVFP4: `"w4a16"` (weights), `"w4a4"` (inputs too), or a `FakeQuant`.
        qat: vLLM's NVFP4 schemes made repeatable, for reload code that processes weights more than once: `"nvfp4"`, one of
            `scoped_patch.vllm`'s target patches, or several. Takes no model; enter it before vLLM loads the first weights.
        vlm_mixed_batch: of a vision-language model: batches without images run the tower on a blank one, with no effect, so
            that ranks with and without images stay in step (`VLMMixedBatch`). None: with `sp=`.
        on_foreign: what leaving does about a place that somebody else changed meanwhile: `"error"` leaves it and raises,
            `"keep"` leaves it, `"restore"` puts the original back.
        on_compiled: what entering does about edits of module classes when compiled code exists, which would not see them:
            `"error"`, or `"reset"` the compiler on enter and exit. Edits of instances are always seen.

    Returns:
        PatchedScope: reusable; nothing is changed until it is entered.

    Raises:
        BadOptionError, BadTargetError: an option or the target cannot work; says what can.
        UnsupportedError, ConflictError: when entering (or at `.plan()`): a patch cannot act on this model, or two patches
            want one place. Nothing is changed then.
    """
    if isinstance(target, Patch):
        patches, target = (target, *patches), None
    if not (isinstance(on_compiled, str) and on_compiled in ("error", "reset")):
        raise BadOptionError(f"on_compiled must be 'error' or 'reset', got {on_compiled!r}")
    shipped: list[Patch] = []
    if sp is not None and sp is not False:
        shipped.append(sp if isinstance(sp, Ulysses) else Ulysses(sp))
    if fused is not None and fused is not False:
        shipped.append(_option("fused", fused, FusedHead, (str,), "'torch', 'triton', 'auto' or a FusedHead"))
    if tiled_mlp is not None and tiled_mlp is not False:
        shipped.append(_option("tiled_mlp", tiled_mlp, TiledMLP, (int,), "a number of tiles or a TiledMLP"))
    if prefix_grouper is not None and prefix_grouper is not False:
        prefix_grouper = PrefixGrouper() if prefix_grouper is True else prefix_grouper
        shipped.append(_option("prefix_grouper", prefix_grouper, PrefixGrouper, (), "True or a PrefixGrouper"))
    if fake_quant is not None and fake_quant is not False:
        shipped.append(_option("fake_quant", fake_quant, FakeQuant, (str,), "'w4a16', 'w4a4' or a FakeQuant"))
    is_model = isinstance(target, nn.Module)
    if vlm_mixed_batch not in (None, True, False):
        raise BadOptionError(f"vlm_mixed_batch must be True, False or None (with sp=), got {vlm_mixed_batch!r}")
    if vlm_mixed_batch:
        shipped.append(VLMMixedBatch())
    if shipped and not is_model:
        raise BadTargetError(
            f"{shipped[0].name} acts on a model, and the target is {type(target).__name__}: pass the model first, "
            f"as in patched(model, ...)"
        )
    if qat is not None and qat is not False:
        if target is not None:
            raise BadTargetError(
                f"qat= patches vLLM's own classes, before any model is built, and the target is {type(target).__name__}: "
                f"pass no target, as in patched(qat={qat!r}), in a scope of its own"
            )
        from .vllm.targets import qat_targets

        shipped += qat_targets(qat)
    refuse_two_settings((*shipped, *patches))
    refuse_calibration_in_tiles((*shipped, *patches))
    root, own = target, list[Patch]()
    if is_model:
        found = unwrap(target)
        root = found.model
        shares = any(isinstance(patch, PrefixGrouper) for patch in shipped)
        if shares and not any(isinstance(patch, FusedHead) for patch in (*shipped, *patches)):
            shipped += scoring_for_trl(root)
        own = [RecomputeAsRun(), SavesUnpatched()]
        if found.value_head is not None:
            own.insert(0, ValueHead())
        kinds = {type(one) for one in (*shipped, *patches)}
        if vlm_mixed_batch is None and Ulysses in kinds and VLMMixedBatch not in kinds and is_multimodal(root):
            own.insert(0, VLMMixedBatch(required=False))
    return PatchedScope(target, (*shipped, *patches, *own), root=root, on_foreign=on_foreign, on_compiled=on_compiled)


def _option(keyword: str, value: Any, kind: type[Any], simple: tuple[type, ...], wanted: str) -> Patch:
    if isinstance(value, kind):
        return value  # type: ignore[no-any-return]
    if isinstance(value, simple) and not isinstance(value, bool):
        return kind(value)  # type: ignore[no-any-return]
    raise BadOptionError(f"{keyword} must be {wanted}, got {value!r}")


def refuse_two_settings(patches: tuple[Patch, ...]) -> None:
    """One kind of shipped patch with two different options in one call is a mistake, whichever would win."""
    known: dict[str, Any] = {}
    for patch in patches:
        options = getattr(patch, "options", None)
        if options is not None and known.setdefault(patch.name, options) != options:
            raise ConflictError(f"{patch.name} was given twice with other options: keep one of them")


def refuse_calibration_in_tiles(patches: tuple[Patch, ...]) -> None:
    """Inputs that are measured as they come would be measured tile by tile, and the first tile rounded by its own."""
    observing = any(isinstance(p, FakeQuant) and p.scheme == "w4a4" and p.input_global_scales is None for p in patches)
    if observing and any(isinstance(p, TiledMLP) for p in patches):
        raise ConflictError(
            "fake_quant='w4a4' measures the inputs of whole calls, and tiled_mlp shows it one tile at a time: pass "
            "fake_quant=FakeQuant('w4a4', input_global_scales=...), or leave out tiled_mlp"
        )


def scoring_for_trl(model: nn.Module) -> list[Patch]:
    """TRL's fused head cannot score shared prefixes: on a model that has one, ours does it, in its terms."""
    try:
        found = find_trl_head(model.forward)
    except UnsupportedError:  # of a kind that is not known; calls with its flag are refused by name
        return []
    return [FusedHead("auto")] if found is not None else []


def compiled_code_exists() -> bool:
    """Has anything been compiled in this process? (Looks only if Dynamo is loaded at all.)

    Functions that are only marked for compilation do not count: libraries have those, and they run as they are when called.
    """
    codes = getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", None)
    seen = getattr(codes, "seen", None)
    if seen is not None:
        return bool(seen)
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return bool(getattr(frames, "cached_backends", None))


def class_slots(plan: Plan) -> list[ClassSlot]:
    """The edits of module classes: those that compiled code does not see."""
    slots = [one.edit.slot for one in plan.edits if isinstance(one.edit.slot, ClassSlot)]
    return [slot for slot in slots if issubclass(slot.owner, nn.Module)]


def reset_compiler() -> None:
    torch.compiler.reset()
