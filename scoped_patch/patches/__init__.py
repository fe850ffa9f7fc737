"""The shipped patches, one file each."""

from .fused_head import FusedHead

__all__ = ["FusedHead"]
