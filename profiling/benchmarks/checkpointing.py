"""The cost of checkpoints: the same job without any, and with one after every step.

Its model is random, and larger than the quickstart's (18M parameters, unless overridden) so that there is
something to write; half of its responses are rewarded, so that it trains and the optimizer has a state.
"""

import tempfile
from pathlib import Path

from benchmarks.jobs import steady_means, train
from benchmarks.results import Options, Row

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
WITHOUT = "no checkpoints"
EVERY = {WITHOUT: 1_000_000, "one after every step": 1}


def run(options: Options) -> list[Row]:
    steps = 8 if options.quick else 24
    seconds: dict[str, list[float]] = {name: [] for name in EVERY}
    facts: dict[str, dict[str, float]] = {name: {} for name in EVERY}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds or 1):
            for name, every in EVERY.items():
                overrides = [*LARGER, f"algorithm.num_steps={steps}", f"checkpoint.every_num_steps={every}"]
                job = train(
                    f"every{every}-{number}", [*overrides, *options.overrides], Path(folder), ANY_REWARD
                )
                means = steady_means(job)
                seconds[name].append(means["timing/step_s"])
                if every == 1:
                    files = [file for file in job.checkpoint_path(steps).rglob("*") if file.is_file()]
                    facts[name] = {
                        "MiB": sum(file.stat().st_size for file in files) / 2**20,
                        "Learner blocked, s": means["timing/checkpoint/capture_s"],
                        "written during training, s": means["timing/checkpoint/write_s"],
                    }
    return [Row(name, tuple(values), WITHOUT, facts=facts[name]) for name, values in seconds.items()]
