"""The QAT target patches as patches: all or none, and every scheme class as vLLM made it afterwards."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from scoped_patch import patched
from scoped_patch.engine import Edit, Scope, active
from scoped_patch.engine.errors import BadOptionError, PatchErrorGroup, ScopeStateError, UnsupportedError
from scoped_patch.vllm import NVFP4DenseW4A4, NVFP4DenseW4A16, NVFP4MoE, ParamMeta, qat_targets


def scheme_classes() -> dict[type, dict[str, Any]]:
    out = {}
    for patch in qat_targets("nvfp4"):
        found = patch._find()  # type: ignore[attr-defined]
        out[found.owner] = dict(vars(found.owner))
    return out


def test_leaving_gives_the_classes_back(engines: Any) -> None:
    engines("moe", "w4a16")
    before = scheme_classes()
    with patched(qat="nvfp4") as session:
        inside = scheme_classes()
        assert all(
            inside[owner]["process_weights_after_loading"] is not raw["process_weights_after_loading"]
            for owner, raw in before.items()
        )
        assert {record.patch for record in session.records} == {"nvfp4_dense_w4a16", "nvfp4_dense_w4a4", "nvfp4_moe"}
    after = scheme_classes()
    assert list(after) == list(before)
    for owner, raw in before.items():
        assert list(after[owner]) == list(raw)
        assert all(after[owner][key] is value for key, value in raw.items())


@pytest.mark.parametrize("patch", [NVFP4DenseW4A16, NVFP4DenseW4A4, NVFP4MoE])
def test_each_target_alone(engines: Any, patch: type) -> None:
    engines("moe", "w4a16")
    before = scheme_classes()
    with patched(qat=patch()):
        changed = [
            o
            for o, raw in scheme_classes().items()
            if raw["process_weights_after_loading"] is not before[o]["process_weights_after_loading"]
        ]
        assert len(changed) == 1
    assert all(scheme_classes()[o][k] is v for o, raw in before.items() for k, v in raw.items())


def test_a_missing_class_or_an_unknown_version_changes_nothing(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines("moe", "w4a16")
    before = scheme_classes()
    path = NVFP4MoE.candidates[0].partition(":")[0]
    for name in {path, NVFP4MoE.candidates[1].partition(":")[0]}:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(UnsupportedError, match=r"nvfp4_moe: vLLM .* has none of .*CompressedTensorsW4A4Nvfp4MoEMethod"):
        patched(qat="nvfp4").apply()
    monkeypatch.undo()
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(PatchErrorGroup) as caught:
        patched(qat="nvfp4").apply()
    assert len(caught.value.exceptions) == 3
    assert "nvfp4_dense_w4a16: vLLM 0.99.0 is outside 0.18 to 0.32" in str(caught.value.exceptions[0])
    monkeypatch.undo()
    assert all(scheme_classes()[o][k] is v for o, raw in before.items() for k, v in raw.items())
    assert not active()


def test_a_failure_at_the_last_write_takes_the_others_back(engines: Any) -> None:
    engines("moe", "w4a16")
    before = scheme_classes()

    class Broken(NVFP4MoE):
        def plan(self, target: Any) -> Any:
            for edit in super().plan(target):
                yield Edit(edit.slot, lambda prior: 1 / 0, reason="fails when it is written")

    assert issubclass(Broken, NVFP4MoE)
    with pytest.raises(ZeroDivisionError):
        patched(qat=[NVFP4DenseW4A16(), NVFP4DenseW4A4(), Broken()]).apply()
    assert all(scheme_classes()[o][k] is v for o, raw in before.items() for k, v in raw.items())
    assert not active()
    with patched(qat="nvfp4") as session:
        assert len(session.records) == 3


def test_refusals(engines: Any) -> None:
    plain = engines("dense", "bf16")
    with pytest.raises(ScopeStateError, match="before vLLM loads"):
        ParamMeta(plain.model)
    with pytest.raises(UnsupportedError, match="pass no model"):
        Scope(plain.model, qat_targets(NVFP4MoE())).plan()
    for bad in ("int4", [], torch.nn.Linear(1, 1)):
        with pytest.raises(BadOptionError, match="nvfp4"):
            qat_targets(bad)
