"""Guess a number from 1 to 31 in five tries, told after each whether it is higher or lower.

Halving the interval wins always; guessing anything at random wins 5 times in 31.
"""

import random
import re
from collections.abc import Callable

from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.learning.plain_chat import transcript
from grpo_ray.tasks.examples import Example, ExampleSets, Pairs

LOW, HIGH, TRIES = 1, 31, 5
QUESTION = f"Guess my number from {LOW} to {HIGH}."
SHARE_BISECTING = 0.2  # of the warm-up's games

Interval = tuple[int, int]  # the first and the last number that are still possible


async def episode(session: Session, example: Example) -> Outcome:
    """Play one game; the reward is 1 for the right number, else 0."""
    number = int(example.ground_truth)
    messages = [{"role": "user", "content": QUESTION}]
    interval, num_guesses, num_optimal, is_right = (LOW, HIGH), 0, 0, False
    while num_guesses < TRIES and not is_right:
        reply = await session.chat(messages)
        guess = read_guess(reply.text)
        num_guesses += 1
        num_optimal += guess is not None and is_optimal(guess, interval)
        is_right = guess == number
        interval = narrowed(interval, guess, number)
        messages += [reply.message, {"role": "user", "content": hint(guess, number)}]
    metrics = {"num_guesses": float(num_guesses), "optimal": num_optimal / num_guesses}
    return Outcome(float(is_right), metrics=metrics)


def read_guess(text: str) -> int | None:
    """Return the number that the text is, or None."""
    return int(text) if re.fullmatch(r"\s*\d{1,3}\s*", text, re.ASCII) else None


def hint(guess: int | None, number: int) -> str:
    """Return what the player is told about a wrong guess."""
    if guess is None:
        return "Say a number."
    return "higher" if guess < number else "lower"


def narrowed(interval: Interval, guess: int | None, number: int) -> Interval:
    """Return the numbers that are possible after the hint."""
    low, high = interval
    if guess is None:
        return interval
    return (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))


def is_optimal(guess: int, interval: Interval) -> bool:
    """Return whether the guess leaves at most half of the interval, whatever the hint."""
    low, high = interval
    return low <= guess <= high and max(guess - low, high - guess) <= (high - low + 1) // 2


def bisect(interval: Interval) -> int:
    """Return the best guess."""
    return sum(interval) // 2


def examples(seed: int, num_train: int = 310, num_validation: int = 31) -> ExampleSets:
    """Return games with every number equally often, in random order."""
    rng = random.Random(f"guess-number/{seed}")
    numbers = [LOW + n % (HIGH - LOW + 1) for n in range(num_train + num_validation)]
    train, validation = numbers[:num_train], numbers[num_train:]
    rng.shuffle(train)
    return ExampleSets(
        [Example(QUESTION, str(n)) for n in train], [Example(QUESTION, str(n)) for n in validation]
    )


def warmup_pairs(seed: int, num_pairs: int, end_token: str = "<|endoftext|>") -> Pairs:
    """Return games of two habits, halving the interval and guessing anything, as pairs for the warm-up.

    A pair is the question and the rest of the transcript, hints included, so one pair teaches every turn.

    Args:
        end_token: ends each reply in the transcripts, as the model's own tokenizer writes it.
    """
    rng = random.Random(f"guess-number-warmup/{seed}")

    question = transcript([{"role": "user", "content": QUESTION}], end_token)
    pairs: Pairs = []
    for _ in range(num_pairs):
        player = bisect if rng.random() < SHARE_BISECTING else lambda _: rng.randint(LOW, HIGH)
        pairs.append((question, played(rng.randint(LOW, HIGH), player, end_token).removeprefix(question)))
    return pairs


def played(number: int, player: Callable[[Interval], int], end_token: str) -> str:
    """Return the transcript of one game, without the end of its last guess."""
    messages, interval = [{"role": "user", "content": QUESTION}], (LOW, HIGH)
    for num_guesses in range(1, TRIES + 1):
        guess = player(interval)
        if guess == number or num_guesses == TRIES:
            break
        interval = narrowed(interval, guess, number)
        messages += [
            {"role": "assistant", "content": str(guess)},
            {"role": "user", "content": hint(guess, number)},
        ]
    return transcript(messages, end_token) + str(guess)
