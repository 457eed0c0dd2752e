"""A try of a reward on one example before anything expensive starts: with its truth, and with no answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_ray.config.reward import Reward, ScorerConfig, terms_of
from grpo_ray.config.task import field_of
from grpo_ray.rewards.answer_formats import written
from grpo_ray.rewards.base import Result, Scores, ScoringError, Ungradable
from grpo_ray.rewards.grader import Grader
from grpo_ray.types import TERM, PromptItem

LONGEST = 300  # characters shown of a prompt's beginning, and of its end
NO_JUDGES = ("brevity", "format")  # of an answer


@dataclass(frozen=True)
class Trial:
    """The rewards of an example's truth, written as the reward reads it, and of an empty response."""

    item: PromptItem
    place: str
    right: str  # the response with the truth
    rewards: tuple[Result, Result]  # of it, and of the empty response

    @property
    def lines(self) -> Iterator[str]:
        """The example as the model sees it, with both rewards."""
        part = f" of {self.item.task}" if self.item.task else ""
        yield f"first prompt{part}{f' ({self.place})' if self.place else ''}, as the model sees it:"
        text = self.item.prompt
        if len(text) > 2 * LONGEST:
            text = f"{text[:LONGEST]} [... {len(text) - 2 * LONGEST:,} characters ...] {text[-LONGEST:]}"
        yield from (f"  | {line}" for line in text.split("\n"))
        shown = ", ".join(
            f"{_shown(result)} for {response!r}" if response else f"{_shown(result)} for an empty response"
            for response, result in zip((self.right, ""), self.rewards, strict=True)
        )
        yield f"its ground truth: {self.item.ground_truth!r}; its reward: {shown}"


def try_rewards(
    rewards: Mapping[str, Reward], items: Mapping[str, tuple[PromptItem, str]], config: ScorerConfig
) -> tuple[list[Trial], list[str]]:
    """Grade each task's example twice, where the run would: functions of the user's in isolated processes.

    Args:
        items: an example of each task, and its place for messages.

    Returns:
        The trials, and notices of what looks wrong but may be meant.

    Raises:
        RunError: the reward's process cannot be started.
        ValueError: a function of the user's fails with both responses.
    """
    trials: list[Trial] = []
    notices: list[str] = []
    tried = {task: reward for task, reward in rewards.items() if task in items}
    grader = Grader(tried, config)
    try:
        for task, reward in tried.items():
            item, place = items[task]
            right = written(reward, item.ground_truth).strip()
            first, second = grader.grade(task, [(right, item.ground_truth), ("", item.ground_truth)], item)
            trials.append(Trial(item, place, right, (first, second)))
            notices += _judged(f"{field_of(task)}.reward", reward, trials[-1])
    finally:
        grader.close()
    return trials, notices


def _judged(field: str, reward: Reward, trial: Trial) -> Sequence[str]:
    failures = [str(each) for each in trial.rewards if isinstance(each, ScoringError | Ungradable)]
    example = f"the first example{f' ({trial.place})' if trial.place else ''}"
    if len(failures) == 2:
        raise ValueError(
            f"{field}: it fails on {example}, with its ground truth as the response and with an empty one: "
            f"{failures[0]}"
        )
    if failures:
        kind = "its ground truth as" if isinstance(trial.rewards[0], Exception) else "an empty"
        return [f"{field}: it fails on {example} with {kind} response: {failures[0].splitlines()[0]}"]
    first = terms_of(reward)[0].reward
    right = trial.rewards[0]
    assert isinstance(right, dict)
    if ":" not in first and first not in NO_JUDGES and not right["answer_reward"]:
        return [
            f"{field}: {first} does not accept {example}'s own ground truth ({trial.item.ground_truth!r}) as "
            "correct: is it in the form that the reward reads? (task.answer_marker, task.answer_is_boxed)"
        ]
    return []


def _shown(result: Scores | Exception) -> str:
    if isinstance(result, dict):
        terms = [(name.removeprefix(TERM), value) for name, value in result.items() if name.startswith(TERM)]
        own = ", ".join(f"{name} {value:g}" for name, value in terms)
        return f"{result['reward']:g}{f' ({own})' if own else ''}"
    return f"none ({str(result).splitlines()[0]})"
