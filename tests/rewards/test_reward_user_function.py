"""Reward functions of the user's own: import, checks before a run, checks of results, and the examples."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.rewards import json_object, numeric_tolerance, regex_format, shuffled
from grpo_ray.config import Config
from grpo_ray.config.reward import RewardTerm
from grpo_ray.rewards import get_reward_fn
from grpo_ray.rewards.configured import check_reward
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.run.preparation import check_files

EXAMPLES = "examples.rewards"


def result_of(value: Any) -> dict[str, float]:
    return UserFunction(lambda response, ground_truth: value, "mine:reward", {}).read(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, (1, 1, 1)),
        (0.99, (0.99, 1, 0)),
        (-1.0, (-1, 1, 0)),
        (np.float32(0.5), (0.5, 1, 0)),
        (np.True_, (1, 1, 1)),
        (Decimal("0.5"), (0.5, 1, 0)),
        (torch.tensor(0.5), (0.5, 1, 0)),
        ({"reward": 0.3}, (0.3, 1, 0)),
        ({"reward": 0.3, "answer_reward": 1.0}, (0.3, 1, 1)),
        ({"reward": 1, "format_reward": 0, "answer_reward": 0}, (1, 0, 0)),
    ],
)
def test_a_number_or_a_dict(value: Any, expected: tuple[float, float, float]) -> None:
    result = result_of(value)
    assert result == dict(zip(("reward", "format_reward", "answer_reward"), expected, strict=True))
    assert all(type(number) is float for number in result.values())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None as 'reward'; it must be a finite number"),
        (float("nan"), "returned nan as 'reward'; it must be a finite number"),
        ([1.0], r"returned \[1.0\] as 'reward'"),
        (10**400, "returned 10{400} as 'reward'; it must be a finite number"),
        ({}, "returned a dict of nothing; it needs 'reward'"),
        ({"reward": 1, "formt_reward": 1}, "returned a dict of 'reward', 'formt_reward'"),
        ({"reward": 1, "format_reward": 0.5}, "returned 0.5 as 'format_reward'; it must be 0 or 1"),
        ({"reward": 1, "answer_reward": None}, "returned None as 'answer_reward'"),
    ],
)
def test_any_other_result_is_refused(value: Any, message: str) -> None:
    place = r"\(test_reward_user_function.py:\d+\)"
    with pytest.raises(ValueError, match=f"task.reward: mine:reward {place} {message}"):
        result_of(value)


MODULE = "my_rewards_4711"
CODE = """
from typing import Literal
BLEU = 3
def reward(response, ground_truth): return float(response == ground_truth)
def scaled(response: str, ground_truth: str, scale: float, mode: Literal["a", "b"] = "a") -> float: return scale
def anything(response, ground_truth, **options): return 0.5
def three(response, ground_truth, margin): return 0.5
class Judge:
    def __call__(self, response, ground_truth): return 0.25
