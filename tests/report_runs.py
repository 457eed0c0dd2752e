"""Folders of runs as training leaves them, written or changed by hand."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from builders import make_completion, make_group, make_item, write_rows

from grpo_ray.config import Config
from grpo_ray.config.run import CheckpointConfig
from grpo_ray.records.checkpoint import CheckpointState, CheckpointStore
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.types import ScoredGroup

Rows = list[dict[str, Any]]
NEAR_DEFAULT = Config.model_validate(
    {"model": {"tiny": {}, "dtype": "float32"}, "task": {"kind": "sorting"}, "generator": {"num_gpus": 0}}
)
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "{{script}} {{data}} \\u003c ${window.hacked = 1} <!--<script>",
    "right \u202eto left, \u2028 a line, \0 nothing, \N{PILE OF POO} שלום, e\u0301",
]


def make_run(
    folder: Path, config: Config, num_steps: int = 6, steps: Sequence[Sequence[ScoredGroup]] | None = None
) -> RunDirectory:
    """Write a run with rewards that rise by 0.1 per step; `steps` are each step's groups (default: two)."""
    run = RunDirectory(folder)
    run.create(config)
    write_rows(run.metrics_path, [metrics_of(step) for step in range(1, num_steps + 1)])
    evaluated = range(0, num_steps + 1, 2)
    summaries = [{"step": step, "reward": step / 10, "reward_standard_error": 0.05} for step in evaluated]
    write_rows(run.evaluations_summary_path, summaries)
    for step, groups in enumerate(steps or [[group(step)] for step in range(num_steps)], start=1):
        write_rollouts(run.rollouts_path(step), step, groups)
    return run


def metrics_of(step: int) -> dict[str, Any]:
    return {
        "step": step, "reward/mean": step / 10, "reward/format": 1.0, "reward/answer": step / 10,
        "lag/mean": 0.5, "lag/max": 1.0, "policy/entropy": 2.0 - step / 10, "mismatch/kl": None,
        "rollout/response_tokens/mean": 12.0, "throughput/trained_tokens": 200.0,
        "throughput/trained_tokens_per_s": 100.0, "timing/step_s": 2.0, "timing/train_s": 1.0,
        "timing/wait_for_batch_s": 0.25, "timing/generate_s": 1.5, "time/learner/train_s": 1.0,
        "time/learner/wait_for_batch_s": 0.25, "time/learner/snapshot_s": 0.75,
    }  # fmt: skip


def ranks_of(step: int, num_ranks: int = 2) -> dict[str, Any]:
    """Return the lines of a step of a Learner of several ranks, of which `step % num_ranks` was the slowest."""
    row = {name: value for name, value in metrics_of(step).items() if not name.startswith("time/learner/")}
    for rank in range(num_ranks):
        is_slowest = rank == step % num_ranks
        row |= {
            f"time/learner-{rank}/train_s": 1.5, f"time/learner-{rank}/wait_for_batch_s": 0.5,
            f"ranks/learner-{rank}/collectives_s": 0.1 if is_slowest else 0.4 + 0.01 * rank,
            f"memory/learner-{rank}_bytes": (1 + rank + step / 8) * 2**30,
            f"memory/learner-{rank}_device_peak_bytes": (10 + rank) * 2.0**30,
        }  # fmt: skip
    return row | {"ranks/slowest": float(step % num_ranks), "ranks/imbalance": 1 + step / 100}


def group(
    step: int, texts: Sequence[str] = ("right", "wrong"), size: int = 3, group_id: int | None = None
) -> ScoredGroup:
    """Make a group that two versions sampled; the first response has reward 1, the others 0.

    Args:
        step: from 0.
    """
    versions = [max(0, step - 1)] * (size - 1) + [step]
    logprobs, ends = [-0.5] * size, {"long": "length"}
    completions = [
        make_completion([5 + place % 20] * size, logprobs, versions, text, ends.get(text, "stop"))
        for place, text in enumerate(texts)
    ]
    rewards = [1.0, *[0.0] * (len(texts) - 1)]
    item = make_item(step if group_id is None else group_id)
    return make_group(item, completions, rewards, [reward - 0.5 for reward in rewards])


def rewrite(path: Path, change: Callable[[Rows], Rows | None]) -> None:
    """Change the rows of a file of rollouts, in place unless `change` returns others."""
    table = pq.ParquetFile(path).read()
    rows = table.to_pylist()
    pq.write_table(pa.Table.from_pylist(change(rows) or rows, schema=table.schema), path)


def set_in_group(group: int, **values: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        for row in rows:
            if row["group_id"] == group:
                row.update(values)

    return change


def add_checkpoint(run: RunDirectory, step: int, model: Path) -> Path:
    store = CheckpointStore(run, CheckpointConfig(keep=5, keep_best=False))
    folder = store.begin(step)
    shutil.copytree(model, folder, dirs_exist_ok=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    return store.commit(step, CheckpointState(step, {}, {}), sizes).path
