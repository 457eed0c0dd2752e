"""A whole step of the Learner, by the size of its micro-batches, with and without gradient checkpointing."""

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import make_batch, make_learners, model_folder
from benchmarks.turns import take_turns

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
    with model_folder() as folder:
        learners = make_learners(folder, VARIANTS, options.quick)
    config = learners[PLAIN]._config
    tokens = config.rollouts_per_step * 16

    def step(name: str) -> None:
        learners[name].train_step(make_batch(config, learners[name].version))

    cases = {name: (lambda name=name: step(name)) for name in VARIANTS}
    seconds = take_turns(cases, options.rounds or (1 if options.quick else 6))
    return [Row(name, values, PLAIN, tokens, "tokens") for name, values in seconds.items()]
