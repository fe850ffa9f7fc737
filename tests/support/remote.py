"""A model whose code comes from a folder, as `trust_remote_code=True` loads it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

KIMI_VL = Path(__file__).parent / "kimi_vl"


@functools.cache
def kimi_vl_classes() -> tuple[Any, Any]:
    """The config and model class of `tests/support/kimi_vl`."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    names = ("configuration_kimi_vl.KimiVLConfig", "modeling_kimi_vl.KimiVLForConditionalGeneration")
    config, model = (get_class_from_dynamic_module(name, str(KIMI_VL)) for name in names)
    return config, model
