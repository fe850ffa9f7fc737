"""The CUDA forms of shared-prefix attention against plain products in float32."""

from __future__ import annotations

import pytest
import torch

from scoped_patch.ops.prefix_attention import PrefixLayout, choose_backend, prefix_attention
from scoped_patch.ops.prefix_attention.kernels import Score
from scoped_patch.ops.prefix_attention.merge import merge_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUTS = {
    "one group": PrefixLayout([300], [[150, 7, 64]]),
    "many": PrefixLayout([150, 1, 300, 0], [[50, 0, 90, 3], [4], [20, 200], [60, 0]]),
    "no prefix": PrefixLayout([0], [[130, 40]]),
    "no response": PrefixLayout([130], [[]]),
}


def tensors(layout, dtype, sinks=False, size=64):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, layout.tokens, size) for heads in (6, 2, 2)]
    made = [torch.randn(s, device="cuda", dtype=torch.float32, generator=generator) for s in shapes]
    made = [x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    made += [torch.randn(6, device="cuda", dtype=dtype, generator=generator)] if sinks else []
    return [x.requires_grad_() for x in made]


def run(inputs, layout, backend, **options):
    sinks = inputs[3] if len(inputs) > 3 else None
    out = prefix_attention(*inputs[:3], layout, sinks=sinks, backend=backend, **options)
    grad = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def assert_close_to_plain(layout, dtype, tolerance, backend, sinks=False, size=64, **options):
    inputs = tensors(layout, dtype, sinks, size)
    found = run(inputs, layout, backend, **options)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    wanted = run(exact, layout, "plain", **options)
    for name, ours, right in zip(("out", "query", "key", "value", "sinks"), found, wanted, strict=False):
        error = float((ours.float() - right).norm() / right.norm().clamp(min=1e-6))
        # the sinks' gradient is one number a head: a sum of many terms of both signs, rounded once each
        assert error <= (3 * tolerance if name == "sinks" else tolerance), f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_merged_calls_of_flash(layout, dtype, sinks):
    assert_close_to_plain(layout, dtype, 8e-3 if dtype == torch.bfloat16 else 1e-3, "flash", sinks)


#: no segment below cuDNN's shortest
LONG = {
    "one group": PrefixLayout([300], [[150, 70, 64]]),
    "equal": PrefixLayout([128] * 3, [[96, 96]] * 3),
    "many": PrefixLayout([150, 65, 300, 0], [[90, 0, 90, 65], [64], [77, 200], [66, 0]]),
    "no prefix": PrefixLayout([0], [[130, 75]]),
    "no response": PrefixLayout([130], [[]]),
}


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LONG.values(), ids=LONG.keys())
def test_merged_calls_of_cudnn(layout, dtype, sinks, size):
    assert_close_to_plain(layout, dtype, 8e-3 if dtype == torch.bfloat16 else 1e-3, "cudnn", sinks, size=size)


def test_long_equal_segments_go_to_cudnn():
    for layout, wanted in (
        (PrefixLayout([8192], [[1024] * 8]), "cudnn"),
        (PrefixLayout([8192], [[1000, 1001, 1002, 1003, 1004]]), "flash"),
        (PrefixLayout([128], [[96, 96]]), "flash"),
        (PrefixLayout([8192], [[1024, 1]]), "flash"),
    ):
        query, _, value = (torch.empty(1, 16, layout.tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        if torch.cuda.get_device_capability()[0] < 9:
            wanted = "flash"
        assert choose_backend(query, value, layout, Score(1.0)) == wanted


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0}, {"window": 150, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 2e-3)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_flex(layout, dtype, tolerance, options):
    assert_close_to_plain(layout, dtype, tolerance, "flex", **options)


def test_flex_with_sinks():
    assert_close_to_plain(LAYOUTS["many"], torch.bfloat16, 1e-2, "flex", True)


def test_flash_copies_no_keys():
    """Its memory beyond the inputs: outputs, gradients and normalisers; repeated keys would be several times that."""
    layout = PrefixLayout([8192], [[16] * 32])
    query, key, value = tensors(layout, torch.bfloat16)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = prefix_attention(query, key, value, layout, backend="flash")
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated() - base
    repeated_keys = 32 * 8192 * 2 * 64 * 2 * 2
    assert forward < 4 * out.numel() * out.element_size() < repeated_keys


def test_choice():
    long = PrefixLayout([64], [[1024, 1100]])
    query, _, value = tensors(long, torch.bfloat16)
    assert choose_backend(query, value, long, Score(1.0)) == "flash"
    assert choose_backend(query, value, long, Score(1.0, window=7)) == "flex"
    assert choose_backend(query.float(), value.float(), long, Score(1.0)) == "flex"
    assert choose_backend(query.double(), value.double(), long, Score(1.0)) == "plain"


@pytest.mark.parametrize("size", [64, 80, 128])
def test_merge_kernel(size):
    """The Triton kernel against the torch form, at a row that is no multiple of its block and beyond the first one."""
    out, norm = torch.randn(200, 3, size, device="cuda", dtype=torch.bfloat16), torch.randn(3, 200, device="cuda")
    part, part_norm = torch.randn(131, 3, size, device="cuda", dtype=torch.bfloat16), torch.randn(3, 131, device="cuda")
    right_out, right_norm = out.cpu().float(), norm.cpu()
    merge_(right_out, right_norm, part.cpu().float(), part_norm.cpu(), 69, None)
    merge_(out, norm, part, part_norm, 69, None)
    torch.testing.assert_close(out.cpu().float(), right_out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(norm.cpu(), right_norm, rtol=1e-5, atol=1e-5)
