"""`apply_monkey_patch`: what verl's FSDP engine calls on a model that it has just built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...compose import ModelSession, patched
from ...engine import Edit, Patch
from ...engine.adhoc import signature_of
from ...engine.errors import BadOptionError, ScopedPatchError
from ...models.attention import mixing_layers
from ...models.modules import forward_edit
from ...models.unwrap import unwrap
from ...patches import Ulysses
from .ulysses import get_ulysses_sequence_parallel_group

RANK = 90  # around all shipped patches: it hands a call on in the terms that they know

#: verl's names of fused kernels -> ours; `None` is what its config holds when it names none
_BACKENDS = {"torch": "torch", "triton": "triton", "liger": "auto", None: "auto"}

_EXTRA = ("cu_seqlens", "cu_seqlens_cpu")


def apply_monkey_patch(
    model: nn.Module,
    ulysses_sp_size: int = 1,
    use_remove_padding: bool = True,
    use_fused_kernels: bool = False,
    fused_kernels_backend: str | None = None,
    use_prefix_grouper: bool = False,
    use_tiled_mlp: bool = False,
    tiled_mlp_shards: int = 4,
) -> ModelSession:
    """Patch this model as verl's function of that name patches its class, for as long as the session is not restored.

    May be called before `.to(dtype)`, gradient checkpointing, PEFT, FSDP and the optimizer. What verl passes then, a packed
    row [1, N / sp] of ids with restarting `position_ids`, `shift_labels`, `temperature`, and `cu_seqlens` of all N tokens, is
    what the model takes; `log_probs` and `entropy` [1, N / sp] are what it gives with fused kernels.

    Args:
        model: any model that the shipped patches act on; only this instance is changed.
        ulysses_sp_size: ranks that share a sequence: those of the group that was set with
            `set_ulysses_sequence_parallel_group`, or else consecutive ranks. Inputs and outputs are a rank's part of the
            tokens (whole inputs for multimodal models). Gradients are scaled by nothing here: `gather_outputs_and_unpad`,
            verl's or ours, does it.
        use_remove_padding: packed rows; layers that are recurrent over tokens start anew at each sample.
        use_fused_kernels: log-probs and entropy without logits.
        fused_kernels_backend: "torch", "triton", or "liger" and None for whichever suits the device.
        use_prefix_grouper: common prefixes computed once, for calls that carry a `prefix_grouper` or `group_ids`.
        use_tiled_mlp: feed-forward blocks in `tiled_mlp_shards` tiles.

    Returns:
        ModelSession: with `explain()`, `verify()` and `restore()`. Calling this again with the same arguments gives another
        session on the same edits; they stay until both are restored.

    Raises:
        BadOptionError, UnsupportedError, ConflictError: something that was asked for cannot work; nothing is changed then.
    """
    if use_fused_kernels and not (isinstance(fused_kernels_backend, str | None) and fused_kernels_backend in _BACKENDS):
        known = ", ".join(repr(name) for name in _BACKENDS if name)
        raise BadOptionError(f"fused_kernels_backend must be {known} or None, got {fused_kernels_backend!r}")
    if isinstance(ulysses_sp_size, bool) or not isinstance(ulysses_sp_size, int) or ulysses_sp_size < 1:
        raise BadOptionError(f"ulysses_sp_size must be a number of ranks (int >= 1), got {ulysses_sp_size!r}")
    sp: Ulysses | None = None
    if ulysses_sp_size > 1:
        sp = Ulysses(_group(ulysses_sp_size), inputs="sharded", grad_reduction="sum")
    elif use_remove_padding and _has_mixers(model):
        sp = Ulysses(1)
    scope = patched(
        model,
        VerlCalls(scores=use_fused_kernels),
        sp=sp,
        fused=_BACKENDS[fused_kernels_backend] if use_fused_kernels else None,
        tiled_mlp=tiled_mlp_shards if use_tiled_mlp else None,
        prefix_grouper=use_prefix_grouper or None,
    )
    return scope.apply()


def _group(size: int) -> Any:
    group = get_ulysses_sequence_parallel_group()
    if group is None:
        return size
    if group.size() != size:
        raise BadOptionError(
            f"ulysses_sp_size={size}, and the group set by set_ulysses_sequence_parallel_group has {group.size()} ranks"
        )
    return group


def _has_mixers(model: nn.Module) -> bool:
    try:
        _, layers = mixing_layers(unwrap(model).model)
    except ScopedPatchError:
        return False
    return any(layer.mixers for layer in layers)


class VerlCalls(Patch):
    """The model's call in verl's terms: it shows `cu_seqlens`, and takes a temperature per sample of a packed row.

    Args:
        scores: the call may carry `temperature`, since the fused head is on.
    """

    name = "verl_calls"

    def __init__(self, scores: bool) -> None:
        self.scores = scores

    @property
    def options(self) -> Hashable:
        return (self.scores,)

    def plan(self, target: Any) -> Iterable[Edit]:
        model = unwrap(target).model
        edit = forward_edit(
            model,
            type(model).__name__,
            self.forward,
            name="verl_model_forward",
            rank=RANK,
            reason="take what verl's engine passes",
            to="cu_seqlens and temperature per sample",
            token=(self.name, self.scores, id(model)),
            exclusive=self.name,
        )

        def make(prior: Any) -> Any:
            made = edit.make(prior)
            show_parameters(made.__func__, prior)
            return made

        yield replace(edit, make=make)

    def forward(self, prior: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cu_seqlens, on_host = (_boundaries(name, kwargs.pop(name, None)) for name in _EXTRA)
        temperature = kwargs.get("temperature")
        if temperature is not None:
            if not self.scores:
                raise BadOptionError("temperature was passed to a model without fused kernels, which would ignore it")
            kwargs["temperature"] = self._aligned(temperature, cu_seqlens, kwargs)
        if cu_seqlens is not None:
            longest = _longest(cu_seqlens, on_host)
            bounds = cu_seqlens.to(torch.int32)
            kwargs.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)
        return prior(*args, **kwargs)

    def _aligned(self, temperature: Any, cu_seqlens: Tensor | None, kwargs: dict[str, Any]) -> Any:
        """A temperature per sample of a packed row becomes one per token of this rank's part."""
        targets = kwargs.get("shift_labels")
        given = targets if targets is not None else kwargs.get("input_ids")
        if not isinstance(temperature, Tensor) or temperature.ndim != 1 or given is None or temperature.shape[0] == len(given):
            return temperature
        samples = temperature.shape[0]
        if samples == 1:
            return temperature[0]
        if cu_seqlens is None or len(given) != 1 or len(cu_seqlens) - 1 - samples not in (0, 1):
            raise BadOptionError(
                f"temperature has {samples} values for {len(given)} rows of input; for the samples of a packed row pass "
                f"cu_seqlens too, with as many samples (one more where the row is padded)"
            )
        lengths = cu_seqlens.diff()
        if len(lengths) > samples:
            temperature = torch.cat([temperature, temperature.new_ones(1)])
        tokens = temperature.repeat_interleave(lengths)[None]
        size = given.shape[1]
        if tokens.shape[1] == size:
            return tokens
        group = get_ulysses_sequence_parallel_group()
        ranks = tokens.shape[1] // max(size, 1)
        if ranks * size != tokens.shape[1] or (group is not None and group.size() != ranks):
            raise BadOptionError(
                f"cu_seqlens tells of {tokens.shape[1]} tokens, which is not this rank's {size} times the number of ranks"
            )
        rank = group.rank() if group is not None else torch.distributed.get_rank() % ranks
        return tokens[:, rank * size : (rank + 1) * size].contiguous()


