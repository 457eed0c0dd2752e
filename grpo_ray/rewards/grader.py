"""The Grader of a run's answers, which the Scorer, the audit and the evaluation share."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from grpo_ray.config import ScorerConfig
from grpo_ray.config.reward import Reward, is_own, named_terms
from grpo_ray.rewards.base import NOTHING, About, Result, RewardFn, Scores, ScoringError, Ungradable
from grpo_ray.rewards.configured import get_reward_fn, get_wrong_fn, needs_isolation
from grpo_ray.rewards.isolation.confinement import protection_here
from grpo_ray.rewards.isolation.pool import RewardPool
from grpo_ray.rewards.isolation.worker import try_to_grade
from grpo_ray.types import TERM, PromptItem


class Grader:
    """A grader of answers by their task's reward: in a RewardPool, or in this process if it cannot run away."""

    def __init__(self, rewards: Mapping[str, Reward], config: ScorerConfig) -> None:
        """
        Args:
            rewards: each task's reward, by the task's name (`config.task.rewards`).
        """
        self._reward_fns = {
            task: get_reward_fn(reward) for task, reward in rewards.items() if not needs_isolation(reward)
        }
        self._wrong_fns: dict[str, RewardFn | None] = {
            task: get_wrong_fn(reward, config.ungradable_reward) for task, reward in rewards.items()
        }
        self._asks_about = {task for task, reward in rewards.items() if is_own(reward)}
        terms = {task: named_terms(reward) for task, reward in rewards.items() if needs_isolation(reward)}
        offline = {task: tuple(term for term in own if not term.network) for task, own in terms.items()}
        offline = {task: own for task, own in offline.items() if own}
        limits = config.num_workers, config.timeout_s, config.memory_gib, config.readable_paths
        # One pool for all terms without the network, and one for each with it, as only that has its secrets.
        shared = RewardPool(offline, *limits) if offline else None
        self._pools: dict[str, list[RewardPool]] = {}
        self._names = {task: [f"{TERM}{term.name}" for term in own] for task, own in terms.items()}
        for task, own in terms.items():
            pools = [RewardPool({task: (term,)}, *limits, term) if term.network else shared for term in own]
            self._pools[task] = list(dict.fromkeys(pool for pool in pools if pool is not None))

    def start(self) -> None:
        """Wait until answers can be graded.

        Raises:
            RunError: workers cannot be started; the message says why.
        """
        for pool in self._all_pools:
            pool.start()

    @property
    def notices(self) -> tuple[str, ...]:
        """Gaps in the isolation of the workers on this machine, if there are workers; at most one line."""
        return protection_here().notices if self._all_pools else ()

    def grade(
        self, task: str, pairs: Sequence[tuple[str, str]], item: PromptItem | None = None
    ) -> list[Result]:
        """Return, in order, the scores of each (response, ground truth), or the reason why it has none.

        An answer that is the cause itself is Ungradable, with the scores of a wrong one.

        Args:
            item: the prompt that all of them answer, about which a function of the user's may ask.

        Raises:
            RunError: workers cannot be started.
        """
        reward_fn = self._reward_fns.get(task)
        if reward_fn is not None:
            results = [try_to_grade(reward_fn, *pair) for pair in pairs]
        else:
            about: About = about_of(item) if task in self._asks_about and item is not None else NOTHING
            pools = self._pools[task]
            with ThreadPoolExecutor(len(pools)) as threads:
                parts = [*threads.map(lambda pool: pool.grade(task, pairs, about), pools)]
            results = [_sum_of(part, self._names[task]) for part in zip(*parts, strict=True)]
        return [
            self._as_wrong(task, pair, result) if isinstance(result, Ungradable) else result
            for pair, result in zip(pairs, results, strict=True)
        ]

    def wrong_scores(self, task: str, response: str, ground_truth: str) -> Scores | ScoringError:
        """Return what the response earns if no term that may run away judges it right."""
        wrong_fn = self._wrong_fns[task]
        if wrong_fn is None:
            return ScoringError("scorer.ungradable_reward is null")
        result = try_to_grade(wrong_fn, response, ground_truth)
        return ScoringError(str(result)) if isinstance(result, Ungradable) else result

    def _as_wrong(self, task: str, pair: tuple[str, str], cause: Ungradable) -> Ungradable | ScoringError:
        scores = self.wrong_scores(task, *pair)
        return ScoringError(str(cause)) if isinstance(scores, ScoringError) else type(cause)(str(cause), scores)

    def close(self) -> None:
        """End the worker processes."""
        for pool in self._all_pools:
            pool.close()

    @property
    def _all_pools(self) -> list[RewardPool]:
        return list(dict.fromkeys(pool for pools in self._pools.values() for pool in pools))


def _sum_of(parts: Sequence[Result], names: Sequence[str]) -> Result:
    """Return the sum of what the pools gave one answer; an error before what is the answer's own doing.

    Format and answer are those of the first of the named terms that applies.
    """
    for kind in (ScoringError, Ungradable):
        if failed := next((part for part in parts if isinstance(part, kind)), None):
            return failed
    applied = [part for part in parts if isinstance(part, dict) and part]
    if not applied:
        return ScoringError("no reward applies to it: each returned None")
    if len(applied) == 1:
        return applied[0]
    applied.sort(key=lambda part: next(place for place, name in enumerate(names) if name in part))
    terms = {name: value for part in applied for name, value in part.items() if name.startswith(TERM)}
    return {**applied[0], **terms, "reward": sum(part["reward"] for part in applied)}


def about_of(item: PromptItem) -> About:
    """Return the facts about a prompt that functions of the user's may ask for."""
    return {"prompt": item.prompt, **(json.loads(item.about) if item.about else {})}
