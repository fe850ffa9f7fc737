"""The fused head against a float64 reference that keeps its logits, on the torch backend."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scoped_patch.engine.errors import UnsupportedError
from scoped_patch.ops.linear_cross_entropy import (
    LabelOutOfRangeError,
    SecondOrderGradientError,
    api,
    checks,
    linear_cross_entropy,
    linear_cross_entropy_loss,
    topk_kl_divergence,
)
from scoped_patch.ops.linear_cross_entropy.remember import Remembered

NAMES = ("log_probs", "entropy", "sum_sq_probs")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def reference(h, w, y, b=None, temperature=1.0, ignore=-100, softcap=None, scale=None, eh=None, ew=None, topk=None):
    """Straight from the definition, every logit kept: (log_probs, entropy, sum_sq_probs, is_top1, topk_log_probs)."""
    z = h @ w.t()
    if b is not None:
        z = z + b
    if eh is not None:
        z = z + eh @ ew.t()
    if scale is not None:
        z = z * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[..., None] if isinstance(temperature, Tensor) and temperature.ndim else temperature)
    lp = torch.log_softmax(z, -1)
    p = lp.exp()
    real = y != ignore
    label = lp.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    entropy = -(p * lp.masked_fill(p == 0, 0)).sum(-1)
    return {
        "log_probs": label.masked_fill(~real, 0),
        "entropy": entropy.masked_fill(~real, 0),
        "sum_sq_probs": (p * p).sum(-1).masked_fill(~real, 0),
        "is_top1": (label >= lp.amax(-1)) & real,
        "topk_log_probs": lp.gather(-1, topk).masked_fill(~real[..., None], 0) if topk is not None else None,
    }


def rel(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def problem(n=37, h=16, v=130, r=None, bias=False, dtype=torch.float64, ignored=0):
    x = {"h": torch.randn(n, h), "w": torch.randn(v, h) * (4 / math.sqrt(h))}
    if bias:
        x["b"] = torch.randn(v)
    if r:
        x["eh"], x["ew"] = torch.randn(n, r), torch.randn(v, r)
    x = {k: t.to(dtype).requires_grad_() for k, t in x.items()}
    y = torch.randint(0, v, (n,))
    if ignored:
        y[torch.randperm(n)[:ignored]] = -100
    return x, y


def call(x, y, **options):
    return linear_cross_entropy(
        x["h"], x["w"], y, x.get("b"), extra_hidden_states=x.get("eh"), extra_weight=x.get("ew"), **options
    )


def compare(x, y, tol, *, grad_tol=None, names=NAMES, topk=None, ref_options=None, **options):
    """Values and gradients, each output with its own random upstream gradient, against float64."""
    out = call(x, y, outputs=(*names, "is_top1"), topk_ids=topk, **options)
    x64 = {k: t.detach().double().requires_grad_(t.requires_grad) for k, t in x.items()}
    ref = reference(x64["h"], x64["w"], y, x64.get("b"), eh=x64.get("eh"), ew=x64.get("ew"), topk=topk, **(ref_options or {}))
    names = (*names, "topk_log_probs") if topk is not None else names
    for name in names:
        assert getattr(out, name).shape == ref[name].shape
        assert rel(getattr(out, name), ref[name]) < tol, name
    assert torch.equal(out.is_top1, ref["is_top1"])
    ups = [torch.randn_like(getattr(out, name)) for name in names]
    leaves = [k for k, t in x.items() if t.requires_grad]
    grads = torch.autograd.grad([getattr(out, n) for n in names], [x[k] for k in leaves], ups)
    wanted = torch.autograd.grad([ref[n] for n in names], [x64[k] for k in leaves], [u.double() for u in ups])
    for key, got, want in zip(leaves, grads, wanted, strict=True):
        assert got.dtype == x[key].dtype
        assert got.shape == x[key].shape
        assert rel(got, want) < (grad_tol or tol), key


@pytest.mark.parametrize("v", [5, 129, 130, 1000])
@pytest.mark.parametrize("budget", [1, 1 << 14, 1 << 30], ids=["narrow", "blocks", "whole"])
def test_every_option_against_float64(v, budget):
    x, y = problem(v=v, r=3, bias=True, ignored=9)
    t = torch.rand(37, dtype=torch.float64) + 0.5
    topk = torch.randint(0, v, (37, 4))
    topk[:, 3] = topk[:, 0]  # a repeated id adds up
    compare(
        x,
        y,
        1e-12,
        topk=topk,
        ref_options={"temperature": t, "softcap": 5.0, "scale": 0.7},
        temperature=t,
        softcap=5.0,
        logit_scale=0.7,
        memory=budget,
    )


@pytest.mark.parametrize("names", [("log_probs",), ("entropy",), ("sum_sq_probs",), NAMES])
def test_each_output_alone(names):
    x, y = problem(ignored=3)
    compare(x, y, 1e-12, names=names, memory=1 << 12)
    out = call(x, y, outputs=names)
    assert [n for n in (*NAMES, "is_top1", "topk_log_probs") if getattr(out, n) is not None] == list(names)


def test_gradcheck_with_every_differentiable_output():
    x, y = problem(n=5, h=3, v=70, r=2, bias=True, ignored=1)

    def f(*leaves):
        out = call(dict(zip(x, leaves, strict=True)), y, outputs=NAMES, softcap=4.0, logit_scale=0.5, memory=1)
        return out.log_probs, out.entropy, out.sum_sq_probs

    assert torch.autograd.gradcheck(f, tuple(x.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_keep_fp32_results(dtype):
    x, y = problem(n=64, h=64, v=3200, dtype=dtype, ignored=5)
    out = call(x, y)
    ref = reference(x["h"].double(), x["w"].double(), y)
    assert out.log_probs.dtype == out.entropy.dtype == torch.float32
    assert float((out.log_probs - ref["log_probs"]).abs().max()) < 1e-5
    assert float((out.entropy - ref["entropy"]).abs().max()) < 1e-5


@pytest.mark.parametrize("blocks", [1, 256])
def test_weight_gradient_error_does_not_grow_with_the_number_of_blocks(blocks):
    x, y = problem(n=4096, h=32, v=16384 if blocks == 256 else 64, dtype=torch.bfloat16)
    out = call(x, y, outputs=("log_probs",), memory=1 if blocks == 256 else 1 << 30)
    up = torch.randn_like(out.log_probs)
    gh, gw = torch.autograd.grad(out.log_probs, (x["h"], x["w"]), up)
    h64, w64 = x["h"].detach().double().requires_grad_(), x["w"].detach().double().requires_grad_()
    rh, rw = torch.autograd.grad(reference(h64, w64, y)["log_probs"], (h64, w64), up.double())
    # One rounding to bf16 is 1.7e-3; a bf16 accumulator is ten times that at 256 blocks.
    assert rel(gh, rh) < 2e-3
    assert rel(gw, rw) < 2e-3


@pytest.mark.parametrize("v", [5, 130, 1000, 129])
def test_equal_logits_give_minus_log_v_and_no_phantom_rows(v):
    h, w = torch.zeros(3, 4), torch.zeros(v, 4)
    out = linear_cross_entropy(h, w, torch.tensor([0, v - 1, 1]), torch.full((v,), -10.0), memory=1)
    torch.testing.assert_close(out.log_probs, torch.full((3,), -math.log(v)))
    torch.testing.assert_close(out.entropy, torch.full((3,), math.log(v)))


def test_a_bias_of_minus_infinity_is_probability_zero_without_gradient():
    b = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    h, w = torch.zeros(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    out = linear_cross_entropy(h, w, torch.tensor([0, 1]), b, outputs=("log_probs", "entropy", "sum_sq_probs"))
    torch.testing.assert_close(out.entropy, torch.full((2,), math.log(2)))
    torch.testing.assert_close(out.sum_sq_probs, torch.full((2,), 0.5))
    (out.log_probs + out.entropy + out.sum_sq_probs).sum().backward()
    assert torch.isfinite(h.grad).all()
    assert torch.isfinite(w.grad).all()
    assert float(b.grad[2]) == 0
    assert float(w.grad[2].abs().max()) == 0


def test_minus_infinity_at_the_label_and_in_a_whole_row_is_what_log_softmax_says():
    h, w = torch.zeros(2, 4), torch.randn(20, 4)
    b = torch.zeros(20)
    b[7] = -math.inf
    ids = torch.tensor([[7, 1], [1, 7]])
    out = linear_cross_entropy(h, w, torch.tensor([7, 1]), b, topk_ids=ids)
    some = -math.log(19)
    torch.testing.assert_close(out.log_probs, torch.tensor([-math.inf, some]))
    torch.testing.assert_close(out.topk_log_probs, torch.tensor([[-math.inf, some], [some, -math.inf]]))
    torch.testing.assert_close(out.entropy, torch.full((2,), -some))
    out = linear_cross_entropy(h, w, torch.tensor([7, 1]), torch.full((20,), -math.inf), outputs=NAMES)
    assert all(getattr(out, name).isnan().all() for name in NAMES)


def test_no_chosen_ids():
    x, y = problem(n=6)
    out = call(x, y, topk_ids=torch.empty(6, 0, dtype=torch.int64))
    assert out.topk_log_probs.shape == (6, 0)
    got = torch.autograd.grad(out.log_probs.sum() + out.topk_log_probs.sum(), (x["h"], x["w"]))
    want = torch.autograd.grad(reference(x["h"], x["w"], y)["log_probs"].sum(), (x["h"], x["w"]))
    assert rel(got[0], want[0]) < 1e-12
    assert rel(got[1], want[1]) < 1e-12


@pytest.mark.parametrize("labels", [[1, -100, 2], [-100, -100, -100], []])
def test_ignored_and_empty_rows(labels):
    h = torch.randn(len(labels), 4, requires_grad=True)
    w = torch.randn(7, 4, requires_grad=True)
    y = torch.tensor(labels, dtype=torch.int64)
    out = linear_cross_entropy(h, w, y)
    (out.log_probs.sum() + out.entropy.sum()).backward()
    gone = y == -100
    assert torch.isfinite(out.log_probs).all()
    assert float(out.log_probs[gone].abs().sum() + out.entropy[gone].abs().sum() + h.grad[gone].abs().sum()) == 0
    assert h.grad.shape == h.shape
    assert (float(w.grad.abs().max()) > 0) == bool((~gone).any())


def test_shapes_and_temperatures():
    h, w = torch.randn(2, 3, 8), torch.randn(11, 8)
    y = torch.randint(0, 11, (2, 3))
    per_token = torch.rand(2, 3) + 0.5
    out = linear_cross_entropy(h, w, y, temperature=per_token)
    assert out.log_probs.shape == (2, 3)
    ref = reference(h.double(), w.double(), y, temperature=per_token.double())
    assert rel(out.log_probs, ref["log_probs"]) < 1e-6
    per_row = torch.tensor([0.5, 2.0])
    got = linear_cross_entropy(h, w, y, temperature=per_row).log_probs
    ref = reference(h.double(), w.double(), y, temperature=per_row.double()[:, None].expand(2, 3))
    assert rel(got, ref["log_probs"]) < 1e-6
    scalar = linear_cross_entropy(h, w, y, temperature=torch.tensor(0.7)).log_probs
    torch.testing.assert_close(scalar, linear_cross_entropy(h, w, y, temperature=0.7).log_probs)


def test_strided_inputs():
    h = torch.randn(16, 9, dtype=torch.float64).t()[:, :16].requires_grad_()
    w = torch.randn(16, 200, dtype=torch.float64).t().requires_grad_()
    y = torch.randint(0, 200, (18,))[::2]
    compare({"h": h, "w": w}, y, 1e-12, memory=1)


@pytest.mark.parametrize("frozen", ["h", "w", "b", "eh", "ew"])
def test_frozen_inputs_get_no_gradient_and_the_rest_is_right(frozen):
    x, y = problem(r=3, bias=True)
    x[frozen] = x[frozen].detach()
    compare(x, y, 1e-12)


def test_rows_without_upstream_gradient_do_not_reach_the_backward_products(monkeypatch):
    from scoped_patch.ops.linear_cross_entropy import torch_backend

    seen = []
    original = torch_backend._multiply_out

    def watch(blocks, *args):
        seen.append(blocks.n)
        return original(blocks, *args)

    forward_rows = []
    statistics = torch_backend._statistics

    def watch_forward(head, rows, *args):
        forward_rows.append(rows.hidden.shape[0])
        return statistics(head, rows, *args)

    monkeypatch.setattr(torch_backend, "_multiply_out", watch)
    monkeypatch.setattr(torch_backend, "_statistics", watch_forward)
    x, y = problem(n=40, ignored=4)
    out = call(x, y, backend="torch")
    assert forward_rows == [36]
    ref = reference(x["h"], x["w"], y)
    up = torch.randn(40, dtype=torch.float64)
    up[::2] = 0
    expected = int(((up != 0) & (y != -100)).sum())
    got = torch.autograd.grad(out.log_probs, (x["h"], x["w"]), up)
    want = torch.autograd.grad(ref["log_probs"], (x["h"], x["w"]), up)
    assert seen == [expected]
    assert rel(got[0], want[0]) < 1e-12
    assert rel(got[1], want[1]) < 1e-12


def test_entropy_as_a_metric_has_no_gradient():
    x, y = problem()
    out = call(x, y, entropy_grad=False)
    assert out.log_probs.requires_grad
    assert not out.entropy.requires_grad


def test_one_block_of_logits_is_alive_at_most():
    n, v, h = 512, 8192, 8
    x, y = problem(n=n, h=h, v=v, dtype=torch.float32)
    budget = 1 << 20
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(result):
                if isinstance(t, Tensor):
                    sizes.append(t.untyped_storage().nbytes())
            return result

    with Watch():
        out = call(x, y, memory=budget, backend="torch")
        torch.autograd.grad([out.log_probs, out.entropy], (x["h"], x["w"]), [torch.ones(n), torch.ones(n)])
    assert max(sizes) < 2 * budget < n * v * 4 / 4


def test_loss_reductions():
    x, y = problem(ignored=7)
    nll = -reference(x["h"], x["w"], y)["log_probs"].sum()
    torch.testing.assert_close(linear_cross_entropy_loss(x["h"], x["w"], y, reduction="sum"), nll)
    torch.testing.assert_close(linear_cross_entropy_loss(x["h"], x["w"], y), nll / 30)
    torch.testing.assert_close(linear_cross_entropy_loss(x["h"], x["w"], y, num_items=torch.tensor(64)), nll / 64)
    empty = linear_cross_entropy_loss(x["h"], x["w"], torch.full_like(y, -100))
    assert float(empty) == 0
    empty.backward()
    assert float(x["w"].grad.abs().max()) == 0
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy_loss(x["h"], x["w"], y, reduction="none")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "temperature: got 0.0"),
        ({"temperature": torch.ones((), dtype=torch.bfloat16)}, TypeError, "cast_forward_inputs"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature: got shape"),
        ({"temperature": torch.ones((), requires_grad=True)}, ValueError, "requires a gradient"),
        ({"softcap": 0.0}, ValueError, "softcap"),
        ({"memory": 0}, ValueError, "memory"),
        ({"backend": "cuda"}, ValueError, "backend"),
        ({"outputs": ("logits",)}, ValueError, "outputs"),
        ({"outputs": ()}, ValueError, "outputs"),
    ],
)
def test_bad_options_are_refused_by_name(change, error, message):
    x, y = problem()
    with pytest.raises(error, match=message):
        call(x, y, **change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"memory": True}, ValueError, "memory: got True"),
        ({"outputs": (["log_probs"],)}, ValueError, "outputs: got"),
        ({"softcap": float("nan")}, ValueError, "softcap"),
        ({"softcap": "5"}, TypeError, "softcap: got '5'"),
        ({"ignore_index": []}, TypeError, "ignore_index"),
        ({"ignore_index": -100.0}, TypeError, "ignore_index: got -100.0"),
    ],
)
def test_an_option_is_refused_after_a_call_that_was_right(change, error, message):
    """What was found right is remembered: what is not the same, but equal, or has no hash, is not taken for it."""
    x, y = problem()
    for _ in range(2):
        call(x, y, memory=1)
    with pytest.raises(error, match=message):
        call(x, y, **({"memory": 1} | change))


def test_an_integer_of_another_library_is_one():
    class Five:
        def __index__(self):
            return 5

    x, y = problem()
    for ignored in (Five(), torch.tensor(5)):
        out = call(x, y, ignore_index=ignored)
        torch.testing.assert_close(out.log_probs, call(x, y, ignore_index=5).log_probs)
        assert not bool(out.log_probs[y == 5].any())


def test_what_is_remembered_is_bounded_and_not_mixed_up(monkeypatch):
    monkeypatch.setattr(checks, "_right", Remembered(2))
    x, y = problem()
    for softcap, scale, ignored in [
        (None, None, -100),
        (5.0, None, -100),
        (None, 5.0, -100),
        (None, None, 5),
        (None, None, -100),
    ]:
        out = call(x, y, softcap=softcap, logit_scale=scale, ignore_index=ignored)
        wanted = reference(x["h"], x["w"], y, softcap=softcap, scale=scale or 1.0)["log_probs"]
        torch.testing.assert_close(out.log_probs, torch.where(y == ignored, 0, wanted))
        assert 0 < len(checks._right) <= 2


def test_bad_tensors_are_refused_by_name():
    h, w, y = torch.randn(4, 8), torch.randn(9, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"weight: got torch.float8_e4m3fn.*dequantise"):
        linear_cross_entropy(h, w.to(torch.float8_e4m3fn), y)
    with pytest.raises(TypeError, match="wanted one dtype"):
        linear_cross_entropy(h, w.bfloat16(), y)
    with pytest.raises(TypeError, match=r"labels: got torch.int32"):
        linear_cross_entropy(h, w, y.int())
    with pytest.raises(ValueError, match="hidden_states: got shape"):
        linear_cross_entropy(h[:, :7], w, y)
    with pytest.raises(ValueError, match="labels: got shape"):
        linear_cross_entropy(h, w, y[:3])
    with pytest.raises(ValueError, match="bias: got shape"):
        linear_cross_entropy(h, w, y, torch.zeros(8))
    with pytest.raises(ValueError, match="belong together"):
        linear_cross_entropy(h, w, y, extra_weight=torch.zeros(9, 2))


@pytest.mark.parametrize("bad", [9, -1, -99])
def test_a_label_out_of_range_is_an_error(bad):
    y = torch.tensor([0, bad, -100])
    with pytest.raises(LabelOutOfRangeError, match="1 of 3") as caught:
        linear_cross_entropy(torch.randn(3, 8), torch.randn(9, 8), y)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, IndexError)
    ids = torch.tensor([[0, 1], [bad, 2], [bad, bad]])  # the last row is ignored
    with pytest.raises(LabelOutOfRangeError, match="topk_ids: 1 of 6"):
        linear_cross_entropy(torch.randn(3, 8), torch.randn(9, 8), torch.tensor([0, 1, -100]), topk_ids=ids)


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jvp", "batched"])
def test_transforms_of_functions_are_refused_by_name(transform):
    x, y = problem()
    h, w = x["h"].detach(), x["w"].detach()

    def loss(h):
        return linear_cross_entropy(h, w, y).log_probs.sum()

    out = linear_cross_entropy(x["h"], w, y).log_probs
    run = {
        "grad": lambda: torch.func.grad(loss)(h),
        "vjp": lambda: torch.func.vjp(loss, h),
        "vmap": lambda: torch.func.vmap(loss)(h[None]),
        "jvp": lambda: torch.func.jvp(loss, (h,), (h,)),
        "batched": lambda: torch.func.vmap(lambda up: torch.autograd.grad(out, x["h"], up))(torch.eye(len(out))),
    }[transform]
    with pytest.raises(UnsupportedError, match=r"torch\.func's transforms .* one gradient at a time"):
        run()


def test_second_order_gradients_are_refused():
    x, y = problem()
    (grad,) = torch.autograd.grad(call(x, y).log_probs.sum(), x["h"], create_graph=True)
    with pytest.raises(SecondOrderGradientError, match="second-order"):
        grad.sum().backward()


def test_autocast_computes_in_its_dtype_and_keeps_fp32_statistics():
    x, y = problem(n=64, h=64, v=500, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(x, y)
    rounded = [x[k].detach().bfloat16().double().requires_grad_() for k in ("h", "w")]
    ref = reference(*rounded, y)
    assert rel(out.log_probs, ref["log_probs"]) < 1e-6
    grads = torch.autograd.grad(out.log_probs.sum(), (x["h"], x["w"]))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]
    want = torch.autograd.grad(ref["log_probs"].sum(), rounded)
    assert rel(grads[0], want[0]) < 1e-5
    assert rel(grads[1], want[1]) < 1e-5


def test_deterministic_mode_is_honoured():
    x, y = problem(dtype=torch.float32, ignored=4)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            out = call(x, y, topk_ids=torch.randint(0, 130, (37, 3), generator=torch.Generator().manual_seed(1)))
            total = out.log_probs.sum() + out.entropy.sum() + out.topk_log_probs.sum()
            runs.append(torch.autograd.grad(total, (x["h"], x["w"])))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_divergence_from_a_teacher_s_top_logits():
    x, y = problem(n=12, v=40, ignored=2)
    teacher = torch.log_softmax(2 * torch.randn(12, 40, dtype=torch.float64), -1)
    some, ids = teacher.topk(5)
    student = torch.log_softmax(x["h"] @ x["w"].t(), -1)
    out = call(x, y, outputs=(), topk_ids=ids)
    assert out.log_probs is None
    picked = student.gather(1, ids)
    wanted = (some.exp() * (some - picked)).sum(-1)
    real = y != -100
    torch.testing.assert_close(topk_kl_divergence(some, out.topk_log_probs, rest=False)[real], wanted[real])
    left, student_left = 1 - some.exp().sum(-1), 1 - picked.exp().sum(-1)
    wanted = wanted + left * (left / student_left).log()
    got = topk_kl_divergence(some, out.topk_log_probs)
    torch.testing.assert_close(got[real], wanted[real])
    assert (got[real] >= 0).all()
    grads = torch.autograd.grad(got[real].sum(), (x["h"], x["w"]))
    torch.testing.assert_close(grads, torch.autograd.grad(wanted[real].sum(), (x["h"], x["w"])))
    whole, every = teacher, torch.arange(40).expand(12, 40).contiguous()
    out = call(x, y, outputs=(), topk_ids=every)
    wanted = (whole.exp() * (whole - student)).sum(-1)
    torch.testing.assert_close(topk_kl_divergence(whole, out.topk_log_probs, rest=False)[real], wanted[real])


@pytest.mark.parametrize("where", ["inference", "fake", "functorch"])
def test_a_temperature_first_seen_elsewhere_can_be_trained_with(where):
    """The tensor that stands for a number is shared by all calls: no call may make it one of its own kind."""
    temperature = {"inference": 0.811, "fake": 0.812, "functorch": 0.813}[where]  # seen nowhere else
    x, y = problem()

    def evaluate(h):
        return linear_cross_entropy(h, torch.randn(130, 16), torch.zeros(37, dtype=torch.int64), temperature=temperature)

    if where == "inference":
        with torch.inference_mode():
            evaluate(torch.randn(37, 16))
    elif where == "fake":
        with FakeTensorMode():
            evaluate(torch.randn(37, 16))
    else:
        with pytest.raises(RuntimeError, match=r"no rules for torch\.func"):
            torch.func.grad(lambda h: evaluate(h).log_probs.sum())(torch.randn(37, 16))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(api._number(temperature))
    compare(x, y, 1e-12, temperature=temperature, ref_options={"temperature": temperature})