judge = Judge()
"""


@pytest.fixture
def here(own_module: None, tmp_path: Path) -> Path:
    (tmp_path / "failing_4711.py").write_text("1 / 0")
    (tmp_path / "leaving_4711.py").write_text("raise SystemExit(3)")
    (tmp_path / "needing_4711.py").write_text("import no_such_library_4711")
    return tmp_path


@pytest.mark.usefixtures("here")
def test_a_module_in_the_current_folder_is_found() -> None:
    check_reward("my_rewards_4711:reward")
    assert get_reward_fn("my_rewards_4711:reward")("a", "a")["reward"] == 1
    assert get_reward_fn("my_rewards_4711:judge")("a", "a")["reward"] == 0.25
    term = RewardTerm(reward="my_rewards_4711:scaled", weight=2, arguments={"scale": 0.25})
    check_reward((term,))
    assert get_reward_fn((term,))("", "")["reward"] == 0.5
    check_reward((RewardTerm(reward="my_rewards_4711:anything", arguments={"a": 1, "b": "x"}),))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_module_4711:f", {}, "there is no module 'no_module_4711' in "),
        ("my_rewards_4711.py:f", {}, "Leave out .py: my_rewards_4711:f"),
        ("my_rewards_4711:f", {}, "'my_rewards_4711' has no function 'f'; its file is "),
        ("sys:f", {}, "'sys' has no function 'f'; its file is none: it is a folder, or built in"),
        ("my_rewards_4711:BLEU", {}, "'BLEU' of 'my_rewards_4711' is a int, not a function"),
        ("failing_4711:reward", {}, "importing 'failing_4711' failed: ZeroDivisionError: division by zero"),
        ("leaving_4711:reward", {}, "importing 'leaving_4711' failed: SystemExit: 3"),
        ("needing_4711:reward", {}, "'needing_4711' imports 'no_such_library_4711', which is not installed"),
        ("my_rewards_4711:three", {}, "my_rewards_4711:three needs margin; give `arguments` in a list"),
        ("my_rewards_4711:reward", {"scale": 1}, "has no argument 'scale'; it takes none"),
        ("my_rewards_4711:scaled", {"scael": 1}, "has no argument 'scael'; it takes scale, mode"),
        ("my_rewards_4711:scaled", {"scale": "x"}, "has scale='x': input should be a valid number"),
        ("my_rewards_4711:scaled", {"scale": 1, "mode": "c"}, "has mode='c': input should be 'a' or 'b'"),
        ("brevity", {"free": -1}, "brevity has free=-1: input should be greater than or equal to 0"),
        ("graded", {"response": "x"}, "graded has no argument 'response'; it takes right, wrong, missing, "),
        ("format", {"answer_in": "tag"}, "format has answer_in='tag'"),
    ],
)
def test_a_reward_that_does_not_fit_is_refused_before_a_run(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"task\.reward: .*{message}"):
        check_reward((RewardTerm(reward=name, arguments=arguments),))


def test_the_preflight_checks_it(tiny_config: Config) -> None:
    task = tiny_config.task.model_copy(update={"reward": "no_module_4711:f"})
    with pytest.raises(ValueError, match=r"^task\.reward: there is no module 'no_module_4711'"):
        check_files(tiny_config.model_copy(update={"task": task}))


@pytest.mark.parametrize(
    ("response", "expected"),
    [("about 3.14", 1), ("3.2 or 3.13", 1), ("3.3", 0), ("3.14 of 100", 0), ("none", -1), ("3,140.0e-3", 1)],
)
def test_numeric_tolerance(response: str, expected: float) -> None:
    assert numeric_tolerance.reward_fn(response, "3.1416") == expected


def test_shuffled_rewards_are_the_earned_ones() -> None:
    responses = [f"{number}" for number in range(10)]

    def given(*others: str) -> list[float]:
        answers = [*responses[:-1], *others]
        return shuffled.shuffled(answers, ["3"] * 10, [{}] * 10, "last_number")

    assert sorted(given("9")) == [0.0] * 9 + [1.0]
    assert given("9") == given("9")
    places = {given(f"{number}").index(1.0) for number in range(9, 40)}
    assert len(places) > 5  # anywhere


def test_numeric_tolerance_from_a_configuration() -> None:
    term = RewardTerm(reward=f"{EXAMPLES}.numeric_tolerance:reward_fn", arguments={"tolerance": 0.2})
    check_reward((term,))
    assert get_reward_fn((term,))("80", "100") == {"reward": 1, "format_reward": 1, "answer_reward": 1}
    assert get_reward_fn((term,))("79", "100") == {"reward": 0, "format_reward": 1, "answer_reward": 0}


@pytest.mark.parametrize(
    ("response", "reward", "has_format", "is_right"),
    [
        ('{"name": "Ada", "age": 36}', 1.0, 1, 1),
        (' {"age": 36, "name": "Ada", "x": null}\n', 1.0, 1, 1),
        ('{"name": "Ada", "age": 37}', 0.6, 1, 0),
        ("{}", 0.2, 1, 0),
        ('["Ada", 36]', 0.0, 0, 0),
        ('{"name": "Ada", "age": 36', 0.0, 0, 0),
        ("[" * 100_000, 0.0, 0, 0),
    ],
)
def test_json_object(response: str, reward: float, has_format: float, is_right: float) -> None:
    result = get_reward_fn(f"{EXAMPLES}.json_object:reward_fn")(response, '{"name": "Ada", "age": 36}')
    expected = {"reward": pytest.approx(reward), "format_reward": has_format, "answer_reward": is_right}
    assert result == expected
    assert json_object.reward_fn(response, '{"name": "Ada", "age": 36}') == expected


def test_regex_format() -> None:
    pattern = r"(?s).+Check:.+</answer>"
    assert regex_format.reward_fn("so\nCheck: yes </answer>\n", "", pattern)["reward"] == 1
    assert regex_format.reward_fn("so\nyes </answer>", "", pattern)["reward"] == 0
    with pytest.raises(ValueError, match="regex_format:reward_fn needs pattern"):
        check_reward(f"{EXAMPLES}.regex_format:reward_fn")
