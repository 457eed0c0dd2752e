"""Scorer: verified rewards and group advantages."""

import logging
import os
from collections.abc import Mapping

import numpy as np

from grpo_ray.config import Config
from grpo_ray.config.reward import term_weights
from grpo_ray.objectives import advantages_of
from grpo_ray.objectives.returns import verdict_on
from grpo_ray.rewards.base import Overrun, ScoringError, Ungradable, verdict
from grpo_ray.rewards.grader import Grader
from grpo_ray.types import TERM, Episode, RolloutGroup, Verdict
from grpo_ray.watch.memory import resident_bytes
from grpo_ray.watch.stage_clock import StageClock, StageTimes

NO_SECRETS: Mapping[str, str] = {}
UNGRADED = verdict(has_format=False, is_right=False)


class Scorer:
    """The grader of groups; `score` may run in several threads, to keep all workers of the Grader busy."""

    def __init__(self, config: Config, secrets: Mapping[str, str] = NO_SECRETS) -> None:
        """`secrets`: those that the rewards list, put into this process's environment."""
        os.environ.update(secrets)
        self._config = config
        self._grader = Grader(config.rewards, config.scorer)
        self._weights = {task: term_weights(reward) for task, reward in config.rewards.items()}
        self._clock = StageClock(("start", "score"), rest="wait_for_groups")

    def __repr__(self) -> str:
        return f"Scorer({self._clock.current})"

    def ready(self) -> bool:
        """Start the workers; raises RunError with the reason if they cannot start."""
        with self._clock.stage("start"):
            self._grader.start()
        for notice in self._grader.notices:
            logging.warning("%s", notice)
        return True

    def score(self, group: RolloutGroup) -> Verdict:
        """Return the group's rewards and advantages, and the facts by which it is admitted to a batch."""
        algorithm, discount = self._config.algorithm, self._config.episodes.turn_discount
        has_teacher = self._config.distillation.teacher is not None
        with self._clock.stage("score", f"group {group.item.group_id}"):
            episodes = [each for each in group.completions if isinstance(each, Episode)]
            verdict = verdict_on(episodes, algorithm, discount) if episodes else self._score(group)
            return verdict.with_facts(group, algorithm.dynamic_sampling_metric, has_teacher)

    def _score(self, group: RolloutGroup) -> Verdict:
        item, algorithm, max_tokens = group.item, self._config.algorithm, self._config.sampling.max_tokens
        pairs = [(completion.text, item.ground_truth) for completion in group.completions]
        scores, errors, ungradable, overruns = [], {}, {}, set()
        for sample, result in enumerate(self._grader.grade(item.task, pairs, item)):
            if isinstance(result, ScoringError):
                errors[sample] = str(result)
                tail = pairs[sample][0][-200:]
                logging.warning("group %d: not graded: %s: ...%r", item.group_id, result, tail)
                scores.append(UNGRADED)
            elif isinstance(result, Ungradable):
                ungradable[sample] = str(result)
                overruns |= {sample} if isinstance(result, Overrun) else set()
                scores.append(result.scores)
            else:
                scores.append(result)
        rewards, formats, answers = (
            np.array([score[name] for score in scores], dtype=np.float32)
            for name in ("reward", "format_reward", "answer_reward")
        )
        lengths = np.array([len(completion.token_ids) for completion in group.completions])
        is_graded = np.array([sample not in errors for sample in range(len(scores))])
        weights = self._weights[item.task]
        terms = {
            name: np.array([score.get(f"{TERM}{name}", np.nan) for score in scores], np.float32)
            for name in weights
        }
        advantages = advantages_of(
            rewards, lengths, is_graded, algorithm, max_tokens, formats, answers, terms, weights
        )
        return Verdict(
            rewards, formats, answers, advantages, errors, ungradable, overruns=frozenset(overruns), terms=terms
        )

    def take_stats(self) -> StageTimes:
        return self._clock.take(resident_bytes())

    def close(self) -> None:
        """End the workers, which would also end with this process."""
        self._grader.close()
