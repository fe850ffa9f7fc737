"""The Triton kernels of the tiled MLP, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

CODE = """
import functools, torch, torch.nn.functional as F
from scoped_patch.ops.tiled_mlp import kernels

device = "cuda" if torch.cuda.is_available() else "cpu"
known = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "relu": F.relu}
if device == "cpu":
    # The interpreter's tensors live on the CPU: there is no device to select.
    import contextlib
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
for name, activation in known.items():
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):  # the interpreter truncates
        for columns in (5, 1024, 1500):
            # Gate and up as halves of one tensor: rows are strided.
            both = (torch.randn(3, 2 * columns, device=device) * 4).to(dtype)
            incoming = torch.randn(3, columns, device=device).to(dtype)
            for with_factor in (True, False):
                x, f = both[:, :columns].double().requires_grad_(), both[:, columns:].double().requires_grad_()
                value = activation(x) * f if with_factor else activation(x)
                wanted = torch.autograd.grad(value, (x, f) if with_factor else (x,), incoming.double())

                def close(got, true):
                    assert got.dtype == dtype
                    error = (got.double() - true).abs().max() / true.abs().max()
                    assert error <= tolerance, (name, dtype, columns, with_factor, float(error))

                work = both.clone()
                argument, factor = work[:, :columns], work[:, columns:] if with_factor else None
                close(kernels.act(name, argument, factor), value)
                assert torch.equal(work[:, columns:], both[:, columns:]), "the factor is only read"
                work, gradient = both.clone(), incoming.clone()
                argument, factor = work[:, :columns], work[:, columns:] if with_factor else None
                d_argument, d_factor, again = kernels.act_backward(name, argument, factor, gradient)
                close(d_argument, wanted[0])
                close(again, value)
                assert (d_factor is None) == (not with_factor)
                if with_factor:
                    close(d_factor, wanted[1])
                assert d_argument.data_ptr() == work.data_ptr() and again.data_ptr() == gradient.data_ptr(), "in place"
extremes = torch.tensor([[-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4]], device=device)
for name, activation in known.items():
    x = extremes.clone().requires_grad_()
    slope = torch.autograd.grad(activation(x).sum(), x)[0]
    d_argument, _, value = kernels.act_backward(name, extremes.clone(), None, torch.ones_like(extremes))
    assert torch.allclose(d_argument, slope, atol=1e-6) and torch.allclose(value, activation(extremes), atol=1e-6), name
print("all equal")
"""


def test_kernels_equal_float64() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    # In a process of its own: Triton decides at import whether it interprets.
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout
