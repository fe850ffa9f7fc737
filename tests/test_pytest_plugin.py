"""The pytest plugin: the fixture, and the sweep that catches a leak planted in each of its ways."""

from __future__ import annotations

import importlib

import pytest

# pytester forgets what was imported inside it, and torch cannot be imported twice in one process.
for name in ("scoped_patch", "scoped_patch.leaks", "scoped_patch.pytest_plugin", "transformers.models.llama.modeling_llama"):
    importlib.import_module(name)

pytest_plugins = ["pytester"]

# A model that exists before the tests, as a module's own or a session fixture's does.
HEAD = """
import pytest, torch
from torch import nn
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from scoped_patch import active, patched, replace_attribute, wrap_call

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mlp, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.mlp(self.first(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x):
        return self.layers[0](x)

MODEL = Model()

def mine(*args, **kwargs):
    return "mine"

"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run tests in this process, with the model library already imported."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run_tests(body, *options, ini=""):
        pytester.makefile(".ini", pytest=f"[pytest]\n{ini}")
        pytester.makepyfile(HEAD + body)
        return pytester.runpytest_inprocess("-p", "scoped_patch.pytest_plugin", *options)

    return run_tests


LEAKS = {
    "live scope": (
        "patched(MODEL, wrap_call(MODEL.layers[0], 'forward', lambda f, x: f(x))).apply()",
        "assert not active() and 'forward' not in MODEL.layers[0].__dict__",
        "a live scope: <Session wrap *, entered at *.py:*>",
    ),
    "instance forward": (
        "MODEL.layers[0].mlp.forward = mine",
        "assert 'forward' not in MODEL.layers[0].mlp.__dict__",
        "the forward of the instance Model.layers.0.mlp: was the class's, is *.mine",
    ),
    "class forward": (
        "Block.forward = mine",
        "assert Block.forward.__qualname__ == 'Block.forward'",
        "the forward of the class *.Block: was *.Block.forward, is *.mine",
    ),
    "inherited class forward": (
        "transformers.LlamaForSequenceClassification.forward = mine",
        "assert 'forward' not in vars(transformers.LlamaForSequenceClassification)",
        "the forward of the class *LlamaForSequenceClassification: was inherited, is *.mine",
    ),
    "attention registry, replaced": (
        "ALL_ATTENTION_FUNCTIONS['sdpa'] = mine",
        "assert ALL_ATTENTION_FUNCTIONS['sdpa'] is not mine and 'sdpa' not in ALL_ATTENTION_FUNCTIONS._local_mapping",
        "the entry 'sdpa' of transformers' attention registry: was no entry, is *.mine",
    ),
    "attention registry, added": (
        "transformers.AttentionInterface.register('mine', mine)",
        "assert 'mine' not in ALL_ATTENTION_FUNCTIONS",
        "the entry 'mine' of transformers' attention registry: was no entry, is *.mine",
    ),
    "attention registry, deleted": (
        "del ALL_ATTENTION_FUNCTIONS._global_mapping['sdpa']",
        "assert 'sdpa' in ALL_ATTENTION_FUNCTIONS",
        "the entry 'sdpa' of transformers' attention registry: was *sdpa_attention_forward, is no entry",
    ),
    "mask registry": (
        "ALL_MASK_ATTENTION_FUNCTIONS['sdpa'] = mine",
        "assert ALL_MASK_ATTENTION_FUNCTIONS['sdpa'] is not mine",
        "the entry 'sdpa' of transformers' mask registry: was no entry, is *.mine",
    ),
    "module global": (
        "modeling_llama.apply_rotary_pos_emb = mine",
        "assert modeling_llama.apply_rotary_pos_emb is not mine",
        "the module global transformers.models.llama.modeling_llama.apply_rotary_pos_emb: was *, is *.mine",
    ),
    "child module": (
        "MODEL.layers[0].mlp = nn.Identity()",
        "assert list(dict(MODEL.layers[0].named_children())) == ['first', 'mlp', 'last']"
        " and type(MODEL.layers[0].mlp) is nn.Linear",
        "the child module Model.layers.0.mlp: was Linear, is Identity",
    ),
    "child module, deleted and added": (
        "del MODEL.layers[0].first; MODEL.layers[0].more = nn.Identity()",
        "assert list(dict(MODEL.layers[0].named_children())) == ['first', 'mlp', 'last']",
        "the child module Model.layers.0.more: was missing, is Identity",
    ),
}


@pytest.mark.parametrize("way", LEAKS)
def test_a_planted_leak_fails_its_test_is_named_and_put_back(run, way):
    leak, clean, message = LEAKS[way]
    result = run(
        f"""
