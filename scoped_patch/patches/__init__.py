"""The shipped patches, one file each."""

from .fake_quant import FakeQuant
from .fused_head import FusedHead
from .prefix_grouper import PackedGroups, PrefixGrouper, pack_prefix_groups
from .tiled_mlp import TiledMLP
from .ulysses import Ulysses
from .vlm_mixed_batch import VLMMixedBatch

__all__ = [
    "FakeQuant",
    "FusedHead",
    "PackedGroups",
    "PrefixGrouper",
    "TiledMLP",
    "Ulysses",
    "VLMMixedBatch",
    "pack_prefix_groups",
]
