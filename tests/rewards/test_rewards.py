"""Rewards: right and wrong answers in many spellings, and responses that exploit the format."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from builders import respond

from grpo_ray.config.reward import REWARD_NAMES
from grpo_ray.rewards import REWARDS, get_reward_fn
from grpo_ray.rewards.answer_formats import read_boxed
from grpo_ray.rewards.base import NotGraded, Ungradable
from grpo_ray.rewards.builtin import (
    exact_match_reward_fn,
    last_number_reward_fn,
    question_only_reward_fn,
    r1_zero_reward_fn,
)

NO_FORMAT = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}
WRONG = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}


@pytest.mark.parametrize(
    "answer",
    [
        "9^9^9^9",
        "((10^{999})^{999})^{999}",
        "x^{9^9}",
        "10^{-99999999}",
        "(10^{10})!",
        r"\binom{1000000000}{500000000}",
        "(" * 30 + "72" + ")" * 30,
        "x" * 1000,
        "9" * 1001,
    ],
)
def test_what_would_take_forever_is_the_answers_doing_or_the_truths(answer: str) -> None:
    with pytest.raises(Ungradable):
        r1_zero_reward_fn(respond(answer), "72")
    with pytest.raises(NotGraded):
        r1_zero_reward_fn(respond("72"), answer)
    assert r1_zero_reward_fn(respond(answer), answer) == RIGHT


def test_a_long_list_is_the_truths_doing() -> None:
    truth = ", ".join(map(str, range(1, 35)))
    with pytest.raises(NotGraded, match="a list of more than 32 parts"):
        r1_zero_reward_fn(respond(", ".join(map(str, range(33))) + ", 72"), truth)
    assert r1_zero_reward_fn(respond("1, 2"), truth) == WRONG
    assert r1_zero_reward_fn(respond(truth), truth) == RIGHT


def test_a_truth_that_cannot_be_parsed_gives_no_verdict() -> None:
    with pytest.raises(NotGraded, match=r"the ground truth '.*' cannot be parsed"):
        r1_zero_reward_fn(respond("x+1"), r"\frac{x}{")
    assert r1_zero_reward_fn(respond(r"\frac{x}{"), "x+1") == WRONG
    assert r1_zero_reward_fn(respond(r"\frac{x}{"), r"\frac{x}{") == RIGHT


FORMAT_GAMES = [
    "72",
    "<answer> 72 </answer>",
    "thought </think> 72",
    "thought </think> <answer> 72",
    "thought </think><answer> 72 </answer>",
    "thought </think> <answer> 71 </answer> <answer> 72 </answer>",
    "thought </think> <answer> 72 </answer> </think> <answer> 71 </answer>",
    "thought </think> <answer> 72 </answer> </answer>",
    "</answer> thought </think> <answer> 72",
    "thought <answer> 72 </answer> </think>",
    "thought </THINK> <ANSWER> 72 </ANSWER>",
    "thought <think> </think> <answer> 72 </answer>",
    "thought </think> <answer> <think> 72 </answer>",
    "",
]


@pytest.mark.parametrize("response", FORMAT_GAMES)
@pytest.mark.parametrize("name", ["exact_match", "format", "question_only", "r1_zero", "sort_distance"])
def test_tricks_with_the_format_earn_nothing(name: str, response: str) -> None:
    assert get_reward_fn(name)(response, "72") == NO_FORMAT


@pytest.mark.parametrize("name", ["exact_match", "r1_zero"])
def test_format_alone_is_no_reward(name: str) -> None:
    assert get_reward_fn(name)(respond("71"), "72") == WRONG
    assert get_reward_fn(name)("</think> <answer></answer>", "72") == WRONG
    assert get_reward_fn(name)(respond("72"), " 72\n") == RIGHT


def test_exact_match_accepts_only_the_same_text() -> None:
    for answer in ("1258", "01258.0", "0 1258", "01258 01258"):
        assert exact_match_reward_fn(respond(answer), "01258") == WRONG


def test_a_chat_model_may_open_the_thought_itself() -> None:
    assert r1_zero_reward_fn(" <think> Seventy-two. </think> <answer> 72 </answer>", "72") == RIGHT


@pytest.mark.parametrize(
    ("response", "scores"),
    [
        (r"\boxed{72}, that is \boxed{72.0}", RIGHT),
        (r"\boxed{71} no, \boxed{72}", WRONG),
        ("".join(rf"\boxed{{{n}}}" for n in range(73)), WRONG),
        ("".join(rf"\boxed{{72.{'0' * n}}}" for n in range(16)) + r"\boxed{72}", RIGHT),
        (r"\boxed{\boxed{72}}", RIGHT),
        (r"\boxed{71 \text{ or } \boxed{72}}", WRONG),
        (r"\boxed{71 \boxed{72} 73}", WRONG),
        (r"\boxed{71 \boxed{72}", NO_FORMAT),
    ],
)
def test_an_answer_is_boxed_once_or_the_same_each_time(response: str, scores: dict[str, float]) -> None:
    assert question_only_reward_fn(response, "72") == scores


def test_many_boxes_that_are_all_right_are_not_all_compared() -> None:
    with pytest.raises(Ungradable, match="more than 16 boxes"):
        question_only_reward_fn("".join(rf"\boxed{{72.{'0' * n}}}" for n in range(17)) + r"\boxed{72}", "72")


@pytest.mark.parametrize(
    ("response", "truth", "scores"),
    [
        ("48 + 5 = 53", "53", RIGHT),
        ("The answer is 53.", "53", RIGHT),
        ("It is $1,200.50!", "1200.5", RIGHT),
        ("5 − 8 = −3", "-3", RIGHT),
        ("so x=-.50", "-0.5", RIGHT),
        ("10-7", "7", RIGHT),
        ("1,2", "2", RIGHT),
        ("53, I added 48 and 5", "53", WRONG),
        ("1e53 1.53", "53", WRONG),
        ("fifty-three", "53", NO_FORMAT),
        ("", "53", NO_FORMAT),
        ("9" * 100_000, "9" * 100_000, RIGHT),
    ],
)
def test_the_last_number(response: str, truth: str, scores: dict[str, float]) -> None:
    assert last_number_reward_fn(response, truth) == scores


@pytest.mark.parametrize("truth", ["many", "3 or 4", ""])
def test_the_last_number_needs_one_as_truth(truth: str) -> None:
    with pytest.raises(ValueError, match="is not one number"):
        last_number_reward_fn("3", truth)


def test_the_configuration_knows_every_reward() -> None:
    assert tuple(REWARDS) == REWARD_NAMES == tuple(sorted(REWARD_NAMES))


def test_the_slow_mode_accepts_one_number_in_prose() -> None:
    def scores_of(answer: str) -> dict[str, float]:
        return r1_zero_reward_fn(respond(answer), "72", fast=False)

    for answer in ("So 72 dollars", "She has 72 eggs.", "The answer is: $72", "72 is the answer"):
        assert scores_of(answer) == RIGHT
    two = ["71 or 72 eggs", "72 eggs, not 71", "72 plus five", "eggs"]
    changed = ["172 eggs", "72x eggs", "72-1 eggs", "minus 72", "square root of 72", "double 72", "72 squared"]
    for answer in (*two, *changed, "It is not 72", "72 is wrong"):
        assert scores_of(answer) == WRONG


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"72 \boxed{72}", "72"),
        (r"\boxed{71} no, \boxed{ 72 } is it", "72"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\boxed{72}}", "72"),
        (r"\boxed{71 \boxed{72} 73}", r"71 \boxed{72} 73"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{72", None),
        (r"\boxed{72} \boxed{72", None),
        (r"\boxed{72\}", None),
        (r"\boxed{72} \boxed{}", None),
        ("boxed{72}", None),
    ],
)
def test_the_last_box_is_read(response: str, answer: str | None) -> None:
    assert read_boxed(response) == answer
    if answer is None:
        assert question_only_reward_fn(response, "72") == NO_FORMAT


def test_boxed_answers_are_graded_like_tagged_ones() -> None:
    for answer, truth in [("0.5", r"\frac{1}{2}"), ("71", "72"), ("71 or 72", "72"), ("7" * 1001, "7" * 1001)]:
        boxed = question_only_reward_fn(rf"So it is $\boxed{{{answer}}}$.", truth)
        assert boxed == r1_zero_reward_fn(respond(answer), truth)
    assert question_only_reward_fn(respond("72"), "72") == NO_FORMAT
    assert question_only_reward_fn(r"\boxed{She has 72 eggs}", "72") == WRONG
    assert question_only_reward_fn(r"\boxed{She has 72 eggs}", "72", fast=False) == RIGHT


def test_grading_works_off_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(r1_zero_reward_fn, respond("0.5"), r"\frac{1}{2}").result() == RIGHT


def test_unknown_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="'r1zero' is not a reward; give one of brevity, exact_match, format,"):
        get_reward_fn("r1zero")
