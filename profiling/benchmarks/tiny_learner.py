"""Learners with a random model of the quickstart's shape, and batches for them."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.results import Options, take_turns
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.learner import Learner
from grpo_ray.learning.model_files import end_token_ids, load_tokenizer
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer
from grpo_ray.run.tiny_model import build_model
from grpo_ray.types import Completion, PromptItem, RolloutGroup, ScoredGroup, TrainBatch

QUICKSTART = "configs/quickstart.yaml"
SMALL = ["algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2"]  # for --quick


@contextlib.contextmanager
def model_folder(overrides: Sequence[str] = ()) -> Iterator[str]:
    """Write the quickstart's model with random weights, and its tokenizer, to a temporary folder."""
    config = load_config(QUICKSTART, list(overrides))
    assert config.model.tiny is not None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer(config)
        build_model(config.model.tiny, tokenizer, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


def make_learners(folder: str, variants: Mapping[str, Sequence[str]], quick: bool) -> dict[str, Learner]:
    """Make one Learner per named list of overrides."""
    ends = end_token_ids(folder, load_tokenizer(folder))
    common = SMALL if quick else []
    return {
        name: Learner(folder, load_config(QUICKSTART, [*common, *overrides]), ends)
        for name, overrides in variants.items()
    }


def time_steps(
    variants: Mapping[str, Sequence[str]], options: Options, rounds: int
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of a step in each round, of one Learner per named list of overrides."""
    with model_folder() as folder:
        learners = make_learners(folder, variants, options.quick)
    config = next(iter(learners.values()))._config

    def step(name: str) -> None:
        learners[name].train_step(make_batch(config, learners[name].version))

    cases = {name: (lambda name=name: step(name)) for name in variants}
    return take_turns(cases, options.rounds or (1 if options.quick else rounds))


def make_batch(config: Config, version: int, num_tokens: int = 16, prompt_tokens: int = 12) -> TrainBatch:
    """Make a batch of random tokens and advantages; responses have `num_tokens`, sampled by `version`."""
    rng, algorithm = np.random.default_rng(version), config.algorithm
    groups = []
    for group_id in range(algorithm.prompts_per_step):
        item = PromptItem(group_id, "", tuple(rng.integers(20, 300, prompt_tokens).tolist()), "")
        completions = [
            Completion(
                "",
                rng.integers(20, 300, num_tokens).astype(np.int32),
                np.full(num_tokens, -5.9, np.float32),
                np.full(num_tokens, version, np.int32),
                "stop",
            )
            for _ in range(algorithm.samples_per_prompt)
        ]
        advantages = rng.normal(size=len(completions)).astype(np.float32)
        ones = np.ones_like(advantages)
        rollout = RolloutGroup(item, tuple(completions), "generator-0")
        groups.append(ScoredGroup(ones, ones, ones, advantages, rollout=rollout))
    return TrainBatch(tuple(groups))
