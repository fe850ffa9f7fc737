"""The Triton backend in Triton's interpreter, every kernel against float64; on a GPU the same cases run compiled."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import weakref

import pytest
import torch

from scoped_patch.engine.errors import UnsupportedError
from scoped_patch.ops.linear_cross_entropy import linear_cross_entropy
from scoped_patch.ops.linear_cross_entropy.remember import Remembered
from tests.ops.test_linear_cross_entropy import NAMES, call, compare, problem, reference, rel
from tests.ops.test_linear_cross_entropy_parallel import vocab_parallel
from tests.support.ranks import spawn

pytest.importorskip("triton", reason="the Triton backend needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "no GPU, and not in Triton's interpreter: test_linear_cross_entropy_interpreter.py runs these in a process of its own",
        allow_module_level=True,
    )
# The tiles of the fused route take half precision; the interpreter, which cannot do bf16 products, lets fp32 through.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
FUSED_DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
GRAD_TOL = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 3e-5}


@pytest.fixture(autouse=True)
def _device():
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    from scoped_patch.ops.linear_cross_entropy import kernels

    assert (DEVICE == "cpu") == kernels.INTERPRETED
    return kernels


@pytest.fixture(params=["fused", "blocks"])
def route(request, monkeypatch):
    """Both ways through the backend: tiles of our own, and the library's products with one pass over each block."""
    from scoped_patch.ops.linear_cross_entropy import triton_backward, triton_forward

    if request.param == "blocks":
        for module in (triton_forward, triton_backward):
            monkeypatch.setattr(module, "fused_route", lambda head: False)
        monkeypatch.setattr(triton_forward, "_plans", Remembered())
    return request.param


def grid():
    """Every vocabulary with every pair of the other options, not their whole product."""
    yield from itertools.product((5, 129, 130, 1000), ("plain", "all", "ignored", "temperature", "softcap", "bias"))
    yield from ((130, o) for o in ("scale", "strided", "budget", "entropy", "sum_sq"))


@pytest.mark.parametrize(("v", "option"), list(grid()))
def test_against_float64(v, option, route):
    n = 19
    every = option == "all"
    dtype = FUSED_DTYPE if route == "fused" else torch.float32
    x, y = problem(n=n, v=v, bias=every or option == "bias", dtype=dtype, ignored=5 * (every or option == "ignored"))
    options, ref = {}, {}
    if every or option == "temperature":
        t = torch.rand(n) + 0.5
        options["temperature"], ref["temperature"] = t, t.double()
    if every or option == "softcap":
        options["softcap"] = ref["softcap"] = 5.0
    if every or option == "scale":
        options["logit_scale"] = ref["scale"] = 0.7
    if option == "strided":
        x["h"] = torch.randn(16, 2 * n).to(dtype).t()[::2].requires_grad_()
        x["w"] = torch.randn(v, 40).to(dtype)[:, 8:24].requires_grad_()
    if every or option == "budget":
        options["memory"] = 1
    names = {"entropy": ("log_probs",), "sum_sq": ("log_probs", "sum_sq_probs")}.get(option, NAMES)
    topk = None
    if every:
        topk = torch.randint(0, v, (n, 3))
        topk[:, 2] = topk[:, 0]
    compare(x, y, 2e-5, grad_tol=GRAD_TOL[dtype], names=names, topk=topk, ref_options=ref, backend="triton", **options)


def kept_passes(monkeypatch) -> list[tuple[int, int, int]]:
    """(first column, columns, when) of each pass over kept scores."""
    from scoped_patch.ops.linear_cross_entropy import triton_backward

    passes, original = [], triton_backward._kept_pass
    monkeypatch.setattr(triton_backward, "_kept_pass", lambda *a: (passes.append((a[5], a[6] - a[5], a[7])), original(*a))[1])
    return passes


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("ignored", [0, 9])
def test_kept_logits_give_the_same_gradients(softcap, ignored, monkeypatch):
    x, y = problem(v=300, bias=softcap is not None, dtype=HALF, ignored=ignored)
    ref = {"softcap": softcap}
    kept = kept_passes(monkeypatch)
    compare(x, y, 2e-5, grad_tol=GRAD_TOL[HALF], ref_options=ref, softcap=softcap, memory=1 << 20, backend="triton")
    assert kept
    kept.clear()
    compare(x, y, 2e-5, grad_tol=GRAD_TOL[HALF], ref_options=ref, softcap=softcap, memory="low", backend="triton")
    assert not kept


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_was_never_kept_is_not_read(softcap, monkeypatch):
    """The first block is begun over all rows, before it is known which count; fresh memory may hold anything."""
    from scoped_patch.ops.linear_cross_entropy import triton_backward, triton_forward

    for module in (triton_forward, triton_backward):
        monkeypatch.setattr(module, "SCAN_BLOCK", 16)
    monkeypatch.setattr(triton_forward, "_plans", Remembered())
    passes = kept_passes(monkeypatch)
    torch.use_deterministic_algorithms(True)  # what is asked for empty is filled with NaN
    try:
        for capturing in (False, True):  # then all rows are computed, and those that do not count are zeros
            monkeypatch.setattr(triton_backward, "capturing", lambda _, now=capturing: now)
            for quiet in (False, True):
                x, y = problem(v=300, dtype=HALF, ignored=9)
                y[0] = -100
                up = torch.randn(y.shape[0])
                up[:: 4 if quiet else y.shape[0]] = 0
                grads = []
                for memory in (1 << 20, "low"):
                    topk = torch.arange(2 * y.shape[0]).view(-1, 2) % 300
                    out = call(x, y, memory=memory, backend="triton", softcap=softcap, topk_ids=topk)
                    used = out.log_probs, out.entropy, out.topk_log_probs
                    grads.append(torch.autograd.grad(used, tuple(x.values()), (up, -up, up[:, None].expand(-1, 2))))
                for got, wanted in zip(*grads, strict=True):
                    assert rel(got, wanted) < GRAD_TOL[HALF]
            y.fill_(-100)
            out = call(x, y, memory=1 << 20, backend="triton", softcap=softcap)
            for got in torch.autograd.grad(out.log_probs, tuple(x.values()), up):
                assert not bool(got.any())
    finally:
        torch.use_deterministic_algorithms(False)
    assert passes == [(0, 300, 1), (0, 300, 2)] * 3 + [(0, 300, 0)] * 3


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("ignored", [0, 9])
def test_kept_logits_are_used_up_by_the_last_backward_alone(softcap, ignored, monkeypatch):
    n, v = 37, 1000
    x, y = problem(n=n, v=v, dtype=HALF, ignored=ignored, bias=True)
    passes = kept_passes(monkeypatch)
    leaves = [t.detach().double().requires_grad_() for t in x.values()]
    ref = reference(*leaves[:2], y, leaves[2], softcap=softcap)
    ups = torch.randn(n), torch.randn(n)
    wanted = torch.autograd.grad((ref["log_probs"], ref["entropy"]), leaves, [up.double() for up in ups])
    size = n * (2 * v + 4 * 4)
    out = call(x, y, memory=size, softcap=softcap, backend="triton")
    every = [(low, min(256, v - low)) for low in range(0, v, 256)]
    steps = [(*every[0], 1), (*every[0], 2), (256, v - 256, 0)]
    for retain, whole in ((True, [(*block, 0) for block in every]), (True, [(*block, 0) for block in every]), (False, steps)):
        passes.clear()
        got = torch.autograd.grad((out.log_probs, out.entropy), tuple(x.values()), ups, retain_graph=retain)
        assert passes == whole
        for left, right in zip(got, wanted, strict=True):
            assert rel(left, right) < GRAD_TOL[HALF]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.log_probs, tuple(x.values()), ups[0])


@pytest.mark.parametrize("where", ["product", "hook"])
@pytest.mark.parametrize("identity", [False, True], ids=["saved", "saved through hooks"])
def test_kept_logits_survive_a_backward_that_ends_in_an_exception(where, identity, monkeypatch):
    """Autograd frees nothing of a node that raises: a second backward must not read gradients for scores."""
    from scoped_patch.ops.linear_cross_entropy import triton_backward

    def fail(*_):
        raise MemoryError("none left")

    x, y = problem(v=300, dtype=HALF)
    leaves = [t.detach().double().requires_grad_() for t in x.values()]
    wanted = torch.autograd.grad(reference(*leaves, y)["log_probs"].sum(), leaves)
    with contextlib.ExitStack() as stack:
        if identity:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        log_probs = call(x, y, memory=1 << 20, backend="triton", outputs=("log_probs",)).log_probs
    node = log_probs.grad_fn.next_functions[0][0]  # behind the view in the labels' shape
    assert "_Function" in node.name()
    for _ in range(2):
        with monkeypatch.context() as patch:
            if where == "product":
                patch.setattr(triton_backward, "_multiply_out", fail)
            else:
                handle = node.register_hook(fail)
            with pytest.raises(MemoryError):
                torch.autograd.grad(log_probs.sum(), tuple(x.values()))
            if where == "hook":
                handle.remove()
    for retain in (True, False):
        got = torch.autograd.grad(log_probs.sum(), tuple(x.values()), retain_graph=retain)
        for left, right in zip(got, wanted, strict=True):
            assert rel(left, right) < GRAD_TOL[HALF]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_kept_logits_in_several_blocks_with_rows_that_nothing_flows_into(softcap, monkeypatch):
    """Ignored rows are not kept, and of the kept ones only some are wanted, from blocks that do not start at 0."""
    n, v = 37, 1000
    x, y = problem(n=n, v=v, dtype=HALF, ignored=9)
    passes = kept_passes(monkeypatch)
    kept = n * (2 * v + 4 * 4)  # fp16 scores, and the maxima of four tiles
    out = call(x, y, memory=kept, softcap=softcap, backend="triton")
    leaves = [t.detach().double().requires_grad_() for t in x.values()]
    ref = reference(*leaves, y, softcap=softcap)
    ups = torch.randn(n), torch.randn(n)
    for up in ups:
        up[torch.randperm(n)[:5]] = 0
        up[::3] = 0
    got = torch.autograd.grad((out.log_probs, out.entropy), tuple(x.values()), ups)
    wanted = torch.autograd.grad((ref["log_probs"], ref["entropy"]), leaves, [up.double() for up in ups])
    assert [(low, when) for low, _, when in passes] == [(0, 1), (0, 2), (256, 0), (512, 0), (768, 0)]
    for left, right in zip(got, wanted, strict=True):
        assert rel(left, right) < GRAD_TOL[HALF]


@pytest.mark.parametrize("memory", ["low", 1 << 20], ids=["recomputed", "kept"])
def test_no_block_is_alive_when_the_results_are_copied(memory, monkeypatch):
    from scoped_patch.ops.linear_cross_entropy import triton_backward

    blocks, alive = [], []
    begin, finish = triton_backward._FusedBlocks._begin, triton_backward.Gradients.finish

    def begun(self, *args):
        begin(self, *args)
        blocks.append(weakref.ref(self._block))

    def finished(self, *args):
        alive.append(any(block() is not None for block in blocks))
        return finish(self, *args)

    monkeypatch.setattr(triton_backward._FusedBlocks, "_begin", begun)
    monkeypatch.setattr(triton_backward.Gradients, "finish", finished)
    x, y = problem(v=600, dtype=HALF, ignored=3)
    out = call(x, y, memory=memory, backend="triton")
    up = torch.ones_like(out.log_probs)
    up[4] = 0
    torch.autograd.grad(out.log_probs, tuple(x.values()), up)
    assert blocks
    assert alive == [False]


def test_gradients_of_the_hidden_states_are_summed_in_fp32():
    """A number common to all of the weight leaves them alone, but not their sums over a part of the vocabulary."""
    x, y = problem(n=24, v=4000, dtype=HALF)
    x["w"] = (x["w"].detach() + 8).requires_grad_()
    out = call(x, y, memory=1, backend="triton", outputs=("log_probs",))
    leaves = [t.detach().double().requires_grad_() for t in x.values()]
    up = torch.randn(24)
    (got,) = torch.autograd.grad(out.log_probs, (x["h"],), up)
    (want,) = torch.autograd.grad(reference(*leaves, y)["log_probs"], leaves[:1], up.double())
    assert rel(got, want) < 2 * torch.finfo(HALF).eps


def test_kept_logits_out_of_float16_range_are_right():
    x, y = problem(n=20, v=64, dtype=HALF)
    big = {"h": (x["h"].detach() * 4000).requires_grad_(), "w": (x["w"].detach() * 40).requires_grad_()}
    out = call(big, y, memory=1 << 20, backend="triton", outputs=("log_probs",))
    ref = reference(big["h"].double(), big["w"].double(), y)
    assert float(out.log_probs.detach().abs().max()) > 65504
    assert rel(out.log_probs, ref["log_probs"]) < 1e-5
    up = torch.full((20,), 1e-3)
    got = torch.autograd.grad(out.log_probs, (big["h"],), up)
    want = torch.autograd.grad(ref["log_probs"], (big["h"],), up.double())
    assert rel(got[0], want[0]) < GRAD_TOL[HALF]


def test_a_second_backward_over_kept_logits_is_the_same():
    x, y = problem(v=300, dtype=HALF)
    out = call(x, y, memory=1 << 20, backend="triton")
    first = torch.autograd.grad(out.log_probs.sum(), (x["h"], x["w"]), retain_graph=True)
    second = torch.autograd.grad(out.log_probs.sum(), (x["h"], x["w"]))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("v", [5, 130, 1000, 129])
def test_equal_logits_give_minus_log_v_and_no_phantom_rows(v, route):
    h, w = torch.zeros(3, 8, dtype=FUSED_DTYPE), torch.zeros(v, 8, dtype=FUSED_DTYPE)
    out = linear_cross_entropy(h, w, torch.tensor([0, v - 1, 1]), torch.full((v,), -10.0), backend="triton")
    torch.testing.assert_close(out.log_probs, torch.full((3,), -math.log(v)))
    torch.testing.assert_close(out.entropy, torch.full((3,), math.log(v)))


def test_a_bias_of_minus_infinity_is_probability_zero_without_gradient(route):
    b = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    h = torch.zeros(2, 8, dtype=FUSED_DTYPE, requires_grad=True)
    w = torch.randn(3, 8, dtype=FUSED_DTYPE, requires_grad=True)
    out = linear_cross_entropy(h, w, torch.tensor([0, 1]), b, outputs=NAMES, backend="triton")
    torch.testing.assert_close(out.entropy, torch.full((2,), math.log(2)))
    torch.testing.assert_close(out.sum_sq_probs, torch.full((2,), 0.5))
    (out.log_probs + out.entropy + out.sum_sq_probs).sum().backward()
    assert torch.isfinite(h.grad).all()
    assert torch.isfinite(w.grad).all()
    assert float(b.grad[2]) == 0
    assert float(w.grad[2].abs().max()) == 0


def test_minus_infinity_at_the_label_and_in_a_whole_row_is_what_log_softmax_says(route):
    h, w = torch.zeros(2, 8, dtype=FUSED_DTYPE), torch.randn(20, 8, dtype=FUSED_DTYPE)
    b = torch.zeros(20)
    b[7] = -math.inf
    ids = torch.tensor([[7, 1], [1, 7]])
    out = linear_cross_entropy(h, w, torch.tensor([7, 1]), b, topk_ids=ids, outputs=(*NAMES, "is_top1"), backend="triton")
    some = -math.log(19)
    torch.testing.assert_close(out.log_probs, torch.tensor([-math.inf, some]))
    torch.testing.assert_close(out.topk_log_probs, torch.tensor([[-math.inf, some], [some, -math.inf]]))
    torch.testing.assert_close(out.entropy, torch.full((2,), -some))
    out = linear_cross_entropy(h, w, torch.tensor([7, 1]), torch.full((20,), -math.inf), outputs=NAMES, backend="triton")
    assert all(getattr(out, name).isnan().all() for name in NAMES)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_bias_with_gaps(softcap, route):
    dtype = FUSED_DTYPE if route == "fused" else torch.float32
    x, y = problem(v=130, dtype=dtype, ignored=3)
    x["b"] = torch.randn(130, 3, dtype=dtype)[:, 1].requires_grad_()
    ref = {"softcap": softcap}
    compare(x, y, 2e-5, grad_tol=GRAD_TOL[dtype], ref_options=ref, softcap=softcap, backend="triton")


@pytest.mark.parametrize("labels", [[1, -100, 2], [-100, -100, -100], []])
def test_ignored_and_empty_rows(labels, route):
    h = torch.randn(len(labels), 8, dtype=FUSED_DTYPE, requires_grad=True)
    w = torch.randn(7, 8, dtype=FUSED_DTYPE, requires_grad=True)
    y = torch.tensor(labels, dtype=torch.int64)
    out = linear_cross_entropy(h, w, y, backend="triton", topk_ids=torch.zeros(len(labels), 2, dtype=torch.int64))
    (out.log_probs.sum() + out.entropy.sum() + out.topk_log_probs.sum()).backward()
    gone = y == -100
    zeros = (out.log_probs[gone], out.entropy[gone], h.grad[gone], out.topk_log_probs[gone])
    assert all(float(t.abs().sum()) == 0 for t in zeros)
    assert h.grad.shape == h.shape
    assert (float(w.grad.abs().max()) > 0) == bool((~gone).any())


@pytest.mark.parametrize("frozen", ["h", "w", "b", "eh", "ew"])
def test_frozen_inputs_and_a_second_linear_term(frozen):
    x, y = problem(r=3, bias=True, dtype=torch.float32, ignored=3)
    x[frozen] = x[frozen].detach()
    topk = torch.randint(0, 130, (37, 2))
    compare(x, y, 2e-5, topk=topk, backend="triton", softcap=9.0, ref_options={"softcap": 9.0})


@pytest.mark.parametrize("bad", [9, -1])
def test_a_label_out_of_range_is_not_a_number(bad):
    out = linear_cross_entropy(
        torch.randn(3, 8, dtype=FUSED_DTYPE),
        torch.randn(9, 8, dtype=FUSED_DTYPE),
        torch.tensor([0, bad, -100]),
        backend="triton",
    )
    assert out.log_probs.isnan().tolist() == [False, True, False]
    ids = torch.tensor([[0, 1], [bad, 2], [bad, bad]])
    out = linear_cross_entropy(torch.randn(3, 8), torch.randn(9, 8), torch.tensor([0, 1, -100]), topk_ids=ids, backend="triton")
    assert out.topk_log_probs.isnan().tolist() == [[False, False], [True, False], [False, False]]


def test_a_nan_in_the_hidden_states_shows(route):
    h = torch.randn(3, 8, dtype=FUSED_DTYPE)
    h[1, 2] = math.nan
    out = linear_cross_entropy(h, torch.randn(300, 8, dtype=FUSED_DTYPE), torch.tensor([0, 1, 2]), backend="triton")
    assert out.log_probs.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("zero", [torch.zeros((), device="cpu"), torch.zeros(19, device="cpu")], ids=["scalar", "per row"])
def test_a_temperature_of_zero_is_not_a_number(zero, route):
    """A tensor's value is not looked at: that would wait for the device."""
    x, y = problem(n=19, dtype=FUSED_DTYPE if route == "fused" else torch.float32)
    out = call(x, y, temperature=zero if zero.ndim == 0 else zero.to(DEVICE), backend="triton")
    assert bool(out.log_probs.isnan().all())


def test_many_rows_take_several_launches(monkeypatch):
    from scoped_patch.ops.linear_cross_entropy import triton_forward

    monkeypatch.setattr(triton_forward, "_LAUNCHED_ROWS", 16)
    monkeypatch.setattr(triton_forward, "_plans", Remembered())
    x, y = problem(n=50, dtype=FUSED_DTYPE, ignored=5)
    compare(x, y, 2e-5, grad_tol=GRAD_TOL[FUSED_DTYPE], backend="triton")


def test_a_kernel_is_launched_again_as_it_was_compiled():
    from scoped_patch.ops.linear_cross_entropy.triton_backend import Launch

    launched = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: launched.append((grid, args))

    class Kernel(Compiled):
        arg_names = ("X", "n", "SECOND", "FIRST")

        def __getitem__(self, grid):
            return lambda *args, **rest: (launched.append((grid, args, rest)), Compiled())[1]

    launch = Launch(Kernel(), 7, {"FIRST": 1, "SECOND": 2}, num_warps=4)
    launch("a", 3)
    launch("b", 3)
    assert launched == [((7, 1, 1), ("a", 3), {"FIRST": 1, "SECOND": 2, "num_warps": 4}), ((7, 1, 1), ("b", 3, 2, 1))]


