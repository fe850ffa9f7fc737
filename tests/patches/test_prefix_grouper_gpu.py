"""Prefix sharing of a whole model on CUDA, by each attention backend."""

from __future__ import annotations

import pytest
import torch

from scoped_patch import PrefixGrouper, patched
from tests import tiny_models
from tests.support.groups import text_groups
from tests.support.scores import gradients, objective, unpatched, worst_difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(groups):
    groups.batch = {name: value.cuda() for name, value in groups.batch.items()}
    return groups


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text"])
def test_float32(name):
    model = tiny_models.build(name, train=False)[0].cuda()
    groups = on_gpu(text_groups((40, 3), ((20, 33, 7), (9, 15)), side="left"))
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = unpatched(model, groups.batch).log_probs
    right = gradients(model, lambda: unpatched(model, groups.batch).log_probs.sum())
    with patched(model, prefix_grouper=True, fused="auto"):
        found = model(**groups.batch, group_ids=groups.group_ids).log_probs
        left = gradients(model, lambda: model(**groups.batch, group_ids=groups.group_ids).log_probs.sum())
    assert float((found - wanted).abs().max()) < 2e-3 * float(wanted.abs().max())
    assert worst_difference(left, right) < 5e-3


@pytest.mark.parametrize("backend", ["flash", "cudnn", "flex", "plain"])
def test_bfloat16(backend):
    """No further from float32 than the unpatched model in bfloat16 is, but for a margin."""
    groups = text_groups((40, 3), ((20, 33, 7), (9, 15)), side="left")
    if backend == "cudnn":  # which takes no short ones
        groups = text_groups((70, 66), ((80, 80, 95), (64, 81)), side="left")
    groups = on_gpu(groups)
    exact = tiny_models.build("qwen3", train=False, initializer_range=0.1)[0].cuda()
    model = tiny_models.build("qwen3", train=False, initializer_range=0.1)[0].cuda().bfloat16()
    wanted = unpatched(exact, groups.batch).log_probs
    usual = float((unpatched(model, groups.batch).log_probs - wanted).abs().mean())
    with patched(model, prefix_grouper=PrefixGrouper(backend=backend), fused="auto"):
        out = model(**groups.batch, group_ids=groups.group_ids)
        objective(out).backward()
    assert float((out.log_probs - wanted).abs().mean()) < 1.5 * usual + 1e-3
