"""Attention over shared prefixes against softmax attention of every sequence of its own, in float64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scoped_patch.ops.prefix_attention import Block, PrefixLayout, choose_backend, cudnn, prefix_attention
from scoped_patch.ops.prefix_attention.api import _PrefixAttention
from scoped_patch.ops.prefix_attention.flex import attend, block_mask
from scoped_patch.ops.prefix_attention.kernels import CpuKernel, Score
from scoped_patch.ops.prefix_attention.merge import merge_

LAYOUTS = {
    "one group": PrefixLayout([7], [[5, 3, 4]]),
    "one member": PrefixLayout([7], [[5]]),
    "no response": PrefixLayout([7], [[]]),
    "no prefix": PrefixLayout([0], [[5, 6]]),
    "prefix of one token": PrefixLayout([1], [[3, 2]]),
    "empty responses": PrefixLayout([4, 3], [[0, 0], [0, 5, 0]]),
    "one much larger": PrefixLayout([3, 21, 2], [[2], [9, 1, 14, 6, 8], [1, 1]]),
    "many": PrefixLayout([7, 1, 13, 0], [[5, 0, 9, 3], [4], [20, 2], [6, 0]]),
}
MANY = LAYOUTS["many"]


def reference(
    q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout, scale: float, window=None, softcap=None, sinks=None
) -> Tensor:
    """Every prefix-and-response sequence apart, all scores kept, in float64; a prefix row is taken from its own run."""
    q, k, v = q.double(), k.double(), v.double()
    share = q.shape[1] // k.shape[1]
    rows: dict[int, Tensor] = {}
    for prefix, responses in zip(layout.prefix_bounds, layout.response_bounds, strict=True):
        for start, stop in ((prefix[1], prefix[1]), *responses):
            index = [*range(*prefix), *range(start, stop)]
            if not index:
                continue
            scores = q[0][:, index] @ k[0][:, index].repeat_interleave(share, 0).mT * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(len(index))[:, None] - torch.arange(len(index))
            seen = (distance >= 0) & (distance < (window or len(index)))
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(index), 1)], -1)
            weights = scores.softmax(-1)[..., : len(index)]
            out = weights @ v[0][:, index].repeat_interleave(share, 0)
            rows.update({cell: out[:, place] for place, cell in enumerate(index) if cell not in rows})
    empty = q.new_zeros(q.shape[1], 0, v.shape[-1])
    return torch.stack([rows[i] for i in range(layout.tokens)], 1)[None] if rows else empty[None]


def tensors(layout: PrefixLayout, dtype=torch.float64, heads=6, kv=2, size=8, v_size=8, sinks=False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, heads, layout.tokens, size), (1, kv, layout.tokens, size), (1, kv, layout.tokens, v_size)]
    shapes += [(heads,)] if sinks else []
    # the layout of memory that attention modules give: heads beside each other in a token
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    made[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made[:3]]
    return [x.requires_grad_() for x in made]


def assert_same(layout: PrefixLayout, inputs: list[Tensor], tolerance: float, backend="auto", **options) -> None:
    sinks = inputs[3] if len(inputs) > 3 else None
    out = prefix_attention(*inputs[:3], layout, scale=0.7, sinks=sinks, backend=backend, **options)
    right = reference(*inputs[:3], layout, 0.7, sinks=sinks, **options)
    assert out.dtype == inputs[0].dtype
    assert out.shape == right.shape
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad((out.double() * weights).sum(), inputs)
    wanted = torch.autograd.grad((right * weights).sum(), inputs)
    for name, mine, theirs in zip(("query", "key", "value", "sinks"), found, wanted, strict=False):
        scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        worst = float((mine.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
        assert worst <= tolerance * scale, f"the gradient of {name} is off by {worst:.1e}"


@pytest.mark.parametrize("backend", ["blockwise", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_values_and_gradients_in_float64(layout, backend):
    assert_same(layout, tensors(layout), 1e-11, backend)


@pytest.mark.parametrize("backend", ["blockwise", "plain"])
@pytest.mark.parametrize("window", [1, 2, 5, 9, 22, 33, 50])
def test_sliding_windows_reach_back_into_the_prefix(window, backend):
    assert_same(MANY, tensors(MANY), 1e-11, backend, window=window)


def test_a_window_is_cut_into_bands_of_rows(monkeypatch):
    monkeypatch.setattr("scoped_patch.ops.prefix_attention.layout._BAND_ROWS", 4)
    layout = PrefixLayout([30], [[25, 3]])
    assert len(layout.blocks(3)) > 10
    assert_same(layout, tensors(layout), 1e-11, window=3)
    assert_same(layout, tensors(layout), 1e-11, window=6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("v_size", [8, 16])
def test_softcap_sinks_windows_and_other_value_sizes(softcap, window, sinks, v_size):
    assert_same(MANY, tensors(MANY, sinks=sinks, v_size=v_size), 1e-11, softcap=softcap, window=window)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 1), (9, 3)])
def test_query_heads_read_their_own_key_head(heads, kv):
    assert_same(MANY, tensors(MANY, heads=heads, kv=kv), 1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("backend", ["blockwise", "plain"])
def test_other_dtypes(dtype, tolerance, backend):
    assert_same(MANY, tensors(MANY, dtype, sinks=True), tolerance, backend)


def test_the_plain_form_computes_in_pieces(monkeypatch):
    monkeypatch.setattr("scoped_patch.ops.prefix_attention.kernels._SCORES", 64)
    assert_same(MANY, tensors(MANY), 1e-11, "plain", softcap=3.0, window=7)


@pytest.mark.parametrize("backend", ["blockwise", "plain"])
def test_gradcheck(backend):
    layout = PrefixLayout([3, 2], [[2, 0, 3], [2]])
    inputs = tensors(layout, heads=2, kv=1, size=3, v_size=3, sinks=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: prefix_attention(q, k, v, layout, window=4, sinks=s, backend=backend), inputs
    )


def test_shared_tokens_are_computed_once_and_no_key_is_copied(monkeypatch):
    """Every kernel call reads keys through strides; no tensor as large as the repeated keys is ever made."""
    sizes: list[int] = []
    forward = CpuKernel.forward

    def watched(self, q, k, v, block, how):
        sizes.append(k.shape[1])
        assert k.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        return forward(self, q, k, v, block, how)

    monkeypatch.setattr(CpuKernel, "forward", watched)
    layout = PrefixLayout([50], [[3] * 8])
    query, key, value = tensors(layout)
    prefix_attention(query, key, value, layout)
    # the prefix, eight responses, and once all responses against the prefix
    assert sorted(sizes) == [3] * 8 + [50, 50]


def test_one_backward_only():
    inputs = tensors(MANY)
    out = prefix_attention(*inputs, MANY)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_gradient_where_none_is_asked_for():
    query, key, value = (x.detach() for x in tensors(MANY))
    assert not prefix_attention(query, key, value, MANY).requires_grad
    query.requires_grad_()
    prefix_attention(query, key, value, MANY).sum().backward()
    assert query.grad is not None
    assert key.grad is None


def test_autocast_computes_in_its_dtype():
    query, key, value = tensors(MANY, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = prefix_attention(query, key, value.bfloat16(), MANY)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), reference(query, key, value, MANY, 8**-0.5), rtol=5e-2, atol=5e-2)


def test_tokens_of_nothing():
    layout = PrefixLayout([], [])
    query, key, value = tensors(layout, v_size=5)
    assert prefix_attention(query, key, value, layout).shape == (1, 6, 0, 5)


# --- the layout


def test_lengths_and_bounds():
    layout = PrefixLayout([3, 2], [[2, 0], [4]])
    assert (layout.tokens, layout.prefix_tokens, layout.repeated_tokens, layout.longest) == (11, 5, 14, 6)
    assert layout.prefix_bounds == ((0, 3), (3, 5))
    assert layout.response_bounds == (((5, 7), (7, 7)), ((7, 11),))
    assert layout.cumulative("segments", torch.device("cpu")).tolist() == [0, 3, 5, 7, 11]
    assert layout.cumulative("responses", torch.device("cpu")).tolist() == [0, 2, 6]
    assert layout.cumulative("prefixes", torch.device("cpu")).tolist() == [0, 3, 5]
    assert layout.longest_of("segments") == 4


def test_groups_without_a_prefix_are_left_out_of_the_cross_part():
    layout = PrefixLayout([3, 0], [[2], [4]])
    assert layout.shared_stop == 5
    assert layout.cumulative("responses", torch.device("cpu")).tolist() == [0, 2]


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_blocks_cover_each_pair_once_and_no_other(window):
    """The mask of all pairs, put together from blocks, is the definition's."""
    tokens = MANY.tokens
    seen = torch.zeros(tokens, tokens, dtype=torch.int)
    for block in MANY.blocks(window):
        seen[slice(*block.queries), slice(*block.keys)] += block.mask(window, "cpu").int()
    assert torch.equal(seen, definition(MANY, window).int())


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_ranges_say_the_same(window):
    own_start, own_stop, prefix_start, prefix_stop = MANY.seen(window, torch.device("cpu"))
    key = torch.arange(MANY.tokens)
    own = (key >= own_start[:, None]) & (key < own_stop[:, None])
    shared = (key >= prefix_start[:, None]) & (key < prefix_stop[:, None])
    assert torch.equal(own | shared, definition(MANY, window))


