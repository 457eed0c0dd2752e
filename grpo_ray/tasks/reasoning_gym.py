"""Tasks of the package reasoning-gym: over a hundred generators of questions, each with a verifier.

Some generators go through sets of texts, of which each process has an order of its own unless the seed of its
hashes is fixed, as in grading processes; one takes Python's own random numbers. See `_entry`.
"""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from grpo_ray.config.schema import nearest_name
from grpo_ray.config.task import ReasoningGymTaskConfig
from grpo_ray.errors import counted
from grpo_ray.rewards.base import Scores, scores
from grpo_ray.tasks.examples import Example, ExampleSets

with contextlib.suppress(ImportError):  # `_dataset` says how to get it
    import reasoning_gym.factory  # noqa: F401  # here: a grading process imports before an answer's time begins

MOST = 10**6
"""Entries of a set: an entry's own seed is the set's plus its index, so sets lie this far apart."""
IN_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_examples(config: ReasoningGymTaskConfig, seed: int) -> ExampleSets:
    """Generate the sets of `draw_sets`, in a process of their own unless this one's hashes have a fixed seed.

    Raises:
        ValueError: as `draw_sets`.
    """
    if not sys.flags.hash_randomization:
        return draw_sets(config, seed)
    command, environment = [sys.executable, "-m", __name__], {**os.environ, "PYTHONHASHSEED": "0"}
    given = json.dumps([config.model_dump(mode="json"), seed])
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, env=environment, text=True)
    ended = f"task: the process that draws its questions ended with status {done.returncode}"
    problem, *parts = json.loads(done.stdout) if done.returncode == 0 else (ended,)
    if problem:
        raise ValueError(problem)
    train, validation = ([Example(**fields) for fields in part] for part in parts)
    return ExampleSets(train, validation)


def draw_sets(config: ReasoningGymTaskConfig, seed: int) -> ExampleSets:
    """Draw the sets from seeds of their own; a validation question is not trained on.

    Raises:
        ValueError: as `_dataset`; or a dataset has fewer questions than prompts are asked for.
    """
    validation = _draw(config, (2 * seed + 1) * MOST, "num_validation_prompts", set())
    known = {example.question for example in validation}
    return ExampleSets(_draw(config, 2 * seed * MOST, "num_train_prompts", known), validation)


def _draw(config: ReasoningGymTaskConfig, seed: int, field: str, known: set[str]) -> list[Example]:
    """Return entries with different questions that are not known, as many as `field` says."""
    number: int = getattr(config, field)
    size = 4 * number + 100  # some repeat questions
    dataset = _dataset(config.name, json.dumps(config.config, sort_keys=True), seed, size)
    seen, found = set(known), []
    for index in range(size):
        try:
            entry = _entry(dataset, index)
        except Exception as error:  # the package's own, such as for a value of another type
            what = f"{config.name} of reasoning_gym fails at {index} ({type(error).__name__}: {error})"
            raise ValueError(f"task.config: {what}; change its fields") from None
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


def verified(response: str, ground_truth: str, row: Mapping[str, Any], question: str = "") -> Scores:
    """Return the verifier's score of the answer, from 0 to 1; many give a part for one among other words.

    The answer is the text in the last `<answer>` tags, or else the whole response.

    Args:
        row: the entry's `name`, `config`, `seed`, `size` and `index`, from which it is generated again.

    Raises:
        ValueError: that entry has another question.
    """
    tagged = IN_TAGS.findall(response)
    answer = (tagged[-1] if tagged else response).strip()
    dataset = _dataset(row["name"], json.dumps(row["config"], sort_keys=True), row["seed"], row["size"])
    entry = _entry(dataset, row["index"])
    if question not in ("", entry["question"].strip()):
        needed = "PYTHONHASHSEED=0, and the version of reasoning_gym that the run has"
        raise ValueError(f"{row['name']} draws another question for {row['index']} here; it takes {needed}")
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception:  # some verifiers raise for a text in another form than theirs
        score = 0.0
    return scores(score, has_format=bool(answer), is_right=score >= 1.0)


def _entry(dataset: Any, index: int) -> Any:
    """Return an entry, the same one in each process with the same seed of hashes."""
    random.seed(dataset.seed + index)
    return dataset[index]


@lru_cache(maxsize=8)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    """Return a dataset of the package.

    Args:
        config: its configuration, as JSON.

    Raises:
        ValueError: the package is not installed, or has no such dataset or value.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(
            f"task.kind: reasoning_gym needs the package of that name ({error}); install it with "
            "`pip install 'grpo-ray[reasoning-gym]'`"
        ) from None
    if name not in DATASETS:
        nearest = nearest_name(name, sorted(DATASETS))
        hint = f"did you mean {nearest}?" if nearest else f"it has {', '.join(sorted(DATASETS))}"
        raise ValueError(f"task.name: reasoning_gym has no {name!r}; {hint}")
    try:
        return create_dataset(name, **json.loads(config), seed=seed, size=size)
    except Exception as error:
        fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        raise ValueError(
            f"task.config: {name} of reasoning_gym refuses it ({error}); its fields are {', '.join(fields)}"
        ) from None


if __name__ == "__main__":
    (fields, number), output = json.load(sys.stdin), sys.stdout
    sys.stdout = sys.stderr  # for what a generator prints
    try:
        sets = draw_sets(ReasoningGymTaskConfig(**fields), number)
        answer: list[Any] = ["", *([vars(each) for each in part] for part in (sets.train, sets.validation))]
    except ValueError as error:
        answer = [str(error)]
    json.dump(answer, output)
