"""vLLM rollout engines: weight updates that cannot corrupt them, and the NVFP4 QAT targets."""

from .digest import weights_digest
from .errors import (
    EngineNotReady,
    IncompleteReload,
    RejectedWeight,
    RemoteReloadError,
    UnsupportedLayer,
)
from .param_meta import ParamMeta
from .quantize import quantize_state_dict
from .reload import reload_weights
from .report import ReloadReport, weights_version
from .targets import NVFP4DenseW4A4, NVFP4DenseW4A16, NVFP4MoE, qat_targets
from .update import WeightUpdate
from .worker import EngineUpdate, WorkerExtension, reload_engine

__all__ = [
    "EngineNotReady",
    "EngineUpdate",
    "IncompleteReload",
    "NVFP4DenseW4A4",
    "NVFP4DenseW4A16",
    "NVFP4MoE",
    "ParamMeta",
    "RejectedWeight",
    "ReloadReport",
    "RemoteReloadError",
    "UnsupportedLayer",
    "WeightUpdate",
    "WorkerExtension",
    "qat_targets",
    "quantize_state_dict",
    "reload_engine",
    "reload_weights",
    "weights_digest",
    "weights_version",
]
