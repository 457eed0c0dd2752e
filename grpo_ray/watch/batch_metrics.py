"""Metrics of the groups that a batch is made of."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from grpo_ray.records.episode_metrics import Status, episode_metrics, facts_in
from grpo_ray.types import CONTEXT, Episode, ScoredGroup, Ungraded


def rollout_metrics(groups: Sequence[ScoredGroup], num_dropped: int = 0) -> dict[str, float]:
    """Return metrics of the rewards and responses of a step's fresh groups, dropped ones included.

    Lengths and the entropy are those of sampled tokens: an episode's context is left out.
    """
    completions = [completion for group in groups for completion in group.rollout.completions]
    lengths = np.array([completion.num_tokens for completion in completions])
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    versions = np.concatenate([completion.versions for completion in completions])
    finite = logprobs[np.isfinite(logprobs) & (versions != CONTEXT)]
    # Under the sampling policy the mean of -log p is the entropy, up to the noise of the sample.
    entropy = {"policy/entropy": float(-finite.mean(dtype=np.float64))} if len(finite) else {}
    means = np.array([group.rewards.mean() for group in groups])
    return {
        "reward/mean": float(means.mean()),
        **part_metrics(groups),
        "reward/format": float(np.mean([group.format_rewards.mean() for group in groups])),
        "reward/answer": float(np.mean([group.answer_rewards.mean() for group in groups])),
        **term_metrics(groups),
        "reward/errors": float(sum(len(group.errors) for group in groups)),
        "reward/ungradable": float(sum(len(group.ungradable) for group in groups)),
        "reward/baseline_variance": float(np.mean([baseline_variance(g.rewards[g.is_graded]) for g in groups])),
        "rollout/response_tokens/mean": float(lengths.mean()),
        "rollout/response_tokens/max": float(lengths.max()),
        "rollout/truncated_frac": float(np.mean([c.is_truncated for c in completions])),
        "rollout/zero_variance_groups": float(sum(not group.has_advantage for group in groups)),
        "rollout/dropped_groups": float(num_dropped),
        **entropy,
        **episode_metrics(facts_in(groups)),
    }


def term_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean reward of each named term, unweighted, over the graded responses that it applies to."""
    values: dict[str, list[np.ndarray]] = defaultdict(list)
    for group in groups:
        for name, term in group.terms.items():
            values[name].append(term[group.is_graded & ~np.isnan(term)])
    joined = {name: np.concatenate(parts) for name, parts in values.items()}
    return {f"reward/{name}/mean": float(each.mean()) for name, each in joined.items() if len(each)}


SHOWN = 200  # characters of a response


def ungraded_in(groups: Sequence[ScoredGroup], with_late: bool = True) -> Ungraded | None:
    """Return the answers that the grader failed on, or that ended it; None if there are none.

    An answer that the reward itself calls ungradable is graded: it is a wrong one. An episode that ended in
    an error of its environment has failed, also if `episodes.error_reward` gives it a reward. One that did not
    end in its time counts `with_late`.
    """
    failed = [
        (group.rollout, sample, reason)
        for group in groups
        for sample, reason in _failures_in(group)
        if with_late or getattr(group.rollout.completions[sample], "status", None) != Status.TRUNCATED_TIME
    ]
    if not failed:
        return None
    rollout, sample, reason = failed[0]
    response = rollout.completions[sample].text
    shown = response[:SHOWN] + ("..." if len(response) > SHOWN else "")
    num_answers = sum(len(group.rewards) for group in groups)
    return Ungraded(len(failed), num_answers, reason, shown, rollout.is_of_episodes)


def _failures_in(group: ScoredGroup) -> list[tuple[int, str]]:
    """Return (sample, reason) of each answer or episode that failed."""
    failed = {sample: group.errors.get(sample) or group.ungradable[sample] for sample in group.overruns}
    for sample, episode in enumerate(group.rollout.completions):
        if isinstance(episode, Episode) and episode.status == Status.ENVIRONMENT_ERROR:
            failed[sample] = episode.error or episode.status
    return sorted({**failed, **group.errors}.items())


def part_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean reward of each part of a mixture that the groups contain."""
    by_part: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_part[group.rollout.item.task].append(float(group.rewards.mean()))
    return {f"reward/mean/{part}": float(np.mean(means)) for part, means in sorted(by_part.items()) if part}


def teacher_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the estimate of KL(sampler || teacher) over the sampled tokens, if there is a teacher."""
    gaps = [
        (completion.logprobs - taught)[completion.mask]
        for group in groups
        for completion, taught in zip(group.rollout.completions, group.teacher_rows, strict=True)
        if taught is not None
    ]
    values = np.concatenate(gaps or [np.empty(0)])
    finite = values[np.isfinite(values)]
    return {"distillation/kl": float(finite.mean(dtype=np.float64))} if len(finite) else {}


def baseline_variance(rewards: np.ndarray) -> float:
    """Estimate the variance of a group's mean reward, which is its baseline: s^2 / G, from `[G]` rewards."""
    return float(rewards.var(ddof=1) / len(rewards)) if len(rewards) > 1 else 0.0


def cut_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the ratio of response lengths, prompts cut off before to others: the bias of cutting off."""

    def mean_tokens(was_cut: bool) -> float:
        chosen = [g.rollout for g in groups if (g.rollout.item.num_cuts > 0) == was_cut]
        lengths = [c.num_tokens for rollout in chosen for c in rollout.completions]
        return float(np.mean(lengths)) if lengths else 0.0

    first_time, cut_before = mean_tokens(was_cut=False), mean_tokens(was_cut=True)
    if not first_time or not cut_before:
        return {}
    return {"rollout/response_tokens/cut_before_ratio": cut_before / first_time}
