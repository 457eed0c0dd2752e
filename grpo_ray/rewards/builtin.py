"""The built-in rewards, by name in `REWARDS`; docs/rewards.md has each formula."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from grpo_ray.rewards.answer_formats import AnswerIn, read_answer, read_answer_in, read_boxed, read_boxes
from grpo_ray.rewards.base import RewardFn, Scores, Ungradable, scores, verdict
from grpo_ray.rewards.math.equality import grade, is_right

INTEGERS = re.compile(r"\[?\s*([+-]?\d{1,18}(?:\s*,\s*|\s+|\s*;\s*))*[+-]?\d{1,18}\s*\]?")
INTEGER = re.compile(r"[+-]?\d+")
# `0123`, or one digit each: `0, 1, 2, 3`
DIGITS = re.compile(r"\d+|\[?\s*(?:\d(?:\s*[,;]\s*|\s+))*\d\s*\]?", re.ASCII)
MAX_BOXES = 16  # with different contents; each is compared with the truth
MAX_MARKS, JOINER = 30, "\u034f"  # accents and such after one letter; an invisible character that is no mark
NUMBER = re.compile(r"(?<![\d.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
ALGEBRAIC = ("graded", "question_only", "r1_zero")  # computer algebra; the others take linear time


# ---- sorting, from Stanford CS336's lecture 17 (spring 2025): to compare the two is a lesson in reward design.
# One number out of place shifts all others, so the first may give a nearly sorted response nothing; the second
# gives it most of the points, but many to bad responses too. ----


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


# ---- rewards of the answer alone ----


def exact_match_reward_fn(response: str, ground_truth: str) -> Scores:
    """Reward an answer in tags with the characters of the ground truth, apart from white space around them."""
    answer = read_answer(response)
    return verdict(answer is not None, answer == ground_truth.strip())


def r1_zero_reward_fn(response: str, ground_truth: str, fast: bool = True) -> Scores:
    """Reward an answer in tags that is mathematically equal to the ground truth; `grade` has the rules."""
    return grade(read_answer(response), ground_truth, fast)


def question_only_reward_fn(response: str, ground_truth: str, fast: bool = True) -> Scores:
    r"""Reward an answer in the last `\boxed{}` as `grade` does; all other boxes must hold right answers too."""
    judged = grade(read_boxed(response), ground_truth, fast)
    if judged["answer_reward"]:
        others = list(dict.fromkeys(filter(None, read_boxes(response)[:-1])))
        if not all(is_right(other, ground_truth, fast) for other in others[:MAX_BOXES]):
            return verdict(has_format=True, is_right=False)
        if len(others) > MAX_BOXES:
            raise Ungradable(f"more than {MAX_BOXES} boxes, each with another right answer")
    return judged


def last_number_reward_fn(response: str, ground_truth: str) -> Scores:
    """Reward a response that ends with the ground truth as its last number: `48 + 5 = 53.`, `-7`, `3.50`.

    Raises:
        ValueError: the ground truth is no number.
    """
    response, ground_truth = (text.replace("\N{MINUS SIGN}", "-") for text in (response, ground_truth))
    truths = NUMBER.findall(ground_truth)
    if len(truths) != 1:
        raise ValueError(f"{ground_truth!r} is not one number; use another reward")
    numbers = [Decimal(number.replace(",", "")) for number in (*truths, *NUMBER.findall(response)[-1:])]
    return verdict(has_format=len(numbers) == 2, is_right=numbers[1:] == numbers[:1])


JUDGES: dict[AnswerIn, RewardFn] = {"tags": r1_zero_reward_fn, "boxed": question_only_reward_fn}


def graded_reward_fn(
    response: str, ground_truth: str, right: float = 1.0, wrong: float = -0.5, missing: float = -1.0,
    answer_in: AnswerIn = "tags",
) -> Scores:  # fmt: skip
    """Return `right` or `wrong` as `r1_zero` (boxed: `question_only`) judges; `missing` without an answer."""
    judged = JUDGES[answer_in](response, ground_truth)
    if judged["answer_reward"]:
        return scores(right, has_format=True, is_right=True)
    has_answer = bool(read_answer_in(answer_in, response))
    return scores(wrong if has_answer else missing, has_format=bool(judged["format_reward"]), is_right=False)


# ---- rewards that judge no answer: terms to shape a sum with ----


def format_reward_fn(response: str, ground_truth: str, answer_in: AnswerIn = "tags") -> Scores:
    """Return 1 for an answer in the format, right or wrong; 0 for an empty one, or none."""
    has_format = bool(read_answer_in(answer_in, response))
    return scores(float(has_format), has_format, is_right=False)


def brevity_reward_fn(
    response: str, ground_truth: str, free: Annotated[int, Ge(0)] = 200, span: Annotated[int, Gt(0)] = 800,
    unit: Literal["characters", "words"] = "characters",
) -> Scores:  # fmt: skip
    """Return clip(1 - (length - free) / span, 0, 1): 1 up to `free`, then falling to 0 at `free + span`.

    Args:
        free: length in `unit` that costs nothing.
        span: further length over which the reward falls to 0.
        unit: words are separated by white space.
    """
    length = len(response) if unit == "characters" else len(response.split())
    return scores(min(1.0, max(0.0, 1 - (length - free) / span)), has_format=True, is_right=False)


def keyword_inclusion_reward_fn(response: str, keywords: str | Sequence[str]) -> Scores:
    """Return 1 if every keyword occurs, in either case, as a separate word: `cat` is not in `category`.

    A hyphen ends a word: `ice` is in `ice-cream`. Both kinds of apostrophe, and of accents, are the same.

    Args:
        keywords: separated by commas, as in a ground truth; or a list.

    Raises:
        ValueError: there is no keyword.
    """
    words = keywords.split(",") if isinstance(keywords, str) else keywords
    patterns = [_as_word(_normal(word)) for word in words if word.strip()]
    if not patterns:
        raise ValueError(f"{keywords!r} names no keyword; give them separated by commas")
    text = _normal(response)
    return verdict(has_format=True, is_right=all(pattern.search(text) for pattern in patterns))


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", _with_short_runs(text)).replace("’", "'")


def _with_short_runs(text: str) -> str:
    """Separate marks that stand in a row at every MAX_MARKS, because sorting them takes quadratic time.

    This is Unicode's stream-safe text format (UAX #15, section 13), with the same limit and separator.
    """
    if text.isascii():
        return text
    # A mark, or the first character that it is made of, combines with the one before.
    marks = "".join(c for c in set(text) if unicodedata.combining(unicodedata.normalize("NFD", c)[0]))
    return re.sub(f"([{re.escape(marks)}]{{{MAX_MARKS}}})", r"\1" + JOINER, text) if marks else text


def _as_word(keyword: str) -> re.Pattern[str]:
    """Compile a pattern for the keyword; a line break within `New York` does not matter."""
    text = r"\s+".join(map(re.escape, keyword.split()))
    return re.compile(rf"(?<!\w){text}(?!\w)", re.IGNORECASE)


REWARDS: dict[str, RewardFn] = {
    "brevity": brevity_reward_fn,
    "exact_match": exact_match_reward_fn,
    "format": format_reward_fn,
    "graded": graded_reward_fn,
    "keyword_inclusion": keyword_inclusion_reward_fn,
    "last_number": last_number_reward_fn,
    "question_only": question_only_reward_fn,
    "r1_zero": r1_zero_reward_fn,
    "sort_distance": sort_distance_reward_fn,
    "sort_inclusion_ordering": sort_inclusion_ordering_reward_fn,
}