def definition(layout: PrefixLayout, window: int | None) -> Tensor:
    """bool [N, N] from what segment and position each token has."""
    segment, group, position = ([0] * layout.tokens for _ in range(3))
    for number, (prefix, responses) in enumerate(zip(layout.prefix_bounds, layout.response_bounds, strict=True)):
        for which, (start, stop) in enumerate((prefix, *responses)):
            for cell in range(start, stop):
                segment[cell], group[cell] = which, number
                position[cell] = cell - start + (prefix[1] - prefix[0] if which else 0)
    segment, group, position = (torch.tensor(x) for x in (segment, group, position))
    distance = position[:, None] - position
    seen = (group[:, None] == group) & ((segment == 0) | (segment == segment[:, None])) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def test_kinds_of_blocks():
    assert Block((5, 9), (0, 5), 5).kind(None) == "full"
    assert Block((5, 9), (0, 5), 5).kind(8) == "band"
    assert Block((5, 9), (0, 5), 5).kind(9) == "full"
    assert Block((0, 5), (0, 5), 0).kind(None) == "causal"
    assert Block((0, 5), (0, 5), 0).kind(4) == "band"
    assert Block((0, 1), (0, 1), 0).kind(1) == "full"


def test_a_window_longer_than_every_sequence_is_none():
    assert MANY.effective_window(33) is None
    assert MANY.effective_window(32) == 32


