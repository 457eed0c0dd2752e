"""Grading in a process that can die: what never ends costs one worker, and is counted."""

import psutil
import pytest

from grpo_ray.rewards import make_reward_fn
from grpo_ray.rewards.isolated import IsolatedReward, ScoringError
from grpo_ray.rewards.r1_zero import r1_zero_reward_fn


def response(answer: str) -> str:
    return f" thinking </think> <answer> {answer} </answer>"


@pytest.fixture
def reward():
    isolated = make_reward_fn("r1_zero", timeout_s=1.5, memory_gib=2)
    assert isinstance(isolated, IsolatedReward)
    yield isolated
    isolated.close()


def test_verdicts_are_those_of_the_function_itself(reward):
    for answer, truth in [("72", "72"), ("0.5", r"\frac{1}{2}"), ("71", "72"), ("line\nbreak ü", "72")]:
        assert reward(response(answer), truth) == r1_zero_reward_fn(response(answer), truth)


@pytest.mark.parametrize("answer", [r"\binom{1000000000}{500000000}", r"((10^{999})^{999})^{999}"])
def test_an_endless_answer_is_an_error_and_the_next_one_is_graded(reward, answer):
    assert reward(response("72"), "72")["reward"] == 1
    with pytest.raises(ScoringError):
        reward(response(answer), "72")
    assert reward(response("72"), "72")["reward"] == 1


def test_close_ends_the_worker(reward):
    reward(response("72"), "72")
    worker = psutil.Process(reward._worker.pid)
    reward.close()
    assert not worker.is_running()
