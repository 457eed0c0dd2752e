"""The audit of one file of rollouts: groups, lags, rewards and advantages, recomputed from the tokens."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from grpo_ray.config import Config
from grpo_ray.config.reward import term_weights, terms_of
from grpo_ray.config.user_code import is_function_name
from grpo_ray.core.scorer import UNGRADED
from grpo_ray.core.staleness import version_trained_at
from grpo_ray.objectives import advantages_of
from grpo_ray.records.episode_columns import is_episode
from grpo_ray.records.episode_metrics import episode_metrics
from grpo_ray.records.rollout_log import DROPPED, FRESH
from grpo_ray.rewards.base import Result, ScoringError, Ungradable
from grpo_ray.rewards.grader import Grader
from grpo_ray.tools.audit.episodes import LARGEST, audit_comparison, audit_episode, num_masked, num_unrelated
from grpo_ray.tools.trust import code_of
from grpo_ray.types import CONTEXT, TERM, PromptItem

UNTRUSTED = "is code that the run's configuration names; if you trust it, audit with --run-reward-code"


class Regrader:
    """The Grader of a run's rewards; without `run_reward_code`, not of those that are code named by the run."""

    def __init__(self, configs: Sequence[Config], run_reward_code: bool) -> None:
        config = configs[-1]  # all that the run has had have the same task
        rewards = config.rewards
        named = {} if run_reward_code else {task: code_of(reward) for task, reward in rewards.items()}
        code = {task: names for task, names in named.items() if names}
        # A judge may answer otherwise today, and costs money.
        judged = {task for task, reward in rewards.items() if any(t.network for t in terms_of(reward))}
        own = [kind for c in configs if is_function_name(kind := c.algorithm.advantage_kind)]
        self.graded = rewards.keys() - judged - code.keys()  # without code that is not run, and the network
        self.skips_advantages = bool(own) and not run_reward_code  # the run's advantage is code that is not run
        skipped = own[:1] if self.skips_advantages else []
        self.notes = [f"advantages are not checked, because {name} {UNTRUSTED}" for name in skipped]
        """One line for advantages that are not computed again, and one per task that is not graded again."""
        whys = dict.fromkeys(sorted(judged - code.keys()), "they come over the network")
        whys |= {task: f"{', '.join(names)} {UNTRUSTED}" for task, names in code.items()}
        for task, why in whys.items():
            self.notes.append(f"{f'task {task}: ' if task else ''}rewards are not checked, because {why}")
        self.grader = Grader({task: rewards[task] for task in self.graded}, config.scorer)
        """Close it at the end."""


Row = dict[str, Any]
REWARDS = ("reward", "format_reward", "answer_reward")


def audit_teacher(row: Row, has_teacher: bool) -> Iterator[str]:
    """Yield the problems of one completion of a step."""
    logprobs = row.get("teacher_logprobs")
    if not has_teacher:
        if logprobs is not None:
            yield "has a teacher's logprobs, and there is no teacher"
        return
    if logprobs is None or len(logprobs) != len(row["token_ids"]):
        yield "its teacher's logprobs do not cover its tokens"
        return
    values = np.array(logprobs, np.float64)
    is_context = np.zeros(len(values), bool)
    for span in row["turns"] if is_episode(row) else ():
        is_context[span["start"] : span["end"]] = span["turn"] == CONTEXT
    for place in np.flatnonzero(~np.isfinite(values) | (values > LARGEST))[:1]:
        yield f"token {place} has the teacher's logprob {values[place]}"
    for place in np.flatnonzero(is_context & (values != 0.0))[:1]:
        yield f"token {place} is context, but has a teacher's logprob"


def teacher_kl(rows: list[Row]) -> float | None:
    """Return the mean of log(sampler / teacher) over the sampled tokens of the rows; None without any."""
    names = ("logprobs", "teacher_logprobs")
    return _mean_of_sampled(rows, lambda row: np.subtract(*(np.array(row[name], np.float64) for name in names)))


def _mean_of_sampled(rows: list[Row], values_of: Callable[[Row], np.ndarray]) -> float | None:
    """Return the mean of finite values, one per token of a row, over the sampled tokens; None without any."""
    values = [np.empty(0)]
    for row, of_row in zip(rows, map(values_of, rows), strict=True):
        values += [of_row[span["start"] : span["end"]] for _, span in _sampled_spans([row])]
    joined = np.concatenate(values)
    finite = joined[np.isfinite(joined)]
    return float(finite.mean()) if len(finite) else None


class RolloutRows:
    """A rollout file's rows, by group in the file's order; `name` is for messages."""

    def __init__(self, name: str, rows: list[Row]) -> None:
        self.name, self.rows = name, rows
        self.groups: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            self.groups[row["group_id"]].append(row)

    @property
    def num_errors(self) -> int:
        return sum(row["error"] is not None for row in self.rows)

    def where(self, is_wanted: Callable[[Row], bool]) -> "RolloutRows":
        return RolloutRows(self.name, [row for row in self.rows if is_wanted(row)])

    def mean(self, column: str) -> float:
        return float(sum(row[column] for row in self.rows)) / max(1, len(self.rows))


class GroupPrompt(NamedTuple):
    text: str
    ground_truth: str
    task: str  # the mixture part


