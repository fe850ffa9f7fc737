"""The command line: `scoped-patch explain`, `list` and `doctor`.

Exit codes: 0 all is well; 1 a plan cannot work, or the doctor found something broken; 2 wrong usage, or a model that cannot
be found or read. A mistake is one line on the error stream, whatever the output format.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from . import __version__
from .compose import patched
from .doctor import diagnose
from .engine.errors import PatchErrorGroup, ScopedPatchError

OK, FAILED, USAGE = 0, 1, 2

#: keyword of patched() -> (type on the command line, help); only keywords that patched() has are offered
_KEYWORDS: dict[str, tuple[Any, str]] = {
    "sp": (int, "Ulysses sequence parallelism over this many ranks"),
    "fused": (str, "fused head: torch, triton or auto"),
    "tiled_mlp": (int, "tile the MLPs into this many sequence tiles"),
    "prefix_grouper": (bool, "compute shared prefixes once"),
    "fake_quant": (str, "NVFP4 fake quantisation: w4a16 or w4a4"),
}

#: the values that stand for a keyword where all are tried
_TRIES: dict[str, Any] = {"fused": "torch", "sp": 2, "tiled_mlp": 4, "prefix_grouper": True, "fake_quant": "w4a16"}

#: the families that `list` plans on (model types of transformers; its default config, on the meta device)
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "apertus", "gemma3_text", "gemma4_text", "qwen3_moe", "glm4_moe", "gpt_oss",
    "deepseek_v3", "kimi_linear", "qwen3_5_text", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v",
    "glm4v_moe", "qwen3_5", "qwen3_5_moe", "kimi_k25", "gemma3", "gemma4",
)  # fmt: skip

_EXIT_CODES = (
    "exit codes: 0 all is well; 1 a plan cannot work, or the doctor found something broken; 2 wrong usage, or a model that "
    "cannot be found or read"
)


class CommandError(Exception):
    """A wrong command; printed as one line."""


class _Console(Console):
    """A console that leaves a reader who has gone to `main`."""

    def on_broken_pipe(self) -> None:
        raise  # what is being handled; rich would end the process with an exit code of 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = ""
        if "invalid choice" in message or "required: COMMAND" in message:
            hint = "; `scoped-patch --help` shows how they are used"
        elif "required: MODEL" in message:
            hint = "; give a model's folder, its config.json, or a model type such as qwen3"
        elif message.startswith("argument --"):
            hint = "; `scoped-patch explain --help` shows what it takes"
        wrong = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
        if message.startswith("unrecognized arguments"):
            hint = "; `scoped-patch --help` shows how they are used"
        if message.startswith("unrecognized arguments") and wrong == "--json":
            hint = "; give it after the command"
        elif message.startswith("unrecognized arguments") and wrong.startswith("-"):
            flags = ["--" + keyword.replace("_", "-") for keyword in _KEYWORDS if keyword in _offered()] + ["--full", "--json"]
            near = difflib.get_close_matches(wrong, flags, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; options are {', '.join(flags)}"
        raise CommandError(message + hint)


def _offered() -> set[str]:
    return set(inspect.signature(patched).parameters)


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="scoped-patch", description="Reversible patches for other people's model classes.", epilog=_EXIT_CODES)
    top.add_argument("--version", action="version", version=f"scoped_patch {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    explain = commands.add_parser(
        "explain", help="show what a scope would change on a model, without weights", allow_abbrev=False
    )
    explain.add_argument("model", metavar="MODEL", help="a model's folder, a config.json, or a model type such as qwen3")
    for keyword, (kind, text) in _KEYWORDS.items():
        if keyword in _offered():
            flag = "--" + keyword.replace("_", "-")
            if kind is bool:
                explain.add_argument(flag, action="store_true", default=None, dest=keyword, help=text)
            else:
                explain.add_argument(flag, type=kind, dest=keyword, help=text, metavar=kind.__name__.upper())
    explain.add_argument("--full", action="store_true", help="one row per edit")
    listing = commands.add_parser("list", help="which patch acts on which family of the installed transformers")
    doctor = commands.add_parser("doctor", help="versions, and whether everything the patches hold on to is there")
    for command in (explain, listing, doctor):
        command.add_argument("--json", action="store_true", help="print data instead of a table")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    console, errors = _Console(), Console(stderr=True)
    try:
        options = parser().parse_args(arguments)
        _silence()
        with _without_collections():
            return int({"explain": _explain, "list": _list, "doctor": _doctor}[options.command](options, console))
    except CommandError as error:
        errors.print(f"scoped-patch: {error}", style="red", markup=False, soft_wrap=True)
        return USAGE
    except ScopedPatchError as error:
        for one in error.exceptions if isinstance(error, PatchErrorGroup) else (error,):
            errors.print(f"scoped-patch: {one}", style="red", markup=False, soft_wrap=True)
        return FAILED
    except BrokenPipeError:
        # `scoped-patch list | head`: the reader has seen enough. Nothing more can be written, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _silence() -> None:
    from transformers.utils import logging  # imported, it sets the level that it finds right

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Importing a model library makes millions of objects that stay; looking through them again and again takes a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ------------------------------------------------------------------------------------------------------ explain
def _explain(options: argparse.Namespace, console: Console) -> int:
    keywords = {k: getattr(options, k) for k in _KEYWORDS if getattr(options, k, None) is not None}
    model = build_on_meta(options.model)
    if not keywords:
        return _offer(options, model, console)
    plan = patched(model, **keywords).plan()
    explanation = plan.explain(options.full)
    if options.json:
        rows = [dict(zip(("patch", "where", "from", "to", "why"), row.cells(True), strict=False)) for row in explanation.rows]
        _print_json({"model": options.model, "options": keywords, "edits": rows, "remarks": explanation.remarks}, console)
    elif console.is_terminal:
        console.print(explanation)
    else:
        console.print(str(explanation), markup=False, highlight=False, soft_wrap=True)  # whole lines, for tools that read them
    return OK


def _offer(options: argparse.Namespace, model: Any, console: Console) -> int:
    """No option was given: which ones this model can take, and why not the others."""
    answers = _tried(model)
    some = "yes" in answers.values()
    if options.json:
        data = {"model": options.model, "options": {}, "edits": [], "remarks": [], "can_take": answers}
        _print_json(data, console)
        return OK if some else FAILED

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(f"Nothing was asked for, so nothing would change. What {type(model).__name__} can take:")
    for keyword, answer in answers.items():
        flag = "--" + keyword.replace("_", "-")
        flag += "" if _KEYWORDS[keyword][0] is bool else f" {_TRIES[keyword]}"
        say(f"  {flag:20} {answer}")
    if some:
        say("Give one or more of them to see the edits.")
    return OK if some else FAILED


def build_on_meta(model: str) -> Any:
    """A model without weights, from a folder, a config file or a model type.

    Raises:
        CommandError: no such model type, or a folder or file that cannot be read.
    """
    import torch
    import transformers

    config = _config(model)
    named = getattr(config, "architectures", None)
    names = [name for name in named if isinstance(name, str)] if isinstance(named, (list, tuple)) else []
    classes = [getattr(transformers, name, None) for name in names]
    # Whatever else a config may name there is no model; then its type says which it is.
    build: Any = next((one for one in classes if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)), None)
    if build is None:
        text_only, multimodal = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        build = multimodal if type(config) in multimodal._model_mapping else text_only
        if type(config) not in build._model_mapping:
            raise CommandError(
                f"{model!r} ({type(config).__name__}) is no causal language model, and nothing here acts on it; "
                "`scoped-patch list` shows families that it acts on"
            )
    try:
        with torch.device("meta"):
            return build._from_config(config) if hasattr(build, "_from_config") else build.from_config(config)
    except Exception as error:  # whatever the model's own code makes of somebody's config
        raise CommandError(
            f"a {build.__name__} cannot be built from the config of {model!r}: {_first_line(error)}; check its sizes"
        ) from error


def _config(model: str) -> Any:
    import transformers

    path = Path(model)
    if path.suffix == ".json" or path.is_dir() or "/" in model:
        hint = "give a model's folder, its config.json, or a model type such as qwen3"
        try:
            file = path / "config.json" if path.is_dir() else path
            if not file.is_file():
                raise CommandError(f"there is no {file} (nothing is downloaded); {hint}")
            # Code that comes with a model is not run, and nobody is asked whether it should be.
            return transformers.AutoConfig.from_pretrained(
                str(file.parent) if file.name == "config.json" else str(file), trust_remote_code=False
            )
        except CommandError:
            raise
        except Exception as error:  # broken JSON, no permission, fields of the wrong type, an unknown model type
            raise CommandError(f"{path} cannot be read as a model's config: {_first_line(error)}; {hint}") from error
    try:
        return transformers.AutoConfig.for_model(model)
    except ValueError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        near = difflib.get_close_matches(model, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "give a model type such as qwen3, a folder or a config.json"
        raise CommandError(f"transformers {transformers.__version__} knows no model type {model!r}; {hint}") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # "Validation error for ...:" says nothing without what comes after it.
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".:")


# ------------------------------------------------------------------------------------------------------ list
def _list(options: argparse.Namespace, console: Console) -> int:
    import transformers

    tries = [keyword for keyword in _TRIES if keyword in _offered()]
    table: dict[str, dict[str, str]] = {}
    for family in FAMILIES:
        try:
            model = build_on_meta(family)
        except CommandError:
            table[family] = dict.fromkeys(tries, "not in this transformers")
            continue
        table[family] = _tried(model)
    if options.json:
        _print_json({"transformers": transformers.__version__, "families": table}, console)
        return OK
    shown = Table(title=f"patches on the families of transformers {transformers.__version__}", title_justify="left")
    shown.add_column("family")
    for keyword in tries:
        shown.add_column(f"{keyword}=")
    reasons = [answer[4:] for answers in table.values() for answer in answers.values() if answer.startswith("no: ")]
    numbers = itertools.count(1)
    for family, answers in table.items():
        shown.add_row(family, *(f"no ({next(numbers)})" if a.startswith("no: ") else a for a in answers.values()))
    console.print(shown)
    for number, reason in enumerate(reasons, 1):
        console.print(f"({number}) {reason}", markup=False, highlight=False, soft_wrap=True)
    return OK


def _tried(model: Any) -> dict[str, str]:
    """keyword -> "yes", or "no: " and why not."""
    return {keyword: _try(model, keyword, value) for keyword, value in _TRIES.items() if keyword in _offered()}


def _try(model: Any, keyword: str, value: Any) -> str:
    try:
        patched(model, **{keyword: value}).plan()
    except ScopedPatchError as error:
        return f"no: {error}"
    return "yes"


# ------------------------------------------------------------------------------------------------------ doctor
def _doctor(options: argparse.Namespace, console: Console) -> int:
    found = diagnose()
    if options.json:
        _print_json(found.as_data(), console)
    else:
        console.print(found)
    return OK if found.ok else FAILED


def _print_json(data: Any, console: Console) -> None:
    console.print_json(json.dumps(data, default=str))
