"""Promises that hold whatever is patched: what files and copies hold, classes beside instances, nothing silently unused."""

from __future__ import annotations

import copy
import copyreg
import json
import pickle
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList

from scoped_patch import (
    BadOptionError,
    SeamNotReachedError,
    UnsupportedError,
    assert_clean,
    patched,
    replace_attribute,
    wrap_call,
)
from tests.tiny_models import build


def plus(amount):
    return lambda original, *args, **kwargs: original(*args, **kwargs) + amount


@pytest.fixture
def llama():
    model, inputs = build("llama", batch=2)
    model.eval()
    yield model, inputs["input_ids"]
    assert_clean()


def test_files_and_copies_hold_the_unpatched_weights_children_and_config(llama, tmp_path):
    model, ids = llama
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    other = copy.deepcopy(model.model.layers[1].mlp)
    eps = model.config.rms_norm_eps
    changes = (
        replace_attribute(model.lm_head, "weight", nn.Parameter(torch.zeros_like(model.lm_head.weight))),
        replace_attribute(model.model.layers[0], "mlp", other),
        replace_attribute(model.config, "rms_norm_eps", 9.0),
    )
    with patched(model, *changes):
        assert model.lm_head.weight.abs().sum() == 0
        model.save_pretrained(tmp_path)
        twin, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert model.lm_head.weight.abs().sum() == 0
    saved = load_file(tmp_path / "model.safetensors")
    for held in (saved, twin.state_dict(), read.state_dict()):
        assert all(torch.equal(held[name], value) for name, value in weights.items())
    assert json.loads((tmp_path / "config.json").read_text())["rms_norm_eps"] == eps
    assert twin.config.rms_norm_eps == read.config.rms_norm_eps == eps
    assert torch.equal(twin(ids).logits, model(ids).logits)
    assert type(model.config) not in copyreg.dispatch_table


class Plain:
    def __init__(self):
        self.value = 1

    def read(self):
        return self.value


def test_a_copy_of_any_object_is_unpatched_and_has_its_own_state():
    thing, bystander = Plain(), Plain()
    with patched(wrap_call(thing, "read", plus(1))):
        copies = [copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing)), copy.deepcopy(bystander)]
        assert thing.read() == 2
        assert "__getstate__" not in vars(thing)
    for one in copies:
        one.value = 10
        assert one.read() == 10
        assert vars(one) == {"value": 10}
    assert Plain not in copyreg.dispatch_table


def test_a_class_and_its_instances_may_be_patched_and_left_in_any_order():
    class Base:
        def f(self):
            return 0

    class Child(Base):
        pass

    thing = Child()
    on_base, on_child, on_thing = (wrap_call(o, "f", plus(n)) for o, n in ((Base, 1), (Child, 10), (thing, 100)))
    import itertools

    for entering in itertools.permutations((on_base, on_child, on_thing)):
        with patched(*entering):
            assert thing.f() == 111
        for leaving in itertools.permutations(range(3)):
            sessions = [patched(one).apply() for one in entering]
            left = 111
            for position in leaving:
                sessions[position].restore()
                left -= {on_base: 1, on_child: 10, on_thing: 100}[entering[position]]
                assert thing.f() == left
    assert vars(thing) == {}
    assert "f" not in vars(Child)


def test_a_loss_function_of_the_users_own_is_refused_by_name(llama):
    model, ids = llama

    def smoothed(logits, labels, **kwargs):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)

    model.loss_function = smoothed
    with patched(model, fused="torch"):
        with pytest.raises(UnsupportedError, match="smoothed"):
            model(input_ids=ids, labels=ids)
        assert model(input_ids=ids).log_probs.shape == ids.shape  # without labels there is no loss to make
    assert model.loss_function is smoothed


def test_a_scope_whose_head_was_only_used_past_it_raises_on_leaving(llama):
    model, ids = llama
    kept = model.forward
    for past in (lambda: kept(input_ids=ids), lambda: model.lm_head(model.model(input_ids=ids).last_hidden_state)):
        session = patched(model, fused="torch").apply()
        past()
        with pytest.raises(SeamNotReachedError, match="nothing was scored"):
            session.restore()
    with patched(model, fused="torch"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    with patched(model, fused="torch"):
        pass


def test_the_classs_own_forward_inside_a_scope_gives_its_own_loss(llama):
    model, ids = llama
    expected = model(input_ids=ids, labels=ids).loss
    with patched(model, fused="torch"):
        model(input_ids=ids)
        assert torch.equal(type(model).forward(model, input_ids=ids, labels=ids).loss, expected)


def test_generating_in_one_thread_leaves_the_scope_on_in_another(llama):
    model, ids = llama
    inside, go_on = threading.Event(), threading.Event()

    class Waits(LogitsProcessor):
        def __call__(self, input_ids, scores):
            inside.set()
            assert go_on.wait(30)
            return scores

    with patched(model, fused="torch"):
        expected = model(input_ids=ids, labels=ids)
        options = {"max_new_tokens": 1, "do_sample": False, "logits_processor": LogitsProcessorList([Waits()])}
        worker = threading.Thread(target=model.generate, args=(ids,), kwargs=options)
        worker.start()
        assert inside.wait(30)
        out = model(input_ids=ids, labels=ids)
        go_on.set()
        worker.join()
    assert torch.equal(out.log_probs, expected.log_probs)
    assert torch.equal(out.loss, expected.loss)


def test_a_head_wrapped_inside_the_scope_is_refused_by_name_and_fine_on_re_entry(llama):
    model, ids = llama
    step = patched(model, fused="torch")
    with step:
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"]))
        with pytest.raises(UnsupportedError, match="replaced by a Linear while the scope was live"):
            adapted(input_ids=ids)
    with step:
        assert adapted(input_ids=ids).log_probs.shape == ids.shape


@pytest.mark.parametrize("values", [[0.0, 1.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_temperatures_that_divide_nothing_are_refused(llama, values):
    model, ids = llama
    with patched(model, fused="torch"), pytest.raises(BadOptionError, match="must be > 0"):
        model(input_ids=ids, temperature=torch.tensor(values))


def test_compiled_calls_are_not_called_never(llama):
    model, ids = llama
    compiled = torch.compile(model, backend="eager")
    with patched(model, fused="torch") as scope:
        compiled(input_ids=ids, use_cache=False)
    text = str(scope.explain())
    assert "compiled" in text
    assert "0 !" not in text


def test_a_sum_over_items_is_not_the_mean(llama):
    model, ids = llama
    labels = ids.clone()
    labels[:, :5] = -100
    for items in (7, torch.tensor(29)):
        expected = model(input_ids=ids, labels=labels, num_items_in_batch=items).loss
        with patched(model, fused="torch"):
            found = model(input_ids=ids, labels=labels, num_items_in_batch=items).loss
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_optimizer_made_before_trains_the_patched_model(llama):
    model, ids = llama
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    for _ in range(2):
        with patched(model, fused="torch"):
            model(input_ids=ids, labels=ids).loss.backward()
        twin(input_ids=ids, labels=ids).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
