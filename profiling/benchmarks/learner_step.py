"""A whole step of the Learner, by the size of its micro-batches, with and without gradient checkpointing."""

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, SMALL, time_steps
from grpo_ray.config.loading import load_config

TITLE = "a Learner's step: micro-batches, gradient checkpointing (quickstart's shapes, one thread)"
PLAIN = "as in the quickstart"
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    "micro-batches of 2048 tokens": ["learner.micro_batch_tokens=2048"],
    "micro-batches of 512 tokens": ["learner.micro_batch_tokens=512"],
    "one sequence at a time": ["learner.micro_batch_tokens=1"],
    "gradient checkpointing": ["learner.gradient_checkpointing=true"],
    "bfloat16": ["model.dtype=bfloat16"],
}


def run(options: Options) -> list[Row]:
    tokens = load_config(QUICKSTART, SMALL if options.quick else []).rollouts_per_step * 16
    seconds = time_steps(VARIANTS, options, rounds=6)
    return [Row(name, values, PLAIN, tokens, "tokens") for name, values in seconds.items()]
