"""The value-head class that TRL had until 0.2x, from the package itself: installed beside, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "0.12.2"

PROGRAM = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl import AutoModelForCausalLMWithValueHead

from scoped_patch import UnsupportedError, assert_clean, patched

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
inner = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3))
model = AutoModelForCausalLMWithValueHead.from_pretrained(inner).eval()
ids = torch.randint(0, 64, (2, 9))


def step():
    model.zero_grad()
    logits, loss, values = model(input_ids=ids, labels=ids)
    (loss + values.mean()).backward()
    return logits.detach(), loss.detach(), values.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


names, entries = list(model.state_dict()), dict(vars(model))
logits, loss, values, gradients = step()
assert names[0] == "model.embed_tokens.weight"  # TRL's own: without the name of the child that holds it

with patched(model, tiled_mlp=2):
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    inside = step()
assert torch.allclose(inside[0], logits, atol=1e-5)
assert torch.allclose(inside[1], loss, atol=1e-6)
assert torch.allclose(inside[2], values, atol=1e-5)
for name, gradient in gradients.items():
    assert (inside[3][name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name

try:
    with patched(model, fused="torch"):
        raise AssertionError("its forward needs logits")
except UnsupportedError as error:
    assert "model.pretrained_model" in str(error)
with patched(model.pretrained_model, fused="torch"):
    found = model.pretrained_model(input_ids=ids).log_probs[:, :-1]
wanted = torch.log_softmax(logits[:, :-1].double(), -1).gather(-1, ids[:, 1:, None])[..., 0]
assert (found - wanted).abs().max() < 1e-5

assert list(model.state_dict()) == names
assert vars(model).keys() == entries.keys()
assert all(vars(model)[name] is value for name, value in entries.items())
assert_clean()
print("all equal")
"""


@pytest.mark.slow
def test_the_value_head_class_of_an_old_trl(tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    installed = subprocess.run([*pip, f"trl=={VERSION}"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"trl {VERSION} could not be installed: {installed.stderr.strip().splitlines()[-1]}")
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "all equal"
