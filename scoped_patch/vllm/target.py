"""Find the models behind what a caller hands over: an in-process engine, a worker, a model runner, or modules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.errors import BadTargetError, TargetError

REMOTE = (
    "Its models live in other processes. Load scoped_patch there: pass "
    'worker_extension_cls="scoped_patch.vllm.WorkerExtension" to the engine, and use '
    "`with scoped_patch.vllm.reload_engine(engine) as update:` here."
)


@dataclass(eq=False)
class Site:
    """One model, and what is known of the engine around it.

    Attributes:
        model: the module whose `load_weights` takes checkpoint names.
        config: the VllmConfig, or None for a bare module.
        runner: the model runner, or None.
        engine: the in-process `LLM`, or None.
    """

    model: torch.nn.Module
    config: Any = None
    runner: Any = None
    engine: Any = None
    _devices: dict[int, torch.device] = field(default_factory=dict)
    _inside: bool = False  # whether `context` is entered

    @property
    def dtype(self) -> torch.dtype:
        if self.config is not None:
            return self.config.model_config.dtype  # type: ignore[no-any-return]
        floats = (p.dtype for p in self.model.parameters() if p.dtype in (torch.bfloat16, torch.float16, torch.float32))
        return next(floats, torch.get_default_dtype())

    @functools.cached_property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters() if not p.is_meta), torch.device("cpu"))

    @property
    def tp_size(self) -> int:
        return 1 if self.config is None else int(self.config.parallel_config.tensor_parallel_size)

    @property
    def graphs(self) -> bool:
        """Whether Python numbers may be baked into captured graphs or compiled code."""
        if self.config is None:
            return False
        return not self.config.model_config.enforce_eager

    def device_of(self, layer: torch.nn.Module) -> torch.device:
        """Where a layer's live tensors are (an offloaded layer differs from the model)."""
        if id(layer) not in self._devices:
            tensors = [t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None]
            self._devices[id(layer)] = tensors[0].device if tensors else self.device
        return self._devices[id(layer)]

    def processing(self) -> contextlib.AbstractContextManager[Any]:
        """`context`, or what of it is not entered yet: cheap within that of a whole load, since every layer asks for it."""
        if not self._inside:
            return self.context()
        return contextlib.nullcontext() if self.device.type == "cpu" else self.device

    @contextlib.contextmanager
    def context(self, on_device: bool = True) -> Iterator[None]:
        """What vLLM's own processing runs under: its config, the device, the model's dtype as default."""
        with contextlib.ExitStack() as stack:
            if on_device and self.device.type != "cpu":  # GPU only
                stack.enter_context(self.device)
            if not self._inside:
                if self.config is not None:
                    from vllm.config import set_current_vllm_config

                    stack.enter_context(set_current_vllm_config(self.config))
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
                stack.callback(setattr, self, "_inside", False)
                self._inside = True
            yield


def sites(target: Any) -> list[Site]:
    """Every model to update.

    Args:
        target: an in-process `vllm.LLM`, a worker, a model runner, one `nn.Module`, or a sequence of those (a target model
            and its drafter).

    Raises:
        BadTargetError: anything else, an engine whose workers are in other processes included.
        TargetError: the model was not found where this kind of object keeps it.
    """
    if isinstance(target, torch.nn.Module):
        return [_checked(Site(target))]
    if isinstance(target, Sequence) and not isinstance(target, (str, bytes)):
        out: list[Site] = []
        for one in target:
            out += [site for site in sites(one) if all(site.model is not other.model for other in out)]
        known = next((site for site in out if site.config is not None), None)
        for site in out:
            if site.config is None and known is not None:  # a drafter beside its engine's runner
                site.config, site.runner = known.config, known.runner
        if out:
            return out
        raise BadTargetError("reload_weights got an empty list of models")
    if hasattr(target, "llm_engine"):
        worker = _worker_of(target.llm_engine)
        found = sites(worker)
        for site in found:
            site.engine = target
        return found
    if hasattr(target, "model_runner"):
        return sites(target.model_runner)
    if hasattr(target, "worker") and hasattr(target.worker, "model_runner"):
        return sites(target.worker.model_runner)
    if hasattr(target, "get_model") and hasattr(target, "vllm_config"):
        return _of_runner(target)
    if hasattr(target, "engine_core") or hasattr(target, "model_executor"):
        return sites(_worker_of(target))
    if hasattr(target, "collective_rpc"):
        raise BadTargetError(f"{type(target).__name__} is a handle of an engine, not the engine itself. {REMOTE}")
    raise BadTargetError(
        f"reload_weights cannot update {type(target).__name__}: it wants an in-process vllm.LLM, a worker, a model runner, "
        f"one nn.Module or a list of them. For an engine in other processes: {REMOTE}"
    )


def _of_runner(runner: Any) -> list[Site]:
    return [_checked(Site(_unwrapped(runner.get_model()), runner.vllm_config, runner))]


def _worker_of(engine: Any) -> Any:
    """The single in-process worker of an engine, through every layer that a version puts around it."""
    seen, at = set(), engine
    executor = None
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        executor = getattr(at, "model_executor", None) or executor
        at = getattr(at, "engine_core", None)
    worker = getattr(executor, "driver_worker", None)
    worker = getattr(worker, "worker", worker)
    if getattr(worker, "model_runner", None) is None:
        raise BadTargetError(f"{type(engine).__name__} does not hold its worker in this process. {REMOTE}")
    size = int(getattr(getattr(executor, "parallel_config", None), "world_size", 1))
    if size > 1:
        raise BadTargetError(f"{type(engine).__name__} runs on {size} workers, of which this process sees one. {REMOTE}")
    return worker


def _unwrapped(model: Any) -> torch.nn.Module:
    """The model under vLLM's graph wrappers and `torch.compile`."""
    seen: set[int] = set()
    while id(model) not in seen:
        seen.add(id(model))
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif not isinstance(model, torch.nn.Module) and hasattr(model, "unwrap"):
            model = model.unwrap()
    return model  # type: ignore[no-any-return]


def _checked(site: Site) -> Site:
    if not callable(getattr(site.model, "load_weights", None)):
        raise TargetError(
            f"{type(site.model).__name__} has no `load_weights`, so it is no vLLM model; "
            "pass the model that vLLM's loader built, not a part of it"
        )
    return site


def reset_runner(runner: Any) -> None:
    """What a model runner caches of the weights' own making: LoRA state, vision features."""
    for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        reset = getattr(runner, name, None)
        if callable(reset):
            reset()
