"""`sp=`: what it asks of a model, and the edits it makes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from ...engine import MISSING, Edit, Patch, Session, Support, attribute_slot, item_slot
from ...engine.errors import BadOptionError, ScopedPatchError, SeamNotReachedError
from ...models.attention import (
    MixingLayer,
    attention_registry,
    local_mapping,
    mask_of_whole_sequence,
    mask_registry,
    mixing_layers,
)
from ...models.modules import foreign_forward, forward_edit, module_paths
from ...models.spec import describe, is_multimodal, text_config
from ...models.unwrap import unwrap
from ...models.vision import find_vision
from ...ops.sequence_parallel import HeadLayout, gather_sequence, report_failure
from . import groups
from .batch import shard_batch, whole_inputs
from .checking import SpreadCheck
from .seam import Seam

RANK = 20  # around the fused head (10) and tiles (15), inside prefix sharing


@dataclass(frozen=True, eq=False)
class Ulysses(Patch):
    """`sp=`: each sequence is spread over the ranks of a group, and the model computes as one process would.

    Per softmax attention, forward sends the ranks' queries, keys and values in one all-to-all, so that each rank has some
    heads of all tokens, and the output back in another; backward the same. Whatever attention implementation the model
    uses runs in between, on the whole sequence and its whole mask. All else is computed on this rank's tokens only.

    With B rows of S tokens, n ranks and one layer of H query and KV key-value heads of size D, a rank hands
    `B * ceil(S/n) * (H * D + n * k * 2 * D)` elements to the first all-to-all and `B * ceil(S/n) * H * D` to the second,
    where k = ceil(KV/n) if n divides KV or the other way round (in general: the key-value heads its query heads need).

    Args:
        group: how many ranks share a sequence (consecutive ranks of the default group), a `ProcessGroup`, or a
            one-dimensional `DeviceMesh`, such as `mesh["sp"]`.
        inputs: `"full"`: every rank passes the same whole batch, and gets the same whole outputs. `"sharded"`: ids,
            position_ids, labels, shift_labels and temperature are this rank's part, and so are the outputs; the parts have
            equal lengths. (Multimodal models take whole inputs, since images may lie anywhere: of these only shift_labels and
            temperature are cut.)
        grad_reduction: what is done with the gradients of all ranks afterwards. `"mean"`, as DDP and FSDP do over all
            ranks; or `"sum"` over the ranks of the group. Either way the result is the gradient of one process.

    Raises (when entering):
        UnsupportedError: the model mixes tokens in a way that is not known, or its heads cannot be shared; says which.
    """

    group: Any
    inputs: Literal["full", "sharded"] = "full"
    grad_reduction: Literal["mean", "sum"] = "mean"
    name: str = field(default="ulysses", init=False, repr=False)
    #: the process group of the last call, for `abandoned`
    in_use: list[Any] = field(default_factory=list, init=False, repr=False)
    _last_length: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        groups.check_option(self.group)
        if not (isinstance(self.inputs, str) and self.inputs in ("full", "sharded")):
            raise BadOptionError(f"sp: inputs must be 'full' or 'sharded', got {self.inputs!r}")
        if not (isinstance(self.grad_reduction, str) and self.grad_reduction in ("mean", "sum")):
            raise BadOptionError(f"sp: grad_reduction must be 'mean' or 'sum', got {self.grad_reduction!r}")

    @property
    def options(self) -> Hashable:
        return (groups.key(self.group), self.inputs, self.grad_reduction)

    def supports(self, target: Any) -> Support:
        unwrapped = unwrap(target)
        model = unwrapped.model
        try:
            _, layers = mixing_layers(model)
        except ScopedPatchError as error:
            return Support(False, str(error))
        outside = unwrapped.value_head is not None
        if outside and (self.grad_reduction == "sum") == (self.inputs == "full") and groups.degree(self.group) > 1:
            return Support(
                False,
                f"the value head of {type(unwrapped.value_head).__name__} lies outside the patched model, and with "
                f"inputs={self.inputs!r} its gradients are right for grad_reduction="
                f"{'mean' if self.inputs == 'full' else 'sum'!r} only",
            )
        if self.inputs == "sharded" and getattr(model, "loss_type", None) == "ForSequenceClassification":
            return Support(
                False,
                f"{describe(model)} answers with the last token of its own input, which with inputs='sharded' is a part of the "
                f"sequence. Use inputs='full'",
            )
        return self._layouts(model, layers)

    def _layouts(self, model: nn.Module, layers: tuple[MixingLayer, ...]) -> Support:
        ranks = groups.degree(self.group)
        notes: list[str] = []
        mixers = [(layer.index, type(m).__name__) for layer in layers for m in layer.mixers]
        if mixers:
            where = ", ".join(str(index) for index, _ in mixers)
            notes.append(f"{mixers[0][1]} (layer {where}) runs on the gathered sequence on every rank")
        apart = [(layer.index, type(m).__name__) for layer in layers for m in layer.apart]
        if apart:
            if self.inputs == "sharded" and not is_multimodal(model):
                return Support(
                    False,
                    f"{describe(model)} makes its masks by itself, from the length of its own input (its {apart[0][1]} knows "
                    f"no attention interface): with inputs='sharded' that is a part of the sequence. Use inputs='full'",
                )
            where = ", ".join(str(index) for index, _ in apart)
            notes.append(
                f"structure inferred: {apart[0][1]} (layer {where}) uses no attention interface, and runs on the gathered "
                f"sequence on every rank; the decoder makes masks of the whole sequence, which is cut at its first layer"
            )
        config = text_config(model)
        heads, kv = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
        if isinstance(heads, int) and any(layer.attentions for layer in layers):
            kv = kv if isinstance(kv, int) and kv else heads
            try:
                layout = HeadLayout(heads, kv, ranks)
            except ValueError as error:
                return Support(False, f"{describe(model)}: {error}")
            if layout.kv_sent is not None:
                notes.append(f"{kv} key-value heads for {ranks} ranks: each rank is sent {layout.kv_per_rank} of them")
        if is_multimodal(model):
            notes += _vision_notes(model)
        foreign = [kind for layer in layers if (kind := foreign_forward(layer.layer))]
        notes += [f"found a forward put on the instance by somebody else and wrapped it: {kind}" for kind in foreign[:3]]
        return Support(True, notes=tuple(notes))

    def ready(self, target: Any) -> str | None:
        return groups.problem(self.group)

    def fingerprint(self, target: Any) -> Hashable:
        model = unwrap(target).model
        try:
            decoder, layers = mixing_layers(model)
        except ScopedPatchError:
            return None
        return (
            getattr(getattr(decoder, "config", None), "_attn_implementation", None),
            tuple(id(part) for layer in layers for part in layer.modules),
        )

    def plan(self, target: Any) -> Iterable[Edit]:
        model = unwrap(target).model
        decoder, layers = mixing_layers(model)
        seam = Seam(self, model, decoder, layers)
        paths = module_paths(model)
        token = (self.name, self.options, id(model))
        common: dict[str, Any] = {"rank": RANK, "token": token, "exclusive": self.name}

        def path(module: nn.Module) -> str:
            return paths.get(id(module)) or type(module).__name__

        for layer in layers:
            yield forward_edit(
                layer.layer,
                path(layer.layer),
                seam.layer_forward(layer),
                name="ulysses_layer_forward",
                reason="give the layer this rank's positions",
                to="positions of this rank's tokens",
                **common,
            )
            for mixer in layer.mixers:
                yield forward_edit(
                    mixer,
                    path(mixer),
                    seam.mixer_forward,
                    name="ulysses_mixer_forward",
                    reason="a recurrence needs the whole sequence, sample by sample",
                    to="gather, run, keep this rank's tokens",
                    **common,
                )
            for attention in layer.apart:
                yield forward_edit(
                    attention,
                    path(attention),
                    seam.apart_forward,
                    name="ulysses_attention_forward",
                    reason="an attention of its own needs the whole sequence",
                    to="gather, run, keep this rank's tokens",
                    **common,
                )
        yield from self._attention_edits(seam, layers, path, common)
        yield from self._mask_edits(decoder)
        yield forward_edit(
            decoder,
            path(decoder),
            seam.decoder_forward,
            name="ulysses_decoder_forward",
            reason="cut the sequence, gather what comes out",
            to=f"this rank's tokens of {groups.degree(self.group)} ranks",
            **common,
        )
        if decoder is not model:
            yield forward_edit(
                model,
                type(model).__name__,
                seam.model_forward,
                name="ulysses_model_forward",
                reason="say how the call is spread",
                to=f"inputs {self.inputs}, gradients for a {self.grad_reduction}",
                **common,
            )
        if self.inputs == "sharded" and not seam.own_loss:
            yield Edit(
                attribute_slot(model, "_loss_function", f"{type(model).__name__}._loss_function"),
                lambda prior: seam.loss_function(getattr(model, "loss_function", None) if prior is MISSING else prior),
                "wrap",
                "the loss of a cut sequence",
                commutes=True,
                to="the same function, told this rank's targets and the count of all",
                **common,
            )
        if hasattr(model, "generate"):
            yield Edit(
                attribute_slot(model, "generate", f"{type(model).__name__}.generate"),
                seam.generate,
                "wrap",
                "a key-value cache is not spread over ranks",
                commutes=True,
                to="as outside the scope",
                **common,
            )

    def _attention_edits(
        self, seam: Seam, layers: tuple[MixingLayer, ...], path: Any, common: dict[str, Any]
    ) -> Iterable[Edit]:
        registered: set[tuple[int, str]] = set()
        # The name holds the implementation's: code that looks for "flash" in it sees what it saw. It is read where nobody
        # changes it, so that two scopes that share edits share the name.
        implementation = getattr(getattr(seam.decoder, "config", None), "_attn_implementation", None)
        name = f"ulysses_{implementation}_{id(seam.model):x}"
        make_view = seam.attention_view(name)
        for layer in layers:
            for module in layer.attentions:
                registry = attention_registry(module)
                if (id(registry), name) not in registered:
                    registered.add((id(registry), name))
                    yield Edit(
                        item_slot(local_mapping(registry), name, f"{type(registry).__name__}[{name!r}]"),
                        lambda prior: seam.attention,
                        "replace",
                        "run the model's attention on this rank's heads of all tokens",
                        commutes=True,
                        to="all-to-all, the model's own attention, all-to-all",
                        counter=seam.attention_counter,
                        **common,
                    )
                yield Edit(
                    attribute_slot(module, "config", f"{path(module)}.config"),
                    make_view,
                    "wrap",
                    "send this attention through the exchange",
                    commutes=True,
                    to=f"a copy that names {name}",
                    **common,
                )

    def _mask_edits(self, decoder: nn.Module) -> Iterable[Edit]:
        registry = mask_registry()
        name = getattr(getattr(decoder, "config", None), "_attn_implementation", None)
        if name is None or name not in registry:
            return
        yield Edit(
            item_slot(local_mapping(registry), name, f"{type(registry).__name__}[{name!r}]"),
            lambda prior: mask_of_whole_sequence(name, prior),
            "wrap",
            "masks of the whole sequence, for this model's decoder only",
            RANK,
            commutes=True,
            token=(self.name, "mask", name),
            any_thread=True,
            to="the same function, told the whole length",
        )

    def audit(self, session: Session) -> None:
        calls = {"model": 0, "layers": 0}
        for record in session.records:
            if record.planned.patch is self and record.calls is not None:
                to = record.edit.to
                if to.startswith("this rank's tokens"):
                    calls["model"] += record.calls
                elif to.startswith(("all-to-all", "gather")):
                    calls["layers"] += record.calls
        if calls["model"] and not calls["layers"]:
            raise SeamNotReachedError(
                f"{self.name}: the decoder ran {calls['model']} times in the scope entered at {session.location}, and none "
                f"of its attentions exchanged heads"
            )

    def abandoned(self, error: BaseException) -> None:
        """The scope is left with an error of its body (in backward, say): tell the other ranks, who may wait for this one."""
        for group in self.in_use:
            report_failure(group, error)

    # ------------------------------------------------------------------------------------------------- helpers
    def spread_check(self, model: nn.Module, batch: dict[str, Any]) -> SpreadCheck:
        """How `verify()` compares a whole batch on one process with this rank's part of it."""
        group, mean = groups.resolve(self.group), self.grad_reduction == "mean"
        return SpreadCheck(group, self.inputs == "sharded", mean, model, unwrap(model).model, batch)

    def shard(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole batch, as `inputs="sharded"` takes it; see `ModelSession.shard`."""
        made = shard_batch(groups.resolve(self.group), batch, whole_inputs(unwrap(model).model))
        given = batch.get("input_ids")
        self._last_length[:] = [(given if given is not None else batch["inputs_embeds"]).shape[1]]
        return made

    def gather(self, x: Tensor, dim: int = 1, length: int | None = None, backward: Literal["slice", "sum"] = "slice") -> Tensor:
        """The whole of a cut tensor, on every rank; see `ModelSession.gather`."""
        group: dist.ProcessGroup | None = groups.resolve(self.group)
        if group is None:
            return x
        if length is None:
            whole = x.shape[dim] * dist.get_world_size(group)
            known = self._last_length[0] if self._last_length else whole
            length = known if 0 <= whole - known < dist.get_world_size(group) else whole
        return gather_sequence(x, dim, group, length=length, backward=backward)


def _vision_notes(model: nn.Module) -> list[str]:
    """Sequences are cut after the tower, at the decoder; which parts these are."""
    try:
        parts = find_vision(model).notes()
    except ScopedPatchError as error:
        parts = (str(error),)
    return ["images are computed whole on every rank, and sequences cut at the decoder", *parts]