@pytest.mark.parametrize(
    ("prefixes", "responses", "message"),
    [
        ([1], [[1], [2]], "1 groups, response_lengths 2"),
        ([-1], [[1]], "must not be negative"),
        ([1], [[-1]], "must not be negative"),
        ([0, 3], [[1], [2]], "without a prefix must come last"),
    ],
)
def test_layouts_that_cannot_be(prefixes, responses, message):
    with pytest.raises(ValueError, match=message):
        PrefixLayout(prefixes, responses)


# --- arguments


def test_arguments_that_do_not_fit():
    q, k, v = tensors(MANY)
    cases = [
        ((q[0], k, v), {}, ValueError, "query must be"),
        ((q, k[:, :, 1:], v), {}, ValueError, r"key has 69 tokens, and the layout 70"),
        ((q, k.float(), v), {}, TypeError, "key is torch.float32 and query torch.float64"),
        ((q, k[..., :4], v), {}, ValueError, "head size of 8 and key of 4"),
        ((q[:, :5], k, v), {}, ValueError, "5 heads, key 2 and value 2"),
        ((q, k, v[:, :1]), {}, ValueError, "key 2 and value 1"),
        ((q, k, v), {"window": 0}, ValueError, "window must be at least 1"),
        ((q, k, v), {"softcap": 0.0}, ValueError, "softcap must be a finite number > 0"),
        ((q, k, v), {"sinks": torch.zeros(3)}, ValueError, r"sinks must be \[6\]"),
        ((q, k, v), {"backend": "fast"}, ValueError, "backend must be one of 'auto'"),
        ((q, k, v), {"backend": "flash"}, ValueError, "the tensors are on cpu, it needs cuda"),
        ((q, k, v), {"backend": "flex"}, ValueError, "the tensors are on cpu"),
        ((q, k, v), {"backend": "cudnn"}, ValueError, "the tensors are on cpu, it needs cuda"),
    ]
    for given, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            prefix_attention(*given, MANY, **options)


