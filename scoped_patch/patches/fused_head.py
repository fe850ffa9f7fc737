"""The fused head: per-token log-probs and entropy from inside the head's own forward, without keeping logits.

Two seams per model. The head's instance forward runs the linear cross entropy on the hidden states it is given and hands
back [..., 2] (log-prob, entropy) in place of logits; running there keeps sharded heads (FSDP2 units of their own) whole.
The model's instance forward opens a frame that says what to score, and turns what comes out into declared output fields.
The model's own code in between runs as it is: what it does to logits (softcap, scale) is applied inside the op, and the
first call proves by value that the model does just that.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..engine import LIVE, Edit, Patch, Support, attribute_slot
from ..engine.adhoc import signature_of
from ..engine.errors import BadOptionError, ConflictError, ScopedPatchError, SeamNotReachedError, UnsupportedError
from ..models.head import head_problem, head_terms
from ..models.modules import foreign_forward, forward_edit, forward_slot, is_class_forward, module_paths
from ..models.outputs import declare_for, fused_output_class
from ..models.packing import IGNORE_INDEX, aligned_targets
from ..models.sharding import KeptRows, SequenceShard, active_shard
from ..models.spec import Anatomy, anatomy, describe
from ..models.unwrap import unwrap
from ..ops.linear_cross_entropy import linear_cross_entropy
from .trl_head import TrlHead, find_trl_head

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
        if self.backend not in ("auto", "torch", "triton"):
            raise BadOptionError(f"fused: the backend must be 'auto', 'torch' or 'triton', got {self.backend!r}")
        wanted = (self.outputs,) if isinstance(self.outputs, str) else tuple(self.outputs)
        if not wanted or any(one not in OUTPUTS for one in wanted):
            raise BadOptionError(f"fused: outputs must be one or more of {', '.join(OUTPUTS)}, got {self.outputs!r}")
        object.__setattr__(self, "outputs", wanted)
        memory: Any = self.memory
        is_bytes = isinstance(memory, int) and not isinstance(memory, bool) and memory > 0
        if memory not in ("auto", "low") and not is_bytes:
            raise BadOptionError(f"fused: memory must be 'auto', 'low' or a number of bytes > 0, got {memory!r}")
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
                check=functools.partial(check_head_forward, leaf, seam.what),
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
                lambda prior: seam.loss_function(prior),
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


class Frame:
    """What one call of the model wants scored, and what the head found."""

    __slots__ = (
        "entropy",
        "ignore_index",
        "keep",
        "labels",
        "log_probs",
        "packed",
        "ran",
        "rows",
        "scored",
        "shard",
        "targets",
        "temperature",
        "thread",
        "trl",
    )

    def __init__(
        self, targets: Tensor | None, labels: Any, temperature: float | Tensor, ignore_index: int, thread: int
    ) -> None:
        self.targets = targets
        self.labels = labels
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.thread = thread
        self.ran = False
        self.packed: Tensor | None = None
        self.log_probs: Tensor | None = None
        self.entropy: Tensor | None = None
        self.scored: Tensor | None = None
        self.trl: TrlHead | None = None
        #: how the call's sequence is spread over ranks, and the rows that the caller wants of the whole
        self.shard: SequenceShard | None = None
        self.rows: KeptRows | None = None
        self.keep: Any = 0


#: The calls that are under way, by model.
_frames: weakref.WeakKeyDictionary[nn.Module, list[Frame]] = weakref.WeakKeyDictionary()


class Seam:
    """The functions of one plan."""

    def __init__(self, patch: FusedHead, parts: Anatomy) -> None:
        self.patch = patch
        self.transform = parts.transform
        self.own_loss = parts.own_loss
        self.what = describe(parts.model)
        self.frames = _frames.setdefault(parts.model, [])
        self.head_places = tuple(forward_slot(leaf, "").place for leaf in parts.head_leaves)
        self.pass_through = 0
        self.proved = False
        self.trl: TrlHead | None = None
        signature = signature_of(type(parts.model).forward)
        parameters = list(signature.parameters.values())[1:] if signature is not None else []
        self.positional = tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)

    # ------------------------------------------------------------------------------------------------- the model
    def model_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.pass_through or not self._in_charge():
            return prior(*args, **kwargs)
        if len(args) > len(self.positional):
            raise TypeError(f"{self.what} takes at most {len(self.positional)} positional arguments, got {len(args)}")
        for name, value in zip(self.positional, args, strict=False):
            if name in kwargs:
                raise TypeError(f"{self.what} got multiple values for argument {name!r}")
            kwargs[name] = value
        temperature = kwargs.pop("temperature", None)
        trl = self.trl
        if trl is not None:
            if not kwargs.pop("fused_lm_head", False):
                if temperature is None:
                    return prior(**kwargs)  # no flag: logits are wanted
                trl = None
            else:
                temperature = trl.prepare(kwargs, self.patch.temperature if temperature is None else temperature)
        if temperature is None:
            temperature = self.patch.temperature
        else:
            check_temperature(temperature)
        as_tuple = kwargs.get("return_dict") is False
        if as_tuple:
            kwargs["return_dict"] = True
        keep = kwargs.get("logits_to_keep", 0)
        shard = active_shard(module)
        if shard is not None and not shard.gathers_outputs:
            targets = shard.targets  # shifted over the whole sequence, and cut
        else:
            targets = aligned_targets(kwargs, kwargs.get("ignore_index", IGNORE_INDEX))
        if targets is not None and not _kept_already(kwargs, keep):
            temperature = _kept_temperature(temperature, keep, targets)
            targets = _kept(targets, keep)
        labels = kwargs.get("labels")
        if self.own_loss:
            kwargs.pop("labels", None)
        thread = 0 if torch.compiler.is_dynamo_compiling() else threading.get_ident()
        frames = self.frames
        if frames and frames[-1].thread != thread:
            raise ConflictError(
                f"fused_head: two threads run {self.what} at once; patched models are run from one thread at a time"
            )
        frame = Frame(targets, labels, temperature, kwargs.get("ignore_index", IGNORE_INDEX), thread)
        frame.trl = trl
        if shard is not None:
            # The head scores this rank's tokens: results are smaller to gather than hidden states or logits.
            shard.wants_local_hidden = True
            frame.shard = shard
            frame.keep = kwargs.pop("logits_to_keep", 0)
            if shard.gathers_outputs and _is_list_of_rows(frame.keep):
                frame.rows = shard.kept_rows(frame.keep)
                kwargs["logits_to_keep"] = frame.rows.rows
        frames.append(frame)
        try:
            out = prior(**kwargs)
        finally:
            frames.pop()
        if not frame.ran:
            raise SeamNotReachedError(
                f"fused_head: the forward of {self.what} never called its head, so nothing was scored. Something computes "
                f"the logits elsewhere (another fused head, such as TRL's or Liger's): switch that off, or leave out `fused`"
            )
        made = self._output(out, frame, as_tuple)
        if trl is None or frame.packed is None or frame.targets is None:
            return made
        return trl.output(made, frame.packed, frame.targets, kwargs.get("shift_labels") is not None)

    def look_at(self, prior: Any) -> None:
        """Called with the forward that the model's edit is built on."""
        self.trl = find_trl_head(prior)

    def _in_charge(self) -> bool:
        """False where somebody has kept this forward and calls it out of turn.

        A wrapper made inside the scope (accelerate's `prepare`) goes on calling it after the scope was left, and, when the
        next scope has wrapped that wrapper, in the middle of a call that is being scored.
        """
        if torch.compiler.is_dynamo_compiling():
            return True
        frames = self.frames
        if frames and not frames[-1].ran and frames[-1].thread == threading.get_ident():
            return False
        return any(place in LIVE.states for place in self.head_places)

    def _output(self, out: Any, frame: Frame, as_tuple: bool) -> Any:
        if not hasattr(out, "logits"):
            raise UnsupportedError(
                f"fused_head: {self.what} returned a {type(out).__name__} without `logits`; only transformers' outputs are "
                f"supported"
            )
        self._receive(frame, out.logits)
        loss = getattr(out, "loss", None)
        if self.own_loss and frame.labels is not None:
            loss = _loss(frame, None)
        values = {name: getattr(out, name) for name in out.__dataclass_fields__}
        values["logits"] = None
        values["loss"] = loss
        values["log_probs"] = frame.log_probs if "log_probs" in self.patch.outputs else None
        values["entropy"] = frame.entropy if "entropy" in self.patch.outputs else None
        made = fused_output_class(type(out))(**values)
        return made.to_tuple() if as_tuple else made

    def _receive(self, frame: Frame, received: Any) -> None:
        """Take the results out of what arrived where logits go.

        They are read from what the head made, since whatever happened on the way (softcap, a cast of outputs) is not meant
        for them; but what arrived must be that, changed only as the model is known to change logits.
        """
        packed = frame.packed
        assert packed is not None
        if received is not packed or self.transform:
            self._prove(packed, received)
        if frame.log_probs is None:
            if received.device != packed.device:
                packed = packed.to(received.device)
            frame.log_probs, frame.entropy = packed[..., 0], packed[..., 1]

    def _prove(self, packed: Tensor, received: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or (self.proved and isinstance(received, Tensor)):
            return  # a look at values would break the graph; the eager call that traced it has been looked at
        ours = isinstance(received, Tensor) and received.shape == packed.shape
        if ours and not packed.is_meta:
            expected = self.transform(packed.detach())
            found = received.detach().to(expected.device, expected.dtype)
            ours = torch.allclose(found, expected, rtol=1e-2, atol=1e-3, equal_nan=True)
        if not ours:
            raise UnsupportedError(
                f"fused_head: {self.what} changes its logits after the head in a way that is not known here (known: "
                f"{self.transform}). Looked for final_logit_softcapping, logit_scale and logits_scaling in its config; "
                f"without that the log-probs would be wrong, so leave out `fused` for this model"
            )
        self.proved = True

    # ------------------------------------------------------------------------------------------------- the head
    def head_forward(
        self, prior: Callable[..., Any], module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.pass_through or not self.frames:
            return prior(hidden_states, *args, **kwargs)
        frame = self.frames[-1]
        if any(extra is not None for extra in (*args, *kwargs.values())):
            names = ", ".join([*(type(extra).__name__ for extra in args), *kwargs])
            raise UnsupportedError(
                f"fused_head: the head of {self.what} was called with more than hidden states ({names}), which would be ignored"
            )
        if frame.ran:
            raise UnsupportedError(f"fused_head: {self.what} calls its head more than once per forward, which is not supported")
        frame.ran = True
        targets = frame.targets
        if targets is None:
            raise BadOptionError(
                "fused_head: nothing says which tokens to score: pass input_ids, labels= or shift_labels= (with inputs_embeds "
                "alone, labels are needed)"
            )
        temperature = frame.temperature
        shard = frame.shard
        if frame.rows is not None:
            targets = frame.rows.cut(targets, frame.ignore_index)
            if isinstance(temperature, Tensor) and temperature.ndim == 2:
                temperature = frame.rows.cut(temperature, 1.0)
        elif shard is not None and shard.gathers_outputs:
            targets = shard.cut_kept(targets, frame.keep, frame.ignore_index)
            if isinstance(temperature, Tensor) and temperature.ndim == 2:
                temperature = shard.cut_kept(temperature, frame.keep, 1.0)
        if targets.shape != hidden_states.shape[:-1]:
            raise BadOptionError(
                f"fused_head: the head was given hidden states {list(hidden_states.shape)}, and the tokens to score are "
                f"{list(targets.shape)}; they must agree in all but the last dimension"
            )
        patch, trl = self.patch, frame.trl
        terms = head_terms(module, hidden_states)
        if trl is not None:
            hidden_states, terms = trl.cast(hidden_states, terms)
        targets = targets.to(hidden_states.device)
        if isinstance(temperature, Tensor):
            temperature = temperature.to(hidden_states.device)
        outputs = patch.outputs if frame.labels is None or "log_probs" in patch.outputs else ("log_probs", *patch.outputs)
        score = linear_cross_entropy if trl is None else trl.score
        result = score(
            hidden_states,
            terms.weight,
            targets,
            terms.bias,
            temperature=temperature,
            ignore_index=frame.ignore_index,
            softcap=self.transform.softcap,
            logit_scale=self.transform.scale,
            extra_hidden_states=terms.extra_hidden_states,
            extra_weight=terms.extra_weight,
            memory=patch.memory,
            backend=patch.backend,
            outputs=outputs if trl is None else trl.op_outputs,
            entropy_grad=patch.entropy_grad,
        )
        frame.scored = frame.targets
        log_probs, entropy = result.log_probs, result.entropy
        # Packed, so that a head that is a unit of its own (FSDP2) hands back one tensor with one gradient.
        first = log_probs if log_probs is not None else torch.zeros_like(entropy)  # type: ignore[arg-type]
        second = entropy if entropy is not None else torch.zeros_like(first)
        extra = [] if trl is None else trl.columns(result, hidden_states, terms, self.transform, temperature)
        packed = torch.stack([first, second, *extra], -1)
        if frame.rows is not None:
            packed = frame.rows.gather(packed)
        elif shard is not None and shard.gathers_outputs:
            packed = _kept(shard.gather(packed, 1), frame.keep)
        frame.packed = packed
        return packed

    # ------------------------------------------------------------------------------------------------- loss, generate
    def loss_function(self, prior: Any) -> Callable[..., Any]:
        def fused_loss_function(
            logits: Any, labels: Any = None, vocab_size: Any = None, num_items_in_batch: Any = None, **kwargs: Any
        ) -> Tensor:
            frame = self.frames[-1]
            self._receive(frame, logits)
            return _loss(frame, num_items_in_batch)

        return fused_loss_function

    def generate(self, prior: Callable[..., Any]) -> Callable[..., Any]:
        def fused_generate(*args: Any, **kwargs: Any) -> Any:
            self.pass_through += 1
            try:
                return prior(*args, **kwargs)
            finally:
                self.pass_through -= 1

        fused_generate.__doc__ = prior.__doc__
        signature = signature_of(prior)
        if signature is not None:
            fused_generate.__signature__ = signature  # type: ignore[attr-defined]
        return fused_generate


def check_head_forward(head: nn.Module, what: str, prior: Any) -> None:
    """The fused head stands in for the head's forward and never calls it: that must be the one that is known.

    Raises:
        UnsupportedError: somebody put another forward on this instance.
    """
    if not is_class_forward(head, prior):
        name = getattr(prior, "__qualname__", type(prior).__name__)
        raise UnsupportedError(
            f"fused_head: the forward of the head of {what} was replaced on this instance by {name}, which would never run. "
            f"Take that off, or leave out `fused`"
        )


def _loss(frame: Frame, num_items: Any) -> Tensor:
    """Mean negative log-prob of the labels, or their sum over `num_items`; 0 where there are none."""
    total = -frame.log_probs.sum()  # type: ignore[union-attr]  # ignored rows are 0
    if num_items is None:
        num_items = (frame.scored != frame.ignore_index).sum().clamp(min=1)  # type: ignore[union-attr]
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    loss: Tensor = total / num_items
    return loss


def _kept_already(kwargs: dict[str, Any], keep: Any) -> bool:
    """As transformers' losses have it: `shift_labels` as long as a list of rows to keep belong to those rows."""
    given = kwargs.get("shift_labels")
    return given is not None and _is_list_of_rows(keep) and given.shape[1:] == keep.shape


def _is_list_of_rows(keep: Any) -> bool:
    return isinstance(keep, Tensor) and keep.dtype == torch.int64 and keep.ndim == 1


def _kept(values: Tensor, keep: Any) -> Tensor:
    """Cut [B, S] values as the model cuts its hidden states for `logits_to_keep`."""
    if isinstance(keep, int):
        return values[:, -keep:] if keep else values
    return values if keep is None else values[:, keep]


def _kept_temperature(temperature: float | Tensor, keep: Any, targets: Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor) and temperature.ndim == 2 and temperature.shape[1] == targets.shape[1]:
        return _kept(temperature, keep)
    return temperature


def check_temperature(temperature: Any) -> None:
    """Refuse what cannot divide logits.

    Raises:
        BadOptionError: not a number > 0, or a tensor of integers or of less than fp32.
    """
    if isinstance(temperature, Tensor):
        if temperature.dtype not in (torch.float32, torch.float64):
            raise BadOptionError(
                f"temperature: got a {temperature.dtype} tensor, wanted float32. Mixed precision (FSDP's cast_forward_inputs "
                f"for one) casts float tensors among the arguments of a call: pass a float, or set the tensor on the scope "
                f"with fused=FusedHead(temperature=...), which no cast reaches"
            )
        if temperature.ndim > 2:
            raise BadOptionError(f"temperature: got shape {list(temperature.shape)}, wanted [], [B] or [B, S]")
    elif isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature > 0:
        raise BadOptionError(f"temperature: got {temperature!r}, wanted a number > 0 or a float32 tensor [B] or [B, S]")
