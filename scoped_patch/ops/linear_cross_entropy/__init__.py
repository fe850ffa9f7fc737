"""Per-token log-probability and entropy of a language model head, without keeping the logits."""

from .api import LinearCrossEntropyOutput, linear_cross_entropy
from .checks import OUTPUT_NAMES
from .errors import LabelOutOfRangeError, SecondOrderGradientError
from .loss import linear_cross_entropy_loss, topk_kl_divergence

__all__ = [
    "OUTPUT_NAMES",
    "LabelOutOfRangeError",
    "LinearCrossEntropyOutput",
    "SecondOrderGradientError",
    "linear_cross_entropy",
    "linear_cross_entropy_loss",
    "topk_kl_divergence",
]