def test_auto_is_blockwise_on_cpu():
    q, _, v = tensors(MANY)
    assert choose_backend(q, v, MANY, Score(1.0)) == "blockwise"


# --- the parts of the CUDA forms that a CPU can show


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5, 140])
def test_block_mask_of_flex_attention(window):
    """Torch's unfused FlexAttention (forward only on CPU) with our block mask, sinks and softcap."""
    layout = PrefixLayout([150, 1, 300, 0], [[50, 0, 90, 3], [4], [20, 200], [60, 0]])
    query, key, value, sinks = (x.detach() for x in tensors(layout, torch.float32, sinks=True))
    out = attend(query, key, value, sinks, layout, Score(0.3, window, 2.0), compiled=False)
    right = reference(query, key, value, layout, 0.3, window, 2.0, sinks)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    assert block_mask(layout, window, query.device) is block_mask(layout, window, query.device)


@pytest.mark.parametrize("window", [None, 5, 140])
def test_block_mask_names_only_blocks_with_something_to_see(window):
    layout = PrefixLayout([150, 1, 300, 0], [[50, 0, 90, 3], [4], [20, 200], [60, 0]])
    blocks = -(-layout.tokens // 128)
    padded = torch.zeros(blocks * 128, blocks * 128, dtype=torch.bool)
    padded[: layout.tokens, : layout.tokens] = definition(layout, window)
    tiles = padded.view(blocks, 128, blocks, 128).permute(0, 2, 1, 3).flatten(2)
    mask = block_mask(layout, window, torch.device("cpu"))
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(-1))
    full = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        full[row, mask.full_kv_indices[0, 0, row, :count].long()] = True
    assert torch.equal(full, tiles.all(-1))
    assert full.any() == (window is None)


class StandInForCudnn:
    """What cuDNN's attention takes and gives, in plain products: views of any strides, and normalisers [B, H, n, 1]."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale
    ):
        assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
        self.shapes.append((q.shape[0], q.shape[2], k.shape[2]))
        scores = self.scores(q, k, is_causal, scale)
        norm = scores.logsumexp(-1, keepdim=True)
        out = torch.exp(scores - norm) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        state = torch.zeros((), dtype=torch.int64)
        return out, norm.float(), None, None, q.shape[2], k.shape[2], state, state, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad, q, k, v, out, norm, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale
    ):
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert norm.shape == (*q.shape[:3], 1)
        assert norm.is_contiguous()
        assert seed.dtype == offset.dtype == torch.int64
        share, (b, kv, m, size) = q.shape[1] // k.shape[1], k.shape
        ks, vs = (x.repeat_interleave(share, 1) for x in (k, v))
        p = torch.exp(self.scores(q, k, is_causal, scale) - norm)
        ds = p * (grad @ vs.mT - (grad * out).sum(-1, keepdim=True)) * scale
        grouped = (x.view(b, kv, share, m, size).sum(2) for x in (ds.mT @ q, p.mT @ grad))
        return ds @ ks, *grouped

    @staticmethod
    def scores(q, k, is_causal, scale):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")) if is_causal else scores


@pytest.fixture
def cudnn_stand_in(monkeypatch):
    stand_in = StandInForCudnn()
    monkeypatch.setattr("scoped_patch.ops.prefix_attention.cudnn._aten", stand_in)
    monkeypatch.setattr("scoped_patch.ops.prefix_attention.cudnn.cudnn_problem", lambda *_: None)
    return stand_in


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS.values(), PrefixLayout([3, 3, 3, 3], [[2, 2], [], [2, 2], [4]]), PrefixLayout([5, 5], [[4, 3], [2, 5]])],
    ids=[*LAYOUTS, "equal groups, one without responses", "equal sums"],
)
def test_calls_made_of_cudnn(cudnn_stand_in, layout, sinks):
    """The runs that calls are made of, and their merging, with a stand-in for the kernel; that itself needs a GPU."""
    assert_same(layout, tensors(layout, sinks=sinks), 1e-6, "cudnn")


def test_equal_segments_and_equal_groups_share_a_call(cudnn_stand_in):
    layout = PrefixLayout([7, 7, 4], [[3, 3], [2, 4], [5]])
    assert_same(layout, tensors(layout), 1e-6, "cudnn")
    # (how many, rows, keys): prefixes, responses, then groups whose 6 rows see 7 keys, and the one of 5 rows and 4 keys
    assert cudnn_stand_in.shapes == [(2, 7, 7), (1, 4, 4), (2, 3, 3), (1, 2, 2), (1, 4, 4), (1, 5, 5), (2, 6, 7), (1, 5, 4)]


def test_torch_takes_the_arguments_given_to_cudnn():
    """On meta tensors: names, order and kinds of arguments fit this torch's operators."""
    layout = PrefixLayout([3, 3], [[2, 2], [1, 3]])
    shapes = ((layout.tokens, 4, 8), (layout.tokens, 2, 8), (layout.tokens, 2, 8))
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    out, norm, *states = cudnn.forward(q, k, v, None, layout, 1.0)
    assert (out.shape, norm.shape) == (q.shape, (4, layout.tokens))
    found = cudnn.backward(out, q, k, v, out, norm, tuple(states), layout, 1.0)
    assert [x.shape for x in found] == list(shapes)


