"""The general form: any token-wise function in tiles of tokens, its inside unknown, recomputed as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from scoped_patch.ops.tiled_mlp.products import StepAside, WeightSums
from scoped_patch.ops.tiled_mlp.reached import Parameters, Reached, check_all_listed
from scoped_patch.ops.tiled_mlp.structure import Structure, leading_shape
from scoped_patch.ops.tiled_mlp.tiles import (
    AutocastState,
    accumulation_dtype,
    check_tiles,
    refuse_second_derivative,
    tile_slices,
)


def tiled_call(
    function: Callable[..., Any],
    tensors: Tensor | Sequence[Tensor],
    parameters: Parameters,
    tiles: int,
    *,
    token_dims: int | None = None,
    preserve_rng_state: bool = True,
    recompute_context: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Any:
    """`function(*tensors)` in tiles of tokens: the activations of one tile alive at a time, in both directions.

    The forward runs `function` on each tile and keeps only `tensors` and the random state. The backward runs it again,
    a tile at a time, and takes that tile's gradients. So `function` runs twice per tile, hooks inside it included.

    Args:
        function: token-wise: what it returns for a token depends on that token only, and it keeps no account of its
            calls. It gets one tensor per entry of `tensors`, with the tile's tokens in the last of the token dimensions
            and the others of size 1: of [batch, sequence, hidden] it gets [1, tokens, hidden].
        tensors: one tensor, or several that agree in the token dimensions, as [tokens, hidden] and [tokens, experts].
        parameters: the other tensors that `function` computes with and that may need a gradient: the module that holds
            them, a function that lists them, or a list. Of a module, other tensors, training flags and plain attributes
            (numbers, strings, lists of such) that are found in the backward make way for those of the forward while it
            recomputes (`torch.func.functional_call` gives a module tensors for the length of a call). A function is asked
            again in the backward, for wrappers that put other objects for the same memory in their place in between. A
            tensor that turns out not to be used gets no gradient, though autograd calls its hooks.
        tiles: the largest number of tiles. Fewer are used where there are fewer tokens; sizes may be uneven.
        token_dims: how many leading dimensions are the tokens; if not given, all but the last of the first tensor.
        preserve_rng_state: replay each tile's random state in the backward, so that dropout drops the same elements.
        recompute_context: makes a context manager that is entered around the recomputation of each backward.

    Returns:
        What `function(*tensors)` returns: a tensor, or a tuple or list of tensors and None. In each tensor the tokens
        are the leading dimensions, as in the input, or flattened into one, [batch * sequence, ...]; both kinds come
        back in the shape and the order of the untiled call.

    Gradients of `parameters` are summed over the tiles in float32 (float64 for float64) and handed to autograd once per
    backward. Those of 16-bit products with them (`F.linear`, `x @ weight`, on the CPU `F.grouped_mm`) are not rounded on
    their way into the sum; what else `function` does with them is rounded once per tile. The recomputation runs under the
    forward's autocast settings. `tensors` go through saved-tensor hooks. A single token is computed without tiling.
    Compiled code around it is left for the call (one graph break).

    Raises:
        ValueError, TypeError: arguments or outputs that are no tensors of tokens.
        RuntimeError: if `function` changes its input in place; in the backward, if it computed with a tensor that needs a
            gradient and is not listed, or if a listed one was replaced, or modified in place, since the forward; and in
            the use of a gradient of the gradient (`create_graph=True`): there is no second derivative.
    """
    if torch.compiler.is_dynamo_compiling():
        from scoped_patch.ops.tiled_mlp.uncompiled import uncompiled

        return uncompiled(
            tiled_call,
            function,
            tensors,
            parameters,
            tiles,
            token_dims=token_dims,
            preserve_rng_state=preserve_rng_state,
            recompute_context=recompute_context,
        )
    check_tiles(tiles)
    inputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    lead = leading_shape(inputs, token_dims)
    if lead.numel() <= 1:
        return function(*inputs)
    reached = Reached(parameters)
    call = _Call(function, reached, lead, tiles, preserve_rng_state, recompute_context, inputs[0].device)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *reached.tensors)):
        outputs = _TiledCall.apply(call, len(inputs), *inputs, *reached.tensors)  # type: ignore[no-untyped-call]
    else:
        outputs = call.forward(inputs)
    return call.structure.restore(outputs)


class _Call:
    """One tiled call: all that its backward needs besides tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        reached: Reached,
        lead: torch.Size,
        tiles: int,
        preserve_rng_state: bool,
        recompute_context: Callable[[], AbstractContextManager[Any]] | None,
        device: torch.device,
    ) -> None:
        self.function = function
        self.reached = reached
        self.lead = lead
        self.tiles = list(tile_slices(lead.numel(), tiles))
        self.structure = Structure(lead)
        self.autocast = AutocastState(device.type)
        self.recompute_context = recompute_context or contextlib.nullcontext
        self._preserve_rng_state = preserve_rng_state
        self._devices = [device] if device.type == "cuda" else []
        self._rng_states: list[list[Tensor]] = []

    def rows(self, tensor: Tensor, tile: slice) -> Tensor:
        """One tile of a tensor that begins with the token dimensions, as [tokens, ...]."""
        return tensor.reshape(self.lead.numel(), *tensor.shape[len(self.lead) :])[tile]

    def cut(self, tensor: Tensor, tile: slice) -> Tensor:
        """The same tile as `function` gets it, [1, ..., tokens, ...]."""
        part = self.rows(tensor, tile)
        return part.reshape(*(1,) * (len(self.lead) - 1), *part.shape)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs over all tokens, each [tokens, ...]."""
        if torch.is_grad_enabled():
            # Nothing listed needs a gradient. Should the function reach something that does, plain autograd serves it.
            results = [self._forward_tile(inputs, tile) for tile in self.tiles]
            return [torch.cat(pieces) for pieces in zip(*results, strict=True)]
        outputs: list[Tensor] = []
        for tile in self.tiles:
            results_of_tile = self._forward_tile(inputs, tile)
            if not outputs:
                outputs = [result.new_empty(self.lead.numel(), *result.shape[1:]) for result in results_of_tile]
            for output, result in zip(outputs, results_of_tile, strict=True):
                output[tile] = result
        return outputs

    def _forward_tile(self, inputs: Sequence[Tensor], tile: slice) -> list[Tensor]:
        if self._preserve_rng_state:
            self._rng_states.append(self._get_rng_state())
        pieces = [self.cut(part, tile) for part in inputs]
        versions = [_version(piece) for piece in pieces]
        results = self.structure.flatten(self.function(*pieces), tile.stop - tile.start)
        for piece, version in zip(pieces, versions, strict=True):
            if _version(piece) != version:
                raise RuntimeError(
                    f"tiled_call: the function changes its input of shape {tuple(piece.shape)} (one tile) in place, and its "
                    "recomputation would do so once more: change a clone in the function, or call it without tiling."
                )
        return results

    def recompute_tile(self, index: int, leaves: Sequence[Tensor], weights: WeightSums | None) -> list[Tensor]:
        """The outputs of tile `index` again, under what its forward ran under, with a graph."""
        if self._preserve_rng_state:
            self._set_rng_state(self._rng_states[index])
        with torch.enable_grad(), self.autocast.enter(), weights or contextlib.nullcontext():
            return self.structure.flatten(self.function(*leaves), self.tiles[index].stop - self.tiles[index].start)

    @contextlib.contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Leaves the random state of the caller as it was."""
        if not self._preserve_rng_state:
            yield
            return
        states = self._get_rng_state()
        try:
            yield
        finally:
            self._set_rng_state(states)

    def _get_rng_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def _set_rng_state(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state, device in zip(states[1:], self._devices, strict=True):
            torch.cuda.set_rng_state(state, device)


class _TiledCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.count = call, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:count])
        outputs = tuple(call.forward(tensors[:count]))
        call.reached.forward_is_done()
        if call.autocast.active:
            # Casts of weights made here, under no_grad, must not be found by later code that wants their gradients.
            torch.clear_autocast_cache()
        ctx.mark_non_differentiable(*(out for out in outputs if not (out.is_floating_point() or out.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[2:]
        with ctx.call.recompute_context(), ctx.call.own_randomness(), ctx.call.reached.put_back():
            gradients = _backward(ctx.call, ctx.saved_tensors, d_outputs, needed[: ctx.count], needed[ctx.count :])
        return (None, None, *refuse_second_derivative("tiled_call", gradients))


def _backward(
    call: _Call,
    inputs: Sequence[Tensor],
    d_outputs: Sequence[Tensor | None],
    needed_inputs: Sequence[bool],
    needed_parameters: Sequence[bool],
) -> list[Tensor | None]:
    reached, everything = call.reached.now()
    # One that was frozen since the forward gets no gradient from autograd either.
    taken = [wanted and tensor.requires_grad for tensor, wanted in zip(reached, needed_parameters, strict=True)]
    parameters = [tensor for tensor, wanted in zip(reached, taken, strict=True) if wanted]
    found: tuple[list[Tensor | None], list[Tensor | None]] | None = None
    # Sums need no help where autograd's gradients are in float32 already.
    if call.autocast.active or any(tensor.dtype.itemsize < 4 for tensor in parameters):
        with contextlib.suppress(StepAside):
            found = _over_tiles(call, inputs, d_outputs, needed_inputs, parameters, everything, WeightSums(parameters))
    if found is None:
        found = _over_tiles(call, inputs, d_outputs, needed_inputs, parameters, everything, None)
    d_inputs, sums = found
    totals = [None if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, parameters, strict=True)]
    in_order = iter(totals)
    return [*d_inputs, *(next(in_order) if wanted else None for wanted in taken)]


def _over_tiles(
    call: _Call,
    inputs: Sequence[Tensor],
    d_outputs: Sequence[Tensor | None],
    needed_inputs: Sequence[bool],
    parameters: Sequence[Tensor],
    everything: Sequence[Tensor],
    weights: WeightSums | None,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the inputs, and the sums of those of the parameters, with or without the help of `weights`."""
    d_inputs: list[Tensor | None] = [None] * len(inputs)
    sums: list[Tensor | None] = [None] * len(parameters) if weights is None else weights.sums
    for index, tile in enumerate(call.tiles):
        leaves = [
            call.cut(tensor, tile).detach().requires_grad_(wanted) for tensor, wanted in zip(inputs, needed_inputs, strict=True)
        ]
        pairs = [
            (result, d_output[tile])
            for result, d_output in zip(call.recompute_tile(index, leaves, weights), d_outputs, strict=True)
            if d_output is not None and result.requires_grad
        ]
        if not pairs:
            continue
        if weights is not None:
            for result, _ in pairs:
                result.register_hook(weights.begin_backward)  # type: ignore[no-untyped-call]
        # Of each tile: which tensors a function computes with may depend on the tokens.
        check_all_listed([result for result, _ in pairs], [*leaves, *everything])
        wanted_leaves = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(
            [result for result, _ in pairs],
            [*wanted_leaves, *parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        del pairs
        with torch.no_grad():
            of_leaves = iter(gradients[: len(wanted_leaves)])
            for position, (tensor, wanted) in enumerate(zip(inputs, needed_inputs, strict=True)):
                if wanted:
                    d_inputs[position] = _place(d_inputs[position], next(of_leaves), tensor, call, tile)
            for position, gradient in enumerate(gradients[len(wanted_leaves) :]):
                sums[position] = _add(sums[position], gradient)
    return d_inputs, sums


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _place(whole: Tensor | None, gradient: Tensor | None, tensor: Tensor, call: _Call, tile: slice) -> Tensor | None:
    """`whole`, the gradient of the input `tensor`, with one tile's gradient written into it."""
    if gradient is None:
        return whole
    if whole is None:
        whole = tensor.new_zeros(tensor.shape)
    rows = call.rows(whole, tile)
    rows.copy_(gradient.reshape(rows.shape))
    return whole


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    if total is None:
        # Always a copy: autograd may hand out one tensor for two inputs, or the incoming gradient itself.
        return gradient.to(accumulation_dtype(gradient.dtype), copy=True)
    return total.add_(gradient)
