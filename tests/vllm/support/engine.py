"""The real vLLM engine on CPU, in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Read when vLLM is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
)

import torch

PROMPT = (5, 17, 33, 101)
Output = tuple[list[int], list[float]]


def options(path: Path) -> dict[str, Any]:
    """Of a small engine."""
    return dict(
        model=str(path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=8 << 20,
        dtype="bfloat16",
        seed=0,
        disable_log_stats=True,
        enable_prefix_caching=False,
    )


def start(path: Path, **changes: Any) -> Any:
    from vllm import LLM

    threads = torch.get_num_threads()
    try:
        return LLM(**(options(path) | changes))
    finally:
        torch.set_num_threads(threads)


def generate(llm: Any, prompt: tuple[int, ...] = PROMPT, tokens: int = 8) -> Output:
    """Greedy tokens, and the log-probability of each: any stale or wrong weight shows in the latter."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, logprobs=1, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)[0].outputs[0]
    return list(out.token_ids), [entry[token].logprob for token, entry in zip(out.token_ids, out.logprobs, strict=True)]


def worker(llm: Any) -> Any:
    core = getattr(llm.llm_engine, "engine_core", None)
    executor = getattr(llm.llm_engine, "model_executor", None) or core.engine_core.model_executor
    return executor.driver_worker.worker


def model(llm: Any) -> torch.nn.Module:
    return worker(llm).model_runner.get_model()
