"""Shared prefixes computed once: GRPO's several answers to one prompt, without the prompt's repetition."""

from .helper import PackedGroups, pack_prefix_groups
from .patch import PrefixGrouper

__all__ = ["PackedGroups", "PrefixGrouper", "pack_prefix_groups"]