@dataclass
class RolloutFacts:
    """The contents of one file, and the problems with it. A step's own groups were sampled for it."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be audited
    prompts: dict[int, GroupPrompt] = field(default_factory=dict)  # by own group
    trained: list[int] = field(default_factory=list)  # own groups that were trained
    replayed: dict[int, int] = field(default_factory=dict)  # `use` by group, for groups of earlier steps
    dropped: list[int] = field(default_factory=list)  # own groups that were left out for lack of signal
    num_completions: int = 0
    num_errors: int = 0


def audit_step(rows: RolloutRows, metrics: Row, configs: Sequence[Config], grader: Regrader) -> RolloutFacts:
    """Audit the batch of one step: its own groups (fresh or dropped) and the replayed ones.

    Args:
        metrics: the step's line in metrics.jsonl.
        configs: those of the run until this step, that of the step last. A group may have been scored by an
            earlier one than the step was trained by.
    """
    step, config = metrics["step"], configs[-1]
    own = rows.where(lambda row: row["use"] in (DROPPED, FRESH))
    replayed = rows.where(lambda row: row["use"] > FRESH)
    fresh = own.where(lambda row: row["use"] == FRESH)
    trained = rows.where(lambda row: row["use"] >= FRESH)
    problems = [f"a row is of step {row['step']}" for row in rows.rows if row["step"] != step]
    problems += _audit_size(fresh, own, replayed, config)
    problems += _audit_groups(rows, configs, config.algorithm.samples_per_prompt, grader)
    wrong, notes = _audit_rewards(rows, grader)
    problems += wrong
    problems += _audit_lag(fresh, metrics, config.weight_sync.max_lag, "weight_sync.max_lag")
    if replayed.rows:
        problems += _audit_lag(replayed, metrics, config.buffer.replay.max_age, "buffer.replay.max_age")
        uses = {group: members[0]["use"] for group, members in replayed.groups.items()}
        allowed = config.buffer.replay.max_uses
        problems += [
            f"group {g} is used {n} times, {allowed} are allowed" for g, n in uses.items() if n > allowed
        ]
    problems += _compare(metrics, "lag/max", _lag(trained, step))
    if config.episodes.over_age == "mask":
        problems += _compare(metrics, "lag/masked_tokens", sum(map(num_masked, fresh.rows)))
    problems += _compare(metrics, "reward/mean", own.mean("reward"))
    problems += _audit_teacher(rows, fresh, metrics, config)
    problems += _compare(metrics, "reward/errors", own.num_errors)
    others = {
        "reward/ungradable": sum(row.get("ungradable") is not None for row in own.rows),
        "reward/format": own.mean("format_reward"),
        "reward/answer": own.mean("answer_reward"),
        "rollout/response_tokens/mean": own.mean("num_tokens"),
        "rollout/response_tokens/max": max((row["num_tokens"] for row in own.rows), default=0),
        "rollout/truncated_frac": float(np.mean([row["finish_reason"] == "length" for row in own.rows] or [0])),
        "rollout/dropped_groups": len(own.groups) - len(fresh.groups),
        "lag/mean": _mean_lag(trained, step),
    }
    for part in sorted({row["task"] for row in own.rows} - {""}):
        rewards = [row["reward"] for row in own.rows if row["task"] == part]
        others[f"reward/mean/{part}"] = sum(rewards) / len(rewards)
    entropy = _mean_of_sampled(own.rows, lambda row: -np.array(row["logprobs"], np.float64))
    if entropy is not None:
        others["policy/entropy"] = entropy
    others |= episode_metrics(list(filter(is_episode, own.rows)))
    problems += _compare_recorded(metrics, others)
    facts = _facts(own, problems, notes)
    facts.trained = list(fresh.groups)
    facts.replayed = {group: members[0]["use"] for group, members in replayed.groups.items()}
    facts.dropped = [group for group in own.groups if group not in fresh.groups]
    return facts


def _audit_teacher(rows: RolloutRows, fresh: RolloutRows, metrics: Row, config: Config) -> Iterator[str]:
    has_teacher = config.distillation.teacher is not None
    found = [
        f"group {row['group_id']}: completion {row['sample']}: {problem}"
        for row in rows.rows
        for problem in audit_teacher(row, has_teacher)
    ]
    yield from found
    if has_teacher and not found and (kl := teacher_kl(fresh.rows)) is not None:
        yield from _compare(metrics, "distillation/kl", kl)


def _audit_size(fresh: RolloutRows, own: RolloutRows, replayed: RolloutRows, config: Config) -> Iterator[str]:
    if len(fresh.groups) != config.fresh_per_step:
        yield f"has {len(fresh.groups)} groups of its own instead of {config.fresh_per_step}"
    if len(replayed.groups) > config.replayed_per_step:
        yield f"replays {len(replayed.groups)} groups, more than {config.replayed_per_step}"
    allowed = config.algorithm.dynamic_sampling_tries * config.fresh_per_step
    dropped = {group: members for group, members in own.groups.items() if group not in fresh.groups}
    if len(dropped) > allowed:
        yield f"left out {len(dropped)} groups, more than {allowed}"
    for group, members in dropped.items():
        if _has_signal(members, config.algorithm.dynamic_sampling_metric):
            yield f"group {group} was left out, but has a signal"


def _has_signal(members: list[Row], metric: str) -> bool:
    """Return True if a group has the signal of `algorithm.dynamic_sampling_metric`."""
    if metric != "advantage":
        name = "reward" if metric == "reward" else "answer_reward"
        return len({row[name] for row in members if row["error"] is None}) > 1
    by_turn = [row["turn_advantages"] for row in members if row.get("turn_advantages") is not None]
    return any(map(any, by_turn)) if by_turn else any(row["advantage"] for row in members)


def audit_evaluation(
    rows: RolloutRows, summary: Row, found: Row | None, config: Config, grader: Regrader
) -> RolloutFacts:
    """Audit one validation; all its tokens must be of its step's version.

    Args:
        summary: the validation's line in summary.jsonl.
        found: what its groups give; None if they are not whole.
    """
    problems = list(_audit_groups(rows, [config], config.evaluation.samples_per_prompt, grader))
    wrong, notes = _audit_rewards(rows, grader)
    problems += wrong
    versions = {version for row in rows.rows for version in (row["min_version"], row["max_version"])}
    if versions - {None} and versions - {None} != {summary["step"]}:
        problems.append(f"sampled by versions {sorted(versions - {None})}, not only by {summary['step']}")
    problems += _compare(summary, "num_examples", len(rows.groups))
    problems += _compare_recorded(dict(_numbers(summary)), dict(_numbers(found or {})))
    return _facts(rows, problems, notes)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a summary by dotted path."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from _numbers(part, f"{name}[{place}]")
    elif value is not None:
        yield name, value


def _facts(rows: RolloutRows, problems: list[str], notes: list[str]) -> RolloutFacts:
    asked = {group: members[0] for group, members in rows.groups.items()}
    prompts = {g: GroupPrompt(row["prompt"], row["ground_truth"], row["task"]) for g, row in asked.items()}
    named, noted = ([f"{rows.name}: {text}" for text in texts] for texts in (problems, notes))
    return RolloutFacts(named, noted, prompts, num_completions=len(rows.rows), num_errors=rows.num_errors)


def _compare(recorded: Mapping[str, Any], name: str, value: float) -> Iterator[str]:
    given = recorded.get(name)
    if not isinstance(given, int | float) or not math.isclose(given, value, rel_tol=1e-5, abs_tol=1e-5):
        yield f"{name} is recorded as {given}, its responses give {value:g}"


def _compare_recorded(recorded: Mapping[str, Any], values: Mapping[str, float]) -> Iterator[str]:
    """Compare the values that were recorded; runs of earlier releases have not all of them."""
    for name in filter(recorded.__contains__, values):
        yield from _compare(recorded, name, values[name])


def _audit_lag(rows: RolloutRows, metrics: Row, bound: int, name: str) -> Iterator[str]:
    """Check the lag of every token, recomputed from its version, against the bound."""
    lag, newest = _lag(rows, metrics["step"]), max(_versions(rows), default=0)
    if lag > bound:
        yield f"a token is {lag} versions old; {name} is {bound}"
    if newest > version_trained_at(metrics["step"]):
        yield f"a token is of version {newest}, which did not exist yet"


def _lag(rows: RolloutRows, step: int) -> int:
    """Return the lag of the oldest token."""
    version = version_trained_at(step)
    return version - min(_versions(rows), default=version)


def _mean_lag(rows: RolloutRows, step: int) -> float:
    spans = [span for _, span in _sampled_spans(rows.rows)]
    ages = sum((version_trained_at(step) - s["version"]) * (s["end"] - s["start"]) for s in spans)
    return float(ages / max(1, sum(s["end"] - s["start"] for s in spans)))


def _versions(rows: RolloutRows) -> list[int]:
    return [span["version"] for _, span in _sampled_spans(rows.rows)]


def _sampled_spans(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield rows with their spans of tokens that a version sampled; an episode's context has none."""
    for row in rows:
        yield from ((row, s) for s in row["versions"] if not is_episode(row) or s["version"] != CONTEXT)