def test_leaks():
    {leak}

def test_next():
    {clean}
""",
        "--patch-leaks",
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks*", "this test left patches behind*", f"  - {message}"])


def test_it_is_off_by_default(run):
    result = run(
        "def test_leaks():\n    MODEL.layers[0].forward = mine\n\ndef test_next():\n    assert MODEL.layers[0](1) == 'mine'"
    )
    result.assert_outcomes(passed=2)


def test_it_can_be_switched_on_in_the_configuration(run):
    result = run("def test_leaks():\n    MODEL.layers[0].forward = mine", ini="patch_leaks = true")
    result.assert_outcomes(passed=1, errors=1)


def test_what_is_undone_is_no_leak(run):
    """By a scope, a fixture of the test, monkeypatch, or by hand."""
    result = run(
        """
@pytest.fixture
def changed(monkeypatch):
    monkeypatch.setattr(MODEL.layers[0], "forward", mine)
    monkeypatch.setattr(Block, "forward", mine)
    child, MODEL.layers[0].mlp = MODEL.layers[0].mlp, nn.Identity()
    yield
    MODEL.layers[0].mlp = child

def test_fixture(changed):
    assert MODEL(1) == "mine"

def test_scope():
    with patched(replace_attribute(modeling_llama, "apply_rotary_pos_emb", mine), replace_attribute(Block, "forward", mine)):
        assert modeling_llama.apply_rotary_pos_emb is mine

def test_by_hand(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", mine)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", mine)
""",
        "--patch-leaks",
    )
    result.assert_outcomes(passed=3)


def test_what_a_module_patches_for_all_its_tests_is_no_leak_of_one(run):
    result = run(
        """
@pytest.fixture(scope="module")
def for_all():
    scope = patched(MODEL, wrap_call(MODEL, "forward", lambda original, x: "scope")).apply()
    Block.forward, original = mine, Block.forward
    yield
    Block.forward = original
    scope.restore()

def test_first(for_all):
    assert MODEL(1) == "scope"

def test_second(for_all):
    assert MODEL(1) == "scope" and MODEL.layers[0](1) == "mine"
""",
        "--patch-leaks",
    )
    result.assert_outcomes(passed=2)


def test_what_is_made_in_a_test_is_its_own(run):
    """New models, classes and modules may be as they like; a model of the test that lives on is no other test's."""
    result = run(
        """
KEPT = []

def test_makes():
    model = Model()
    model.forward = mine
    model.layers[0].mlp = nn.Identity()
    KEPT.append(model)

    class Late(nn.Linear):
        pass

    Late.forward = mine
    KEPT.append(Late)
    from transformers.models.mistral import modeling_mistral

def test_next():
    assert KEPT[0](1) == "mine"
""",
        "--patch-leaks",
    )
    result.assert_outcomes(passed=2)


def test_several_leaks_come_together_and_a_failing_test_is_swept_too(run):
    result = run(
        """
def test_leaks():
    Block.forward = mine
    MODEL.layers[0].mlp.forward = mine
    patched(replace_attribute(modeling_llama, "rotate_half", mine)).apply()
    assert False

def test_next():
    assert not active() and modeling_llama.rotate_half is not mine
""",
        "--patch-leaks",
    )
    result.assert_outcomes(failed=1, passed=1, errors=1)
    result.stdout.fnmatch_lines(["  - a live scope: *", "  - the forward of the instance *", "  - the forward of the class *"])


