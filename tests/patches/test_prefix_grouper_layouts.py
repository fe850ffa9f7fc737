"""The packed row with boundaries, and rows with an object of the package `prefix_grouper`."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from scoped_patch import pack_prefix_groups, patched
from scoped_patch.engine.errors import BadOptionError
from tests import tiny_models
from tests.support.groups import PREFIXES, RESPONSES, count
from tests.support.scores import assert_gradients, gradients, take_gradients

INSTALLED = importlib.util.find_spec("prefix_grouper") is not None


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    return tiny_models.build("qwen3", attn=request.param, train=False)[0]


def tokens(prefixes=PREFIXES, responses=RESPONSES):
    generator = torch.Generator().manual_seed(3)
    heads = [torch.randint(3, 100, (n,), generator=generator) for n in prefixes]
    tails = [[torch.randint(3, 100, (n,), generator=generator) for n in group] for group in responses]
    return heads, tails


def each_alone(model, prefixes, responses):
    """Log-probs of every response's tokens, each response in a call of its own."""
    found = []
    for prefix, group in zip(prefixes, responses, strict=True):
        for response in group:
            ids = torch.cat([prefix, response])[None]
            table = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
            found.append(table[len(prefix) - 1 : -1].gather(-1, response[:, None])[:, 0])
    return found


def assert_all_close(found, wanted):
    assert len(found) == len(wanted)
    scale = max(float(x.detach().abs().max()) for x in wanted if len(x))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * scale)


# --- packed rows


def response_labels(packed):
    labels = packed.input_ids.clone()
    for prefix, *_ in packed.segments(labels):
        prefix.fill_(-100)
    return labels


def test_packed_row_scores_each_response_token_at_its_own_place(model):
    prefixes, responses = tokens()
    packed = pack_prefix_groups(prefixes, responses)
    labels = response_labels(packed)
    wanted = each_alone(model, prefixes, responses)
    right = gradients(model, lambda: torch.cat(each_alone(model, prefixes, responses)).square().sum())
    with patched(model, prefix_grouper=True, fused="torch"):
        out = []
        counted = count(model, lambda: out.append(model(**packed.inputs(), labels=labels)))
        model.zero_grad()
        model(**packed.inputs(), labels=labels).log_probs.double().square().sum().backward()
        left = take_gradients(model)
    assert out[0].log_probs.shape == packed.input_ids.shape
    assert_all_close([r for _, *group in packed.segments(out[0].log_probs) for r in group], wanted)
    assert not out[0].log_probs[labels == -100].any()
    torch.testing.assert_close(out[0].loss.double(), -torch.cat(wanted).mean(), rtol=1e-5, atol=0)
    assert_gradients(left, right)
    assert counted.embedded == [sum(PREFIXES) + sum(map(sum, RESPONSES))]
    assert counted.head_rows == [sum(map(sum, RESPONSES))]


def test_packed_row_without_labels_scores_prefixes_too(model):
    prefixes, responses = tokens()
    packed = pack_prefix_groups(prefixes, responses)
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(**packed.inputs())
    for prefix, (scores, *_) in zip(prefixes, packed.segments(out.log_probs), strict=True):
        assert scores[0] == 0
        table = model(input_ids=prefix[None], use_cache=False).logits[0].log_softmax(-1)
        torch.testing.assert_close(scores[1:], table[:-1].gather(-1, prefix[1:, None])[:, 0], rtol=1e-5, atol=1e-4)


def test_packed_row_gives_logits_in_its_own_order_and_the_loss(model):
    prefixes, responses = tokens()
    packed = pack_prefix_groups(prefixes, responses)
    wanted = each_alone(model, prefixes, responses)
    with patched(model, prefix_grouper=True):
        out = model(**packed.inputs(), labels=response_labels(packed))
    torch.testing.assert_close(out.loss.double(), -torch.cat(wanted).mean(), rtol=1e-5, atol=0)
    for prefix, group, (_, *rows) in zip(prefixes, responses, packed.segments(out.logits), strict=True):
        for response, logits in zip(group, rows, strict=True):
            alone = model(input_ids=torch.cat([prefix, response])[None], use_cache=False).logits[0, len(prefix) :]
            torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-4)


def test_segments_of_groups_may_be_mixed_and_positions_left_out(model):
    """Segments in any order, the first of a group being its prefix; positions are made when none are given."""
    (p0, p1), ((a, b), (c,)) = tokens((4, 6), ((3, 5), (2,)))
    row = torch.cat([p1, p0, b, c, a])[None]
    bounds = torch.tensor([0, 6, 10, 15, 17, 20])
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(input_ids=row, cu_seqlens=bounds, group_ids=torch.tensor([5, 2, 2, 5, 2]))
    wanted = each_alone(model, [p1, p0, p0], [[c], [b], [a]])
    assert_all_close([out.log_probs[0, 15:17], out.log_probs[0, 10:15], out.log_probs[0, 17:20]], wanted)


