"""The cost of checkpoints: the same job without any, and with one after every step.

Its model is random, and larger than the quickstart's (18M parameters, unless overridden) so that there is
something to write; half of its responses are rewarded, so that it trains and the optimizer has a state.
"""

from benchmarks.jobs import compare_runs
from benchmarks.results import Options, Row
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.run_files import RunDirectory

TITLE = "whole runs with a checkpoint after every step against none, seconds per step"
TAKES_OVERRIDES = True
LARGER = [
    "model.tiny.hidden_size=512",
    "model.tiny.num_layers=6",
    "model.tiny.intermediate_size=1408",
    "model.tiny.warmup=null",
    "generator.engine=torch",
    "algorithm.prompts_per_step=16",
    "evaluation.every_num_steps=1000000",
]
ANY_REWARD = ("tests/any_reward_cli.py",)
CASES = {
    "no checkpoints": ["checkpoint.every_num_steps=1000000"],
    "one after every step": ["checkpoint.every_num_steps=1"],
}
FACTS = {
    "MiB": "MiB",
    "Learner blocked, s": "timing/checkpoint/capture_s",
    "written during training, s": "timing/checkpoint/write_s",
}


def run(options: Options) -> list[Row]:
    return compare_runs(
        CASES, LARGER, options, FACTS, num_steps=24, rounds=1, program=ANY_REWARD, also=_size_of_last
    )


def _size_of_last(run: RunDirectory) -> dict[str, float]:
    files = [file for file in CheckpointStore(run).all()[-1].path.rglob("*") if file.is_file()]
    return {"MiB": sum(file.stat().st_size for file in files) / 2**20}
