"""Which tokens are where: labels, pack boundaries, temperature, odd lengths, cut layouts, and what is communicated for it."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scoped_patch import Ulysses, UnsupportedError, patched
from scoped_patch.models.sharding import SequenceShard, active_shard
from scoped_patch.ops.sequence_parallel import HeadLayout, count_collectives, shard_length
from tests.support import models as odd_models
from tests.support.checks import run_checks
from tests.support.ranks import spawn
from tests.support.scores import reference, shifted
from tests.support.ulysses import reduced_gradients, take
from tests.support.versions import present
from tests.tiny_models import build


def _ids(*values: int) -> Tensor:
    return torch.tensor([values])


def _targets_of(model: nn.Module, **call: Tensor) -> list[int]:
    """The aligned targets of this rank, as the head is called."""
    seen: list[Tensor | None] = []
    handle = model.lm_head.register_forward_pre_hook(lambda *_: seen.append(active_shard(model).targets))
    try:
        model(**call)
    finally:
        handle.remove()
    (targets,) = seen
    return targets[0].tolist()


def _sharded(world: int, **options: str) -> Ulysses:
    return Ulysses(world, inputs="sharded", **options)


# ---------------------------------------------------------------------------------------------------- labels


def check_labels_are_shifted_over_the_whole_sequence_and_then_cut(rank: int, world: int) -> None:
    model, _ = build("llama")
    with patched(model, sp=_sharded(world), fused="torch") as scope:
        mine = scope.shard({"input_ids": _ids(*range(10, 18))})
        assert _targets_of(model, **mine) == [[11, 12, 13, 14], [15, 16, 17, -100]][rank]
        mine = scope.shard({"input_ids": _ids(*range(10, 18)), "labels": _ids(-100, 31, 32, -100, 34, 35, 36, 37)})
        assert _targets_of(model, **mine) == [[31, 32, -100, 34], [35, 36, 37, -100]][rank]
        # shift_labels are taken as they are
        mine["shift_labels"] = _ids(1, 2, 3, 4)
        assert _targets_of(model, **mine) == [1, 2, 3, 4]


def check_the_last_token_of_a_packed_sample_has_no_target(rank: int, world: int) -> None:
    model, _ = build("llama")
    ids, positions = _ids(10, 11, 12, 20, 21), _ids(0, 1, 2, 0, 1)
    with patched(model, sp=_sharded(world), fused="torch") as scope:
        mine = scope.shard({"input_ids": ids, "position_ids": positions})
        assert _targets_of(model, **mine) == [[11, 12, -100], [21, -100, -100]][rank]  # the last one is padding
    with patched(model, sp=world, fused="torch"):
        out = model(input_ids=ids, position_ids=positions)
    assert (out.log_probs[0] == 0).tolist() == [False, False, True, False, True]


def check_a_mean_over_tokens_is_one_over_all_ranks(rank: int, world: int) -> None:
    """Three labels on rank 0 and one on rank 1, and then none: neither a mean of means nor a NaN."""
    model, _ = build("llama")
    ids = torch.randint(3, 100, (1, 8), generator=torch.Generator().manual_seed(1))
    for labelled in ([1, 2, 3, 6], [1, 2, 3]):
        labels = torch.full_like(ids, -100)
        labels[0, labelled] = ids[0, labelled]
        wanted = model(input_ids=ids, labels=labels, use_cache=False).loss
        wanted.backward()
        gradients = take(model)
        for fused in (None, "torch"):
            for how in ("mean", "sum"):
                with patched(model, sp=_sharded(world, grad_reduction=how), fused=fused) as scope:
                    loss = model(**scope.shard({"input_ids": ids, "labels": labels})).loss
                    loss.backward()
                torch.testing.assert_close(loss, wanted)
                for name, g in reduced_gradients(model, world, how).items():
                    torch.testing.assert_close(g, gradients[name], rtol=1e-4, atol=1e-5)


def check_token_losses_of_2_2_2_and_04_have_the_mean_16(rank: int, world: int) -> None:
    """Not 1.2, the mean of the ranks' means; and where rank 1 has nothing to learn 2, neither 1 nor NaN."""
    model, _ = build("llama")
    losses = torch.tensor([2.0, 2.0, 2.0, 9.0, 0.4, 9.0, 9.0, 9.0])
    ids = torch.randint(3, 100, (1, 8), generator=torch.Generator().manual_seed(1))

    def logits_of_known_loss(module: nn.Module, args: object, out: Tensor) -> Tensor:
        start, end = active_shard(model).bounds()
        made = torch.zeros_like(out)
        for row, t in enumerate(range(start, min(end, 7))):
            others = out.shape[-1] - 1
            made[0, row, ids[0, t + 1]] = torch.log(others / (losses[t].exp() - 1))
        return made + 0 * out

    handle = model.lm_head.register_forward_hook(logits_of_known_loss)
    try:
        for last, wanted in ((ids[0, 5], 1.6), (-100, 2.0)):
            labels = torch.full_like(ids, -100)
            labels[0, 1:4], labels[0, 5] = ids[0, 1:4], last
            for sp in (_sharded(world), _sharded(world, grad_reduction="sum")):
                with patched(model, sp=sp) as scope:
                    loss = model(**scope.shard({"input_ids": ids, "labels": labels})).loss
                    loss.backward()
                assert abs(loss.item() - wanted) < 1e-5, (loss, wanted)
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)


