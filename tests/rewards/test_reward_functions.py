"""Rewards other than the graders: values worked out by hand, the lecture's own examples, and arguments."""

from collections.abc import Callable

import pytest
from builders import respond

from grpo_ray.config.reward import RewardTerm
from grpo_ray.rewards import get_reward_fn, needs_isolation
from grpo_ray.rewards.answer_formats import answer_place
from grpo_ray.rewards.builtin import (
    brevity_reward_fn,
    format_reward_fn,
    graded_reward_fn,
    keyword_inclusion_reward_fn,
    sort_distance_reward,
    sort_distance_reward_fn,
    sort_inclusion_ordering_reward,
    sort_inclusion_ordering_reward_fn,
)


def scores(reward: float, has_format: float, is_right: float) -> dict[str, float]:
    return {"reward": reward, "format_reward": has_format, "answer_reward": is_right}


# ---- in three grades ----


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (respond("1/2"), scores(1, 1, 1)),
        (respond("1/3"), scores(-0.5, 1, 0)),
        (respond(""), scores(-1, 1, 0)),
        ("It is 0.5", scores(-1, 0, 0)),
        (respond("0.5") + respond("0.5"), scores(-1, 0, 0)),
    ],
)
def test_graded(response: str, expected: dict[str, float]) -> None:
    assert graded_reward_fn(response, "0.5") == expected


def test_graded_in_boxes_with_grades_of_ones_own() -> None:
    def grade(response: str) -> dict[str, float]:
        return graded_reward_fn(response, "72", right=2, wrong=0.1, missing=-3, answer_in="boxed")

    assert grade(r"\boxed{72}") == scores(2, 1, 1)
    assert grade(r"\boxed{71}") == scores(0.1, 1, 0)
    assert grade(r"\boxed{71} \boxed{72}") == scores(0.1, 1, 0)
    assert grade(respond("72")) == scores(-3, 0, 0)


@pytest.mark.parametrize(
    ("response", "keywords", "value"),
    [
        ("The cat saw a dog.", "cat, dog", 1),
        ("A cat-like dog!", "cat, dog", 1),
        ("cat", "cat,dog", 0),
        ("category and dogma", "cat, dog", 0),
        ("_cat_ dog", "cat, dog", 0),
        ("In New\nYork", "new york", 1),
        ("C++ (and c#)", "c++, c#", 1),
        ("Übung macht den Meister", "übung, meister", 1),
        ("", "cat", 0),
        ("a.b", "a*b", 0),
        ("dog", " , dog,", 1),
        ("Five o’clock in a cafe\u0301", "o'clock, caf\u00e9", 1),
    ],
)
def test_keywords(response: str, keywords: str, value: float) -> None:
    expected = scores(value, 1, value)
    assert keyword_inclusion_reward_fn(response, keywords) == expected
    assert keyword_inclusion_reward_fn(response, keywords.split(",")) == expected


@pytest.mark.parametrize("keywords", ["", " , ", []])
def test_no_keyword_is_an_error(keywords: str | list[str]) -> None:
    with pytest.raises(ValueError, match="names no keyword; give them separated by commas"):
        keyword_inclusion_reward_fn("cat", keywords)


# ---- sorting: Stanford CS336, spring 2025, lecture 17 ----


@pytest.mark.parametrize(
    ("response", "distance", "inclusion_ordering"),
    [
        ([0, 1, 2, 3], 4, 7),
        ([7, 2, 2, 5], 1, 3),
        ([0, 3, 1, 2], 1, 6),
        ([3, 2, 1, 0], 0, 4),
        ([5, 5, 5, 5], 0, 3),
    ],
)
def test_the_lectures_examples(response: list[int], distance: float, inclusion_ordering: float) -> None:
    assert sort_distance_reward([3, 1, 0, 2], response) == distance
    assert sort_inclusion_ordering_reward([3, 1, 0, 2], response) == inclusion_ordering


@pytest.mark.parametrize("reward", [sort_distance_reward, sort_inclusion_ordering_reward])
def test_sequences_of_two_lengths_are_refused(reward: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match="prompt and response differ in length: 2 and 3 numbers"):
        reward([1, 2], [1, 2, 3])


