"""What is chosen for tensors on a GPU, asked on a machine without one: stand-ins have a device, a dtype and a shape."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scoped_patch.ops.linear_cross_entropy import backends, memory
from scoped_patch.ops.prefix_attention import PrefixLayout, choose_backend
from scoped_patch.ops.prefix_attention.kernels import Score

SHORT = PrefixLayout([7], [[5, 3]])
LONG = PrefixLayout([4096], [[512] * 8])
MIB = 1 << 20


def on_gpu(size: int = 64, dtype: torch.dtype = torch.bfloat16, heads: int = 8) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=torch.Size((1, heads, 8192, size)))


@pytest.mark.parametrize(
    ("options", "how", "layout", "capability", "wanted"),
    [
        ({}, Score(1.0), SHORT, 9, "flash"),
        ({"heads": 32}, Score(1.0), LONG, 9, "cudnn"),
        ({"heads": 32}, Score(1.0), LONG, 8, "flash"),
        ({"heads": 8}, Score(1.0), LONG, 9, "flash"),
        ({"size": 160}, Score(1.0), LONG, 9, "flash"),
        ({"size": 60}, Score(1.0), LONG, 9, "flex"),
        ({"size": 264}, Score(1.0), LONG, 9, "flex"),
        ({}, Score(1.0, softcap=20.0), LONG, 9, "flex"),
        ({}, Score(1.0, window=9), LONG, 9, "flex"),
        ({"dtype": torch.float32}, Score(1.0), LONG, 9, "flex"),
        ({"dtype": torch.float64}, Score(1.0), LONG, 9, "plain"),
    ],
)
def test_the_backend_of_prefix_attention(monkeypatch, options, how, layout, capability, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert choose_backend(on_gpu(**options), on_gpu(**options), layout, how) == wanted


@pytest.mark.parametrize(
    ("backend", "query", "value", "how", "layout", "text"),
    [
        ("flash", on_gpu(dtype=torch.float32), on_gpu(), Score(1.0), LONG, "torch.float32, it needs bfloat16 or float16"),
        ("flash", on_gpu(64), on_gpu(128), Score(1.0), LONG, r"different head sizes \(64 and 128\)"),
        ("flash", on_gpu(60), on_gpu(60), Score(1.0), LONG, "the head size is 60, it needs a multiple of 8 up to 256"),
        ("flash", on_gpu(), on_gpu(), Score(1.0, softcap=2.0), LONG, "it has no softcap"),
        ("flash", on_gpu(), on_gpu(), Score(1.0, window=3), LONG, "a sliding window cuts the shared prefix"),
        ("cudnn", on_gpu(dtype=torch.float32), on_gpu(), Score(1.0), LONG, "torch.float32, it needs bfloat16 or float16"),
        ("cudnn", on_gpu(64), on_gpu(128), Score(1.0), LONG, "the head sizes are 64 and 128"),
        ("cudnn", on_gpu(), on_gpu(), Score(1.0, softcap=2.0), LONG, "no softcap, and no window"),
        ("cudnn", on_gpu(), on_gpu(), Score(1.0), SHORT, "a segment has 3 tokens, it needs 64"),
        ("flex", on_gpu(dtype=torch.float64), on_gpu(), Score(1.0), LONG, "the tensors are float64"),
    ],
)
def test_a_backend_that_cannot_do_it_says_why(backend, query, value, how, layout, text):
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot do this: .*{text}.*; use 'auto' or 'blockwise'"):
        choose_backend(query, value, layout, how, backend)


@pytest.mark.parametrize(
    ("asked", "numbers", "taken", "wanted"),
    [
        (memory.AUTO, 1 << 30, 0, 512 * MIB),
        (memory.LOW, 1, 0, 48 * MIB),
        (memory.LOW, 25 * MIB, 0, 100 * MIB),
        (memory.LOW, 1 << 30, 0, 128 * MIB),
        (300 * MIB, 1, 0, 300 * MIB),
        (300 * MIB, 1, 100 * MIB, 200 * MIB),
        (900 * MIB, 1, 0, 512 * MIB),
        (1 * MIB, 1, 2 * MIB, 1),
    ],
)
def test_the_bytes_of_a_block(asked, numbers, taken, wanted):
    hidden = SimpleNamespace(is_cuda=True, numel=lambda: numbers, element_size=lambda: 2)
    assert memory.block_bytes(asked, hidden, taken) == wanted


@pytest.mark.parametrize(
    ("asked", "free", "cached", "capturing", "wanted"),
    [
        (memory.AUTO, 4001, 0, False, True),
        (memory.AUTO, 3999, 0, False, False),
        (memory.AUTO, 3000, 1001, False, True),
        (memory.AUTO, 3000, 999, False, False),
        (memory.AUTO, 4001, 0, True, False),
        (memory.LOW, 1 << 40, 0, False, False),
        (1001, 0, 0, False, True),
        (999, 1 << 40, 0, False, False),
    ],
)
def test_logits_are_kept_where_they_fit(monkeypatch, asked, free, cached, capturing, wanted):
    """10 rows of 48 words: 960 bytes of fp16, and one fp32 maximum a row."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500 + cached)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    monkeypatch.setattr(memory, "_CUDA_BLOCK", 1999)
    monkeypatch.setattr(memory, "_answers", {})
    assert memory.keeps_logits(asked, 10, 48, torch.device("cuda")) is wanted
    assert not memory.keeps_logits(memory.AUTO, 10, 48, torch.device("cpu"))