def _audit_groups(
    rows: RolloutRows, configs: Sequence[Config], num_samples: int, grader: Regrader
) -> Iterator[str]:
    masks_old = any(config.episodes.over_age == "mask" for config in configs)
    for group, members in rows.groups.items():
        compare = audit_comparison if is_episode(members[0]) else _audit_advantages
        problems = list(_audit_members(members, num_samples, masks_old))
        if not is_episode(members[0]) and (task := members[0]["task"]) not in configs[-1].rewards:
            problems.append(f"is of task {task!r}, which the configuration lacks")
        elif not grader.skips_advantages:
            by_config = [list(compare(members, config)) for config in reversed(configs)]
            fewest = min(by_config, key=len)
            problems += fewest
        yield from (f"group {group}: {problem}" for problem in problems)


def _audit_members(members: list[Row], num_samples: int, masks_old: bool) -> Iterator[str]:
    """Check that the group has one prompt, and each completion once and whole."""
    if [row["sample"] for row in members] != list(range(num_samples)):
        yield f"has completions {[row['sample'] for row in members]} instead of {num_samples}"
    for name in ("task", "prompt", "ground_truth", "prompt_token_ids", "generator", "use"):
        if any(row[name] != members[0][name] for row in members):
            yield f"has more than one {name}"
    if len({is_episode(row) for row in members}) > 1:
        yield "only some of its completions are episodes"
    for row in members:
        problems = audit_episode(row, masks_old) if is_episode(row) else _audit_tokens(row)
        yield from (f"completion {row['sample']}: {problem}" for problem in problems)


