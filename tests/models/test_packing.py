"""Which token a row is scored against, and where packed samples begin."""

from __future__ import annotations

import pytest
import torch

from scoped_patch.models.packing import aligned_targets, sample_starts, shift

X = -100


def starts(ids, cu=None, length=None):
    ids = None if ids is None else torch.as_tensor(ids)
    found = sample_starts(ids, None if cu is None else torch.tensor(cu), length or ids.shape[-1])
    return None if found is None else found.int().tolist()


def test_shift():
    assert shift(torch.tensor([[1, 2, 3], [4, X, 6]])).tolist() == [[2, 3, X], [X, 6, X]]
    assert shift(torch.tensor([[1, 2]]), 7).tolist() == [[2, 7]]
    assert shift(torch.zeros(2, 1, dtype=torch.int64)).tolist() == [[X], [X]]
    assert shift(torch.zeros(1, 0, dtype=torch.int64)).shape[0] == 1


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([[0, 1, 2, 0, 1]], [[0, 0, 0, 1, 0]]),
        ([[3, 4, 5, 0, 1]], [[0, 0, 0, 1, 0]]),  # a row that begins in the middle of a sample
        ([[0, 1, 2, 2, 2, 2, 4, 5]], [[0] * 8]),  # ids stand still over an image and jump after it
        ([[0, 0, 0]], [[0, 1, 1]]),  # samples of one token
        ([[0, 1, 5, 6]], [[0, 0, 0, 0]]),  # a gap is no boundary
        ([[5, 6, 3, 4]], [[0, 0, 1, 0]]),  # going down is one
        ([[0, 1, 0, 1], [0, 1, 2, 3]], [[0, 0, 1, 0], [0, 0, 0, 0]]),
        ([0, 1, 0], [[0, 0, 1]]),  # [S]
        ([[0]], [[0]]),
        ([[-3, -2, -1, 0, 1, 2]], [[0] * 6]),  # a model's offset of an earlier batch's images: rising through 0
        ([[-1, 0, 1, 2]], [[0] * 4]),
        ([[0, 1, -1, -1, 0, 1]], [[0, 0, 1, 0, 1, 0]]),  # fillers between samples
    ],
)
def test_starts_of_position_ids(ids, wanted):
    assert starts(ids) == wanted


def test_starts_of_multi_axis_ids():
    rows = torch.arange(4)
    assert starts(rows.expand(3, 1, 4)) == [[0, 0, 0, 0]]
    packed = torch.tensor([0, 1, 0, 1])
    assert starts(packed.expand(4, 1, 4)) == [[0, 0, 1, 0]]
    # a leading image: the temporal axis of three stands at 0 over all its tokens
    assert starts(torch.tensor([[[0, 0, 0, 0, 2]], [[0, 0, 1, 1, 2]], [[0, 1, 0, 1, 2]]])) == [[0] * 5]
    # after a video of four frames the text goes on where its height and width ended, below the last frame's time
    video = torch.tensor([[[0, 1, 2, 3, 4, 2, 3]], [[0, 1, 1, 1, 1, 2, 3]], [[0, 1, 1, 1, 1, 2, 3]]])
    assert starts(video) == [[0] * 7]
    assert starts(torch.cat([video, video], -1)) == [[0] * 7 + [1] + [0] * 6]
    assert starts(torch.tensor([3, 4, 5, 0, 1]).expand(3, 1, 5)) == [[0, 0, 0, 1, 0]]
    assert starts(torch.tensor([5, 6, 2, 3]).expand(3, 1, 4)) == [[0, 0, 1, 0]]


def test_lengths_win():
    assert starts([[0, 1, 2, 3, 4]], cu=[0, 3, 5]) == [[0, 0, 0, 1, 0]]
    assert starts(None, cu=[0, 5], length=5) == [[0, 0, 0, 0, 0]]
    assert starts(None, length=5) is None
    # a sample without tokens begins where the next one does
    assert starts(None, cu=[0, 2, 2, 5], length=5) == [[0, 0, 1, 0, 0]]


def test_the_ids_are_scored_up_to_the_end_of_each_sample():
    ids = torch.tensor([[10, 11, 12, 20, 21]])
    call = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    assert aligned_targets(call).tolist() == [[11, 12, X, 21, X]]
    assert aligned_targets({"input_ids": ids}).tolist() == [[11, 12, 20, 21, X]]
    for name in ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q"):
        assert aligned_targets({"input_ids": ids, name: torch.tensor([0, 3, 5])}).tolist() == [[11, 12, X, 21, X]]


def test_what_is_given_is_taken_as_it_is():
    ids = torch.tensor([[10, 11, 12, 20, 21]])
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert aligned_targets({"input_ids": ids, "labels": ids, "position_ids": positions}).tolist() == [[11, 12, 20, 21, X]]
    assert aligned_targets({"input_ids": ids, "labels": ids, "shift_labels": ids}) is ids
    assert aligned_targets({"inputs_embeds": ids}) is None
    assert aligned_targets({"input_ids": None, "labels": None}) is None
