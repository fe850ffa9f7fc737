"""The plugin is inert until it is asked."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from scoped_patch.engine import active
from scoped_patch.engine.errors import BadOptionError
from scoped_patch.vllm import plugin


def test_inert_unless_asked(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines("moe", "w4a16")
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    plugin.register()
    assert not active()
    monkeypatch.setenv(plugin.VARIABLE, "int4")
    with pytest.raises(BadOptionError, match="nvfp4"):
        plugin.register()
    monkeypatch.setenv(plugin.VARIABLE, "nvfp4")
    monkeypatch.setattr(plugin, "_session", None)
    plugin.register()
    plugin.register()
    (session,) = active()
    assert len(session.records) == 3
    session.restore()
    assert not active()


def test_the_entry_point_leads_here() -> None:
    """vLLM finds it by this group in every process of an engine."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("scoped_patch", value, "vllm.general_plugins").load() is plugin.register
