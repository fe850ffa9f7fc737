"""A feed-forward block whose inside is known: two or three projections and an elementwise activation.

The forward keeps the input and the weights, nothing of the intermediate size. The backward recomputes the activations
of one tile of tokens at a time, without the down projection, whose result no gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from scoped_patch.ops.tiled_mlp.activations import Activation, act, act_backward, check_activation
from scoped_patch.ops.tiled_mlp.reached import PlainAttributes, put_back
from scoped_patch.ops.tiled_mlp.tiles import (
    AutocastState,
    accumulation_dtype,
    add_product,
    add_rows,
    check_tiles,
    refuse_second_derivative,
    tile_slices,
)

if TYPE_CHECKING:
    from torch import Tensor


class _Settings(NamedTuple):
    activation: Activation
    fused: bool
    tiles: int
    dtype: torch.dtype
    attributes: PlainAttributes | None


class _Weights(NamedTuple):
    """The six tensors of a block, or one thing per tensor (a flag, a sum); None where the block has no such tensor."""

    gate: Any
    up: Any
    down: Any
    gate_bias: Any
    up_bias: Any
    down_bias: Any


def tiled_mlp(
    hidden_states: Tensor,
    gate_weight: Tensor | None,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    activation_parameters: Sequence[Tensor] = (),
    tiles: int,
) -> Tensor:
    """`down(activation(gate(x)) * up(x))` in tiles of tokens: the activations of one tile alive at a time.

    Args:
        hidden_states: [..., hidden]; all leading dimensions together are the tokens.
        gate_weight: [intermediate, hidden]. None for one of two other blocks, told apart by the shape of `up_weight`:
        up_weight: [intermediate, hidden]; without a gate, this shape means the plain `down(activation(up(x)))`, and
            [2 * intermediate, hidden] means gate and up in one projection, gate first.
        down_weight: [output, intermediate].
        gate_bias, up_bias, down_bias: one-dimensional, as long as their weight's first dimension, or None.
        activation: a name of `ACTIVATIONS`, or an elementwise function of one tensor, without randomness.
        activation_parameters: the tensors that such a function computes with and that may need a gradient.
        tiles: the largest number of tiles. Fewer are used where there are fewer tokens; sizes may be uneven.

    Returns:
        [..., output], of the dtype that `torch.nn.functional.linear` would give: under autocast, the autocast dtype.

    The gradient of each weight is summed over the tiles in float32 (float64 for float64), rounded once, and handed to
    autograd once per backward, so hooks on it fire as they do without tiling. Under autocast the backward computes in
    the forward's autocast dtype. A tensor that needs no gradient costs no matrix product. The tensors kept for the
    backward go through saved-tensor hooks. Working memory: about three [tokens / tiles, intermediate] tensors, and in
    the backward a float32 sum per trainable weight.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
        RuntimeError: in the use of a gradient of the gradient (`create_graph=True`): there is no second derivative.

    Source: the idea of tiling the MLP over the sequence is from Arctic Long Sequence Training (arXiv:2506.13996).
    """
    check_tiles(tiles)
    check_activation(activation)
    tensors = _Weights(gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    fused = _check_shapes(hidden_states, tensors)
    dtype = _compute_dtype(hidden_states, tensors)
    # In a compiled graph they are constants.
    has_attributes = isinstance(activation, nn.Module) and not torch.compiler.is_compiling()
    attributes = PlainAttributes(activation) if has_attributes else None  # type: ignore[arg-type]
    if not isinstance(activation, str):
        activation = _under_autocast_of_now(activation, hidden_states)
    settings = _Settings(activation, fused, tiles, dtype, attributes)
    inputs = (hidden_states, *tensors, *activation_parameters)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        return _TiledMLP.apply(settings, *inputs)  # type: ignore[no-any-return,no-untyped-call]
    return _forward(hidden_states, tensors, settings)


def _check_shapes(hidden_states: Tensor, tensors: _Weights) -> bool:
    """Whether gate and up are one projection; raises if the shapes do not fit."""
    down, up = tensors.down, tensors.up
    for name, weight in (("gate_weight", tensors.gate), ("up_weight", up), ("down_weight", down)):
        if weight is not None and weight.ndim != 2:
            raise ValueError(f"{name}: got shape {tuple(weight.shape)}, wanted two dimensions, [out, in]")
    hidden, intermediate = up.shape[1], down.shape[1]
    if hidden_states.ndim < 1 or hidden_states.shape[-1] != hidden:
        raise ValueError(
            f"hidden_states: got shape {tuple(hidden_states.shape)}, wanted [..., {hidden}] for an up_weight of shape "
            f"{tuple(up.shape)}"
        )
    fused = tensors.gate is None and intermediate > 0 and up.shape[0] == 2 * intermediate
    if up.shape[0] != (2 * intermediate if fused else intermediate):
        wanted = f"[{intermediate}, hidden]" + (
            f", or [{2 * intermediate}, hidden] with gate and up in one" if tensors.gate is None else ""
        )
        raise ValueError(
            f"up_weight: got shape {tuple(up.shape)}, wanted {wanted}, for a down_weight of shape {tuple(down.shape)}"
        )
    if tensors.gate is not None and tensors.gate.shape != up.shape:
        raise ValueError(f"gate_weight: got shape {tuple(tensors.gate.shape)}, wanted up_weight's {tuple(up.shape)}")
    if tensors.gate is None and tensors.gate_bias is not None:
        raise ValueError("gate_bias: got a tensor without a gate_weight; a bias of both in one goes to up_bias")
    for name, bias, weight in (
        ("gate_bias", tensors.gate_bias, tensors.gate),
        ("up_bias", tensors.up_bias, up),
        ("down_bias", tensors.down_bias, down),
    ):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}: got shape {tuple(bias.shape)}, wanted ({weight.shape[0]},)")
    return fused


def _compute_dtype(hidden_states: Tensor, tensors: _Weights) -> torch.dtype:
    """The one dtype of the whole block: autocast's where that is on, the common dtype of the tensors elsewhere."""
    dtypes = {tensor.dtype for tensor in (hidden_states, *tensors) if tensor is not None}
    kind = hidden_states.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(kind)
    if len(dtypes) > 1:
        got = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"hidden_states and weights: got dtypes {got}, wanted one dtype, or autocast")
    return dtypes.pop()


