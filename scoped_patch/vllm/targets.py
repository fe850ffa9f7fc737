"""The QAT targets: vLLM's NVFP4 schemes, made repeatable for reload code that processes weights more than once.

`reload_weights` needs none of this. These patches serve code that follows the older protocol: put checkpoint-format
parameters back (`ParamMeta`), `model.load_weights(...)`, then `process_weights_after_loading` on every layer. Enter them
before the first weights are processed, in the process that holds the model.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..engine import Edit, Patch, Support, attribute_slot
from ..engine.errors import BadOptionError
from .repeatable import process_again

logger = logging.getLogger("scoped_patch")

#: The minor versions that `tests/vllm/probe_versions.py` was run on. Outside of them is refused, in between is said.
MEASURED = ((0, 18), (0, 20), (0, 24), (0, 26), (0, 30), (0, 32))
_QUANTIZATION = "vllm.model_executor.layers.quantization.compressed_tensors"
_METHOD = "process_weights_after_loading"
_DENSE = f"{_QUANTIZATION}.schemes.compressed_tensors_w4a4_nvfp4:CompressedTensorsW4A4Fp4"


@dataclass(frozen=True)
class _Found:
    owner: type
    path: str
    applies: Callable[[Any], bool]
    mode: str


class _Target(Patch):
    """One vLLM scheme class. Class scope: a scheme has no instance before the model is built."""

    #: "module:Class", tried in this order
    candidates: tuple[str, ...] = ()

    def supports(self, target: Any) -> Support:
        if target is not None:
            return Support(False, f"{self.name} names its own target, vLLM's scheme classes; pass no model")
        found = self._find()
        if not isinstance(found, _Found):
            return Support(False, found)
        unmeasured = _unmeasured()
        if unmeasured is None:
            return Support(True)
        _warn(unmeasured)  # workers of an engine have nobody to ask them for `explain()`
        return Support(True, notes=(unmeasured,))

    def plan(self, target: Any) -> Iterable[Edit]:
        found = self._find()
        assert isinstance(found, _Found)
        yield Edit(
            attribute_slot(found.owner, _METHOD),
            lambda prior: _repeatable(prior, found.applies),
            reason="processing keeps its storage from the second time on",
            token=(self.name, found.path),
            commutes=True,
            to="repeatable processing",
        )

    def _find(self) -> _Found | str:
        """The class to patch, or why there is none."""
        try:
            import vllm
        except ImportError:
            return f"{self.name}: vLLM is not installed in this process"
        version = vllm.__version__
        minor = _minor(version)
        if minor is not None and not MEASURED[0] <= minor <= MEASURED[-1]:
            return (
                f"{self.name}: vLLM {version} is outside {_show(MEASURED[0])} to {_show(MEASURED[-1])}, on which this was "
                f"measured: install one of these, or use reload_weights, which needs no target patches"
            )
        failures = []
        for path in self.candidates:
            module, _, name = path.partition(":")
            try:
                owner = getattr(importlib.import_module(module), name, None)
            except ImportError as error:
                failures.append(str(error))
                continue
            if owner is None:
                continue
            if not _takes_a_layer(owner):
                return f"{self.name}: {path}.{_METHOD} of vLLM {version} does not take (self, layer)"
            return self.accept(owner, path, version)
        why = f" ({'; '.join(dict.fromkeys(failures))})" if failures else ""
        return f"{self.name}: vLLM {version} has none of {', '.join(self.candidates)}{why}"

    def accept(self, owner: type, path: str, version: str) -> _Found | str:
        return _Found(owner, path, lambda method: True, "all")


class NVFP4DenseW4A16(_Target):
    """Linear layers with NVFP4 weights and 16-bit activations: a scheme of its own up to 0.23, a mode of W4A4's from 0.24."""

    name = "nvfp4_dense_w4a16"
    candidates = (f"{_QUANTIZATION}.schemes.compressed_tensors_w4a16_nvfp4:CompressedTensorsW4A16Fp4", _DENSE)

    def accept(self, owner: type, path: str, version: str) -> _Found | str:
        if path != _DENSE:
            return super().accept(owner, path, version)
        if "use_a16" not in inspect.signature(owner).parameters:
            return f"{self.name}: {path} of vLLM {version} has no use_a16 mode, and there is no W4A16 scheme beside it"
        return _Found(owner, path, lambda method: bool(getattr(method, "use_a16", False)), "use_a16")


class NVFP4DenseW4A4(_Target):
    """Linear layers with NVFP4 weights and activations."""

    name = "nvfp4_dense_w4a4"
    candidates = (_DENSE,)

    def accept(self, owner: type, path: str, version: str) -> _Found | str:
        return _Found(owner, path, lambda method: not getattr(method, "use_a16", False), "w4a4")


class NVFP4MoE(_Target):
    """Expert layers, with 16-bit or NVFP4 activations."""

    name = "nvfp4_moe"
    candidates = (
        f"{_QUANTIZATION}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4:CompressedTensorsW4A4Nvfp4MoEMethod",
        f"{_QUANTIZATION}.compressed_tensors_moe:CompressedTensorsW4A4Nvfp4MoEMethod",
    )


def qat_targets(qat: Any) -> tuple[Patch, ...]:
    """The patches that `patched(qat=...)` stands for: "nvfp4" is all three, or one target, or several.

    Raises:
        BadOptionError: anything else.
    """
    if isinstance(qat, str) and qat == "nvfp4":
        return NVFP4DenseW4A16(), NVFP4DenseW4A4(), NVFP4MoE()
    given = qat if isinstance(qat, (list, tuple)) else (qat,)
    if given and all(isinstance(one, _Target) for one in given):
        return tuple(given)
    raise BadOptionError(f'qat={qat!r}: must be "nvfp4", or NVFP4DenseW4A16(), NVFP4DenseW4A4(), NVFP4MoE(), or some of them')


def _repeatable(prior: Callable[[Any, Any], None], applies: Callable[[Any], bool]) -> Callable[[Any, Any], None]:
    def process_weights_after_loading_repeatably(self: Any, layer: Any) -> None:
        if applies(self):
            process_again(prior, self, layer)
        else:
            prior(self, layer)

    process_weights_after_loading_repeatably.__doc__ = prior.__doc__
    return process_weights_after_loading_repeatably


def _takes_a_layer(owner: type) -> bool:
    method = getattr(owner, _METHOD, None)
    if method is None:
        return False
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False
    return True


def _minor(version: str) -> tuple[int, int] | None:
    """(0, 30) of "0.30.1"; None of a build from a checkout, which has no usable number: what is found decides alone."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(numbers[1]), int(numbers[2])) if numbers and version != "dev" else (0, 0)
    return None if minor == (0, 0) else minor


def _unmeasured() -> str | None:
    import vllm

    if _minor(vllm.__version__) in MEASURED:
        return None
    return f"vLLM {vllm.__version__} was not measured; {', '.join(map(_show, MEASURED))} were"


@functools.cache
def _warn(text: str) -> None:
    """Once in a process, not once for each target."""
    logger.warning("qat: %s", text)


def _show(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def targets_by_name(names: Any) -> tuple[Patch, ...]:
    """The target patches of these names, as a spec has them; "nvfp4" is all.

    Raises:
        BadOptionError: a name that is none of theirs.
    """
    if isinstance(names, str):
        return qat_targets(names)
    known = {patch.name: patch for patch in qat_targets("nvfp4")}
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n in known for n in names):
        raise BadOptionError(f'qat={names!r}: must be "nvfp4" or some of {", ".join(known)}')
    return tuple(known[name] for name in names)
