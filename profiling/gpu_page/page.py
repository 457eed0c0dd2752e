"""The results of gpu.py as Markdown."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_page.throughput import NO_CHECKPOINTING
from gpu_page.weights import COPY

WAYS = {
    "plain": "plain transformers, log_softmax",
    "repeated": "Learner, a prompt per response",
    "shared": "Learner, a prompt per group",
}


def write_page(result: Mapping[str, Any]) -> str:
    """Return the whole page."""
    device, versions = result["device"], result["versions"]
    parts = [
        f"# {device['name']}",
        f"{device['memory_gib']:.0f} GiB; "
        + ", ".join(f"{name} {value}" for name, value in versions.items())
        + ".",
    ]
    if result.get("exactness"):
        parts += ["## Exactness", EXACTNESS_NOTE, exactness_table(result["exactness"])]
    if result.get("weights"):
        parts += ["## Weight sync", WEIGHTS_NOTE, weights_table(result["weights"])]
    if result.get("throughput"):
        parts += ["## Steps", THROUGHPUT_NOTE, throughput_table(result["throughput"])]
    if result.get("engine"):
        parts += ["## vLLM", ENGINE_NOTE, engine_table(result["engine"])]
    if result.get("left_out"):
        parts += ["## Left out, as the time was up", "\n".join(f"- {name}" for name in result["left_out"])]
    return "\n\n".join(parts) + "\n"


EXACTNESS_NOTE = (
    "A small Qwen2, 3 groups of 4 responses of 1 to 96 tokens; distance from plain float32 on the CPU: "
    "of log-probabilities in nats, of the whole gradient relative to its norm."
)
WEIGHTS_NOTE = (
    "All weights in bfloat16, from float32 ones, through the functions that a sync calls; relative to a copy "
    "of the same bytes on the device."
)
THROUGHPUT_NOTE = (
    "One step is all forward and backward passes on the batch, and one AdamW update. Tokens per second count a "
    "prompt once per group; MFU counts the FLOPs that the batch needs (watch/flops.py), not what a way "
    "computes besides. Relative: seconds per step relative to the plain way with the same batch."
)


ENGINE_NOTE = (
    "vLLM without Ray: tokens per second alone and through the engine's methods, log-probabilities "
    "against the Learner's, and syncs after which greedy tokens must change and come back."
)


def engine_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        found = {name: value for name, value in row.items() if name not in ("case", "stage", "seconds")}
        model = row["case"]["model"] if "case" in row else ""
        lines.append([model, row["stage"], json.dumps(found), f"{row.get('seconds', 0):.1f}"])
    return _table(["model", "stage", "found", "s"], lines, num_texts=3)


def exactness_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        figures = [row["error"], "", ""]
        if not row["error"]:
            figures = [f"{row[name]:.2g}" for name in ("logprob_max", "logprob_mean", "gradient")]
        lines.append([row["way"], row["dtype"], row["kernel"], *figures])
    return _table(["way", "dtype", "kernel", "logprob, max", "logprob, mean", "gradient"], lines, num_texts=3)


def weights_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["model"], row["error"], "", "", ""])
        for part, error in row.get("errors", {}).items():
            lines.append([row["model"], f"{part}: {error}", "", "", ""])
        if COPY not in row.get("seconds", {}):
            continue
        gib = row["num_bytes"] / 2**30
        for part, seconds in row["seconds"].items():
            relative = seconds / row["seconds"][COPY]
            lines.append(
                [row["model"], part, f"{1000 * seconds:.3g}", f"{gib / seconds:.3g}", f"{relative:.2f}"]
            )
        if "skipped" in row:
            lines.append([row["model"], row["skipped"], "", "", ""])
    return _table(["model", "part", "ms", "GiB/s", "relative"], lines, num_texts=2)


def throughput_table(rows: Sequence[Mapping[str, Any]]) -> str:
    base = {_batch(row): step_s(row) for row in rows if row["case"]["way"] == "plain" and step_s(row)}
    lines = []
    for row in rows:
        case = row["case"]
        start = [
            case["model"],
            f"{case['prompt_tokens']:,} + {case['response_tokens']:,}",
            WAYS[case["way"]],
            _options(row),
        ]
        lines.append(start + _figures(row, base.get(_batch(row))))
        if "without_optimizer" in row:
            inner = row["without_optimizer"]
            lines.append([*start[:2], start[2] + ", no update", start[3], *_figures(inner, None)])
    header = ["model", "tokens", "way", "options", "s per step", "relative", "tokens/s", "MFU", "peak GiB"]
    return _table(header, lines, num_texts=4)


def _figures(row: Mapping[str, Any], base: float | None) -> list[str]:
    if row.get("out_of_memory"):
        return [f"out of memory ({row['phase']})", "", "", "", ""]
    if "error" in row:
        return [row["error"], "", "", "", ""]
    seconds = step_s(row)
    assert seconds is not None
    return [
        f"{seconds:.3g}",
        "" if base is None else f"{seconds / base:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        "" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}",
    ]


def step_s(row: Mapping[str, Any]) -> float | None:
    """Return a case's seconds per step, None if it was not measured."""
    return row["forward_backward_s"] + row["update_s"] if "update_s" in row else None


def _batch(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("model", "prompt_tokens", "response_tokens", "num_groups", "samples_per_prompt", "dtype")
    return tuple(row["case"][name] for name in names)


def _options(row: Mapping[str, Any]) -> str:
    case = row["case"]
    found = [case["dtype"], f"{case['micro_batch_tokens']:,} per micro-batch"]
    if case["way"] != "plain":
        found += [row.get("kernel") or case["attention"]]
        found += ["compiled"] if case["compile"] != "false" else []
    if case["checkpointing"] not in NO_CHECKPOINTING:
        found.append(
            "checkpointing" if case["checkpointing"] == "true" else f"{case['checkpointing']} checkpointing"
        )
    return ", ".join([*found, *case["overrides"]])


def _table(header: Sequence[str], lines: Sequence[Sequence[str]], num_texts: int) -> str:
    rule = ["---"] * num_texts + ["---:"] * (len(header) - num_texts)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])
