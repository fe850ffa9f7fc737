"""NVFP4 numerics by value: codes, scales, and bit-equality with the compressed-tensors package."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from scoped_patch.ops.nvfp4 import block_scales, fake_quantize, largest, quantize_dequantize, round_to_e2m1, tensor_scale

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])


def test_every_code_stays_and_ties_go_to_the_even_code():
    assert torch.equal(round_to_e2m1(CODES), CODES)
    assert torch.equal(round_to_e2m1(-CODES), -CODES)
    middle = (CODES[1:] + CODES[:-1]) / 2
    even = torch.tensor([0, 1, 1, 2, 2, 4, 4.0])
    assert torch.equal(round_to_e2m1(middle), even)
    assert torch.equal(round_to_e2m1(-middle), -even)


def test_the_nearest_code_everywhere():
    x = torch.linspace(-6, 6, 4801, dtype=torch.float64)
    both = torch.cat([-CODES.flip(0), CODES]).double()
    distance = (x[:, None] - both).abs().amin(-1)
    torch.testing.assert_close((round_to_e2m1(x) - x).abs(), distance, rtol=0, atol=1e-12)


def test_scales():
    x = torch.zeros(2, 48)
    x[0, :16] = 6.0
    x[0, 16:32] = 3.0
    x[1, 5] = -12.0
    scale = tensor_scale(largest([x]))
    assert scale.item() == 448 * 6 / 12
    assert block_scales(x, scale).tolist() == [[224.0, 112.0, 0.125], [448.0, 0.125, 0.125]]
    assert torch.equal(quantize_dequantize(x, scale), x)  # the largest of a block is a code times its scale


def test_zeros_and_extremes_stay_finite():
    for x in (torch.zeros(4, 32), torch.randn(4, 32) * 1e-30, torch.randn(4, 32) * 1e30):
        out = quantize_dequantize(x, tensor_scale(largest([x])))
        assert out.isfinite().all()
        assert (out - x).norm() <= 0.2 * x.norm() or x.abs().max() < 1e-20
    assert torch.equal(quantize_dequantize(torch.zeros(4, 32), tensor_scale(torch.zeros(()))), torch.zeros(4, 32))


def test_largest_of_several():
    assert largest([torch.tensor([1.0, -3.0]), torch.tensor([2.0]), torch.empty(0)]).item() == 3.0
    assert largest([torch.empty(0)]).item() == 0.0
    assert largest([torch.tensor([-7.0], dtype=torch.bfloat16)]).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_goes_straight_through(dtype):
    x = torch.randn(3, 5, 32).to(dtype).requires_grad_()
    out = fake_quantize(x, tensor_scale(largest([x])))
    assert out.dtype == dtype
    assert not torch.equal(out, x)
    g = torch.randn(3, 5, 32).to(dtype)
    out.backward(g)
    assert torch.equal(x.grad, g)


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs the compressed-tensors package")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_bit_equal_to_compressed_tensors(dtype, spread):
    """Its own quantise-and-dequantise, with scales that it has made itself."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    x = (torch.randn(48, 96) * torch.exp(spread * torch.randn(48, 1))).to(dtype)
    x[:, 16:32] = 0
    values = x.float()
    top = values.abs().amax()
    scale = generate_gparam(-top, top)
    assert torch.equal(tensor_scale(largest([x])), scale[0])
    blocks = values.unflatten(1, (-1, 16))
    block, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, scale)
    assert torch.equal(block_scales(x, scale[0]), block)
    wanted = theirs(x=values, scale=block, zero_point=None, args=args, global_scale=scale).to(dtype)
    assert torch.equal(quantize_dequantize(x, scale[0]), wanted)