def _cast(tensors: _Weights, dtype: torch.dtype) -> _Weights:
    return _Weights._make(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def _project(x: Tensor, weights: _Weights, fused: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(argument of the activation, factor of its value, the tensor that holds both if one does) of one tile."""
    up = F.linear(x, weights.up, weights.up_bias)
    if fused:
        half = up.shape[1] // 2
        return up[:, :half], up[:, half:], up
    if weights.gate is None:
        return up, None, None
    return F.linear(x, weights.gate, weights.gate_bias), up, None


def _forward(hidden_states: Tensor, tensors: _Weights, settings: _Settings) -> Tensor:
    with torch.no_grad(), _no_autocast(hidden_states):
        weights = _cast(tensors, settings.dtype)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        # Made in its final shape: a view made in here could not be changed in place by whoever gets it.
        output = x.new_empty(*hidden_states.shape[:-1], weights.down.shape[0], dtype=settings.dtype)
        rows = output.view(x.shape[0], weights.down.shape[0])
        for tile in tile_slices(x.shape[0], settings.tiles):
            _forward_tile(rows[tile], x[tile].to(settings.dtype), weights, settings)
    return output


def _forward_tile(output: Tensor, x: Tensor, weights: _Weights, settings: _Settings) -> None:
    argument, factor, _ = _project(x, weights, settings.fused)
    output.copy_(F.linear(act(settings.activation, argument, factor), weights.down, weights.down_bias))


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: _Settings, hidden_states: Tensor, *tensors: Any) -> Tensor:
        weights = _Weights._make(tensors[:6])
        ctx.settings = settings
        # `activation` computes with these very objects. They are saved too, for autograd to see if they were changed.
        ctx.activation_parameters = tensors[6:]
        ctx.down_bias_dtype = None if weights.down_bias is None else weights.down_bias.dtype
        ctx.save_for_backward(hidden_states, *weights[:5], *tensors[6:])
        return _forward(hidden_states, weights, settings)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Any:
        hidden_states, *saved = ctx.saved_tensors[:6]
        with torch.no_grad(), _no_autocast(hidden_states), put_back(ctx.settings.attributes):
            backward = _Backward(
                hidden_states,
                d_output,
                _Weights._make([*saved, None]),
                ctx.down_bias_dtype,
                ctx.activation_parameters,
                ctx.needs_input_grad[1:],
                ctx.settings,
            )
            gradients = backward.run()
        return (None, *refuse_second_derivative("tiled_mlp", gradients))


class _Backward:
    """One backward: goes over the tiles and sums the gradients of the weights."""

    def __init__(
        self,
        hidden_states: Tensor,
        d_output: Tensor,
        tensors: _Weights,
        down_bias_dtype: torch.dtype | None,
        activation_parameters: Sequence[Tensor],
        needed: Sequence[bool],
        settings: _Settings,
    ) -> None:
        self._hidden_states = hidden_states
        self._d_output = d_output
        self._settings = settings
        self._weights = _cast(tensors, settings.dtype)
        self._needs_input = needed[0]
        self._needs = _Weights._make(needed[1:7])
        self._activation_parameters = [
            tensor for tensor, wanted in zip(activation_parameters, needed[7:], strict=True) if wanted
        ]
        self._activation_needs = needed[7:]
        # One sum for each of the six tensors of the block, then for each wanted activation parameter.
        self._dtypes: list[torch.dtype | None] = [
            *(None if tensor is None else tensor.dtype for tensor in tensors[:5]),
            down_bias_dtype,
            *(tensor.dtype for tensor in self._activation_parameters),
        ]
        self._sums: list[Tensor | None] = [None] * len(self._dtypes)

    def run(self) -> list[Tensor | None]:
        """The gradients of the input, the block's six tensors and the activation's parameters."""
        shape = self._hidden_states.shape
        x, dy = self._hidden_states.reshape(-1, shape[-1]), self._d_output.reshape(-1, self._d_output.shape[-1])
        d_input = x.new_empty(x.shape) if self._needs_input else None
        for tile in tile_slices(x.shape[0], self._settings.tiles):
            d_x = self._tile(x[tile].to(self._settings.dtype), dy[tile])
            if d_input is not None and d_x is not None:
                d_input[tile] = d_x
            del d_x
        gradients = [None if d_input is None else d_input.view(shape)]
        gradients += [self._take(index) if wanted else None for index, wanted in enumerate(self._needs)]
        rest = iter(range(6, len(self._sums)))
        gradients += [self._take(next(rest)) if wanted else None for wanted in self._activation_needs]
        return gradients

    def _take(self, index: int) -> Tensor | None:
        """A finished sum in its tensor's dtype. The sum is let go, so that not all exist in both dtypes at once."""
        total, self._sums[index] = self._sums[index], None
        return None if total is None else total.to(self._dtypes[index])

    def _add(self, index: int, left: Tensor, right: Tensor | None = None) -> None:
        dtype = accumulation_dtype(left.dtype)
        total = self._sums[index]
        self._sums[index] = add_rows(total, left, dtype) if right is None else add_product(total, left, right, dtype)

    def _tile(self, x: Tensor, dy: Tensor) -> Tensor | None:
        """Adds one tile's share to the sums; returns the gradient of the tile's input, if that is wanted."""
        needs, weights, activation = self._needs, self._weights, self._settings.activation
        if needs.down_bias:
            self._add(5, dy)
        inner = self._needs_input or any(self._activation_needs) or any((*needs[:2], *needs[3:5]))
        if not (inner or needs.down):
            return None
        argument, factor, joined = _project(x, weights, self._settings.fused)
        if not inner:
            self._add(2, dy, act(activation, argument, factor))
            return None
        gradients = act_backward(activation, argument, factor, dy @ weights.down, self._activation_parameters)
        if needs.down:
            self._add(2, dy, gradients.value)
        for index, gradient in enumerate(gradients.parameters, start=6):
            if gradient is not None:
                self._add(index, gradient[None])
        d_argument, d_factor, _, _ = gradients
        # The value is the size of the tile's activations: it goes before more of that size may come.
        del gradients
        d_up = d_argument if d_factor is None else d_factor
        if joined is not None:
            for half, d_half in ((argument, d_argument), (factor, d_factor)):
                if half is not None and d_half is not None and d_half is not half:
                    half.copy_(d_half)
            d_up = joined
        del argument, factor, joined
        if needs.up:
            self._add(1, d_up, x)
        if needs.up_bias:
            self._add(4, d_up)
        if needs.gate:
            self._add(0, d_argument, x)
        if needs.gate_bias:
            self._add(3, d_argument)
        if not self._needs_input:
            return None
        d_x: Tensor = d_up @ weights.up
        return d_x if weights.gate is None else d_x.addmm_(d_argument, weights.gate)


def _no_autocast(tensor: Tensor) -> torch.autocast:
    kind = tensor.device.type
    return torch.autocast(kind if torch.amp.is_autocast_available(kind) else "cpu", enabled=False)


def _under_autocast_of_now(activation: Callable[[Tensor], Tensor], tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A foreign activation as it runs without tiling: what it computes with may depend on autocast."""
    state = AutocastState(tensor.device.type)
    if not state.active:
        return activation

    def under_autocast(argument: Tensor) -> Tensor:
        with state.enter():
            return activation(argument)

    return under_autocast
