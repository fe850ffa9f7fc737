"""Finding the real model and its parts, and edits of modules."""

from .modules import register_with_engine
from .spec import Anatomy, LogitsTransform, ModelSpec, anatomy
from .unwrap import Unwrapped, unwrap

register_with_engine()

__all__ = ["Anatomy", "LogitsTransform", "ModelSpec", "Unwrapped", "anatomy", "unwrap"]