def test_packages_of_ones_own_are_watched(run, pytester):
    pytester.makepyfile(my_package="def compute():\n    return 1\n")
    body = """
import my_package

def test_leaks():
    my_package.compute = mine

def test_next():
    assert my_package.compute() == 1
"""
    pytester.syspathinsert()
    result = run(body, "--patch-leaks", ini="patch_leak_packages = my_package")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["  - the module global my_package.compute: was my_package.compute, is *.mine"])


def test_memory_is_searched_once_for_a_file_and_after_each_fixture_that_outlives_a_test(run, monkeypatch):
    """The search takes a tenth of a second; it finds the models that such a fixture made, whichever test asks for it first."""
    from scoped_patch import leaks

    searches = []
    search = leaks._instances
    monkeypatch.setattr(leaks, "_instances", lambda classes: searches.append(len(classes)) or search(classes))
    result = run(
        """
@pytest.fixture(scope="module")
def late():
    return Model()

@pytest.mark.parametrize("_", range(5))
def test_clean(_):
    assert MODEL.layers

def test_leaks(late):
    late.layers[0].mlp.forward = mine
    MODEL.layers[0].last = nn.Identity()
    modeling_llama.rotate_half = mine

def test_next(late):
    assert "forward" not in vars(late.layers[0].mlp) and type(MODEL.layers[0].last) is nn.Linear
    assert modeling_llama.rotate_half is not mine
    late.layers[0].mlp.forward = mine

def test_last(late):
    assert "forward" not in vars(late.layers[0].mlp)
""",
        "--patch-leaks",
    )
    result.assert_outcomes(passed=8, errors=2)
    assert len(searches) == 2


def test_a_module_imported_by_one_test_is_watched_in_the_next(run, pytester):
    pytester.makepyfile(my_late_package="def compute():\n    return 1\n")
    pytester.syspathinsert()
    body = """
def test_imports():
    import my_late_package

def test_leaks():
    import my_late_package
    my_late_package.compute = mine

def test_next():
    import my_late_package
    assert my_late_package.compute() == 1
"""
    result = run(body, "--patch-leaks", ini="patch_leak_packages = my_late_package")
    result.assert_outcomes(passed=3, errors=1)


def test_what_packages_change_themselves_can_be_ignored(run):
    body = """
def test_leaks():
    modeling_llama.rotate_half = mine
    modeling_llama.__compiled_fn_1 = mine  # as compilers do

def test_next():
    assert modeling_llama.rotate_half is mine
    del modeling_llama.__compiled_fn_1
    modeling_llama.apply_rotary_pos_emb = mine
"""
    from transformers.models.llama import modeling_llama

    before = modeling_llama.rotate_half
    try:
        result = run(body, "--patch-leaks", ini="patch_leak_ignore = other.* transformers.models.llama.*.rotate_h*")
    finally:
        modeling_llama.rotate_half = before
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_next*"])


def test_the_sweep_is_on_for_the_tests_of_this_project(request):
    assert request.config.pluginmanager.has_plugin("scoped_patch_leaks")
    assert "_scoped_patch_leak_sweep" in request.fixturenames


# ------------------------------------------------------------------------------------------------- the fixture
def test_the_fixture_enters_until_the_end_of_the_test(run):
    result = run(
        """
def test_patched(patched_scope):
    outer = patched_scope(MODEL, wrap_call(MODEL, "forward", lambda original, x: "outer"))
    assert MODEL(1) == "outer" and outer.state == "live"
    inner = patched_scope(MODEL, wrap_call(MODEL, "forward", lambda original, x: "inner"))
    assert MODEL(1) == "inner" and active() == [outer, inner]

def test_next(patched_scope):
    assert not active() and "forward" not in MODEL.__dict__
""",
        "--patch-leaks",
    )
    result.assert_outcomes(passed=2)


def test_the_fixture_reports_what_leaving_reports(run):
    result = run(
        """
def test_overwrites(patched_scope):
    patched_scope(MODEL, wrap_call(MODEL, "forward", lambda original, x: "mine"))
    MODEL.forward = mine

def test_next():
    MODEL.__dict__.pop("forward", None)
"""
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ForeignOverwriteError*Model@*forward was changed by somebody else*"])


def test_entry_point():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"scoped_patch.pytest_plugin": "scoped_patch.pytest_plugin"}
