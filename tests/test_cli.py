"""The command line: true edits, one-line errors with a hint, exit codes."""

from __future__ import annotations

import json
import time

import pytest
from transformers import LlamaConfig

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


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["explain", "qwen33"], USAGE, "did you mean qwen3"),
        (["explain", "./no/such/folder"], USAGE, "there is no no/such/folder"),
        (["explain", "qwen3", "--fusd", "torch"], USAGE, "did you mean --fused?"),
        (["explain", "qwen3", "--fused", "tritn"], FAILED, "'auto', 'torch' or 'triton'"),
        (["explain", "t5", "--fused", "torch"], USAGE, "no causal language model"),
        (["nonsense"], USAGE, "invalid choice"),
    ],
)
def test_mistakes_give_one_line_and_a_hint(capsys, arguments, code, said):
    got, out, err = run(capsys, *arguments)
    assert got == code
    assert said in err
    assert "Traceback" not in err + out
    assert len(err.strip().splitlines()) == 1


def test_an_unreadable_config_is_named(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{ not json")
    code, _, err = run(capsys, "explain", str(tmp_path))
    assert code == USAGE
    assert "cannot be read as a model's config" in err


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
