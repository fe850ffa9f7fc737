"""Weight updates of an engine whose workers are other processes: an extension of the worker, and the scope that drives it.

Pass `worker_extension_cls="scoped_patch.vllm.WorkerExtension"` to the engine. Every rank stages and validates its own shard;
only when all have are the weights swapped, and if one rank cannot, all go back to the old ones.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from ..engine.errors import BadTargetError, ScopeStateError
from .digest import Digest
from .errors import RemoteReloadError
from .reload import reload_weights
from .update import Weights, WeightUpdate

logger = logging.getLogger("scoped_patch")

EXTENSION = "scoped_patch.vllm.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker class by `worker_extension_cls`; call the methods through `collective_rpc`.

    Each returns its rank's state as a JSON object: `rank`, `ok`, `error`, `version`, `digest`, `scales` and, after a commit,
    the report. Failures are answered, not raised: an exception would leave the other ranks' answers unread.

    With a transport of your own, subclass this, receive tensors in a method of your own, and hand them to
    `self.scoped_patch_load(pairs)`.
    """

    def scoped_patch_begin(self, **options: Any) -> str:
        """Start an update; see `reload_weights` for the options. An update that a lost driver left open is dropped."""

        def begin() -> None:
            open_update = self._scoped_patch_get()
            if open_update is not None:
                open_update.rollback()
            update = reload_weights(self, **options)
            update.__enter__()
            self.__dict__["_scoped_patch_update"] = update

        return self._scoped_patch_answer(begin)

    def scoped_patch_load(self, weights: str | Iterable[tuple[str, torch.Tensor]]) -> str:
        """Stage a bucket: pairs, or the path of a safetensors file that this process can read."""

        def load() -> None:
            update = self._scoped_patch_need()
            if isinstance(weights, str):
                from safetensors.torch import load_file

                update.load(load_file(weights).items())
            else:
                update.load((str(name), tensor) for name, tensor in weights)

        return self._scoped_patch_answer(load)

    def scoped_patch_prepare(self) -> str:
        """The first phase of the commit: is everything here and right? The old weights still serve."""
        return self._scoped_patch_answer(lambda: self._scoped_patch_need().prepare())

    def scoped_patch_commit(self) -> str:
        """The second phase: swap. Only after every rank has prepared."""
        return self._scoped_patch_answer(lambda: self._scoped_patch_need().commit())

    def scoped_patch_rollback(self) -> str:
        """Back to the weights before this update, whatever phase it is in."""

        def rollback() -> None:
            update = self._scoped_patch_get()
            if update is not None and update.state == "committed" and update.keep_previous:
                update.rollback_to_previous()
            elif update is not None:
                update.rollback()

        return self._scoped_patch_answer(rollback)

    def scoped_patch_release(self) -> str:
        """Give up the copy of the previous weights that a commit keeps."""

        def release() -> None:
            update = self._scoped_patch_get()
            if update is not None:
                update.discard_previous()

        return self._scoped_patch_answer(release)

    def scoped_patch_status(self) -> str:
        """This rank's state; changes nothing."""
        return self._scoped_patch_answer(lambda: None)

    def _scoped_patch_get(self) -> WeightUpdate | None:
        return self.__dict__.get("_scoped_patch_update")

    def _scoped_patch_need(self) -> WeightUpdate:
        update = self._scoped_patch_get()
        if update is None:
            raise ScopeStateError("no weight update is open on this worker; call scoped_patch_begin first")
        return update

    def _scoped_patch_answer(self, action: Callable[[], None]) -> str:
        error: str | None = None
        try:
            action()
        except Exception as failure:
            logger.exception("weight update on rank %s", getattr(self, "rank", "?"))
            error = f"{type(failure).__name__}: {failure}"
        update = self._scoped_patch_get()
        report = None if update is None else update.report
        return json.dumps(
            {
                "rank": int(getattr(self, "rank", 0)),
                "ok": error is None,
                "error": error,
                "state": None if update is None else update.state,
                "version": 0 if update is None else update.version,
                "digest": None if update is None else update.digest_so_far,
                "scales": None if update is None else update.scales_digest,
                "layers": None if report is None else report.layers,
                "committed_bytes": None if report is None else report.committed_bytes,
                "moved": None if report is None else report.moved,
                "seconds": None if report is None else report.seconds,
            }
        )


