"""Evaluation loops of transformers' `Trainer`, which collect the logits of a model for metrics."""

from __future__ import annotations

import sys

import torch

#: from a model's forward up to `prediction_step`: calls of modules and wrappers, `compute_loss`
_FRAMES = 60


def collects_logits() -> bool:
    """Is this forward run by a `Trainer.prediction_step` that hands its logits on, for `compute_metrics` or `predict()`?

    Outputs are read by position there, so that log-probs would be taken for logits.
    """
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return False
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "prediction_step" and "prediction_loss_only" in frame.f_code.co_varnames:
            return not frame.f_locals["prediction_loss_only"]
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
