"""The two rewards for sorting numbers from Stanford CS336's lecture 17 (spring 2025), also as reward functions.

Comparing them is a lesson in reward design. One number out of place shifts all the others, so a reward for
matching positions may give a nearly sorted response nothing. A reward for inclusion and ordering gives that
response most of the points, but it gives many points to bad responses too.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from grpo_ray.rewards.answer_formats import read_answer
from grpo_ray.rewards.base import Scores, scores

INTEGERS = re.compile(r"\[?\s*([+-]?\d{1,18}(?:\s*,\s*|\s+|\s*;\s*))*[+-]?\d{1,18}\s*\]?")
INTEGER = re.compile(r"[+-]?\d+")
DIGITS = re.compile(
    r"\d+|\[?\s*(?:\d(?:\s*[,;]\s*|\s+))*\d\s*\]?", re.ASCII
)  # `0123`, or one digit each: `0, 1, 2, 3`


def sort_distance_reward(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Count the positions at which the response equals the sorted prompt; 0 to n.

    Raises:
        ValueError: prompt and response differ in length.
    """
    _check_lengths(prompt, response)
    return float(sum(given == wanted for given, wanted in zip(response, sorted(prompt), strict=True)))


def sort_inclusion_ordering_reward(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Count the prompt's numbers that the response has, plus its adjacent pairs in order; 0 to 2n - 1.

    Raises:
        ValueError: prompt and response differ in length.
    """
    _check_lengths(prompt, response)
    num_included = sum(number in response for number in prompt)
    num_ordered = sum(left <= right for left, right in pairwise(response))
    return float(num_included + num_ordered)


def sort_distance_reward_fn(response: str, ground_truth: str) -> Scores:
    """Return `sort_distance_reward` of the numbers in the answer tags, divided by n."""
    return _score(response, ground_truth, sort_distance_reward)


def sort_inclusion_ordering_reward_fn(response: str, ground_truth: str) -> Scores:
    """Return `sort_inclusion_ordering_reward` of the numbers in the answer tags, divided by 2n - 1."""
    return _score(response, ground_truth, sort_inclusion_ordering_reward)


def _score(response: str, ground_truth: str, reward: Callable[[Sequence[int], Sequence[int]], float]) -> Scores:
    """Return the share of what the sorted truth would earn; 0 for an answer with more or fewer numbers.

    The truth holds the prompt's numbers, either as one run of digits, each of which is a number, or separated.
    """
    answer = read_answer(response)
    are_digits = ground_truth.strip().isdecimal()
    numbers, wanted = _numbers(answer or "", are_digits), sorted(_numbers(ground_truth, are_digits))
    if not wanted:
        raise ValueError(
            f"the ground truth {ground_truth!r} is not a list of integers, which the sorting rewards require"
        )
    share = reward(wanted, numbers) / reward(wanted, wanted) if len(numbers) == len(wanted) else 0.0
    return scores(share, has_format=answer is not None, is_right=numbers == wanted)


def _numbers(text: str, are_digits: bool) -> list[int]:
    """Return the integers if the whole text is a list of them; none otherwise."""
    if not (DIGITS if are_digits else INTEGERS).fullmatch(text.strip()):
        return []
    return [int(number) for number in (re.findall(r"\d", text) if are_digits else INTEGER.findall(text))]


def _check_lengths(prompt: Sequence[int], response: Sequence[int]) -> None:
    if len(prompt) != len(response):
        raise ValueError(f"prompt and response differ in length: {len(prompt)} and {len(response)} numbers")
