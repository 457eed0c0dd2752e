"""The prompt experiment warms up the tiny model in the format that its reward reads."""

import re
from typing import Any

import pytest
from small_run import QUICKSTART

from grpo_ray.config.loading import load_config
from grpo_ray.config.task import SortingTaskConfig
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer
from grpo_ray.rewards import get_reward_fn
from grpo_ray.tasks.prompts import load_template
from grpo_ray.tasks.sorting import sorting_examples, warmup_pairs
from grpo_ray.tools.experiments.experiment import EXPERIMENTS

BOXED_TERMS = [
    [{"reward": "question_only"}, {"reward": "brevity", "weight": 0.1}],
    [{"reward": "graded", "arguments": {"answer_in": "boxed"}}],
]


@pytest.mark.parametrize("reward", ["exact_match", "question_only", "r1_zero", *BOXED_TERMS])
def test_warmed_up_habits_are_in_the_format_and_a_quarter_is_right(reward: Any) -> None:
    config = SortingTaskConfig.model_validate({"reward": reward, "num_digits": 4})
    verdicts = []
    for question, response in warmup_pairs(config, seed=0, num_pairs=2000):
        truth = "".join(sorted(question.removeprefix("Sort ")))
        verdicts.append(get_reward_fn(config.reward)(response, truth))
    assert all(verdict["format_reward"] == 1 for verdict in verdicts)
    # Sorted numbers are correct when copied, and 0012 equals 012 as a number.
    assert 0.23 < sum(verdict["answer_reward"] for verdict in verdicts) / len(verdicts) < 0.33


def test_the_few_shot_prompt_is_the_short_one_after_right_examples() -> None:
    few_shot = load_template("few_shot_sorting").render("Sort 51280")
    short = load_template("short").render("Sort 51280")
    examples = few_shot.removesuffix(short)
    assert examples != few_shot
    found = re.findall(r"User: Sort (\d+)\nAssistant: <think>(.*)\n", examples)
    turns = [f"User: Sort {digits}\nAssistant: <think>{response}\n" for digits, response in found]
    assert "".join(turns) == examples
    right = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
    for digits, response in found:
        assert get_reward_fn("exact_match")(response, "".join(sorted(digits))) == right
    assert len(found) == 3
    for config in (QUICKSTART, "configs/cs336-2026.yaml"):  # no example is a question of their first seeds
        task = load_config(config).task
        assert task.kind == "sorting"
        examples_of = [sorting_examples(task, seed) for seed in range(4)]
        questions = {e.question for sets in examples_of for e in (*sets.train, *sets.validation)}
        assert not questions & {f"Sort {digits}" for digits, _ in found}


VARIANTS = [(name, variant) for name in ("prompt", "cs336-2026") for variant in EXPERIMENTS[name].variants]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_each_variants_longest_response_fits(name: str, variant: str) -> None:
    """No stop string cuts it off."""
    config = load_config(QUICKSTART, EXPERIMENTS[name].variants[variant])
    assert config.task.kind == "sorting"
    tokenizer, template = tiny_tokenizer(config), load_template(config.task.prompt)
    for question, response in warmup_pairs(config.task, seed=5, num_pairs=300):
        num_tokens = len(tokenizer(response, add_special_tokens=False)["input_ids"]) + 1  # the end token
        prompt = tokenizer(template.render(question), add_special_tokens=False)["input_ids"]
        assert num_tokens <= config.sampling.max_tokens
        assert config.model.tiny is not None
        assert len(prompt) + config.sampling.max_tokens <= config.model.tiny.max_position_embeddings
        assert not any(stop in response and not response.endswith(stop) for stop in config.sampling.stop)
