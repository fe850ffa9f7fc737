"""The command line: true edits, one-line errors with a hint, exit codes."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig

from scoped_patch import patched
from scoped_patch.cli import FAILED, OK, USAGE, main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_explain_lists_the_edits_of_a_model_type(capsys):
    code, out, _ = run(capsys, "explain", "qwen3", "--fused", "triton", "--json")
    data = json.loads(out)
    assert code == OK
    assert {row["where"] for row in data["edits"]} >= {"lm_head.forward", "Qwen3ForCausalLM.forward"}
    assert "linear cross entropy (triton)" in {row["to"] for row in data["edits"]}


def test_explain_without_options_says_what_the_model_can_take(capsys, monkeypatch):
    code, out, _ = run(capsys, "explain", "bert")
    assert code == OK
    assert out.startswith("Nothing was asked for, so nothing would change. What BertLMHeadModel can take:\n")
    assert re.search(r"^  --fused torch +yes$", out, re.MULTILINE)
    assert re.search(r"^  --tiled-mlp 4 +no: tiled_mlp: BertLMHeadModel .* has no text decoder", out, re.MULTILINE)
    assert out.endswith("Give one or more of them to see the edits.\n")
    code, out, _ = run(capsys, "explain", "llama", "--json")
    assert code == OK
    data = json.loads(out)
    assert data["edits"] == []
    assert set(data["can_take"].values()) == {"yes"}
    # each answer is that of the option given alone
    code, _, err = run(capsys, "explain", "bert", "--tiled-mlp", "4")
    assert code == FAILED
    assert "tiled_mlp: BertLMHeadModel" in err
    monkeypatch.setattr("scoped_patch.cli._offered", lambda: {"tiled_mlp", "sp"})
    code, out, _ = run(capsys, "explain", "bert")
    assert code == FAILED
    assert "yes" not in out
    assert "Give one" not in out


def test_explain_needs_no_process_group(capsys):
    started = time.process_time()
    code, out, err = run(capsys, "explain", "qwen3", "--sp", "4", "--fused", "torch", "--tiled-mlp", "8", "--json")
    took = time.process_time() - started
    assert (code, err) == (OK, "")
    edits = json.loads(out)["edits"]
    where = {(edit["patch"], edit["where"]) for edit in edits}
    assert {("ulysses", "model.forward"), ("fused_head", "lm_head.forward")} <= where
    assert any(patch == "ulysses" and ".self_attn.config (x32)" in place for patch, place in where)
    assert any(patch == "tiled_mlp" and ".mlp.forward (x32)" in place for patch, place in where)
    assert took < 5


def test_explain_reads_a_folder_and_a_file(capsys, tmp_path):
    LlamaConfig(num_hidden_layers=2, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        code, out, _ = run(capsys, "explain", str(place), "--fused", "torch")
        assert code == OK
        assert "fused_head" in out


def test_the_edits_are_those_of_a_scope(capsys):
    """What is printed is what entering does, row by row."""
    from tests.tiny_models import build

    code, out, _ = run(capsys, "explain", "qwen3", "--fused", "triton", "--tiled-mlp", "8", "--full", "--json")
    assert code == OK
    printed = {row["where"] for row in json.loads(out)["edits"] if row["patch"] != "checkpoint_replay"}
    model, _ = build("qwen3")
    with patched(model, fused="triton", tiled_mlp=8) as scope:
        found = {record["where"] for record in scope.diff() if record["patch"] != "checkpoint_replay"}
    layers = {where for where in printed if re.search(r"layers\.([2-9]|\d\d)\.", where)}
    assert len(layers) == 30  # the default qwen3 has 32 layers, the tiny one two
    assert printed - layers == found


def test_the_edits_are_those_of_a_scope_over_four_ranks(capsys, tmp_path):
    """The same for `sp=`, row by row and in words, on one rank of a group that has no others: entering sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.tiny_models import build

    model, _ = build("qwen3", num_attention_heads=4)
    model.config.save_pretrained(tmp_path)
    options = ("--sp", "4", "--fused", "triton", "--tiled-mlp", "8", "--full", "--json")
    code, out, _ = run(capsys, "explain", str(tmp_path), *options)
    assert code == OK
    words = ("patch", "where", "to", "why")
    printed = [[row[word] for word in words] for row in json.loads(out)["edits"]]
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with patched(model, sp=4, fused="triton", tiled_mlp=8) as scope:
            entered = [[*row.cells(False)[:2], *row.cells(False)[3:5]] for row in scope.explain(full=True).rows]
    finally:
        dist.destroy_process_group()

    def without_its_own_name(rows):  # a registry entry is named after the scope that it belongs to
        return sorted(tuple(re.sub(r"ulysses_sdpa_[0-9a-f]+", "ulysses_sdpa", cell) for cell in row) for row in rows)

    assert len(printed) > 15
    assert without_its_own_name(printed) == without_its_own_name(entered)


