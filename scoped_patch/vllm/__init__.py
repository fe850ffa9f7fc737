"""vLLM rollout engines: weight updates that cannot corrupt them, and the NVFP4 QAT targets."""

from .digest import weights_digest
from .errors import (
    EngineNotReady,
    IncompleteReload,
    RejectedWeight,
    RemoteReloadError,
    UnsupportedLayer,
)
from .reload import WeightUpdate, reload_weights
from .report import ReloadReport, weights_version

__all__ = [
    "EngineNotReady",
    "IncompleteReload",
    "RejectedWeight",
    "ReloadReport",
    "RemoteReloadError",
    "UnsupportedLayer",
    "WeightUpdate",
    "reload_weights",
    "weights_digest",
    "weights_version",
]
