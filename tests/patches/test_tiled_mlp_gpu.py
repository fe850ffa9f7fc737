"""Tiles on a GPU: values of every family, and the weights' gradients in bfloat16."""

from __future__ import annotations

import pytest
import torch

from scoped_patch import patched
from tests.patches.test_tiled_mlp_families import MIXTURES, drawn, gradient_errors, step
from tests.support.scores import assert_gradients
from tests.tiny_models import BUILDERS, VLMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TEXT = [family for family in BUILDERS if family not in VLMS]


@pytest.mark.parametrize("family", TEXT)
def test_float32(family):
    model, batch = drawn(family)
    model.cuda()
    batch = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    if family in MIXTURES:
        model.set_experts_implementation("eager")
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted, right = step(model, batch)
    with patched(model, tiled_mlp=5):
        out, found = step(model, batch)
    assert (out.logits - wanted.logits).abs().max() <= 2e-6 * wanted.logits.abs().max()
    assert_gradients(found, right, rtol=2e-5)


@pytest.mark.parametrize("family", TEXT)
def test_bfloat16_weight_gradients_are_no_worse_than_untiled(family):
    gradient_errors(family, "eager" if family in MIXTURES else "", whole=False, device="cuda")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("family", "implementation"), [("llama", ""), ("qwen3_moe", "eager"), ("gpt_oss", "eager")])
def test_bfloat16_weight_gradients_of_blocks_that_are_recomputed_whole(family, implementation, autocast):
    gradient_errors(family, implementation, whole=True, autocast=autocast, device="cuda")