def check_the_caller_can_normalise_a_cut_layout_too(rank: int, world: int) -> None:
    """A local sum over a global count, averaged by the trainer: the gradient is that of one process, not 1/sp of it."""
    model, _ = build("qwen3")
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(2))
    reference(model(input_ids=ids, use_cache=False).logits, shifted(ids)).log_probs.sum().div(14).backward()
    gradients = take(model)
    with patched(model, sp=_sharded(world), fused="torch") as scope:
        out = model(**scope.shard({"input_ids": ids}))
        (out.log_probs.sum() / 14).backward()
    for name, g in reduced_gradients(model, world, "mean").items():
        torch.testing.assert_close(g, gradients[name].float(), rtol=1e-4, atol=1e-5)


def check_a_gathered_result_trains_as_one_process(rank: int, world: int) -> None:
    """The same loss of the whole on every rank; or every rank's own row of it, summed over the ranks."""
    model, _ = build("llama")
    ids = torch.randint(3, 100, (world, 9), generator=torch.Generator().manual_seed(8))
    reference(model(input_ids=ids, use_cache=False).logits, shifted(ids)).log_probs.square().mean().backward()
    gradients = take(model)
    for reduction in ("mean", "sum"):
        for backward in ("slice", "sum"):
            with patched(model, sp=_sharded(world, grad_reduction=reduction), fused="torch") as scope:
                out = model(**scope.shard({"input_ids": ids}))
                whole = scope.gather(out.log_probs, backward=backward)
                rows = whole if backward == "slice" else whole[rank]
                (rows.square().sum() / whole.numel()).backward()
            for name, g in reduced_gradients(model, world, reduction).items():
                torch.testing.assert_close(g, gradients[name].float(), rtol=1e-4, atol=1e-4)


def check_a_tuple_has_the_whole_loss_too(rank: int, world: int) -> None:
    model, _ = build("qwen2")
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        wanted = model(input_ids=ids, labels=ids, use_cache=False).loss
        for fused in (None, "torch"):
            with patched(model, sp=_sharded(world), fused=fused) as scope:
                mine = scope.shard({"input_ids": ids, "labels": ids})
                loss, *others = model(**mine, return_dict=False)
                torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
                assert others[0].shape[:2] == (2, 5)
                model.config.return_dict = False
                try:
                    torch.testing.assert_close(model(**mine)[0], wanted, rtol=1e-5, atol=1e-5)
                finally:
                    model.config.return_dict = True