def test_packed_positions_are_taken_as_given(model):
    prefixes, responses = tokens()
    packed = pack_prefix_groups(prefixes, responses)
    inputs = packed.inputs() | {"position_ids": packed.position_ids * 3 + 5}
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(**inputs, labels=response_labels(packed))
    table = model(
        input_ids=torch.cat([prefixes[0], responses[0][1]])[None],
        position_ids=torch.arange(16)[None] * 3 + 5,
        attention_mask=torch.ones(1, 16),  # without one, transformers takes ids that jump for packed samples
        use_cache=False,
    ).logits[0]
    own = table.log_softmax(-1)[8:15].gather(-1, responses[0][1][:, None])[:, 0]
    torch.testing.assert_close(packed.segments(out.log_probs)[0][2], own, rtol=1e-5, atol=1e-4)


def test_empty_segments(model):
    (prefix,), ((answer,),) = tokens((4,), ((3,),))
    packed = pack_prefix_groups([prefix, [], [7, 8]], [[[], answer], [answer, answer + 1], []])
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(**packed.inputs(), labels=response_labels(packed))
    parts = packed.segments(out.log_probs)
    assert_all_close([parts[0][2]], each_alone(model, [prefix], [[answer]]))
    # a response without a prefix has nothing that predicts its first token
    assert parts[1][1][0] == 0
    table = model(input_ids=answer[None], use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(parts[1][1][1:], table[:-1].gather(-1, answer[1:, None])[:, 0], rtol=1e-5, atol=1e-4)


def test_the_helper():
    packed = pack_prefix_groups([[5, 6, 7], torch.tensor([8])], [[[1, 2], [3]], [[4]]])
    assert packed.input_ids.tolist() == [[5, 6, 7, 1, 2, 3, 8, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 8]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.group_ids.tolist() == [0, 0, 0, 1, 1]
    assert [[part.tolist() for part in group] for group in packed.segments(packed.input_ids)] == [
        [[5, 6, 7], [1, 2], [3]],
        [[8], [4]],
    ]
    assert packed.responses(packed.input_ids).tolist() == [[1, 2], [3, 0], [4, 0]]
    assert packed.responses(packed.input_ids, padding=-100).tolist() == [[1, 2], [3, -100], [4, -100]]
    assert pack_prefix_groups([[5]], [[]]).responses(torch.zeros(1, 1, 3)).shape == (0, 0, 3)
    with pytest.raises(BadOptionError, match="2 prefixes and 1 groups of responses"):
        pack_prefix_groups([[1], [2]], [[[3]]])
    with pytest.raises(BadOptionError, match="nothing to pack"):
        pack_prefix_groups([], [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 5])}, "must rise from 0 to the 42 tokens"),
        ({"cu_seqlens": torch.tensor([1, 42])}, "must rise from 0 to the 42 tokens"),
        ({"cu_seqlens": torch.tensor([0, 9, 5, 42])}, "must rise from 0"),
        ({"group_ids": torch.tensor([0, 0])}, "group_ids must be 9 integers, one for each of the segments"),
        ({"input_ids": torch.zeros(2, 42, dtype=torch.int64), "position_ids": None}, r"one row \[1, N\]"),
        ({"shift_labels": torch.zeros(1, 42, dtype=torch.int64)}, "take labels=, one per token"),
    ],
)
def test_packed_rows_that_do_not_fit(change, message):
    model = tiny_models.build("qwen3", train=False)[0]
    packed = pack_prefix_groups(*tokens())
    assert packed.input_ids.shape == (1, 42)
    with patched(model, prefix_grouper=True, fused="torch"), pytest.raises(BadOptionError, match=message):
        model(**(packed.inputs() | change))


# --- the package's object


def stand_in(info, padding_mode):
    """What is read of the package's object: its groups, and where its rows are padded."""
    lengths = [sum(group) for group in info]
    column = torch.arange(max(lengths))
    rows = [column < n if padding_mode == "right" else column >= max(lengths) - n for n in lengths]
    groups = [SimpleNamespace(prefix_len=group[0], suffix_lens=group[1:]) for group in info]
    return SimpleNamespace(group_info=groups, padding_mask=torch.stack(rows))


def real_one(info, padding_mode):
    if not INSTALLED:
        pytest.skip("the package prefix_grouper is not installed (pip install --no-deps prefix_grouper)")
    from prefix_grouper import PrefixGrouper

    return PrefixGrouper(info, padding_mode=padding_mode)


@pytest.fixture(params=["right", "left"])
def padding(request):
    return request.param