class EngineUpdate:
    """One weight update of an engine in other processes; see `reload_engine`.

    Attributes:
        ranks: the last answer of each rank.
    """

    def __init__(
        self, engine: Any, *, bucket_bytes: int, directory: str | None, reset_prefix_cache: bool, **options: Any
    ) -> None:
        if not callable(getattr(engine, "collective_rpc", None)):
            raise BadTargetError(f"{type(engine).__name__} has no collective_rpc; pass a vllm.LLM")
        if inspect.iscoroutinefunction(engine.collective_rpc):
            raise BadTargetError(
                f"{type(engine).__name__}.collective_rpc is asynchronous: await its scoped_patch_begin, scoped_patch_load, "
                "scoped_patch_prepare and scoped_patch_commit yourself, and scoped_patch_rollback on all ranks if one fails"
            )
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self._directory = directory or ("/dev/shm" if os.path.isdir("/dev/shm") else None)
        self._reset_prefix_cache = reset_prefix_cache
        self._options = options | {"keep_previous": True, "digest": True}
        self._digest = Digest()
        self._open = False
        self.ranks: list[dict[str, Any]] = []

    def __enter__(self) -> EngineUpdate:
        self._open = True
        try:
            self._call("scoped_patch_begin", **self._options)
        except AttributeError as error:
            raise BadTargetError(
                f'the engine\'s workers lack the extension: pass worker_extension_cls="{EXTENSION}"'
            ) from error
        return self

    def load(self, weights: Weights) -> None:
        """Send (checkpoint name, tensor) pairs to every rank, through files of at most `bucket_bytes`."""
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in weights:
            if name in bucket or (bucket and size + tensor.nbytes > self._bucket_bytes):
                self._send(bucket)
                bucket, size = {}, 0
            # A copy: the caller may reuse the memory for the next pair.
            bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
            self._digest.add(name, bucket[name])
        if bucket:
            self._send(bucket)

    def _send(self, bucket: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        handle, path = tempfile.mkstemp(suffix=".safetensors", dir=self._directory)
        os.close(handle)
        try:
            save_file(bucket, path)
            self._call("scoped_patch_load", path)
        finally:
            os.unlink(path)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self._open:
            return
        if value is not None:
            self._back()
            return
        self._call("scoped_patch_prepare")
        self._agree()
        self._call("scoped_patch_commit")
        self._call("scoped_patch_release")
        self._open = False
        if self._reset_prefix_cache:
            self._engine.reset_prefix_cache()

    def _agree(self) -> None:
        """Every rank must have seen what was sent, and the same global scales."""
        sent = self._digest.hexdigest()
        wrong = {r["rank"]: f"digest {r['digest']}, sent {sent}" for r in self.ranks if r["digest"] != sent}
        if not wrong and len({r["scales"] for r in self.ranks}) > 1:
            wrong = {r["rank"]: f"global scales {r['scales']}" for r in self.ranks}
        if wrong:
            self._fail("the ranks do not hold the same update", wrong)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """One step on every rank; if it fails on any, all go back to the old weights."""
        try:
            answers = self._engine.collective_rpc(method, args=args, kwargs=kwargs)
            self.ranks = [json.loads(answer) for answer in answers]
        except BaseException:
            self._back()
            raise
        failed = {r["rank"]: r["error"] for r in self.ranks if not r["ok"]}
        if failed:
            self._fail(f"{method.removeprefix('scoped_patch_')} failed on {len(failed)} of {len(self.ranks)} ranks", failed)

    def _fail(self, what: str, ranks: dict[int, str]) -> None:
        self._back()
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(ranks.items()))
        raise RemoteReloadError(f"{what}; every rank serves the old weights:\n{lines}", ranks)

    def _back(self) -> None:
        if self._open:
            self._open = False
            try:
                self._engine.collective_rpc("scoped_patch_rollback")
            except Exception:
                logger.exception("the roll-back did not reach every rank")


def reload_engine(
    engine: Any,
    *,
    bucket_bytes: int = 256 << 20,
    directory: str | None = None,
    reset_prefix_cache: bool = False,
    **options: Any,
) -> EngineUpdate:
    """`reload_weights` for an engine whose workers are other processes of this machine, over all its ranks.

        llm = LLM(..., tensor_parallel_size=2, worker_extension_cls="scoped_patch.vllm.WorkerExtension")
        with reload_engine(llm) as update:
            update.load(state_dict.items())

    Args:
        engine: a `vllm.LLM`, or anything with a synchronous `collective_rpc`.
        bucket_bytes: how much is sent at a time, through a file.
        directory: where the files are written; shared memory by default.
        reset_prefix_cache: empty the engine's prefix cache after the commit.
        options: `expect` and `on_error`, as for `reload_weights`.

    Raises:
        RemoteReloadError: a rank failed, with the text of each; all ranks kept, or went back to, the old weights.
    """
    return EngineUpdate(
        engine, bucket_bytes=bucket_bytes, directory=directory, reset_prefix_cache=reset_prefix_cache, **options
    )