def _audit_tokens(row: Row) -> Iterator[str]:
    """Check that each token has a logprob, and that the spans cover all tokens with rising versions."""
    if not row["num_tokens"] == len(row["token_ids"]) == len(row["logprobs"]):
        yield "numbers of tokens and logprobs differ"
    for place, logprob in enumerate(row["logprobs"]):
        if logprob is not None and logprob > LARGEST:
            yield f"token {place} has logprob {logprob}"
            break
    spans = row["versions"]
    ends = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != ends[:-1] or ends[-1] != row["num_tokens"]:
        yield "its version spans do not cover its tokens"
    versions = [span["version"] for span in spans]
    if versions != sorted(set(versions)):
        yield f"its versions are {versions}"
    if versions and (row["min_version"], row["max_version"]) != (min(versions), max(versions)):
        yield "its min_version and max_version are not those of its spans"


def _audit_rewards(rows: RolloutRows, grader: Regrader) -> tuple[list[str], list[str]]:
    """Check that each reward is what the response earns: a wrong one's if ungradable, 0 if the grader failed.

    The result is problems and notes. A response that cannot be graded now, as on a busy machine, is a note:
    it proves nothing. Episodes bring their rewards along, and cannot be graded again.
    """
    problems, failures = [], []
    for group, members in rows.groups.items():
        if is_episode(members[0]) or members[0]["task"] not in grader.graded:
            continue
        for row, earned in zip(members, _earned(members, grader), strict=True):
            name = f"group {group}: completion {row['sample']}"
            if isinstance(earned, ScoringError | Ungradable):
                failures.append(f"{name}: {earned}")
            elif any(row.get(name, value) != np.float32(value) for name, value in earned.items()):  # as stored
                problems.append(f"{name}: reward {row['reward']:g}, it earns {earned}")
    notes = [f"{len(failures)} responses could not be graded now; first {failures[0]}"] if failures else []
    if num_apart := sum(num_unrelated(row) for row in rows.rows if is_episode(row)):
        notes.append(f"{num_apart} sequences begin with no token of their episode's earlier ones")
    return problems, notes


def _earned(members: list[Row], grader: Regrader) -> list[Result]:
    """Return what each response earns; nothing if the run's grader failed with it."""
    first, task = members[0], members[0]["task"]
    about = first.get("about") or ""
    prompt = PromptItem(first["group_id"], first["prompt"], (), first["ground_truth"], about=about)
    pairs = [(row["response"], row["ground_truth"]) for row in members]
    earned: list[Result] = []
    for row, result in zip(members, grader.grader.grade(task, pairs, prompt), strict=True):
        if row["error"] is not None:
            result = UNGRADED
        elif row.get("ungradable") is not None:
            unjudged = ScoringError("the run could not grade it")
            result = result.scores if isinstance(result, Ungradable) else unjudged
        earned.append(result)
    return earned


def _audit_advantages(members: list[Row], config: Config) -> Iterator[str]:
    rewards = np.array([row["reward"] for row in members], np.float32)
    lengths = np.array([row["num_tokens"] for row in members])
    is_graded = np.array([row["error"] is None for row in members])
    formats, answers = (np.array([row[name] for row in members], np.float32) for name in REWARDS[1:])
    weights = term_weights(config.rewards[members[0]["task"]])
    weights = {name: weight for name, weight in weights.items() if TERM + name in members[0]}  # of this release
    terms = {name: np.array([row[TERM + name] for row in members], np.float32) for name in weights}
    shapes = config.algorithm, config.sampling.max_tokens
    expected = advantages_of(rewards, lengths, is_graded, *shapes, formats, answers, terms, weights)
    recorded = np.array([row["advantage"] for row in members])
    if not np.allclose(recorded, expected, rtol=1e-5, atol=1e-5):
        yield f"advantages {recorded.tolist()} are recorded, its rewards give {expected.tolist()}"