def test_merging_two_partial_softmaxes():
    scores, values = torch.randn(3, 5, 9), torch.randn(9, 4)
    sinks = torch.randn(3)
    left, right = scores[..., :4], scores[..., 4:]
    out, norm = (left.softmax(-1) @ values[:4]).transpose(0, 1).contiguous(), left.logsumexp(-1)
    part, part_norm = (right.softmax(-1) @ values[4:]).transpose(0, 1)[2:].contiguous(), right.logsumexp(-1)[:, 2:]
    whole = torch.cat([scores, sinks[:, None, None].expand(3, 5, 1)], -1)
    partly = whole.clone()
    partly[:, :2, 4:9] = float("-inf")
    merge_(out, norm, part, part_norm, 2, sinks)
    torch.testing.assert_close(out, (partly.softmax(-1)[..., :9] @ values).transpose(0, 1))
    torch.testing.assert_close(norm, partly.logsumexp(-1))


def test_the_merge_kernel_in_triton_interpreter():
    """The CUDA kernel's own code, run on the CPU, against the torch form."""
    code = """
import torch, triton
from scoped_patch.ops.prefix_attention.merge import merge_
from scoped_patch.ops.prefix_attention.merge_triton import merge_kernel
for size in (64, 80):
    out, norm = torch.randn(200, 3, size), torch.randn(3, 200)
    part, part_norm = torch.randn(131, 3, size), torch.randn(3, 131)
    right_out, right_norm = out.clone(), norm.clone()
    merge_(right_out, right_norm, part, part_norm, 69, None)
    merge_kernel[(triton.cdiv(131, 64), 3)](
        out[69:], norm, part, part_norm, 69, 131, 200, 131, 3, size, triton.next_power_of_2(size), 64
    )
    torch.testing.assert_close(out, right_out)
    torch.testing.assert_close(norm, right_norm)
"""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr


def test_the_node_saves_what_attention_saves_and_no_more():
    """Query, key, value, output and one number per row and head: nothing that grows with the number of pairs."""
    query, key, value = tensors(MANY)
    out = _PrefixAttention.apply(query, key, value, None, MANY, Score(1.0), "blockwise")
    saved = [x for x in out.grad_fn.saved_tensors if x is not None]
    assert sum(x.numel() for x in saved) == query.numel() * 2 + key.numel() * 2 + 6 * MANY.tokens