def check_losses_of_other_kinds_are_refused_in_a_cut_layout(rank: int, world: int) -> None:
    """They are not shifted, or look for places in the whole sequence."""
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(10))
    model = odd_models.token_classifier().eval()
    labels = torch.randint(0, 2, ids.shape, generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        wanted = model(input_ids=ids, labels=labels, use_cache=False)
        with patched(model, sp=world):
            torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, wanted.loss)
        with patched(model, sp=_sharded(world)) as scope:
            with pytest.raises(UnsupportedError, match=r"labels for a loss of kind 'ForTokenClassification'.*inputs='full'"):
                model(**scope.shard({"input_ids": ids, "labels": labels}))
            found = scope.gather(model(**scope.shard({"input_ids": ids})).logits)
            torch.testing.assert_close(found, wanted.logits, rtol=1e-4, atol=1e-4)
    model = odd_models.question_answerer()
    places = {"start_positions": torch.tensor([1, 5]), "end_positions": torch.tensor([2, 7])}
    with torch.no_grad():
        wanted = model(input_ids=ids, **places)
        with patched(model, sp=world):
            torch.testing.assert_close(model(input_ids=ids, **places).loss, wanted.loss)
        with patched(model, sp=_sharded(world)) as scope, pytest.raises(UnsupportedError, match="given start_positions"):
            model(**scope.shard({"input_ids": ids}), **places)
    model = odd_models.sequence_classifier()
    with pytest.raises(UnsupportedError, match=r"LlamaForSequenceClassification.*the last token of its own input"):
        patched(model, sp=_sharded(world)).apply()


def check_padding_is_masked_by_every_mask(rank: int, world: int) -> None:
    model, _ = build("llama")
    ids = _ids(*range(10, 17))
    ones = torch.ones_like(ids)
    masks = {
        "attention_mask": ones,
        "loss_mask": ones.float(),
        "response_mask": ones,
        "action_masks": ones,
        "kept": ones.bool(),
    }
    with patched(model, sp=_sharded(world)) as scope:
        mine = scope.shard({"input_ids": ids, **masks, "advantages": ones.float()})
    for name in masks:
        assert mine[name].tolist() == [[[1, 1, 1, 1], [1, 1, 1, 0]][rank]], name
    assert mine["advantages"].tolist() == [[1, 1, 1, 1]]


# ---------------------------------------------------------------------------------------------------- temperature


def check_temperature_is_cut_with_the_tokens(rank: int, world: int) -> None:
    model, _ = build("qwen2")
    ids = torch.randint(3, 100, (1, 8), generator=torch.Generator().manual_seed(3))
    temperature = torch.tensor([[0.5, 1, 2, 4, 0.5, 1, 2, 4]])
    with torch.no_grad():
        wanted = reference(model(input_ids=ids, use_cache=False).logits, shifted(ids), temperature).log_probs.float()
        with patched(model, sp=world, fused="torch"):
            found = model(input_ids=ids, temperature=temperature).log_probs
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        with patched(model, sp=_sharded(world), fused="torch") as scope:
            mine = scope.shard({"input_ids": ids, "temperature": temperature})
            assert mine["temperature"].tolist() == [[0.5, 1, 2, 4]]
            found = scope.gather(model(**mine).log_probs)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- lengths


def check_odd_and_tiny_lengths_go_in_and_come_out(rank: int, world: int) -> None:
    model, _ = build("mistral")
    for length in (1, 7):
        ids = torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits
            with patched(model, sp=world):
                found = model(input_ids=ids).logits
        assert found.shape[1] == length
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def _57_tokens_on_eight(rank: int, world: int) -> None:
    """Seven ranks have eight tokens and the last has one; 8 heads, so one for each."""
    model, _ = build("llama", num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1)
    ids = torch.randint(3, 100, (1, 57), generator=torch.Generator().manual_seed(57))
    wanted = model(input_ids=ids, labels=ids, use_cache=False)
    wanted.loss.backward()
    gradients = take(model)
    with patched(model, sp=world):
        found = model(input_ids=ids, labels=ids)
        assert found.logits.shape[1] == 57
        found.loss.backward()
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    for name, g in reduced_gradients(model, world, "mean").items():
        torch.testing.assert_close(g, gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_57_tokens_on_eight_ranks():
    spawn(8, _57_tokens_on_eight)


def check_a_length_that_fits_no_layout_is_refused(rank: int, world: int) -> None:
    model, _ = build("llama")
    ids = torch.randint(3, 100, (1, 8))
    half = torch.arange(4)[None]
    with patched(model, sp=world, fused="torch"):
        for name in ("position_ids", "attention_mask", "labels", "shift_labels"):
            with pytest.raises(ValueError, match=rf"{name} has 4 tokens and the input 8.*inputs='sharded'"):
                model(input_ids=ids, **{name: half})
        with pytest.raises(ValueError, match="should have 8 tokens"):
            model(input_ids=ids, temperature=torch.ones(1, 4))
        with pytest.raises(ValueError, match="without input_ids"):
            model(attention_mask=half)
    with patched(model, sp=_sharded(world), fused="torch"):
        for name in ("position_ids", "labels", "shift_labels"):
            with pytest.raises(ValueError, match=rf"{name} has 8 tokens, and this rank's share of the input 4"):
                model(input_ids=ids[:, :4], **{name: torch.arange(8)[None]})
        with pytest.raises(ValueError, match="attention_mask has 6 tokens"):
            model(input_ids=ids[:, :4], attention_mask=torch.ones(1, 6))
        with pytest.raises(ValueError, match="logits_to_keep is not supported"):
            model(input_ids=ids[:, :4], logits_to_keep=2)


def check_a_cut_layout_takes_a_whole_padding_mask_too(rank: int, world: int) -> None:
    model, _ = build("llama")
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        with patched(model, sp=_sharded(world)) as scope:
            found = scope.gather(model(input_ids=ids.chunk(world, 1)[rank], attention_mask=mask).logits)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1, 3:], wanted[1, 3:], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- packed samples


