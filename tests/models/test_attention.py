"""What mask functions are told while a decoder runs on a part of its sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoped_patch.models import attention


@pytest.fixture
def told(monkeypatch):
    """Calls a mask function on 3 of 5 tokens, on one of two ranks, and returns what it was told."""
    shard = SimpleNamespace(ranks=2, size=3, length=5)
    monkeypatch.setattr(attention, "shard_of_config", lambda config: shard if config == "its own" else None)

    def call(**kwargs: Any) -> dict[str, Any]:
        return attention.mask_of_whole_sequence("sdpa", lambda **given: given)(**{"config": "its own", **kwargs})

    return call


def test_lengths(told):
    assert told(q_length=3, kv_length=3) == {"config": "its own", "q_length": 5, "kv_length": 5}
    assert told(q_length=1, kv_length=3)["q_length"] == 1
    assert told(q_length=3, kv_length=3, config="another model's")["q_length"] == 3


@pytest.mark.parametrize("given", [3, 5])
def test_positions_in_place_of_a_length(told, given):
    """Before transformers 5.4, `cache_position` says where the queries stand; a caller may pass it whole."""
    found = told(cache_position=torch.arange(given), kv_length=3)
    assert found["cache_position"].tolist() == [0, 1, 2, 3, 4]
    assert found["kv_length"] == 5
    assert "q_length" not in found
    assert told(cache_position=torch.arange(1), kv_length=3)["kv_length"] == 3
