"""The fused head under torch.compile: one node in the graph, no breaks, no recompilation for new values."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from scoped_patch.ops.linear_cross_entropy import linear_cross_entropy
from scoped_patch.ops.linear_cross_entropy.operator import forward_op


@pytest.fixture(autouse=True)
def _fresh():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(h, w, y, temperature):
    out = linear_cross_entropy(h * 2, w, y, temperature=temperature)
    return out.log_probs, out.entropy


def test_fullgraph_forward_and_backward_equal_eager_and_new_values_do_not_recompile():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    h, w = torch.randn(2, 5, 8, requires_grad=True), torch.randn(130, 8, requires_grad=True)
    for _ in range(3):
        y = torch.randint(0, 130, (2, 5))
        y[0, 0] = -100
        temperature = torch.rand(2, 5) + 0.5
        got, want = compiled(h, w, y, temperature), step(h, w, y, temperature)
        ups = (torch.randn(2, 5), torch.randn(2, 5))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, (h, w), ups), torch.autograd.grad(want, (h, w), ups))
    assert counter.frame_count == 1


def test_a_float_temperature_recompiles_once_for_all_values():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    h, w, y = torch.randn(5, 8), torch.randn(130, 8), torch.randint(0, 130, (5,))
    for temperature in (0.5, 0.7, 0.9, 1.3, 1.7):
        torch.testing.assert_close(compiled(h, w, y, temperature), step(h, w, y, temperature))
    assert counter.frame_count == 2


def test_new_lengths_are_dynamic_after_one_recompilation():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    w = torch.randn(130, 8, requires_grad=True)
    for n in (5, 6, 9, 12):
        h, y = torch.randn(n, 8, requires_grad=True), torch.randint(0, 130, (n,))
        got, want = compiled(h, w, y, 1.0), step(h, w, y, 1.0)
        torch.testing.assert_close(torch.autograd.grad(got[0].sum(), (h, w)), torch.autograd.grad(want[0].sum(), (h, w)))
    assert counter.frame_count == 2


def test_the_default_backend_compiles_it_too():
    compiled = torch.compile(step, fullgraph=True)
    h, w, y = (
        torch.randn(5, 8, requires_grad=True),
        torch.randn(130, 8, requires_grad=True),
        torch.randint(0, 130, (5,)),
    )
    got, want = compiled(h, w, y, 0.7), step(h, w, y, 0.7)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got[1].sum(), (h, w)), torch.autograd.grad(want[1].sum(), (h, w)))


def test_autocast_inside_the_graph():
    def f(h, w, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy(h, w, y).log_probs

    h, w, y = (
        torch.randn(5, 8, requires_grad=True),
        torch.randn(130, 8, requires_grad=True),
        torch.randint(0, 130, (5,)),
    )
    got, want = torch.compile(f, fullgraph=True, backend="aot_eager")(h, w, y), f(h, w, y)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), (h, w)), torch.autograd.grad(want.sum(), (h, w)))


def test_the_operator_keeps_the_dispatcher_s_contract():
    h, w = torch.randn(5, 8, requires_grad=True), torch.randn(130, 8, requires_grad=True)
    y = torch.randint(0, 130, (5,))
    y[1] = -100
    settings = (None, 1.0, -100, 0, 130, "", torch.float32, "torch", 0)
    args = (h, w, y, torch.ones(()), None, None, None, None, *settings, True, True, False)
    torch.library.opcheck(forward_op, args)