def test_what_is_remembered_of_a_forward_fits_the_next_one(monkeypatch):
    """One kind of call after another, in two orders: types, alignment, strides and settings that compile differently."""
    from scoped_patch.ops.linear_cross_entropy import triton_forward

    monkeypatch.setattr(triton_forward, "_plans", Remembered(6))
    n, size = 17, 16
    x, y = problem(n=n, h=size, v=130, dtype=FUSED_DTYPE, ignored=3)
    shifted = torch.empty(n * size + 1, dtype=FUSED_DTYPE)[1:].view(n, size).copy_(x["h"].detach()).requires_grad_()
    gaps = torch.empty(n, 2, size, dtype=FUSED_DTYPE)[:, 1].copy_(x["h"].detach()).requires_grad_()
    late = torch.empty(n + 1, dtype=torch.int64)[1:].copy_(y)
    warm = torch.rand(n) + 0.5
    kinds = [
        (x, y, {}),
        (x | {"h": shifted}, y, {}),
        (x | {"h": gaps}, y, {}),
        (x, late, {}),
        (x, y, {"temperature": 0.7}),
        (x, y, {"temperature": warm}),
        (x, y, {"temperature": warm.double()}),
        (x, y, {"temperature": warm[:1].squeeze()}),
        (x | {"b": torch.randn(130, dtype=FUSED_DTYPE).requires_grad_()}, y, {}),
        (x | {"b": torch.randn(131, dtype=FUSED_DTYPE)[1:].requires_grad_()}, y, {"softcap": 4.0}),
        (x, y, {"softcap": 5.0}),
        (x, y, {"logit_scale": 0.5}),
        (x, y, {"outputs": ("log_probs",)}),
        ({k: t[:1].detach().requires_grad_() if k == "h" else t for k, t in x.items()}, y[:1], {}),
    ]
    for x, y, options in kinds + kinds + kinds[::-1]:
        out = call(x, y, memory=1 << 20, backend="triton", **options)
        wanted = linear_cross_entropy(
            *(t.detach().double() if t is not None else None for t in (x["h"], x["w"])), y,
            None if "b" not in x else x["b"].detach().double(), backend="torch", **options,
        )  # fmt: skip
        torch.testing.assert_close(out.log_probs.double(), wanted.log_probs, rtol=2e-5, atol=2e-5)
        if out.entropy is not None:
            torch.testing.assert_close(out.entropy.double(), wanted.entropy, rtol=2e-5, atol=2e-5)
        assert 0 < len(triton_forward._plans) <= 6


def test_a_dtype_or_device_it_cannot_compute_is_refused(monkeypatch, kernels):
    x, y = problem()
    with pytest.raises(UnsupportedError, match="float64"):
        call(x, y, backend="triton")
    if DEVICE == "cpu":
        x, y = problem(dtype=torch.bfloat16)
        with pytest.raises(UnsupportedError, match="interpreter multiplies bfloat16 wrongly"):
            call(x, y, backend="triton")
        monkeypatch.setattr(kernels, "INTERPRETED", False)
        x, y = problem(dtype=torch.float32)
        with pytest.raises(UnsupportedError, match="needs a GPU"):
            call(x, y, backend="triton")
        assert call(x, y, backend="auto").log_probs is not None


@pytest.mark.skipif(DEVICE == "cuda", reason="the ranks of this test are gloo processes without a GPU")
@pytest.mark.parametrize("extra", [False, True], ids=["fused", "two terms"])
def test_vocab_parallel_equals_one_process(extra):
    for error, same_top1 in spawn(2, vocab_parallel, "triton", torch.float32, extra):
        assert error < 3e-5
        assert same_top1


