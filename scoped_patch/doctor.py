"""What `scoped-patch doctor` finds out: versions, and whether everything the patches hold on to in other packages is there."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table

from .engine.errors import TargetError
from .engine.resolve import slot_from_path

#: what the patches hold on to in other packages, and what for
TARGETS = (
    ("transformers.modeling_utils:PreTrainedModel.loss_function", "fused: the model's own loss"),
    ("transformers.modeling_utils:PreTrainedModel.get_decoder", "sp, tiled_mlp: finding the layers"),
    ("transformers.modeling_utils:PreTrainedModel.get_output_embeddings", "fused: finding the head"),
    ("transformers.loss.loss_utils:ForCausalLMLoss", "fused: what the loss means"),
    ("transformers.modeling_layers:GradientCheckpointingLayer", "recomputation as it ran"),
    ("transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS._local_mapping", "sp: the attention registry"),
    ("transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS._local_mapping", "sp: the mask registry"),
    ("transformers.utils.generic:ModelOutput", "fused: declared output fields"),
    ("torch.compiler:is_dynamo_compiling", "compiled code"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper", "recomputation as it ran"),
)

_PACKAGES = (
    "torch", "transformers", "wrapt", "rich", "triton", "flash-attn", "vllm", "accelerate", "peft", "trl", "compressed-tensors",
)  # fmt: skip


@dataclass(frozen=True)
class Package:
    """A package, the version that is installed ("" for none), the range that is wanted, and whether the one fits the other."""

    name: str
    version: str
    wanted: str
    ok: bool


@dataclass(frozen=True)
class Target:
    """A place in another package, what it is for, and what is wrong with it ("" for nothing)."""

    path: str
    purpose: str
    problem: str


@dataclass(frozen=True)
class Diagnosis:
    """Prints as two tables and a line that says what to do."""

    packages: tuple[Package, ...]
    targets: tuple[Target, ...]

    @property
    def problems(self) -> int:
        return sum(not one.ok for one in self.packages) + sum(bool(one.problem) for one in self.targets)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_data(self) -> dict[str, Any]:
        return {
            "packages": {one.name: {"version": one.version, "wanted": one.wanted, "ok": one.ok} for one in self.packages},
            "targets": {one.path: {"for": one.purpose, "problem": one.problem or None} for one in self.targets},
            "ok": self.ok,
        }

    def __rich__(self) -> Any:
        packages = Table(title="packages", title_justify="left")
        for column in ("package", "version", "wanted", ""):
            packages.add_column(column)
        for package in self.packages:
            version, style = package.version or "not installed", None if package.ok else "red"
            packages.add_row(package.name, version, package.wanted, "ok" if package.ok else "out of range", style=style)
        targets = Table(title="what the patches hold on to", title_justify="left")
        for column in ("target", "for", ""):
            targets.add_column(column, overflow="fold")
        for target in self.targets:
            problem = target.problem
            targets.add_row(target.path, target.purpose, problem or "ok", style="red" if problem else None)
        remedy = "nothing to do" if self.ok else "install versions inside the ranges above"
        return Group(packages, targets, f"{self.problems} problems: {remedy}")


def diagnose() -> Diagnosis:
    """Look at what is installed here. Imports transformers and torch."""
    ranges = _required()
    python = Package("python", platform.python_version(), ">=3.11", sys.version_info >= (3, 11))
    packages = (python, *(_package(name, ranges.get(name)) for name in _PACKAGES))
    return Diagnosis(packages, tuple(Target(path, purpose, _problem(path)) for path, purpose in TARGETS))


def _problem(path: str) -> str:
    try:
        slot_from_path(path)
    except TargetError as error:
        return str(error)
    return ""


def _required() -> dict[str, str]:
    """package -> version range, from this package's own metadata."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("scoped_patch") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in lines]
    return {one.name: str(one.specifier) for one in wanted if str(one.specifier) or one.marker is None}


def _package(name: str, wanted: str | None) -> Package:
    from packaging.specifiers import SpecifierSet

    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        optional = name not in ("torch", "transformers", "wrapt", "rich")
        return Package(name, "", wanted or "any, optional", optional)
    fits = SpecifierSet(wanted or "").contains(version, prereleases=True)
    return Package(name, version, wanted or "any", fits)
