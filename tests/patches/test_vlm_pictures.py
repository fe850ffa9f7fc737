"""Pictures drawn here, through the model's real image processor, and the patched model on what comes out.

The processors' Pillow forms need no torchvision. Kimi-VL and kimi_k25 have none, and gemma4's gives 70 tokens at least: their
pixel tensors are made as their processors document them (tests/support/vlm.py).
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.support.ranks import spawn
from tests.support.vlm import Case, Image, compare, make_batch
from tests.tiny_models import build

PIL_Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed, which transformers' image processors need")
np = pytest.importorskip("numpy")

#: family -> (model folder and class of its processor, options)
_GRID = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
_QWEN = ("qwen2_vl", "Qwen2VLImageProcessorPil", _GRID)
_GLM = ("glm4v", "Glm4vImageProcessorPil", _GRID)
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_5": _QWEN,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil", {"size": {"height": 16, "width": 16}}),
}


def _picture(height: int, width: int, turn: int) -> Any:
    y, x = np.mgrid[0:height, 0:width]
    colours = np.stack([(x * 7 + turn * 40) % 256, (y * 13) % 256, (x * y + turn) % 256], -1)
    return PIL_Image.fromarray(colours.astype("uint8"))


def batch_of(family: str) -> dict[str, Any]:
    """Two rows, with a wide picture and a square one, and with a square one; sizes that no patch divides."""
    folder, name, options = PROCESSORS[family]
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    pictures = [_picture(19, 34, 0), _picture(17, 17, 1), _picture(15, 16, 2)]
    made = getattr(module, name)(**options)(pictures, return_tensors="pt")
    batch = make_batch(family, [[3, Image(4, 8), 2, Image(), 4], [5, Image(), 6]], "left")
    assert made["pixel_values"].shape == batch["pixel_values"].shape
    assert len(made["pixel_values"].unique()) > 50, "the pictures are no pictures"
    batch["pixel_values"] = made["pixel_values"]
    if "image_grid_thw" in made:
        assert torch.equal(made["image_grid_thw"], batch["image_grid_thw"])
        batch["image_grid_thw"] = made["image_grid_thw"]
    return batch


def test_pictures_on_two_ranks():
    batches = {family: batch_of(family) for family in PROCESSORS}
    spawn(2, _run, batches)


def _run(rank: int, world: int, batches: dict[str, dict[str, Any]]) -> None:
    for family, batch in batches.items():
        for call in ("logits", "tiled", "sharded_fused"):
            model, _ = build(family)
            compare(model, batch, Case(family, batch=2, call=call), world, rank)
