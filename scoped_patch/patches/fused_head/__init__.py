"""The fused head: per-token log-probs and entropy without keeping logits."""

from .patch import FusedHead
from .seam import Seam

__all__ = ["FusedHead", "Seam"]