def check_cumulative_lengths_make_samples_for_recurrences(rank: int, world: int) -> None:
    model, _ = build("kimi_linear")
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with torch.no_grad():
        wanted = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split([4, 5], 1)], 1)
        with patched(model, sp=world):
            for call in ({"position_ids": positions}, {"position_ids": positions, "cu_seq_lens_q": lengths}):
                torch.testing.assert_close(model(input_ids=ids, **call).logits, wanted, rtol=1e-4, atol=1e-4)


def check_only_later_ranks_see_a_mixer_that_starts_anew(rank: int, world: int) -> None:
    """Why every rank is checked: cut without a gather, the recurrence is right on rank 0."""
    from scoped_patch.patches.ulysses import seam

    model, _ = build("qwen3_5_text", num_hidden_layers=1, layer_types=["linear_attention"])
    ids = torch.randint(3, 100, (1, 8), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits.chunk(world, 1)[rank]
        with patched(model, sp=world):
            found = model(input_ids=ids).logits.chunk(world, 1)[rank]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        real, seam.mix = seam.mix, lambda prior, shard, module, args, kwargs: prior(*args, **kwargs)
        try:
            with patched(model, sp=world):
                broken = model(input_ids=ids).logits.chunk(world, 1)[rank]
        finally:
            seam.mix = real
    assert torch.allclose(broken, wanted, rtol=1e-4, atol=1e-4) == (rank == 0)


# ---------------------------------------------------------------------------------------------------- communication


def check_collectives_and_bytes(rank: int, world: int) -> None:
    batch, length, layers = 2, 9, 2
    ids = torch.randint(3, 100, (batch, length))
    size = shard_length(length, world)
    model, _ = build("llama")
    with torch.no_grad(), count_collectives() as log, patched(model, sp=world):
        model(input_ids=ids, labels=ids)
    assert Counter(kind for kind, _ in log.calls) == {"all_to_all": 2 * layers, "all_gather": 1}
    assert log.calls[-1] == ("all_gather", batch * size * 64 * 4)  # without a fused head: hidden states
    for family, sp, expected in (
        ("llama", Ulysses(world), {"all_to_all": 2 * layers, "all_gather": 1}),
        ("qwen3_moe", Ulysses(world), {"all_to_all": 2 * layers, "all_gather": 1}),
        ("llama", _sharded(world), {"all_to_all": 2 * layers, "all_gather": 1}),
    ):
        model, _ = build(family)
        layout = HeadLayout(4, 2, world)
        exchanged, returned = layout.elements(batch * size, 16, 16)
        with count_collectives() as log, patched(model, sp=sp, fused="torch") as scope:
            out = model(**(scope.shard({"input_ids": ids}) if sp.inputs == "sharded" else {"input_ids": ids}))
            assert Counter(kind for kind, _ in log.calls) == expected, (family, sp.inputs, log.calls)
            assert log.bytes("all_to_all") == 4 * layers * (exchanged + returned)
            if sp.inputs == "full":  # log_probs and entropy, fp32
                assert log.calls[-1] == ("all_gather", batch * size * 2 * 4)
            else:  # position ids and labels, int64
                assert log.calls[0] == ("all_gather", 2 * batch * size * 8)
            forward = len(log.calls)
            out.log_probs.sum().backward()
        backward = Counter(kind for kind, _ in log.calls[forward:])
        assert backward == {"all_to_all": 2 * layers, **({"reduce_scatter": 1} if sp.inputs == "full" else {})}
        assert sum(b for kind, b in log.calls[forward:] if kind == "all_to_all") == 4 * layers * (exchanged + returned)


def check_router_logits_and_recurrences_are_counted_apart(rank: int, world: int) -> None:
    ids = torch.randint(3, 100, (1, 8))
    with torch.no_grad(), count_collectives() as log:
        model, _ = build("qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[])
        with patched(model, sp=world, fused="torch"):
            out = model(input_ids=ids, labels=ids, output_router_logits=True)
        assert [list(x.shape) for x in out.router_logits] == [[8, 4]] * 2
        assert Counter(kind for kind, _ in log.calls) == {"all_to_all": 4, "all_gather": 2}  # both layers' in one
        log.calls.clear()
        model, _ = build("qwen3_5_text")  # one recurrent layer, one softmax attention
        with patched(model, sp=world, fused="torch"):
            model(input_ids=ids)
        assert Counter(kind for kind, _ in log.calls) == {"all_to_all": 2, "all_gather": 2}


def check_nothing_of_the_whole_sequence_is_kept(rank: int, world: int) -> None:
    """Inside the layers there is no [B, S, H] tensor, and no [S, S] mask where the implementation can do without."""
    length = 61
    ids = torch.randint(3, 100, (1, length))
    for family in present(("llama", "gemma4_text")):
        model, _ = build(family, sliding_window=512)
        found: list[list[int]] = []

        def look(module: nn.Module, args: object, out: object, found: list[list[int]] = found) -> None:
            tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.is_floating_point()]
            shapes = [list(x.shape) for x in tensors if x._base is None or x._base.numel() >= length * 64]
            found.extend(s for s in shapes if len(s) == 3 and s[1] >= length and s[2] >= 64)
            masks = [list(x.shape) for x in gc.get_objects() if type(x) is Tensor and x.ndim == 4]
            found.extend(s for s in masks if s[-2:] == [length, length])

        handle = model.get_decoder().layers[1].register_forward_hook(look)
        model(input_ids=ids, use_cache=False)
        assert found, "the look around finds nothing even in the unpatched model"
        found.clear()
        gc.collect()
        with patched(model, sp=world, fused="torch"):
            out = model(input_ids=ids)
        handle.remove()
        assert out.log_probs.shape == (1, length)
        assert not found, (family, found)


CHECKS = [name for name in dir() if name.startswith("check_")]


def test_layouts_on_two_ranks():
    run_checks(__name__, CHECKS, 2)


# ---------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("ids", "boundaries"),
    [
        (torch.arange(4).expand(3, 1, 4), None),  # three axes of one row are not three rows
        (_ids(0, 1, 2, 2, 2, 2, 4, 5), None),  # an image stands still and jumps, and is one sample
        (_ids(3, 4, 5, 0, 1), [0, 3, 5]),
        (_ids(0, 1, 2, 0, 1, 0), [0, 3, 5, 6]),
        (_ids(0, 1, 2, 0, 1).expand(4, 1, 5), [0, 3, 5]),
    ],
)
def test_pack_boundaries(ids, boundaries):
    shard = SequenceShard(nn.Identity(), None, ids.shape[-1])
    shard.position_ids = ids
    samples = shard.samples()
    assert (None if samples is None else samples[0].tolist()) == boundaries


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "kimi_linear"])
def test_one_rank_is_the_model_itself_and_starts_recurrences_anew(family):
    assert not dist.is_initialized()
    model, _ = build(family)
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split([4, 5], 1)]
    with patched(model, sp=1, fused="torch"):
        out = model(input_ids=ids, position_ids=positions)
    with patched(model, sp=1):
        logits = model(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(logits, torch.cat(parts, 1), rtol=1e-4, atol=1e-4)
    wanted = reference(torch.cat(parts, 1), torch.tensor([[*ids[0, 1:4], -100, *ids[0, 5:], -100]])).log_probs
    torch.testing.assert_close(out.log_probs, wanted.float(), rtol=1e-4, atol=1e-4)
