"""Feed-forward blocks a tile of tokens at a time: the gradients of the whole, the activations of one tile."""

from scoped_patch.ops.tiled_mlp.activations import ACTIVATIONS, identify_activation
from scoped_patch.ops.tiled_mlp.dense import tiled_mlp
from scoped_patch.ops.tiled_mlp.general import tiled_call
from scoped_patch.ops.tiled_mlp.reached import reached_tensors

__all__ = ["ACTIVATIONS", "identify_activation", "reached_tensors", "tiled_call", "tiled_mlp"]
