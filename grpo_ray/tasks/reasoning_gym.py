"""Tasks of the package reasoning-gym: over a hundred generators of questions, each with a verifier."""

import json

from grpo_ray.config.task import ReasoningGymTaskConfig
from grpo_ray.rewards.reasoning_gym import dataset_of
from grpo_ray.tasks.examples import Example, ExampleSets, counted

MOST = 10**6
"""Entries of a set: an entry's own seed is the set's plus its index, so sets lie this far apart."""


def reasoning_gym_examples(config: ReasoningGymTaskConfig, seed: int) -> ExampleSets:
    """Generate the sets from seeds of their own; a validation question is not trained on.

    Raises:
        ValueError: as `dataset_of`; or a dataset has fewer questions than prompts are asked for.
    """
    validation = _draw(config, (2 * seed + 1) * MOST, "num_validation_prompts", set())
    known = {example.question for example in validation}
    return ExampleSets(_draw(config, 2 * seed * MOST, "num_train_prompts", known), validation)


def _draw(config: ReasoningGymTaskConfig, seed: int, field: str, known: set[str]) -> list[Example]:
    """Return entries with different questions that are not known, as many as `field` says."""
    number: int = getattr(config, field)
    size = 4 * number + 100  # some repeat questions
    dataset = dataset_of(config.name, json.dumps(config.config, sort_keys=True), seed, size)
    seen, found = set(known), []
    for index in range(size):
        entry = dataset[index]
        question = entry["question"].strip()
        if question in seen:
            continue
        seen.add(question)
        row = {"name": config.name, "config": config.config, "seed": seed, "size": size, "index": index}
        answer = "(verified)" if entry["answer"] is None else str(entry["answer"])
        found.append(Example(question, answer, facts=json.dumps({"row": row})))
        if len(found) == number:
            return found
    raise ValueError(
        f"task.{field}: {config.name} of reasoning_gym gave only {counted(len(found), 'different question')} "
        f"of the {number:,} asked for; lower it, or widen task.config"
    )
