"""Attention over packed rows in which several responses share a prefix: the prefix once, nothing copied, exact gradients."""

from .api import BACKENDS, choose_backend, prefix_attention
from .layout import Block, PrefixLayout

__all__ = ["BACKENDS", "Block", "PrefixLayout", "choose_backend", "prefix_attention"]