def _boundaries(name: str, given: Any) -> Tensor | None:
    if given is None or (
        isinstance(given, Tensor) and given.ndim == 1 and len(given) > 1 and given.dtype in (torch.int32, torch.int64)
    ):
        return given
    what = f"a {given.dtype} tensor {list(given.shape)}" if isinstance(given, Tensor) else f"{given!r}"
    raise BadOptionError(
        f"{name}: got {what}, wanted an int32 or int64 tensor [samples + 1] of where samples begin, and the end"
    )


def _longest(cu_seqlens: Tensor, on_host: Tensor | None) -> int:
    """How many tokens the longest sample has, read from the copy on the host where there is one."""
    if on_host is not None and on_host.shape != cu_seqlens.shape:
        raise BadOptionError(f"cu_seqlens has {len(cu_seqlens)} boundaries, and cu_seqlens_cpu has {len(on_host)}")
    shortest, longest = torch.stack((cu_seqlens if on_host is None else on_host).diff().aminmax()).tolist()
    if shortest < 0:
        raise BadOptionError("cu_seqlens goes down: it must say where samples begin, in order, and where the last one ends")
    return int(longest)


def show_parameters(function: Any, prior: Any) -> None:
    """Add verl's keywords to the signature that a patched forward shows: its engine asks for them there."""
    shown = getattr(function, "__signature__", None)
    if shown is None:
        known = signature_of(prior)
        head = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
        shown = inspect.Signature([*head, *(known.parameters.values() if known is not None else ())])
    parameters = list(shown.parameters.values())
    at = next((i for i, p in enumerate(parameters) if p.kind is inspect.Parameter.VAR_KEYWORD), len(parameters))
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in _EXTRA if n not in shown.parameters]
    function.__signature__ = shown.replace(parameters=[*parameters[:at], *extra, *parameters[at:]])
