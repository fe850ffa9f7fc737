"""The weight update that `reload_weights` returns: stage, check, commit or drop."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch

from ..engine.errors import BadOptionError, ScopeStateError
from ..engine.session import caller_location
from .claims import claim, release
from .digest import Digest
from .errors import UnsupportedLayer
from .exchange import Exchange
from .guard import GenerateGuard
from .process import Processed
from .report import ReloadReport, count_version, incomplete, weights_version
from .source import Source
from .staging import StagedModel
from .target import reset_runner, sites

logger = logging.getLogger("scoped_patch")

Expect = Literal["all", "partial"] | Collection[str]
Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass
class WeightUpdate:
    """One weight update; see `reload_weights`. Load any number of buckets, in any order, then leave the scope.

    Attributes:
        report: what was done, once it is.
        progress: (layers staged or committed, layers of the model that have weights).
    """

    target: Any
    atomic: str
    expect: Expect
    baseline: str
    on_error: str
    reset_prefix_cache: bool = False
    keep_previous: bool = False
    digest: bool = False
    report: ReloadReport | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("atomic", ("model", "layer")),
            ("baseline", ("live", "discarded")),
            ("on_error", ("raise", "drain")),
        ):
            if getattr(self, name) not in allowed:
                raise BadOptionError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(map(repr, allowed))}")
        if isinstance(self.expect, str) and self.expect not in ("all", "partial"):
            raise BadOptionError(f'expect={self.expect!r}: must be "all", "partial" or a collection of checkpoint names')
        if self.keep_previous and (self.atomic == "layer" or self.baseline == "discarded"):
            raise BadOptionError('keep_previous=True needs atomic="model" and baseline="live"')
        self._state: Literal["new", "open", "prepared", "committed", "closed"] = "new"
        self._failure: BaseException | None = None
        self._models: list[StagedModel] = []
        self._kept: list[StagedModel] = []
        self._processed: list[Processed] = []
        self._committed: list[str] = []
        self._committed_bytes = 0
        self._exchange: Exchange | None = None
        self._location = "?"

    # ------------------------------------------------------------------------------------------------- the scope
    def __enter__(self) -> WeightUpdate:
        if self._state != "new":
            raise ScopeStateError("a weight update is entered once; call reload_weights(...) again for the next one")
        self._started = time.perf_counter()
        self._location = caller_location()
        found = sites(self.target)
        if self.reset_prefix_cache and all(site.engine is None for site in found):
            raise BadOptionError("reset_prefix_cache=True needs the vllm.LLM as target: a worker has no prefix cache")
        names = None if isinstance(self.expect, str) else frozenset(self.expect)
        self._sites = found
        self._source = Source(names, Digest() if self.digest else None)
        claim(self, [site.model for site in found], self._location)
        try:
            carry = self.expect != "all" and self.baseline == "live"
            self._models = [StagedModel(s, self._source, carry=carry, on_complete=self._completed) for s in found]
            self._guard = None if carry else GenerateGuard(found, refuse=self.baseline == "discarded")
        except BaseException:
            self._release()
            raise
        self._state = "open"
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._state in ("closed", "committed"):
            self.rollback()
            return
        if value is not None:
            self.rollback()
            logger.warning("the weight update entered at %s was dropped: %r", self._location, value)
            return
        try:
            self.prepare()
            self.commit()
        except BaseException:
            self.rollback()
            raise

    def load(self, weights: Weights) -> None:
        """Stage one bucket of (checkpoint name, tensor) pairs. The tensors may be reused as soon as this returns.

        Within one bucket a tensor's memory may be reused for the next one on the same stream of its device.
        """
        iterator = iter(weights)
        if self._failure is not None and self.on_error == "drain" and self._state == "open":
            _drain(iterator)
            return
        self._must_be("open")
        try:
            if len(self._models) == 1:
                with self._source.naming():
                    self._models[0].load(self._source.stream(iterator))
            else:
                for pair in self._source.stream(iterator):
                    self._load_into_each(pair)
            for device in self._source.on_device:
                torch.accelerator.current_stream(device).synchronize()
        except BaseException as error:
            self._failure = error
            if self.on_error == "drain" and isinstance(error, Exception) and error is not self._source.failure:
                logger.error("the weight update entered at %s has failed, and drains its stream: %s", self._location, error)
                _drain(iterator)
                return
            raise

    def _load_into_each(self, pair: tuple[str, torch.Tensor]) -> None:
        """Several models read one stream: a name must be known to one of them."""
        errors: list[Exception] = []
        for model in self._models:
            try:
                with self._source.naming():
                    model.load(iter([pair]))
            except Exception as error:
                if getattr(error, "reason", None) != "unknown":
                    raise
                errors.append(error)
        if len(errors) == len(self._models):
            raise errors[0]

    # ------------------------------------------------------------------------------------------------- two phases
    def prepare(self) -> None:
        """The first phase: is everything here, right, and able to take the live weights' place? Changes nothing live.

        Leaving the scope does both phases; call them yourself to commit on several ranks only if all can.
        """
        if self._failure is not None:
            raise self._failure
        self._must_be("open")
        everything = self.expect == "all"
        missing: dict[str, list[str]] = {}
        if self._source.expected is not None:
            absent = sorted(self._source.expected - self._source.seen)
            if absent:
                missing["(expected names)"] = absent
        for model in self._models:
            with self._source.naming():
                model.finish_tied()
            missing.update(model.missing(everything))
        if missing:
            raise incomplete(self._location, missing, self._source, self._committed, self.baseline == "discarded")
        for model in self._models:
            with self._source.naming():
                if not everything:
                    model.settle()
                model.finish_deferred()
        if self._processed:
            self._exchange = self._exchange_of(self._processed)
        self._state = "prepared"

    def commit(self) -> None:
        """The second phase: put the staged weights into the live memory.

        An interrupt leaves all of the old weights or all of the new ones; `state` says which ("committed": the new ones).
        """
        self._must_be("prepared")
        if self._exchange is not None and self.keep_previous:
            self._exchange.swap()
        elif self._exchange is not None:
            try:
                self._exchange.commit()
            except BaseException:
                if self._exchange.committed:  # an interrupt that came too late: the new weights serve
                    self._conclude()
                raise
        self._conclude()

    def _conclude(self) -> None:
        self._state = "committed"
        if self._exchange is not None:
            self._committed_bytes += self._exchange.nbytes
        self._finish()

    def rollback(self) -> None:
        """Drop the update: the old weights serve on (with `atomic="layer"`, in the layers that were not committed).

        An interrupt may cut this short. Called again it does the rest. After a commit nothing is dropped: what an interrupt
        kept the update from letting go of, it lets go of now.
        """
        if self._state == "committed":
            self._let_go()
            return
        if self._committed and self._state != "closed":
            logger.error("%d layers keep the new weights of the dropped update", len(self._committed))
        self._state = "closed"
        self._exchange = None
        self._release()

    def rollback_to_previous(self) -> None:
        """Put the weights from before this update back; needs `keep_previous=True`. The copy kept is then given up."""
        if self._state != "committed" or not self.keep_previous or self._exchange is None:
            raise ScopeStateError(f"nothing to go back to: the update is {self._state}, keep_previous={self.keep_previous}")
        self._exchange.unswap()
        for site in self._sites:
            count_version(site.model, -1)
            reset_runner(site.runner)
        self.discard_previous()

    def discard_previous(self) -> None:
        """Give up the copy that `keep_previous=True` keeps."""
        self._exchange = None
        for model in self._kept:
            model.close()
        self._kept = []
        self._state = "closed"

    @property
    def state(self) -> str:
        """ "new", "open", "prepared", "committed" or "closed"."""
        return self._state

    @property
    def version(self) -> int:
        """How many updates this process has committed to the (first) model."""
        return weights_version(self._sites[0].model)

    @property
    def digest_so_far(self) -> str | None:
        """The digest of what has arrived, with `digest=True`."""
        return None if self._source.digest is None else self._source.digest.hexdigest()

    @property
    def scales_digest(self) -> str:
        """A digest of the global scales that arrived, with `digest=True`: equal on every rank of an engine."""
        return self._source.scales.hexdigest()

    @property
    def progress(self) -> tuple[int, int]:
        layers = [layer for model in self._models for layer in model.shadow.layers if layer.required]
        return sum(layer.processed for layer in layers), len(layers)

    # ------------------------------------------------------------------------------------------------- inside
    def _completed(self, processed: list[Processed]) -> bool:
        if self.atomic == "model" and self.baseline == "live":
            self._processed += processed
            return False
        exchange = self._exchange_of(processed)
        try:
            exchange.commit()
        finally:
            if exchange.committed:
                self._committed_bytes += exchange.nbytes
                self._committed += [result.layer for result in processed]
        return True

    def _exchange_of(self, processed: list[Processed]) -> Exchange:
        scalars = [scalar for one in processed for scalar in one.scalars]
        if scalars and any(site.graphs for site in self._sites):
            names = ", ".join(sorted({str(key) for _, key, _, _ in scalars}))
            raise UnsupportedLayer(
                f"{processed[0].layer}: processing derives Python numbers ({names}) from these weights, and the engine's "
                "captured graphs have the old ones baked in. Run the engine with enforce_eager=True to update them."
            )
        return Exchange((pair for one in processed for pair in one.pairs), scalars)

    def _finish(self) -> None:
        """What follows a commit. Whatever fails in it, or interrupts it, the update is over and holds the model no longer."""
        try:
            for site in self._sites:
                count_version(site.model, 1)
                reset_runner(site.runner)
            if self.reset_prefix_cache:
                for engine in {id(s.engine): s.engine for s in self._sites if s.engine is not None}.values():
                    engine.reset_prefix_cache()
            layers = sum(layer.processed for model in self._models for layer in model.shadow.layers if layer.params)
            self.report = ReloadReport(
                layers=layers,
                tensors=len(self._source.seen),
                received_bytes=self._source.nbytes,
                committed_bytes=self._committed_bytes,
                seconds=time.perf_counter() - self._started,
                moved=sum(model.moved() for model in self._models),
                ignored=tuple(sorted(self._source.seen - self._source.used)),
                version=self.version,
                digest=self.digest_so_far,
            )
        finally:
            self._let_go()
        logger.info(
            "weight update: %d layers, %d tensors, %.1f MB, %.3f s",
            layers,
            self.report.tensors,
            self._committed_bytes / 1e6,
            self.report.seconds,
        )

    def _must_be(self, state: str) -> None:
        if self._failure is not None:
            raise ScopeStateError(f"this weight update has failed and takes no more: {self._failure}") from self._failure
        if self._state != state:
            raise ScopeStateError(f"this weight update is {self._state}; that needs it to be {state}")

    def _let_go(self) -> None:
        """Let the engine run, and hold no more of the model than going back to its previous weights needs."""
        if self._guard is not None:
            self._guard.lift()
            self._guard = None  # the next update may guard it too
        if self.keep_previous:
            # Kernel objects of the shadow free what their tensors point to when they die: for as long as the two sides
            # may be swapped again, that must not happen.
            self._kept = self._kept or self._models
        else:
            self._exchange = None
        self._release()

    def _release(self) -> None:
        release(self)
        self._processed = []
        for model in self._models:
            if model not in self._kept:
                model.close()
        self._models = []


def _drain(iterator: Iterable[Any]) -> None:
    for _ in iterator:
        pass
