"""The patch object behind `prefix_grouper=`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ...engine import Edit, Patch, Session, Support, attribute_slot, item_slot
from ...engine.errors import BadOptionError, ScopedPatchError, SeamNotReachedError
from ...models.attention import attention_registry, local_mapping, mixing_layers
from ...models.modules import foreign_forward, forward_edit, module_paths
from ...models.spec import anatomy, describe
from ...models.unwrap import unwrap
from ...ops.prefix_attention import BACKENDS
from .attention import ENTRY_NAME, attention_entry, attention_problem
from .seam import Seam

RANK = 30  # outermost of the shipped patches: everything below sees one packed row
ATTENTION_RANK = 19  # but inside sequence parallelism, whose exchange of heads goes around any attention


@dataclass(frozen=True, eq=False)
class PrefixGrouper(Patch):
    """`prefix_grouper=`: rows of a batch that begin alike compute their common prefix once.

    Three kinds of calls:

    - an ordinary batch [B, S], padded on either side, with `group_ids=` (int64 [B], any order): rows of a group share the
      longest run of real tokens they all begin with, at least one token being left to each. Without `group_ids` the
      groups that save most are found by comparing tokens. Results are in the batch's own layout, equal to the
      unpatched model's; padding is 0;
    - one packed row [1, N] with `cu_seqlens=` (segment boundaries) and `group_ids=` (one per segment); the first segment
      of a group is its prefix. `pack_prefix_groups` makes such a row. Log-probs are per token: position t scores token t;
    - rows with a `prefix_grouper=` object of the package of that name, as its `concat_input` makes them; log-probs
      likewise.

    Args:
        find: look for common prefixes by token in calls without `group_ids`; False leaves such calls as they are.
        backend: of the attention, see `scoped_patch.ops.prefix_attention`; `"auto"` chooses by device and shape.

    Raises (when entering):
        UnsupportedError: a layer mixes tokens by something other than causal softmax attention; names it.
    """

    find: bool = True
    backend: Literal["auto", "blockwise", "plain", "flash", "flex", "cudnn"] = "auto"
    name: str = field(default="prefix_grouper", init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.find, bool):
            raise BadOptionError(f"prefix_grouper: find must be True or False, got {self.find!r}")
        if not (isinstance(self.backend, str) and self.backend in BACKENDS):
            raise BadOptionError(
                f"prefix_grouper: the backend must be one of {', '.join(map(repr, BACKENDS))}, got {self.backend!r}"
            )

    @property
    def options(self) -> Hashable:
        return (self.find, self.backend)

    def supports(self, target: Any) -> Support:
        try:
            parts = anatomy(unwrap(target).model)
            layers = mixing_layers(parts.model)[1]
        except ScopedPatchError as error:
            return Support(False, str(error))
        problem = attention_problem(parts.model, layers)
        if problem is not None:
            return Support(False, problem)
        modules = [module for layer in layers for module in layer.attentions]
        notes = [f"{len(modules)} attention modules of {describe(parts.model)} read one packed row"]
        foreign = [kind for module in (parts.model, *modules) if (kind := foreign_forward(module))]
        notes += [f"found a forward put on the instance by somebody else and wrapped it: {kind}" for kind in foreign]
        return Support(True, notes=tuple(notes))

    def fingerprint(self, target: Any) -> Hashable:
        model = unwrap(target).model
        try:
            layers = mixing_layers(model)[1]
        except ScopedPatchError:
            return None
        return (id(model), "_old_forward" in model.__dict__, *(id(module) for layer in layers for module in layer.attentions))

    def plan(self, target: Any) -> Iterable[Edit]:
        parts = anatomy(unwrap(target).model)
        model = parts.model
        layers = mixing_layers(model)[1]
        seam = Seam(self, model, layers, parts.own_loss)
        paths = module_paths(model)
        token = (self.name, self.options, id(model))
        modules = [module for layer in layers for module in layer.attentions]
        for registry in {id(one): one for one in map(attention_registry, modules)}.values():
            yield Edit(
                item_slot(local_mapping(registry), ENTRY_NAME, f"{type(registry).__name__}[{ENTRY_NAME!r}]"),
                lambda prior: attention_entry,
                "replace",
                "the shared-prefix attention, under a name of its own",
                RANK,
                commutes=True,
                token=(self.name, ENTRY_NAME),
                any_thread=True,
                to="shared-prefix attention",
            )
        for module in modules:
            yield Edit(
                attribute_slot(module, "config", f"{paths.get(id(module), '?')}.config"),
                seam.configs,
                "wrap",
                "prefixes once, responses against them",
                ATTENTION_RANK,
                commutes=True,
                token=token,
                exclusive=self.name,
                counter=seam.grouped,
                to=f"a copy that names {ENTRY_NAME!r}",
            )
        yield forward_edit(
            model,
            type(model).__name__,
            seam.model_forward,
            name="prefix_model_forward",
            rank=RANK,
            reason="pack shared prefixes, give back the caller's layout",
            to="runs one packed row",
            token=token,
            exclusive=self.name,
        )
        if hasattr(model, "generate"):
            yield Edit(
                attribute_slot(model, "generate", f"{type(model).__name__}.generate"),
                seam.generate,
                "wrap",
                "decoding is as outside the scope",
                RANK,
                commutes=True,
                token=token,
                exclusive=self.name,
                to="no grouping inside",
            )

    def audit(self, session: Session) -> None:
        calls = grouped = 0
        for record in session.records:
            if record.planned.patch is self and record.calls is not None:
                if record.edit.counter is not None and "names" in record.edit.to:
                    grouped = max(grouped, record.calls)
                else:
                    calls = max(calls, record.calls)
        if calls and not grouped:
            raise SeamNotReachedError(
                f"{self.name}: the model ran {calls} times in the scope entered at {session.location}, and no call shared a "
                f"prefix: none had group_ids, and no two rows of a batch begin with the same token"
            )