@pytest.fixture(params=[stand_in, real_one])
def rows(request, padding):
    """(input ids [groups, L], object, prefixes, responses)"""
    prefixes, responses = tokens()
    grouper = request.param([[len(p), *map(len, group)] for p, group in zip(prefixes, responses, strict=True)], padding)
    ids = torch.zeros(grouper.padding_mask.shape, dtype=torch.int64)
    for row, (prefix, group) in enumerate(zip(prefixes, responses, strict=True)):
        ids[row, grouper.padding_mask[row]] = torch.cat([prefix, *group])
    return ids, grouper, prefixes, responses


def parts(values, grouper, prefixes, responses):
    """Each response's rows of [groups, L, ...], the last prefix row in front."""
    found = []
    for row, (prefix, group) in enumerate(zip(prefixes, responses, strict=True)):
        real = values[row][grouper.padding_mask[row]]
        start = len(prefix)
        for response in group:
            found.append(torch.cat([real[len(prefix) - 1 : len(prefix)], real[start : start + len(response)]]))
            start += len(response)
    return found


def test_object_gives_logits_in_grouped_rows(model, rows):
    ids, grouper, prefixes, responses = rows
    wanted = each_alone(model, prefixes, responses)
    with patched(model, prefix_grouper=True):
        out = model(input_ids=ids, attention_mask=grouper.padding_mask.long(), prefix_grouper=grouper, use_cache=False)
    assert out.logits.shape[:2] == ids.shape
    flat = [response for group in responses for response in group]
    found = [
        logits.double().log_softmax(-1)[:-1].gather(-1, response[:, None])[:, 0]
        for logits, response in zip(parts(out.logits, grouper, prefixes, responses), flat, strict=True)
    ]
    assert_all_close(found, wanted)


def test_object_with_a_fused_head_gives_log_probs_per_token(model, rows):
    ids, grouper, prefixes, responses = rows
    wanted = each_alone(model, prefixes, responses)
    right = gradients(model, lambda: torch.cat(each_alone(model, prefixes, responses)).sum())
    with patched(model, prefix_grouper=True, fused="torch"):
        out = model(input_ids=ids, prefix_grouper=grouper)
        found = [part[1:] for part in parts(out.log_probs, grouper, prefixes, responses)]
        left = gradients(model, lambda: torch.cat(found).sum())
    assert_all_close(found, wanted)
    assert_gradients(left, right)


def test_split_output_of_the_package_fits(model):
    if not INSTALLED:
        pytest.skip("the package prefix_grouper is not installed (pip install --no-deps prefix_grouper)")
    from prefix_grouper import PrefixGrouper

    prefixes, responses = tokens()
    grouper = PrefixGrouper([[len(p), *map(len, group)] for p, group in zip(prefixes, responses, strict=True)])
    pad = torch.nn.utils.rnn.pad_sequence
    flat = [response for group in responses for response in group]
    prefix, suffix = pad(prefixes, batch_first=True), pad(flat, batch_first=True)
    masks = [pad([torch.ones_like(x) for x in xs], batch_first=True).bool() for xs in (prefixes, flat)]
    ids = grouper.concat_input(prefix, masks[0], suffix, masks[1])
    with patched(model, prefix_grouper=True):
        logits = model(input_ids=ids, attention_mask=grouper.padding_mask.long(), prefix_grouper=grouper).logits
    _, _, after, mask = grouper.split_output(logits, include_prefix_last=1)
    found = [
        after[i][mask[i]].double().log_softmax(-1)[:-1].gather(-1, response[:, None])[:, 0] for i, response in enumerate(flat)
    ]
    assert_all_close(found, each_alone(model, prefixes, responses))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix_grouper": object()}, "must be an initialised prefix_grouper.PrefixGrouper, got object"),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.int64)}, r"input_ids are \[2, 5\], .* describes rows \[3, "),
        ({"group_ids": [0, 0, 0]}, "either prefix_grouper= or group_ids=, not both"),
        ({"prefix_grouper": stand_in([[4, 3], [9, 2]], "right")}, r"describes rows \[2, 11\]"),
    ],
)
def test_objects_that_do_not_fit(change, message):
    model = tiny_models.build("qwen3", train=False)[0]
    grouper = stand_in([[4, 3], [9, 2], [1, 1, 1]], "right")
    call = {"input_ids": torch.ones(grouper.padding_mask.shape, dtype=torch.int64), "prefix_grouper": grouper}
    with patched(model, prefix_grouper=True), pytest.raises(BadOptionError, match=message):
        model(**(call | change))


def test_an_object_that_counts_wrongly():
    model = tiny_models.build("qwen3", train=False)[0]
    grouper = stand_in([[4, 3]], "right")
    grouper.group_info[0].suffix_lens = [2]
    with patched(model, prefix_grouper=True), pytest.raises(BadOptionError, match=r"row 0 has 7 real tokens, and .* 6"):
        model(input_ids=torch.ones(1, 7, dtype=torch.int64), prefix_grouper=grouper)
