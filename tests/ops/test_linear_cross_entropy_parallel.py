"""A head whose vocabulary is spread over ranks equals one process, with plain tensors and with DTensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from scoped_patch.engine.errors import UnsupportedError
from scoped_patch.ops.linear_cross_entropy import linear_cross_entropy
from tests.ops.test_linear_cross_entropy import NAMES, problem, rel
from tests.support.ranks import spawn

V = 131


def whole_problem(dtype=torch.float64):
    torch.manual_seed(3)
    x, y = problem(n=23, h=16, v=V, r=3, bias=True, dtype=dtype, ignored=4)
    topk = torch.randint(0, V, (23, 4))
    ups = [torch.randn(23), torch.randn(23), torch.randn(23), torch.randn(23, 4)]
    ups[0][5] = ups[1][5] = ups[2][5] = ups[3][5] = 0  # a row into which nothing flows
    return x, y, topk, ups


def run(x, y, topk, ups, **options):
    out = linear_cross_entropy(
        x["h"], x["w"], y, x.get("b"), extra_hidden_states=x.get("eh"), extra_weight=x.get("ew"), topk_ids=topk,
        outputs=(*NAMES, "is_top1"), temperature=0.7, softcap=6.0, memory=1, **options,
    )  # fmt: skip
    values = [out.log_probs, out.entropy, out.sum_sq_probs, out.topk_log_probs]
    grads = torch.autograd.grad(values, list(x.values()), [u.to(v.dtype) for u, v in zip(ups, values, strict=True)])
    return [*values, out.is_top1], dict(zip(x, grads, strict=True))


def shares(world: int) -> list[slice]:
    """Not all equal, and what torch.chunk gives."""
    chunk = -(-V // world)
    return [slice(i * chunk, min(V, (i + 1) * chunk)) for i in range(world)]


def vocab_parallel(rank, world, backend, dtype, extra):
    x, y, topk, ups = whole_problem(dtype)
    if not extra:
        del x["eh"], x["ew"]
    want_values, want_grads = run(x, y, topk, ups, backend="torch")
    mine = shares(world)[rank]
    part = {k: t.detach()[mine] if k in ("w", "b", "ew") else t.detach() for k, t in x.items()}
    part = {k: t.clone().requires_grad_() for k, t in part.items()}
    for _ in range(2):  # the second time the layout is known
        values, grads = run(part, y, topk, ups, backend=backend, process_group=dist.group.WORLD)
    errors = [rel(a, b) for a, b in zip(values[:-1], want_values[:-1], strict=True)]
    errors += [rel(g, want_grads[k][mine] if k in ("w", "b", "ew") else want_grads[k]) for k, g in grads.items()]
    return max(errors), torch.equal(values[-1], want_values[-1])


@pytest.mark.parametrize("world", [2, 3])
def test_vocab_parallel_equals_one_process(world):
    for error, same_top1 in spawn(world, vocab_parallel, "torch", torch.float64, True):
        assert error < 1e-12
        assert same_top1


def dtensors(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    x, y, topk, ups = whole_problem()
    want_values, want_grads = run(x, y, topk, ups)
    errors = []
    for replicated in (True, False):
        part = {
            k: distribute_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_()
            if k in ("w", "b", "ew")
            else t.detach().clone().requires_grad_()
            for k, t in x.items()
        }
        options = {"process_group": mesh.get_group()}
        if replicated:  # then the mesh tells that the tokens are the same everywhere
            part["h"] = DTensor.from_local(part["h"].detach(), mesh, [Replicate()]).requires_grad_()
            options = {}
        values, grads = run(part, y, topk, ups, **options)
        errors += [rel(a, b) for a, b in zip(values[:-1], want_values[:-1], strict=True)]
        for key, grad in grads.items():
            assert isinstance(grad, DTensor) == isinstance(part[key], DTensor)
            errors.append(rel(grad.full_tensor() if isinstance(grad, DTensor) else grad, want_grads[key]))
    refused = []
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        weight = distribute_tensor(x["w"].detach(), mesh, placements)
        try:
            linear_cross_entropy(x["h"].detach(), weight, y)
        except UnsupportedError as error:
            refused.append("FSDP" in str(error))
    return max(errors), refused


def test_dtensor_weights_equal_one_process_or_are_refused():
    for error, refused in spawn(2, dtensors):
        assert error < 1e-12
        assert refused == [True, True, True]


def fsdp(rank, world):
    from torch.distributed.fsdp import fully_shard

    class Head(torch.nn.Linear):
        def forward(self, h, y):
            return linear_cross_entropy(h, self.weight, y).log_probs

    x, y, _, _ = whole_problem(torch.float32)
    head = Head(16, V, bias=False)
    head.weight.data.copy_(x["w"])
    fully_shard(head)
    mine = torch.arange(rank, 23, world)
    h = x["h"].detach()[mine].requires_grad_()
    head(h, y[mine]).sum().backward()
    want = torch.autograd.grad(linear_cross_entropy(x["h"], x["w"], y).log_probs.sum(), (x["h"], x["w"]))
    # FSDP averages over the ranks.
    return rel(h.grad, want[0][mine]), rel(head.weight.grad.full_tensor() * world, want[1])


def test_a_head_that_fsdp2_shards():
    for errors in spawn(2, fsdp):
        assert max(errors) < 1e-5
