"""What `bench_ulysses.py` found, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.benchmarks.ulysses_layer import PARTS
from tests.support.ulysses_equality import EXACT, FACTOR, MARGIN


def lines(found: dict[str, Any]) -> Iterator[str]:
    """All tables; of times the mean over the ranks."""
    where = found["environment"]
    yield f"{where['ranks']} ranks, {where['backend']}, {where['device']}; torch {where['torch']}; `{where['command']}`"
    if where["shared"]:
        yield f"\nRanks share {where['cards']} card(s): times show what this machine does, and nothing of {where['backend']}."
    if "equality" in found:
        yield from _equality(found["equality"], found.get("left_out", []))
    if "step" in found:
        yield from _step(found["step"])
    for one in found.get("layer", []):
        yield from _layer(one, found["environment"])


def _equality(rows: list[dict[str, Any]], left_out: list[str]) -> Iterator[str]:
    wrong = sum(bool(row["problems"]) for row in rows)
    yield f"\n### Equality with one process: {len(rows) - wrong} of {len(rows)}\n"
    yield f"float32 to {EXACT:g}; bfloat16 at most {FACTOR:g} times as far from float32 as one process, plus {MARGIN:g}.\n"
    yield "| setting | outputs off by | gradients off by | one process in bf16 | bytes a layer |"
    yield "|---|---|---|---|---|"
    for row in rows:
        usual = f"{row['usual_outputs']:.1e}, {row['usual_gradients']:.1e}" if row["usual_outputs"] else ""
        size = "" if row["bytes"] is None else f"{row['bytes']:.0f}" + (" = formula" if row["bytes"] == row["formula"] else "")
        mark = "**off** " if row["problems"] else ""
        yield f"| {mark}{row['setting']} | {row['outputs']:.1e} | {row['gradients']:.1e} | {usual} | {size} |"
    for row in rows:
        for problem in row["problems"]:
            yield f"\n- {row['setting']}: {problem}"
    for line in left_out:
        yield f"\nNot run: {line}."


def _step(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "\n### A training step\n"
    yield "| | step ms | log_probs off by | gradient off by | collectives | MiB handed in | peak MiB |"
    yield "|---|---|---|---|---|---|---|"
    for name, one in rows.items():
        yield (
            f"| {name} | {one['ms']:.1f} | {one['log_probs_off']:.1e} | {one['gradient_off']:.1e} | {one['collectives']} | "
            f"{one['mib_handed_in']:.1f} | {one['peak_mib']:.1f} |"
        )


def _mean(ranks: list[dict[str, Any]], *path: str) -> float:
    values = []
    for one in ranks:
        at: Any = one
        for key in path:
            at = at[key]
        values.append(float(at))
    return sum(values) / len(values)


def _layer(one: dict[str, Any], where: dict[str, Any]) -> Iterator[str]:
    ranks, shape = one["ranks"], one["shape"]
    yield (
        f"\n### {one['length']} tokens, one layer: {shape['heads']} heads, {shape['kv_heads']} KV heads, head_dim "
        f"{shape['head_dim']}, hidden {shape['hidden']}, {one['attention']}, {one['dtype']}\n"
    )
    yield f"| ms | {' | '.join(PARTS)} | whole, unmarked |".replace("_", "-")
    yield "|---|" + "---|" * (len(PARTS) + 1)
    for way in ("forward", "backward"):
        yield f"| {way} | {' | '.join(f'{_mean(ranks, way, part):.2f}' for part in (*PARTS, 'whole'))} |"
    share = _mean(ranks, "exposed_share")
    yield f"\nExposed communication: {share:.1%} of the attention time{_bar(share <= 0.1, where, 'at most 10 %')}."
    counted, formula = ranks[0]["bytes"], one["formula"]
    same = "as the formula says" if counted == formula else f"**and the formula says {formula}**"
    peaks = ", ".join(f"{rank['peak_mib']:.0f}" for rank in ranks)
    yield f"{counted} bytes handed in, {same}, in {ranks[0]['collectives']} collectives. Peak MiB by rank: {peaks}.\n"
    yield "| forward and backward | ms | at least | without communication | exposed | differs by |"
    yield "|---|---|---|---|---|---|"
    names = {"two": "two collectives each way", "overlapped": "overlapped, four", "lists": "four all-to-alls of lists"}
    for way, name in names.items():
        keys = ("ms", "least_ms", "without_communication_ms", "exposed_ms")
        numbers = " | ".join(f"{_mean(ranks, 'ways', way, key):.2f}" for key in keys)
        off = "" if way == "two" else f"{max(rank['ways'][way]['off'] for rank in ranks):.1e}"
        yield f"| {name} | {numbers} | {off} |"
    ours, best = (_mean(ranks, "ways", way, "least_ms") for way in ("two", one["fastest"]))
    gain = f", {1 - best / ours:.1%} less than the library's" if one["fastest"] != "two" else ", which is the library's"
    yield f"\nThe fastest here, by what it takes at least: {names[one['fastest']]}{gain}.\n"
    bandwidth = one["bandwidth"]
    yield "| both exchanges, forward | ms | GB/s to other ranks |"
    yield "|---|---|---|"
    for key, name in (
        ("bare", "bare all_to_all_single of the same bytes"),
        ("collectives", "the exchange, in its collectives"),
        ("exchange", "the exchange, packing and unpacking too"),
    ):
        yield f"| {name} | {_mean(bandwidth, key + '_ms'):.3f} | {_mean(bandwidth, key + '_gb_per_s'):.2f} |"
    share = _mean(bandwidth, "share_of_bare")
    bar = _bar(share >= 0.9, where, "at least 0.9")
    yield f"\nIn its collectives the exchange reaches {share:.2f} of the bare bandwidth{bar}."


def _bar(met: bool, where: dict[str, Any], what: str) -> str:
    """A bar counts where every rank has a GPU of its own under NCCL."""
    if where["backend"] != "nccl" or where["shared"] or where["ranks"] < 2:
        return ""
    return f" (bar: {what}; {'met' if met else 'NOT met'})"
