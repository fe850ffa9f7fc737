"""`reload_weights`: a scope around one weight update of a vLLM engine. On exit all of it serves, or none of it."""

from __future__ import annotations

from typing import Any, Literal

from .update import Expect, WeightUpdate


def reload_weights(
    target: Any,
    *,
    atomic: Literal["model", "layer"] = "model",
    expect: Expect = "all",
    baseline: Literal["live", "discarded"] = "live",
    on_error: Literal["raise", "drain"] = "raise",
    reset_prefix_cache: bool = False,
    keep_previous: bool = False,
    digest: bool = False,
) -> WeightUpdate:
    """Replace the weights of a vLLM model in place, all or nothing.

        with reload_weights(llm) as update:
            for bucket in buckets:
                update.load(bucket)

    New weights are loaded by the model's own `load_weights` into a shadow of the model, processed layer by layer as vLLM
    would, compared with the live layers, and swapped into the live memory when the scope ends: no address changes, so that
    captured CUDA graphs stay valid. The live model serves the old weights until then.

    Args:
        target: an in-process `vllm.LLM`, a worker, a model runner, an `nn.Module` built by vLLM's loader, or a list of
            them (a target model and its drafter share the stream).
        atomic: "model" holds one copy of the changed layers and commits them together at the end; "layer" commits each
            layer as soon as it is whole, needs the memory of one, and cannot take back the ones committed before a failure.
        expect: "all": every parameter of the model must arrive. A collection of checkpoint names: exactly these. "partial":
            whatever arrives; a quantised layer must still arrive whole.
        baseline: "discarded" for an engine whose weights were thrown away before (vLLM's sleep level 2): layers are
            overwritten as they come, and the engine refuses to run until all of them have.
        on_error: "raise" at once, or "drain": consume the rest of every stream first, so that no sender is left waiting,
            and raise when the scope ends.
        reset_prefix_cache: empty the engine's prefix cache after the commit (`vllm.LLM` targets only).
        keep_previous: keep the replaced weights, for `update.rollback_to_previous()`.
        digest: compute a digest of what arrives.

    Raises:
        BadTargetError: (entering) `target` is none of these, or lives in other processes.
        RejectedWeight: a weight has an unknown name, a wrong shape or dtype, a name that came before, or values that are
            not finite. The old weights serve on.
        IncompleteReload: the scope ended, but not all had arrived. The old weights serve on (`atomic="model"`).
        UnsupportedLayer: a layer's new state could not take the place of the live one. Nothing was changed.
    """
    return WeightUpdate(
        target,
        atomic=atomic,
        expect=expect,
        baseline=baseline,
        on_error=on_error,
        reset_prefix_cache=reset_prefix_cache,
        keep_previous=keep_previous,
        digest=digest,
    )