@pytest.mark.parametrize(
    ("answer", "truth", "distance", "inclusion_ordering"),
    [
        ("0123", "0123", 1, 1),
        ("0 1 2 3", "0123", 1, 1),
        ("[0, 1, 2, 3]", "0123", 1, 1),
        ("0312", "0123", 1 / 4, 6 / 7),
        ("012", "0123", 0, 0),
        ("01233", "0123", 0, 0),
        ("", "0123", 0, 0),
        ("0;1;2;3", "0123", 1, 1),
        ("0 -1 2 -3", "0123", 0, 0),
        ("01 23", "0123", 0, 0),
        ("-5, 2, 10", "-5, 2, 10", 1, 1),
        ("-5 10 2", "-5, 2, 10", 1 / 3, 4 / 5),
    ],
)
def test_sorting_reads_answers(answer: str, truth: str, distance: float, inclusion_ordering: float) -> None:
    is_right = float(distance == 1)
    assert sort_distance_reward_fn(respond(answer), truth) == scores(distance, 1, is_right)
    assert sort_inclusion_ordering_reward_fn(respond(answer), truth) == scores(inclusion_ordering, 1, is_right)


def test_sorting_rewards_need_the_format_and_numbers() -> None:
    assert sort_distance_reward_fn("0123", "0123") == scores(0, 0, 0)
    with pytest.raises(ValueError, match="the ground truth 'abc' is not a list of integers"):
        sort_distance_reward_fn(respond("0"), "abc")


@pytest.mark.parametrize(
    ("length", "value"), [(0, 1), (200, 1), (201, 1 - 1 / 800), (600, 0.5), (1000, 0), (5000, 0)]
)
def test_brevity_falls_linearly(length: int, value: float) -> None:
    assert brevity_reward_fn("x" * length, "") == scores(pytest.approx(value), 1, 0)


def test_brevity_in_words() -> None:
    assert brevity_reward_fn("a bb\nccc  dddd", "", free=2, span=4, unit="words")["reward"] == 0.5


def test_format_requires_an_answer_in_its_place() -> None:
    assert format_reward_fn(respond("71"), "72") == scores(1, 1, 0)
    assert format_reward_fn(respond(""), "72") == scores(0, 0, 0)
    assert format_reward_fn("72", "72") == scores(0, 0, 0)
    assert format_reward_fn(r"\boxed{71}", "72", answer_in="boxed") == scores(1, 1, 0)


def test_a_weighted_sum_by_hand() -> None:
    reward_fn = get_reward_fn(
        (
            RewardTerm(reward="r1_zero"),
            RewardTerm(reward="format", weight=0.5),
            RewardTerm(reward="brevity", weight=-0.25, arguments={"free": 0, "span": 100}),
        )
    )
    response = respond("71")
    brevity = 1 - len(response) / 100
    own = {"reward/r1_zero": 0, "reward/format": 1, "reward/brevity": pytest.approx(brevity)}
    assert reward_fn(response, "72") == scores(pytest.approx(0.5 - 0.25 * brevity), 1, 0) | own
    own["reward/r1_zero"] = 1
    assert reward_fn(respond("72"), "72") == scores(pytest.approx(1.5 - 0.25 * brevity), 1, 1) | own
    assert reward_fn("72" * 100, "72") == scores(0, 0, 0) | dict.fromkeys(own, 0)


def test_format_and_answer_are_the_first_terms() -> None:
    terms = (RewardTerm(reward="keyword_inclusion"), RewardTerm(reward="exact_match", weight=3))
    both, one = ({"reward/keyword_inclusion": 1, "reward/exact_match": value} for value in (1, 0))
    assert get_reward_fn(terms)(respond("cat"), "cat") == scores(4, 1, 1) | both
    assert get_reward_fn(terms)("a cat", "cat") == scores(1, 1, 1) | one
    assert get_reward_fn(terms[::-1])("a cat", "cat") == scores(1, 0, 0) | one


def test_rewards_that_may_run_away_are_isolated() -> None:
    assert [needs_isolation(name) for name in ("r1_zero", "question_only", "graded", "mine:reward")] == [
        True
    ] * 4
    assert not any(map(needs_isolation, ("exact_match", "keyword_inclusion", "sort_distance", "brevity")))
    assert needs_isolation((RewardTerm(reward="brevity"), RewardTerm(reward="r1_zero")))
    assert not needs_isolation((RewardTerm(reward="brevity"), RewardTerm(reward="format")))


def test_where_a_reward_reads_the_answer() -> None:
    assert answer_place("question_only") == "boxed"
    assert answer_place("r1_zero") == answer_place("sort_distance") == answer_place("mine:reward") == "tags"
    brevity = RewardTerm(reward="brevity")
    assert answer_place((brevity, RewardTerm(reward="question_only"))) == "boxed"
    assert answer_place((RewardTerm(reward="graded", arguments={"answer_in": "boxed"}), brevity)) == "boxed"
    assert answer_place((RewardTerm(reward="graded"), brevity)) == "tags"