def test_an_ample_answer_about_memory_lasts_a_second(monkeypatch):
    asked, now, free = [], 100.0, 8000
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (free, 1 << 40))[1])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(memory, "_CUDA_BLOCK", 1)
    monkeypatch.setattr(memory, "_answers", {})
    monkeypatch.setattr(memory.time, "monotonic", lambda: now)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    # 10 rows of 48 words take 1000 bytes, 20 rows 2000; a quarter of 8000 is allowed
    for device, rows, at, left, wanted, asks in (
        (first, 10, 100.0, 8000, True, 1),
        (first, 10, 100.9, 0, True, 1),
        (first, 20, 100.9, 8000, True, 2),  # more than half of what was allowed
        (second, 10, 101.0, 0, False, 3),
        (first, 10, 101.8, 0, True, 3),
        (first, 10, 102.0, 0, False, 4),
        (first, 10, 102.1, 8000, True, 5),  # a refusal does not last
    ):
        now, free = at, left
        assert memory.keeps_logits(memory.AUTO, rows, 48, device) is wanted
        assert len(asked) == asks


@pytest.mark.parametrize(("block", "wanted"), [(2000, True), (1999, False)])
def test_logits_that_with_a_block_fit_a_block_are_kept_without_asking(monkeypatch, block, wanted):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(memory, "_CUDA_BLOCK", block)
    assert memory.keeps_logits(memory.AUTO, 10, 48, torch.device("cuda")) is wanted
    assert not memory.keeps_logits(memory.LOW, 10, 48, torch.device("cuda"))


def test_the_backend_of_the_head(monkeypatch):
    device, there = torch.device("cuda:0"), True
    monkeypatch.setattr(backends, "triton_available", lambda: there)
    assert backends.choose("auto", device, torch.bfloat16) == "triton"
    assert backends.choose("auto", device, torch.float64) == "torch"
    assert backends.choose("triton", device, torch.float32) == "triton"
    with pytest.raises(NotImplementedError, match="float64 is not computed there"):
        backends.choose("triton", device, torch.float64)
    there = False
    assert backends.choose("auto", device, torch.bfloat16) == "torch"
    with pytest.raises(NotImplementedError, match="triton is not installed"):
        backends.choose("triton", device, torch.bfloat16)