def test_piped_output_is_whole_lines(capsys):
    code, out, _ = run(capsys, "explain", "qwen3", "--fused", "torch", "--fake-quant", "w4a16")
    assert code == OK
    assert re.search(r"^fused_head  Qwen3ForCausalLM\.forward .*adds log_probs and entropy", out, flags=re.MULTILINE)
    assert re.search(r"^fake_quant  model\.layers\.\*\.mlp\.up_proj\.forward \(x32\)", out, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["explain", "qwen33"], USAGE, "did you mean qwen3"),
        (["explain", "./no/such/folder"], USAGE, "there is no no/such/folder"),
        (["explain", "Qwen/Qwen3-8B"], USAGE, "nothing is downloaded"),
        (["explain", "qwen3", "--fusd", "torch"], USAGE, "did you mean --fused?"),
        (["explain", "qwen3", "--what", "torch"], USAGE, "options are --sp, --fused"),
        (["explain", "qwen3", "--fused", "tritn"], FAILED, "'auto', 'torch' or 'triton'"),
        (["explain", "qwen3", "--tiled-mlp", "many"], USAGE, "invalid int value: 'many'; `scoped-patch explain --help`"),
        (["explain", "qwen3", "--tiled-mlp", "0"], FAILED, "number of tiles must be an int of at least 1"),
        (["explain", "qwen3", "--fake-quant", "int4"], FAILED, "'w4a16', 'w4a4'"),
        (
            ["explain", "t5", "--fused", "torch"],
            USAGE,
            "no causal language model, and nothing here acts on it; `scoped-patch list`",
        ),
        (["explain", "qwen3", "more"], USAGE, "unrecognized arguments: more; `scoped-patch --help`"),
        (["--json", "list"], USAGE, "unrecognized arguments: --json; give it after the command"),
        (["explain"], USAGE, "MODEL; give a model's folder"),
        (["nonsense"], USAGE, "invalid choice"),
        ([], USAGE, "required: COMMAND; `scoped-patch --help`"),
    ],
)
def test_mistakes_give_one_line_and_a_hint(capsys, arguments, code, said):
    for output in ([], ["--json"]) if arguments and arguments[0] == "explain" else ([],):
        got, out, err = run(capsys, *arguments, *output)
        assert got == code
        assert said in err
        assert not out
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"{ not json",
        b"\x80\x81\x82",
        b"[]",
        b"{}",
        b'{"model_type": "no_such_type"}',
        b'{"model_type": "qwen3", "hidden_size": "wide"}',
        b'{"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 0}',
        b'{"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MyConfig"}}',
    ],
)
def test_an_unreadable_config_is_named(capsys, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    code, out, err = run(capsys, "explain", str(tmp_path), "--fused", "torch")
    assert code == USAGE
    assert "cannot be read as a model's config" in err or "cannot be built from the config" in err
    assert str(tmp_path) in err
    assert not out
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("named", [["NoSuchModel"], [3], [None, "AutoConfig", "utils"], "Qwen3ForCausalLM", 3, {"a": 1}, []])
def test_what_a_config_names_that_is_no_model_is_passed_over(capsys, tmp_path, named):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2, "architectures": named}))
    code, out, err = run(capsys, "explain", str(file), "--fused", "torch")
    if code == OK:
        assert "plan for Qwen3ForCausalLM" in out
    else:  # transformers itself may refuse it
        assert "cannot be read as a model's config" in err
        assert len(err.strip().splitlines()) == 1


def test_a_reason_in_more_than_one_line_is_given(capsys, monkeypatch, tmp_path):
    import transformers

    def refuse(*_, **__):
        raise ValueError("Class validation error for validator 'sizes':\n    ValueError: too wide.\n  More lines")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    code, _, err = run(capsys, "explain", str(tmp_path), "--fused", "torch")
    assert code == USAGE
    assert "Class validation error for validator 'sizes': ValueError: too wide; give a model's folder" in err
    assert len(err.strip().splitlines()) == 1


def test_a_folder_that_may_not_be_read(capsys, monkeypatch, tmp_path):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", denied)
    code, _, err = run(capsys, "explain", f"{tmp_path}/config.json")
    assert code == USAGE
    assert "Permission denied" in err
    assert len(err.strip().splitlines()) == 1


