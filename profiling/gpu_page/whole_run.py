"""The second part of the page: a whole run of the quickstart on one GPU, Generator and Learner colocated.

It needs Ray and vLLM.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SKIPPED_STEPS = 4
DTYPES = ("bfloat16", "float32")  # the kernels of GPUs; exactness
OVERRIDES = [
    "generator.num_gpus=1", "learner.num_gpus=1", "generator.num_cpus=1", "learner.num_cpus=1",
    "generator.colocated=true", "generator.gpu_memory_utilization=0.5",
    "weight_sync.transport=ipc", "weight_sync.max_lag=0",
]  # fmt: skip
METRICS = (
    "timing/step_s", "timing/generate_s", "timing/train_s",
    "timing/weight_sync/stage_s", "timing/weight_sync/paused_s",
    "throughput/sampled_tokens_per_s", "throughput/trained_tokens_per_s", "mismatch/kl", "perf/mfu",
)  # fmt: skip
TIMEOUT_S = 300
LOG_CHARACTERS = 4000


def missing() -> list[str]:
    """Return what a whole run needs and this Python lacks."""
    return [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]


def run_quickstart(folder: Path, dtype: str) -> dict[str, Any]:
    """Train the quickstart on the GPU; return medians of its metrics and its first and last reward.

    If it fails, return its error and the ends of its actors' logs, which have the cause.
    """
    name = f"gpu-page-{dtype}"
    command = [sys.executable, "-m", "grpo_ray", "train", "configs/quickstart.yaml", *OVERRIDES]
    command += [f"model.dtype={dtype}", f"run.output_dir={folder}", f"run.name={name}"]
    result: dict[str, Any] = {"command": " ".join(["grpo-ray", *command[3:]])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return result | {"error": f"not done after {TIMEOUT_S} s", "logs": _logs(folder / name)}
    if done.returncode:
        return result | {"error": (done.stdout + done.stderr)[-2000:], "logs": _logs(folder / name)}
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return result | summary([json.loads(line) for line in lines])


def _logs(run: Path) -> dict[str, str]:
    return {path.name: path.read_text(errors="replace")[-LOG_CHARACTERS:] for path in run.glob("logs/*.log")}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the steps after the first few, and the rewards of the first and last step."""
    steady = rows[SKIPPED_STEPS:] or rows
    medians = {}
    for name in METRICS:
        values = [row[name] for row in steady if row.get(name) is not None]
        if values:
            medians[name] = statistics.median(values)
    rewards = [rows[0].get("reward/mean"), rows[-1].get("reward/mean")]
    return {"num_steps": len(rows), "medians": medians, "reward_first_and_last": rewards}
