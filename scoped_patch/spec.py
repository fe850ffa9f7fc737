"""Scopes as text, for processes that a program starts: the same options, on the model that each process has.

A spec is JSON: `{"scoped_patch": 1, "fused": {"backend": "torch", ...}, "tiled_mlp": {"tiles": 8}, ...}`. `exported` puts it
into the environment variable SCOPED_PATCH_SPEC, which child processes inherit, and `from_spec(model)` reads it there. What
belongs to one process only (process groups, tensors, patches of your own) has no form as text and is refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .compose import ModelSession, PatchedScope, patched
from .engine import Patch
from .engine.errors import BadOptionError, BadTargetError, ScopeStateError
from .models.spec import is_multimodal
from .patches import FakeQuant, FusedHead, PrefixGrouper, TiledMLP, Ulysses, VLMMixedBatch

VARIABLE = "SCOPED_PATCH_SPEC"
VERSION = 1

_KEYWORDS: dict[str, type[Any]] = {
    "sp": Ulysses,
    "fused": FusedHead,
    "tiled_mlp": TiledMLP,
    "prefix_grouper": PrefixGrouper,
    "fake_quant": FakeQuant,
}
_MODES = ("on_foreign", "on_compiled", "vlm_mixed_batch")

#: patches that `patched` adds to every scope on a model by itself
_AUTOMATIC = ("checkpoint_replay", "saves_unpatched", "value_head")


def to_spec(scope: PatchedScope | ModelSession) -> str:
    """The options of a scope, entered or not, as JSON; its target is not in it.

    Raises:
        BadTargetError: this is no scope.
        BadOptionError: an option or a patch has no form as text; says which.
    """
    if not isinstance(scope, (PatchedScope, ModelSession)):
        raise BadTargetError(f"a spec is made of a scope, as patched(model, ...) gives it, got {type(scope).__name__}")
    patches = scope.plan.patches if isinstance(scope, ModelSession) else scope.patches
    spec: dict[str, Any] = {"scoped_patch": VERSION, "on_foreign": scope.on_foreign, "on_compiled": scope.on_compiled}
    mixed = _mixed_batch(scope.root, patches)
    if mixed is not None:
        spec["vlm_mixed_batch"] = mixed
    for patch in patches:
        keyword = next((name for name, kind in _KEYWORDS.items() if type(patch) is kind), None)
        if keyword is not None:
            spec[keyword] = _fields(keyword, patch)
        elif _is_target_patch(patch):
            spec.setdefault("qat", []).append(patch.name)
        elif patch.name not in _AUTOMATIC and not isinstance(patch, VLMMixedBatch):
            raise BadOptionError(
                f"{patch.name} is a patch of your own, which has no form as text: give the other process the shipped options "
                f"as a spec, and make your own patch there"
            )
    return json.dumps(spec, sort_keys=True)


def from_spec(target: Any = None, spec: str | Mapping[str, Any] | None = None) -> PatchedScope:
    """The scope that a spec describes, on this process's model. Nothing is changed until it is entered.

    Args:
        target: as for `patched`.
        spec: what `to_spec` gave, or the same as a dict; by default what the environment variable SCOPED_PATCH_SPEC holds.

    Raises:
        ScopeStateError: no spec was given and the variable is not set.
        BadOptionError: this is no spec, or one of another version, or it has an option that is not known here.
    """
    if spec is None:
        spec = os.environ.get(VARIABLE)
        if not spec:
            raise ScopeStateError(
                f"there is no spec: pass one, or start this process inside `with exported(scope):` ({VARIABLE})"
            )
    return patched(target, **_keywords(read_spec(spec)))


def read_spec(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """The options in a spec, by keyword, checked for form.

    Raises:
        BadOptionError: as for `from_spec`.
    """
    try:
        read = dict(json.loads(spec) if isinstance(spec, str) else spec)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadOptionError(f"this is no spec (a JSON object, as to_spec() makes it): {error}") from None
    version = read.pop("scoped_patch", None)
    if type(version) is not int or version != VERSION:
        raise BadOptionError(
            f"this spec is of version {version!r}, and this scoped_patch reads version {VERSION}: make it anew"
        )
    known = [*_KEYWORDS, *_MODES, "qat"]
    unknown = [name for name in read if name not in known]
    if unknown:
        raise BadOptionError(f"the spec has {unknown[0]!r}, which is not known here; known are {', '.join(known)}")
    return read


@contextlib.contextmanager
def exported(scope: PatchedScope | ModelSession) -> Iterator[str]:
    """Put the scope's spec into this process's environment for the length of the block: children started in it inherit it.

    Yields:
        The spec.
    """
    spec = to_spec(scope)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = spec
    try:
        yield spec
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def _mixed_batch(root: Any, patches: Iterable[Patch]) -> bool | None:
    """The keyword that the scope was made with: None where `patched` decides by itself, and would decide the same."""
    given = [patch for patch in patches if isinstance(patch, VLMMixedBatch)]
    spread = any(isinstance(patch, Ulysses) for patch in patches)
    if given:
        return None if spread and not given[0].required else True
    return False if spread and is_multimodal(root) else None


def _fields(keyword: str, patch: Patch) -> dict[str, Any]:
    """The arguments that the patch was made with."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(patch):  # type: ignore[arg-type]
        if not field.init:
            continue
        value = getattr(patch, field.name)
        if isinstance(value, Tensor) and value.numel() == 1 and keyword == "fake_quant":
            value = value.item()
        if isinstance(value, Mapping):
            value = {name: float(one) for name, one in value.items()}
        if isinstance(value, (set, frozenset)):
            value = sorted(value)
        try:
            made[field.name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise BadOptionError(
                f"{keyword}: {field.name} is a {type(value).__name__}, which belongs to this process and has no form as text; "
                f"pass numbers and words (sp= as a number of ranks)"
            ) from None
    return made


def _keywords(read: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {name: read[name] for name in _MODES if name in read}
    for keyword, kind in _KEYWORDS.items():
        if keyword not in read:
            continue
        given = read[keyword]
        if not isinstance(given, Mapping):
            made[keyword] = given  # written by hand: "torch", 8
            continue
        known = [field.name for field in dataclasses.fields(kind) if field.init]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise BadOptionError(f"the spec's {keyword} has {unknown[0]!r}; {kind.__name__} takes {', '.join(known)}")
        needed = [one.name for one in dataclasses.fields(kind) if one.init and one.default is one.default_factory]
        absent = [name for name in needed if name not in given]
        if absent:
            raise BadOptionError(f"the spec's {keyword} has no {absent[0]!r}, without which there is no {kind.__name__}")
        made[keyword] = kind(**given)
    if "qat" in read:
        from .vllm.targets import targets_by_name

        made["qat"] = targets_by_name(read["qat"])
    return made


def _is_target_patch(patch: Patch) -> bool:
    from .vllm.targets import qat_targets

    return type(patch) in {type(one) for one in qat_targets("nvfp4")}
