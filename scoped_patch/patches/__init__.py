"""The shipped patches, one file each."""

from .fused_head import FusedHead
from .ulysses import Ulysses

__all__ = ["FusedHead", "Ulysses"]
