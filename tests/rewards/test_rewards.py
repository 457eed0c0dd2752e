"""Built-in rewards: answers in many spellings, tricks with the format, values worked out by hand, and sums."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from builders import respond

from grpo_ray.config.reward import REWARD_NAMES, RewardTerm
from grpo_ray.rewards import REWARDS, get_reward_fn, needs_isolation, question_only_reward_fn, r1_zero_reward_fn
from grpo_ray.rewards.answer_formats import answer_place, read_boxed
from grpo_ray.rewards.base import NotGraded, Ungradable
from grpo_ray.rewards.builtin import sort_distance_reward, sort_inclusion_ordering_reward


def scores(reward: float, has_format: float, is_right: float) -> dict[str, float]:
    return {"reward": reward, "format_reward": has_format, "answer_reward": is_right}


NO_FORMAT, WRONG, RIGHT = scores(0, 0, 0), scores(0, 1, 0), scores(1, 1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        "9^9^9^9", "((10^{999})^{999})^{999}", "x^{9^9}", "10^{-99999999}", "(10^{10})!",
        r"\binom{1000000000}{500000000}", "(" * 30 + "72" + ")" * 30, "x" * 1000, "9" * 1001,
    ],
)  # fmt: skip
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
    # A chat model may open the thought itself.
    assert get_reward_fn(name)(" <think> Seventy-two. </think> <answer> 72 </answer>", "72") == RIGHT


def test_exact_match_accepts_only_the_same_text() -> None:
    for answer in ("1258", "01258.0", "0 1258", "01258 01258"):
        assert REWARDS["exact_match"](respond(answer), "01258") == WRONG


@pytest.mark.parametrize(
    ("response", "scores"),
    [
        (r"\boxed{72}, that is \boxed{72.0}", RIGHT),
        (r"\boxed{71} no, \boxed{72}", WRONG),
        ("".join(rf"\boxed{{{n}}}" for n in range(73)), WRONG),
        ("".join(rf"\boxed{{72.{'0' * n}}}" for n in range(16)) + r"\boxed{72}", RIGHT),
        (r"\boxed{71 \text{ or } \boxed{72}}", WRONG),
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
        ("48 + 5 = 53", "53", RIGHT), ("The answer is 53.", "53", RIGHT), ("It is $1,200.50!", "1200.5", RIGHT),
        ("5 − 8 = −3", "-3", RIGHT), ("so x=-.50", "-0.5", RIGHT), ("10-7", "7", RIGHT), ("1,2", "2", RIGHT),
        ("53, I added 48 and 5", "53", WRONG), ("1e53 1.53", "53", WRONG),
        ("fifty-three", "53", NO_FORMAT), ("", "53", NO_FORMAT), ("9" * 100_000, "9" * 100_000, RIGHT),
    ],
)  # fmt: skip
def test_the_last_number(response: str, truth: str, scores: dict[str, float]) -> None:
    assert REWARDS["last_number"](response, truth) == scores


@pytest.mark.parametrize("truth", ["many", "3 or 4", ""])
def test_the_last_number_needs_one_as_truth(truth: str) -> None:
    with pytest.raises(ValueError, match="is not one number"):
        REWARDS["last_number"]("3", truth)


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
        (r"72 \boxed{72}", "72"), (r"\boxed{71} no, \boxed{ 72 } is it", "72"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{\boxed{72}}", "72"),
        (r"\boxed{71 \boxed{72} 73}", r"71 \boxed{72} 73"), (r"\boxed{\boxed{72} 73}", r"\boxed{72} 73"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\}}", r"\}"), (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{72", None), (r"\boxed{72} \boxed{72", None), (r"\boxed{71 \boxed{72}", None),
        (r"\boxed{72\}", None), (r"\boxed{72} \boxed{}", None), ("boxed{72}", None),
    ],
)  # fmt: skip
def test_the_last_box_is_read(response: str, answer: str | None) -> None:
    assert read_boxed(response) == answer
    if answer is None:
        assert question_only_reward_fn(response, "72") == NO_FORMAT


def test_boxed_answers_are_graded_like_tagged_ones() -> None:
    for answer, truth in [("0.5", r"\frac{1}{2}"), ("71", "72"), ("71 or 72", "72"), ("7" * 1001, "7" * 1001)]:
        boxed = question_only_reward_fn(rf"So it is $\boxed{{{answer}}}$.", truth)
        assert boxed == r1_zero_reward_fn(respond(answer), truth)
    assert question_only_reward_fn(r"\boxed{She has 72 eggs}", "72") == WRONG
    assert question_only_reward_fn(r"\boxed{She has 72 eggs}", "72", fast=False) == RIGHT


def test_grading_works_off_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(r1_zero_reward_fn, respond("0.5"), r"\frac{1}{2}").result() == RIGHT


def test_unknown_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="'r1zero' is not a reward; give one of brevity, exact_match, format,"):
        get_reward_fn("r1zero")


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
    assert REWARDS["graded"](response, "0.5") == expected


def test_graded_in_boxes_with_grades_of_ones_own() -> None:
    def grade(response: str) -> dict[str, float]:
        return REWARDS["graded"](response, "72", right=2, wrong=0.1, missing=-3, answer_in="boxed")

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
        ("a e" + "\u0301" * 40 + " b", "e" + "\u0301" * 40, 1),  # more marks than stay in one row
    ],
)
def test_keywords(response: str, keywords: str, value: float) -> None:
    expected = scores(value, 1, value)
    assert REWARDS["keyword_inclusion"](response, keywords) == expected
    assert REWARDS["keyword_inclusion"](response, keywords.split(",")) == expected


@pytest.mark.parametrize("keywords", ["", " , ", []])
def test_no_keyword_is_an_error(keywords: str | list[str]) -> None:
    with pytest.raises(ValueError, match="names no keyword; give them separated by commas"):
        REWARDS["keyword_inclusion"]("cat", keywords)


# ---- sorting: Stanford CS336, spring 2025, lecture 17 ----


@pytest.mark.parametrize(
    ("response", "distance", "inclusion_ordering"),
    [
        ([0, 1, 2, 3], 4, 7), ([7, 2, 2, 5], 1, 3), ([0, 3, 1, 2], 1, 6), ([3, 2, 1, 0], 0, 4),
        ([5, 5, 5, 5], 0, 3),
    ],
)  # fmt: skip
def test_the_lectures_examples(response: list[int], distance: float, inclusion_ordering: float) -> None:
    assert sort_distance_reward([3, 1, 0, 2], response) == distance
    assert sort_inclusion_ordering_reward([3, 1, 0, 2], response) == inclusion_ordering


def test_sequences_of_two_lengths_and_a_truth_without_numbers_are_refused() -> None:
    for reward in (sort_distance_reward, sort_inclusion_ordering_reward):
        with pytest.raises(ValueError, match="prompt and response differ in length: 2 and 3 numbers"):
            reward([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="the ground truth 'abc' is not a list of integers"):
        REWARDS["sort_distance"](respond("0"), "abc")


@pytest.mark.parametrize(
    ("answer", "truth", "distance", "inclusion_ordering"),
    [
        ("0123", "0123", 1, 1), ("0 1 2 3", "0123", 1, 1), ("[0, 1, 2, 3]", "0123", 1, 1),
        ("0;1;2;3", "0123", 1, 1), ("0312", "0123", 1 / 4, 6 / 7), ("012", "0123", 0, 0),
        ("01233", "0123", 0, 0), ("", "0123", 0, 0), ("0 -1 2 -3", "0123", 0, 0), ("01 23", "0123", 0, 0),
        ("-5, 2, 10", "-5, 2, 10", 1, 1), ("-5 10 2", "-5, 2, 10", 1 / 3, 4 / 5),
    ],
)  # fmt: skip
def test_sorting_reads_answers(answer: str, truth: str, distance: float, inclusion_ordering: float) -> None:
    is_right = float(distance == 1)
    assert REWARDS["sort_distance"](respond(answer), truth) == scores(distance, 1, is_right)
    assert REWARDS["sort_inclusion_ordering"](respond(answer), truth) == scores(inclusion_ordering, 1, is_right)


def test_brevity_falls_linearly_in_characters_or_words() -> None:
    brevity = REWARDS["brevity"]
    for length, value in ((0, 1), (200, 1), (201, 1 - 1 / 800), (600, 0.5), (1000, 0), (5000, 0)):
        assert brevity("x" * length, "") == scores(pytest.approx(value), 1, 0)
    assert brevity("a bb\nccc  dddd", "", free=2, span=4, unit="words")["reward"] == 0.5


def test_format_requires_an_answer_in_its_place() -> None:
    assert REWARDS["format"](respond("71"), "72") == scores(1, 1, 0)
    assert REWARDS["format"](respond(""), "72") == scores(0, 0, 0)
    assert REWARDS["format"](r"\boxed{71}", "72", answer_in="boxed") == scores(1, 1, 0)


def test_a_weighted_sum_by_hand() -> None:
    short = RewardTerm(reward="brevity", weight=-0.25, arguments={"free": 0, "span": 100})
    reward_fn = get_reward_fn((RewardTerm(reward="r1_zero"), RewardTerm(reward="format", weight=0.5), short))
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
    assert all(map(needs_isolation, ("r1_zero", "question_only", "graded", "mine:reward")))
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