def test_exit_codes_are_documented(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit codes: 0 all is well; 1" in " ".join(capsys.readouterr().out.split())


def test_doctor_and_list_print_tables_for_people(capsys, monkeypatch):
    """In tables as wide as what is in them; with --json the same as data."""
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "doctor")
    assert code == OK
    assert "0 problems: nothing to do" in out
    assert re.search(r"transformers\W+\d+\.\d+", out)
    assert re.search(r"GradientCheckpointingLayer\W+recomputation as it ran\W+ok", out)
    monkeypatch.setattr("scoped_patch.doctor._required", lambda: {"rich": ">=99"})
    monkeypatch.setattr("scoped_patch.doctor.TARGETS", (("json:no_such_name", "this test"),))
    code, out, _ = run(capsys, "doctor")
    assert code == FAILED
    assert "2 problems: install versions inside the ranges above" in out
    assert re.search(r"rich\W+\d\S+\W+>=99\W+out of range", out)
    assert re.search(r"json:no_such_name\W+this test\W+.*no_such_name", out)
    monkeypatch.setattr("scoped_patch.cli.FAMILIES", ("llama", "qwen3_5_text", "no_such_family"))
    code, out, _ = run(capsys, "list")
    assert code == OK
    assert re.search(r"llama\W+yes\W+yes", out)
    assert re.search(r"qwen3_5_text\W+yes\W+yes\W+yes\W+no \(1\)\W+yes", out)
    assert re.search(r"^\(1\) prefix_grouper: layer 0 of Qwen3_5ForCausalLM .* whose state runs", out, re.MULTILINE)
    assert re.search(r"no_such_family\W+not in this transformers", out)


def test_doctor_without_our_own_metadata_or_a_needed_package(capsys, monkeypatch):
    """As in a checkout that is on the path but not installed."""
    import importlib.metadata

    version = importlib.metadata.version

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: absent(name) if name in ("wrapt", "trl") else version(name))
    code, out, _ = run(capsys, "doctor", "--json")
    packages = json.loads(out)["packages"]
    assert code == FAILED
    assert packages["wrapt"] == {"version": "", "wanted": "any, optional", "ok": False}
    assert packages["trl"]["ok"]
    assert packages["torch"]["wanted"] == "any"


def test_a_reader_that_has_seen_enough_is_no_error():
    """`scoped-patch explain ... | head -1`: nothing on the error stream, and an exit code of 0."""
    command = [sys.executable, "-m", "scoped_patch", "explain", "llama", "--tiled-mlp", "2", "--full"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(120), errors) == (OK, b"")


def test_the_program_ends_at_once_but_runs_what_was_registered_to_run_at_the_end():
    code = "import atexit, sys; from scoped_patch.__main__ import program\n"
    code += "atexit.register(lambda: print('registered')); sys.argv[1:] = ['explain']\n"
    code += "try: program()\nfinally: print('never')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (USAGE, "registered\n")
    assert done.stderr.startswith("scoped-patch: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_it_costs_little_more_than_importing_the_model():
    """Seconds of processor time, since a machine may be busy: ours against a bare import of what has to be imported."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=240)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    bare = seconds("-c", "import torch, transformers; transformers.Qwen3ForCausalLM")
    ours = seconds("-m", "scoped_patch", "explain", "qwen3", "--fused", "triton", "--tiled-mlp", "8")
    assert ours < 1.25 * bare, f"{ours:.1f} s, a bare import {bare:.1f} s"


def test_doctor_finds_everything_here(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    data = json.loads(out)
    assert code == OK
    assert data["ok"]
    assert data["packages"]["transformers"]["version"]
    assert all(target["problem"] is None for target in data["targets"].values())


def test_doctor_names_what_is_missing(capsys, monkeypatch):
    import transformers.modeling_utils as upstream

    monkeypatch.delattr(upstream.PreTrainedModel, "loss_function")
    code, out, _ = run(capsys, "doctor", "--json")
    data = json.loads(out)
    assert code == FAILED
    assert "loss_function" in data["targets"]["transformers.modeling_utils:PreTrainedModel.loss_function"]["problem"]


def test_list_plans_on_the_installed_families(capsys, monkeypatch):
    monkeypatch.setattr("scoped_patch.cli.FAMILIES", ("llama", "no_such_family"))
    code, out, _ = run(capsys, "list", "--json")
    families = json.loads(out)["families"]
    assert code == OK
    assert families["llama"]["fused"] == "yes"
    assert families["no_such_family"]["fused"] == "not in this transformers"
