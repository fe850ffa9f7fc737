"""The shipped patches, one file each."""

from .fused_head import FusedHead
from .prefix_grouper import PackedGroups, PrefixGrouper, pack_prefix_groups
from .ulysses import Ulysses

__all__ = ["FusedHead", "PackedGroups", "PrefixGrouper", "Ulysses", "pack_prefix_groups"]
