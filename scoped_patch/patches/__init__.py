"""The shipped patches, one file each."""

from .fake_quant import FakeQuant
from .fused_head import FusedHead
from .prefix_grouper import PackedGroups, PrefixGrouper, pack_prefix_groups
from .tiled_mlp import TiledMLP
from .ulysses import Ulysses

__all__ = ["FakeQuant", "FusedHead", "PackedGroups", "PrefixGrouper", "TiledMLP", "Ulysses", "pack_prefix_groups"]
