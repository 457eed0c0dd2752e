"""Whole runs, one version behind against synchronous: time saved by sampling and training in parallel.

The quickstart has learning rate 0 here, so that every step does the same work; the Generator's processes are
pinned to one core and the Learner's to another, as they would have GPUs of their own on a cluster.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.jobs import rows_of, steady_means, train
from benchmarks.results import Options, Row

TITLE = "whole runs, one version behind against synchronous, seconds per step (a core for each side)"
TAKES_OVERRIDES = True
WORK = [
    "learner.learning_rate=0",
    "generator.cpu_cores=[0]",
    "learner.cpu_cores=[1]",
    "evaluation.every_num_steps=1000000",
    "run.save_rollouts=false",
]
SYNCHRONOUS = "synchronous (max_lag 0)"
SCHEDULES = {SYNCHRONOUS: 0, "one version behind (max_lag 1)": 1}
FACTS = {
    "generate": "timing/generate_s",
    "wait": "timing/wait_for_batch_s",
    "train": "timing/train_s",
    "stage": "timing/weight_sync/stage_s",
    "paused": "timing/weight_sync/paused_s",
    "Learner busy": "utilization/learner",
    "Generators busy": "utilization/generators",
    "lag": "lag/max",
}


def run(options: Options) -> list[Row]:
    steps = 8 if options.quick else 24
    means: dict[str, list[Mapping[str, float]]] = {name: [] for name in SCHEDULES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds or (1 if options.quick else 2)):
            for name, max_lag in SCHEDULES.items():
                overrides = [*WORK, f"algorithm.num_steps={steps}", f"weight_sync.max_lag={max_lag}"]
                job = train(f"lag{max_lag}-{number}", [*overrides, *options.overrides], Path(folder))
                means[name].append(steady_means(job))
    return rows_of(means, SYNCHRONOUS, FACTS)