@pytest.mark.parametrize("memory", ["low", 1 << 20], ids=["recomputed", "kept"])
def test_torch_compile_takes_it_in_one_graph(memory):
    def step(h, w, y, temperature):
        out = linear_cross_entropy(h * 2, w, y, temperature=temperature, backend="triton", memory=memory)
        return out.log_probs, out.entropy

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in (19, 23):
        x, y = problem(n=n, v=300, dtype=HALF, ignored=4)
        arguments = x["h"], x["w"], y, torch.rand(n) + 0.5
        got, want = compiled(*arguments), step(*arguments)
        torch.testing.assert_close(got, want)
        ups = (torch.randn(n), torch.randn(n))
        grads = [torch.autograd.grad(outs, (x["h"], x["w"]), ups) for outs in (got, want)]
        torch.testing.assert_close(*grads)


def test_kernels_run_on_the_device_of_the_tensors(monkeypatch):
    """Triton launches on the current device, which need not be the one that a model, or its head, is on."""
    from scoped_patch.ops.linear_cross_entropy import backends, triton_backward, triton_forward

    current, ran = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    def watched(original):
        return lambda inputs, *rest: (ran.append((current[-1:], inputs.hidden.device)), original(inputs, *rest))[1]

    x, y = problem(v=20, dtype=HALF)
    monkeypatch.setattr(backends.torch.cuda, "device_of", device_of)
    monkeypatch.setattr(triton_forward, "run_forward", watched(triton_forward.run_forward))
    monkeypatch.setattr(triton_backward, "run_backward", watched(triton_backward.run_backward))
    out = call(x, y, backend="triton")
    torch.autograd.grad(out.log_probs.sum(), tuple(x.values()))
    assert ran == [([x["h"].device], x["h"].device)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("memory", ["low", 1 << 20], ids=["recomputed", "kept"])
def test_a_head_on_another_device_than_the_current_one(memory):
    x, y = problem(v=300, dtype=torch.bfloat16, ignored=5)
    x, y = {k: t.detach().to("cuda:1").requires_grad_() for k, t in x.items()}, y.to("cuda:1")
    assert torch.cuda.current_device() == 0
    out = call(x, y, backend="triton", memory=memory)
    leaves = [t.detach().double().requires_grad_() for t in x.values()]
    wanted = torch.autograd.grad(reference(*leaves, y)["log_probs"].sum(), leaves)
    for got, want in zip(torch.autograd.grad(out.log_probs.sum(), tuple(x.values())), wanted, strict=True):
        assert got.device == want.device
        assert rel(got, want) < GRAD_TOL[torch.bfloat16]


def test_rows_that_share_memory_are_not_handed_to_the_tiles(monkeypatch):
    """A tensor descriptor wants rows apart: expanded hidden states are copied, an expanded weight takes the other route."""
    from scoped_patch.ops.linear_cross_entropy import triton_backward, triton_forward

    strides, original = [], triton_forward.descriptor

    def descriptor(tensor, rows, columns):
        strides.append(tensor.stride(0))
        return original(tensor, rows, columns)

    for module in (triton_forward, triton_backward):
        monkeypatch.setattr(module, "descriptor", descriptor)
    x, y = problem(n=20, v=30, dtype=HALF)
    one = x["h"].detach()[:1].expand(20, -1).requires_grad_()
    compare(x | {"h": one}, y, 2e-5, grad_tol=GRAD_TOL[HALF], backend="triton", memory="low")
    assert strides
    assert all(strides)
    strides.clear()
    w = x["w"].detach()[:1].expand(30, -1).requires_grad_()
    out = call(x | {"w": w}, y, backend="triton")
    torch.testing.assert_close(out.log_probs, torch.full((20,), -math.log(30)))
    torch.autograd.grad(out.log_probs.sum(), (x["h"], w))
    assert not strides


def test_a_chosen_label_is_what_the_label_is_under_autocast():
    """Both terms are rounded to the compute dtype, wherever they are multiplied."""
    x, y = problem(r=3, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=HALF):
        out = call(x, y, backend="triton", topk_ids=y[:, None])
    torch.testing.assert_close(out.topk_log_probs[:, 0], out.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="measures memory of a GPU")
def test_the_peak_of_the_smallest_setting():
    n, size, v = 4096, 2048, 16384
    x, y = problem(n=n, h=size, v=v, dtype=torch.bfloat16)
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = call(x, y, memory="low", backend="triton")
        found = torch.autograd.grad(out.log_probs.sum(), tuple(x.values()))
        peak = torch.cuda.max_memory_allocated() - before
        del out, found
    block, per_row = 48 << 20, 64 * n
    # Both results, that of the hidden states in fp32 and then in bf16: by then the block must be gone.
    assert peak < 2 * v * size + 4 * n * size + max(block, 2 * n * size) + per_row + (1 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("memory", ["low", 6 << 30], ids=["recomputed", "kept"])
def test_more_than_two_to_the_31_logits(memory):
    n, size, v = 16384, 64, 151936
    assert n * v > 2**31
    x, y = problem(n=n, h=size, v=v, dtype=torch.bfloat16)
    out = call(x, y, backend="triton", memory=memory)
    up = torch.randn(n)
    dh, dw = torch.autograd.grad(out.log_probs, (x["h"], x["w"]), up)
    rows = torch.arange(n - 64, n)
    h64, w64 = x["h"].detach().double(), x["w"].detach().double()
    ref = reference(h64[rows], w64, y[rows])
    assert rel(out.log_probs[rows], ref["log_probs"]) < 1e-5
    assert rel(out.entropy[rows], ref["entropy"]) < 1e-5
    p = torch.softmax(h64[rows] @ w64.t(), -1)
    hit = torch.nn.functional.one_hot(y[rows], v)
    assert rel(dh[rows], (up[rows, None].double() * (hit - p)) @ w64) < 8e-3
    del p, hit
    last = torch.arange(v - 64, v)
    lse = torch.cat([torch.logsumexp(part @ w64.t(), -1) for part in h64.split(1024)])
    p = torch.exp(h64 @ w64[last].t() - lse[:, None])
    wanted = (up[:, None].double() * ((y[:, None] == last).double() - p)).t() @ h64
    assert rel(dw[last], wanted) < 8e-3


@pytest.mark.parametrize("r", [None, 3], ids=["one term", "two terms"])
def test_rows_that_cannot_be_counted_are_told_apart(r, route, monkeypatch):
    """While a CUDA graph is captured the host does not know how many labels are ignored: all rows are computed."""
    from scoped_patch.ops.linear_cross_entropy import problem as module
    from scoped_patch.ops.linear_cross_entropy import triton_backward, triton_forward

    for each in (module, triton_forward, triton_backward):
        monkeypatch.setattr(each, "capturing", lambda _: True)
    dtype = FUSED_DTYPE if route == "fused" else torch.float32
    n = 19
    x, y = problem(n=n, v=130, r=r, bias=True, dtype=dtype, ignored=6)
    t = torch.rand(n) + 0.5
    topk = torch.randint(0, 130, (n, 3))
    ref = {"temperature": t.double()}
    compare(x, y, 2e-5, grad_tol=GRAD_TOL[dtype], topk=topk, ref_options=ref, backend="triton", temperature=t)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("memory", ["low", 1 << 20], ids=["recomputed", "kept"])
@pytest.mark.parametrize("r", [None, 3], ids=["one term", "two terms"])
def test_a_cuda_graph_can_hold_it(memory, r):
    x, y = problem(n=64, h=64, v=1000, r=r, dtype=torch.bfloat16, ignored=9)
    topk = None if r else torch.randint(0, 1000, (64, 3))

    def step():
        out = call(x, y, backend="triton", memory=memory, topk_ids=topk)
        return out.log_probs, *torch.autograd.grad(out.log_probs.sum(), (x["h"], x["w"]))

    # All outside of the default stream, which a capture must not wait for.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    for a, b in zip(got, wanted, strict=True):
        assert rel(a, b) < (8e-3 if r else 1e-5)  # products of another number of rows
    y.fill_(-100)
    graph.replay()
    assert not any(bool(t.any()) for t in got)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_runs_are_bit_equal_and_deterministic_mode_is_honoured():
    x, y = problem(n=300, h=64, v=3000, dtype=torch.bfloat16, ignored=9)
    topk = torch.randint(0, 3000, (300, 4))
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            out = call(x, y, backend="triton", topk_ids=topk)
            total = out.log_probs.sum() + out.entropy.sum() + out.topk_log_probs.sum()
            runs.append(torch.autograd.grad(total, (x["h"], x["w"])))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
