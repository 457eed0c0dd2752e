"""The Grader of a run's answers, which the Scorer, the audit and the evaluation share."""

import json
from collections.abc import Mapping, Sequence

from grpo_ray.config.reward import Reward, RewardTerm, ScorerConfig, is_own, named_terms
from grpo_ray.rewards.base import NOTHING, About, Result, Scores, ScoringError, Ungradable
from grpo_ray.rewards.configured import TermReward, needs_isolation, summed, tried, wrong_scores
from grpo_ray.rewards.isolation.confinement import protection_here
from grpo_ray.rewards.isolation.pool import RewardPool
from grpo_ray.rewards.isolation.worker import result_of
from grpo_ray.types import PromptItem


class Grader:
    """A grader of answers by the terms of their task's reward, each on its own.

    A term is computed in a RewardPool, or in this process if it cannot run away. So a term that cannot judge an
    answer leaves the others what they say of it.
    """

    def __init__(self, rewards: Mapping[str, Reward], config: ScorerConfig) -> None:
        """
        Args:
            rewards: each task's reward, by the task's name (`config.rewards`).
        """
        self._terms = {
            task: [(f"{task}#{place}", term) for place, term in enumerate(named_terms(reward))]
            for task, reward in rewards.items()
        }
        terms = {key: term for own in self._terms.values() for key, term in own}
        self._asks_about = {task for task, reward in rewards.items() if is_own(reward)}
        self._ungradable_reward = config.ungradable_reward
        isolated = {key: (term,) for key, term in terms.items() if needs_isolation((term,))}
        self._graders = {key: TermReward(term) for key, term in terms.items() if key not in isolated}
        # One pool for all terms without the network, and one for each with it, as only that has its secrets.
        offline = {key: own for key, own in isolated.items() if not terms[key].network}
        limits = config.num_workers, config.timeout_s, config.memory_gib, config.readable_paths
        shared = RewardPool(offline, *limits) if offline else None
        pools = {
            key: RewardPool({key: own}, *limits, terms[key]) if terms[key].network else shared
            for key, own in isolated.items()
        }
        self._pools = {key: pool for key, pool in pools.items() if pool is not None}

    def start(self) -> None:
        """Wait until answers can be graded.

        Raises:
            RunError: workers cannot be started; the message says why.
        """
        for pool in set(self._pools.values()):
            pool.start()

    @property
    def notices(self) -> tuple[str, ...]:
        """Gaps in the isolation of the workers on this machine, if there are workers; at most one line."""
        return protection_here().notices if self._pools else ()

    def grade(
        self, task: str, pairs: Sequence[tuple[str, str]], item: PromptItem | None = None
    ) -> list[Result]:
        """Return, in order, the scores of each (response, ground truth), or the reason why it has none.

        An answer that is the cause itself is Ungradable, with the scores of a wrong one by that term.

        Args:
            item: the prompt that all of them answer, about which a function of the user's may ask.

        Raises:
            RunError: workers cannot be started.
        """
        about: About = about_of(item) if task in self._asks_about and item is not None else NOTHING
        keys = [key for key, _ in self._terms[task]]
        begun = {key: self._pools[key].submit(key, pairs, about) for key in keys if key in self._pools}
        texts = [response for response, _ in pairs], [truth for _, truth in pairs]
        columns = [
            begun[key].result() if key in begun else [*map(result_of, self._graders[key](*texts, about))]
            for key in keys
        ]
        rows = zip(*columns, strict=True)
        return [self._sum_of(task, pair, row) for pair, row in zip(pairs, rows, strict=True)]

    def _sum_of(self, task: str, pair: tuple[str, str], row: Sequence[Result]) -> Result:
        """Return the sum of what the terms gave one answer; an error before what is the answer's own doing."""
        parts, cause = [], None
        for (_, term), outcome in zip(self._terms[task], row, strict=True):
            result = self._as_wrong(term, pair, outcome) if isinstance(outcome, Ungradable) else outcome
            if isinstance(result, ScoringError):
                return result
            if isinstance(outcome, Ungradable):
                cause = cause or outcome
            parts.append(result)
        total = summed(parts)
        if not total:
            return ScoringError("no reward applies to it: each returned None")
        return type(cause)(str(cause), total) if cause is not None else total

    def _as_wrong(self, term: RewardTerm, pair: tuple[str, str], cause: Ungradable) -> Scores | ScoringError:
        own = self._ungradable_reward
        if own is None and is_own((term,)):
            return ScoringError(str(cause))
        result = result_of(tried(lambda: wrong_scores(term, *pair, own or 0.0)))
        return result if isinstance(result, dict) else ScoringError(str(cause))

    def close(self) -> None:
        """End the worker processes."""
        for pool in set(self._pools.values()):
            pool.close()


def about_of(item: PromptItem) -> About:
    """Return the facts about a prompt that functions of the user's may ask for."""
    return {"prompt": item.prompt, **(json.loads(item.about) if item.about else {})}
