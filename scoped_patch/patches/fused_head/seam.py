"""The fused head: per-token log-probs and entropy from inside the head's own forward, without keeping logits.

Two seams per model. The head's instance forward runs the linear cross entropy on the hidden states it is given and hands
back [..., 2] (log-prob, entropy) in place of logits; running there keeps sharded heads (FSDP2 units of their own) whole.
The model's instance forward opens a frame that says what to score, and turns what comes out into declared output fields.
The model's own code in between runs as it is: what it does to logits (softcap, scale) is applied inside the op, and the
first call proves by value that the model does just that.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...engine import LIVE
from ...engine.adhoc import signature_of
from ...engine.errors import BadOptionError, ConflictError, SeamNotReachedError, UnsupportedError
from ...models.head import head_terms
from ...models.modules import forward_slot
from ...models.outputs import fused_output
from ...models.packing import IGNORE_INDEX, aligned_targets
from ...models.placement import Placement
from ...models.sharding import active_shard
from ...models.spec import Anatomy, describe, find_head, head_leaves
from ...ops.linear_cross_entropy import linear_cross_entropy
from ..trl_head import TrlHead, find_trl_head
from .evaluation import collects_logits
from .frame import Frame, check_temperature, frames_of, is_list_of_rows, kept_already, kept_rows, kept_temperature, token_loss

if TYPE_CHECKING:
    from .patch import FusedHead


class Seam:
    """The functions of one plan."""

    def __init__(self, patch: FusedHead, parts: Anatomy) -> None:
        self.patch = patch
        self.transform = parts.transform
        self.own_loss = parts.own_loss
        self.what = describe(parts.model)
        self.frames = frames_of.setdefault(parts.model, [])
        self.head_places = tuple(forward_slot(leaf, "").place for leaf in parts.head_leaves)
        self.placement = Placement(patch.name, parts.model, parts.head_leaves)
        self.model = weakref.ref(parts.model)
        self.decoding: set[int] = set()  # threads inside generate(), where logits are wanted
        self.proved = False
        self.trl: TrlHead | None = None
        signature = signature_of(type(parts.model).forward)
        parameters = list(signature.parameters.values())[1:] if signature is not None else []
        self.positional = tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)

    # ------------------------------------------------------------------------------------------------- the model
    def model_forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._decodes() or not self._in_charge():
            return prior(*args, **kwargs)
        self.placement.check()
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
            if trl is None and collects_logits():
                return prior(**kwargs)
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
        if targets is not None and not kept_already(kwargs, keep):
            temperature = kept_temperature(temperature, keep, targets)
            targets = kept_rows(targets, keep)
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
            if shard.gathers_outputs and is_list_of_rows(frame.keep):
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

    def _decodes(self) -> bool:
        return bool(self.decoding) and (torch.compiler.is_dynamo_compiling() or threading.get_ident() in self.decoding)

    def _refuse_stale(self, head: nn.Module) -> None:
        """Somebody has put another head around the one that was patched (an adapter, say): its sum would be wrong."""
        model = None if torch.compiler.is_dynamo_compiling() else self.model()
        now = None if model is None else find_head(model)
        if now is not None and not any(leaf is head for leaf in head_leaves(now)):
            raise UnsupportedError(
                f"fused_head: the head of {self.what} was replaced by a {type(now).__name__} while the scope was live; leave "
                f"the scope and enter it again, so that it is planned for the new head"
            )

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
            loss = token_loss(frame, None)
        values = {name: getattr(out, name) for name in out.__dataclass_fields__}
        values["logits"] = None
        values["loss"] = loss
        values["log_probs"] = frame.log_probs if "log_probs" in self.patch.outputs else None
        values["entropy"] = frame.entropy if "entropy" in self.patch.outputs else None
        made = fused_output(type(out), values)
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
            # Copies: what is done in place to a view of FSDP2's output would drop its backward hook.
            frame.log_probs, frame.entropy = packed[..., 0].clone(), packed[..., 1].clone()

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
        if self._decodes() or not self.frames:
            return prior(hidden_states, *args, **kwargs)
        frame = self.frames[-1]
        self._refuse_stale(module)
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
            packed = kept_rows(shard.gather(packed, 1), frame.keep)
        frame.packed = packed
        return packed

    # ------------------------------------------------------------------------------------------------- loss, generate
    def loss_function(self, own: Any) -> Callable[..., Any]:
        """`own` is the model's loss function without us."""
        name = getattr(own, "__qualname__", type(own).__name__)

        def fused_loss_function(
            logits: Any, labels: Any = None, vocab_size: Any = None, num_items_in_batch: Any = None, **kwargs: Any
        ) -> Tensor:
            frames = self.frames
            if not frames or not frames[-1].ran or self._decodes():
                # Logits came past the patched forward (a forward that somebody kept, a decoding step).
                loss: Tensor = own(
                    logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch, **kwargs
                )
                return loss
            if name != "ForCausalLMLoss":
                raise UnsupportedError(
                    f"fused_head: {self.what} has a loss function of its own, {name}, which needs logits. Call the model "
                    f"without labels= (shift_labels= says what to score) and make the loss from out.log_probs, or leave out "
                    f"`fused`"
                )
            frame = frames[-1]
            self._receive(frame, logits)
            return token_loss(frame, num_items_in_batch)

        return fused_loss_function

    def generate(self, prior: Callable[..., Any]) -> Callable[..., Any]:
        def fused_generate(*args: Any, **kwargs: Any) -> Any:
            me = threading.get_ident()
            if me in self.decoding:
                return prior(*args, **kwargs)
            self.decoding.add(me)
            try:
                return prior(*args, **kwargs)
            finally:
                self.decoding.discard(me)

        fused_generate.__doc__ = prior.__doc__
        signature = signature_of(prior)
        if signature is not None:
            fused_generate.__signature__ = signature  # type: ignore[attr-defined]
        return fused_generate
