"""The shipped patches, one file each."""

from .fused_head import FusedHead
from .prefix_grouper import PackedGroups, PrefixGrouper, pack_prefix_groups
from .tiled_mlp import TiledMLP
from .ulysses import Ulysses

__all__ = ["FusedHead", "PackedGroups", "PrefixGrouper", "TiledMLP", "Ulysses", "pack_prefix_groups"]
