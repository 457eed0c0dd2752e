"""Whole runs, one version behind against synchronous: time saved by sampling and training in parallel.

The quickstart has learning rate 0 here, so that every step does the same work; the Generator's processes are
pinned to one core and the Learner's to another, as they would have GPUs of their own on a cluster.
"""

from benchmarks.jobs import compare_runs
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
SCHEDULES = {
    "synchronous (max_lag 0)": ["weight_sync.max_lag=0"],
    "one version behind (max_lag 1)": ["weight_sync.max_lag=1"],
}
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
    return compare_runs(SCHEDULES, WORK, options, FACTS, num_steps=24, rounds=2)
