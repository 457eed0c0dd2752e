"""Every built-in reward takes linear time on hostile responses."""

import contextlib
import time
import unicodedata
from collections.abc import Callable

import pytest

from grpo_ray.rewards import REWARDS
from grpo_ray.rewards.base import NotGraded, Ungradable
from grpo_ray.rewards.builtin import keyword_inclusion_reward_fn

N = 100_000
MARKS = "\u0f73\u0316\u0301"  # sorted by class when composed, which takes quadratic time in a row

# By name: a response of about n characters, and whether it goes between the answer tags.
HOSTILE: dict[str, Callable[[int], str]] = {
    "boxes in boxes": lambda n: r"\boxed{" * (n // 8) + "}" * (n // 8),
    "boxes and spaces": lambda n: r"\boxed{ " * (n // 10) + " }" * (n // 10),
    "boxes that stay open": lambda n: r"\boxed{" * (n // 7),
    "boxes side by side": lambda n: r"\boxed{1}" * (n // 9),
    "braces": lambda n: r"\boxed{" + "{" * (n // 2) + "}" * (n // 2) + "}",
    "backslashes": lambda n: r"\boxed{" + "\\" * n + "}",
    "marks": lambda n: "a" + MARKS * (n // 3),
    "marks in order": lambda n: "a" + "\u0301" * (n // 2) + "\u0316" * (n // 2),
    "spaces": lambda n: "cat" + " " * n + "x",
    "words": lambda n: "New " * (n // 4),
    "digits": lambda n: "1" * n + "x",
    "numbers": lambda n: "1 , " * (n // 4) + "x",
    "numbers and spaces": lambda n: ("1" + " " * 100) * (n // 101) + "x",
    "commas": lambda n: "1" + " ,; " * (n // 4) + "1",
    "tags": lambda n: "</think> <answer> " * (n // 18),
    "brackets": lambda n: "(" * n,
    "one line": lambda n: "\ud800\u2028" * (n // 2),
}
TRUTHS = {"keyword_inclusion": "cat, new york", "sort_distance": "3 1 2"}
# The others read an answer in the same way, and judge what is short.
SCANNING = ("exact_match", "keyword_inclusion", "last_number", "question_only", "sort_distance")


def seconds_of(function: Callable[[str, str], object], response: str, truth: str) -> float:
    """Return the CPU time of this thread."""
    started = time.thread_time()
    with contextlib.suppress(NotGraded, Ungradable):
        function(response, truth)
    return time.thread_time() - started


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANNING)
@pytest.mark.parametrize("kind", HOSTILE)
def test_time_grows_with_the_length_alone(name: str, kind: str) -> None:
    truth = TRUTHS.get(name, "72")

    def is_linear(wrap: str) -> bool:
        texts = (wrap.format(HOSTILE[kind](n)) for n in (N, 4 * N))
        small, large = (seconds_of(REWARDS[name], text, truth) for text in texts)
        return large < 9 * small + 0.02  # quadratic: 16 times

    for wrap in ("{}", "so </think> <answer> {} </answer>"):
        assert is_linear(wrap) or is_linear(wrap)  # a busy machine may disturb one try


def test_marks_in_a_row_are_the_same_word_as_before() -> None:
    assert keyword_inclusion_reward_fn("Cafe\u0301", "café")["reward"] == 1
    assert keyword_inclusion_reward_fn("caf" + unicodedata.normalize("NFD", "é"), "café")["reward"] == 1
    accents = "e" + "\u0301" * 40
    assert keyword_inclusion_reward_fn(f"a {accents} b", accents)["reward"] == 1
