"""Whole runs in which syncs interrupt long responses: keys and values recomputed, or kept.

The quickstart's model writes 96 to 192 tokens per response, rewarded for digits, and sampling is
the slower side, so that every sync finds responses half-written. Each round takes the next seed.
"""

import statistics

from benchmarks.jobs import compare_runs
from benchmarks.results import Options, Row
from grpo_ray.records.run_files import RunDirectory, read_metrics

TITLE = "whole runs with syncs in flight, keys and values recomputed or kept, seconds per step"
TAKES_OVERRIDES = True
WORK = [
    "task.reward=profiling.benchmarks.digit_share:share_of_digits",
    "sampling.stop=[]",
    "sampling.min_tokens=96",
    "sampling.max_tokens=192",
    "algorithm.prompts_per_step=16",
    "generator.max_num_seqs=64",
    "weight_sync.in_flight=true",
    "generator.cpu_cores=[0]",
    "learner.cpu_cores=[1]",
    "evaluation.every_num_steps=1000000",
    "run.save_rollouts=false",
]
CASES = {
    "recomputed (recompute_kv true)": ["weight_sync.recompute_kv=true"],
    "kept (recompute_kv false)": ["weight_sync.recompute_kv=false"],
}
FACTS = {
    "sampled tokens/s": "throughput/sampled_tokens_per_s",
    "generate": "timing/generate_s",
    "train": "timing/train_s",
    "stage": "timing/weight_sync/stage_s",
    "paused": "timing/weight_sync/paused_s",
    "tokens": "throughput/trained_tokens",
    "tokens after a switch": "mismatch/tokens_after_switch",
    "KL": "mismatch/kl",
    "KL after a switch": "mismatch/kl/after_switch",
    "effective samples": "mismatch/ess_frac",
    "last reward": "reward/mean",
}
LAST = 5  # steps over which the last reward is averaged


def run(options: Options) -> list[Row]:
    return compare_runs(CASES, WORK, options, FACTS, num_steps=20, rounds=3, has_seeds=True, also=_last_reward)


def _last_reward(run: RunDirectory) -> dict[str, float]:
    last = [row["reward/mean"] for row in read_metrics(run.metrics_path)[-LAST:]]
    return {"reward/mean": statistics.fmean(last)}
