"""Detectors of failures that show in a run's metrics; docs/failures.md has a section on each.

A detector is a pure function of the first steps of a run and of the latest ones. It returns None if it sees
nothing, also if a metric that it needs was not measured: that is nan, for which no comparison holds. Its
thresholds lie well outside of what good runs show, so it misses mild cases, and is seldom wrong.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from grpo_ray.config import Config
from grpo_ray.config.run import DetectorName
from grpo_ray.records.json_lines import readable_rows

KIND = "detected_"  # begins the kinds of their events
NUM_CLEAR_STEPS = 10  # without a finding; then the same detector may warn again
NUM_STEPS = 3  # at the start of a run, and at its end so far: a single odd step gives no warning

LENGTH, ANSWER, REWARD = "rollout/response_tokens/mean", "reward/answer", "reward/mean"
ENTROPY, NO_SIGNAL = "policy/entropy", "rollout/zero_variance_groups"
UNTRAINED, SCALE, CLIPPED = "loss/untrained_frac", "loss/gradient_scale", "loss/clip_frac"
SKIPPED = "optim/skipped_updates"  # which have no gradient to judge
KL, ESS = "mismatch/kl", "mismatch/ess_frac"
ERRORS, UNGRADABLE = "reward/errors", "reward/ungradable"
DROPPED, FINISHED = "rollout/dropped_groups", "episodes/status/finished"
MEAN_LAG, MAX_LAG, NUM_UPDATES = "lag/mean", "lag/max", "optim/num_updates"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RecentSteps:
    """The first steps of a run and the latest ones, as rows of metrics: up to NUM_STEPS of each."""

    config: Config
    first: Sequence[Row]
    latest: Sequence[Row]

    def at_first(self, metric: str) -> float:
        """Return the median over the first steps; nan unless each has a finite value."""
        return _median(self.first, metric)

    def now(self, metric: str, default: float = math.nan) -> float:
        """Return the median over the latest steps; the default unless each has a finite value."""
        return _median(self.latest, metric, default)

    def silent_share(self, rows: Sequence[Row]) -> float:
        """Return the rows' median share of the sampled groups that give no signal, dropped ones included."""
        shares = [_finite(row, NO_SIGNAL, math.nan) / self._num_groups(row) for row in rows]
        return _median([{NO_SIGNAL: share} for share in shares], NO_SIGNAL)

    @property
    def num_sampled(self) -> float:
        """The responses that were sampled for the newest step."""
        return self._num_groups((self.latest or self.first)[-1]) * self.config.algorithm.samples_per_prompt

    @property
    def clip_epsilon(self) -> float:
        """The narrower side of the clip range."""
        return min(self.config.algorithm.clip_epsilons)

    def _num_groups(self, row: Row) -> float:
        return self.config.fresh_per_step + _finite(row, DROPPED, 0.0)

    @property
    def learns(self) -> bool:
        """True if the reward rises where the share of right responses says nothing: it stays 0 or 1."""
        right = self.at_first(ANSWER)
        return right in (0, 1) and self.now(ANSWER) == right and self.now(REWARD) > self.at_first(REWARD)

    def newest(self, metric: str, default: float = math.nan) -> float:
        """Return the value at the newest step; the default unless it is finite."""
        return _finite((self.latest or self.first)[-1], metric, default)


def _median(rows: Sequence[Row], metric: str, default: float = math.nan) -> float:
    values = [_finite(row, metric, math.nan) for row in rows]
    return median(values) if len(values) == NUM_STEPS and not math.isnan(sum(values)) else default


def _finite(row: Row, metric: str, default: float) -> float:
    value = row.get(metric)  # null in a file stands for nan and infinities
    return float(value) if value is not None and math.isfinite(value) else default


def _short_outputs(window: RecentSteps) -> str | None:
    """Find responses that became half as long while no more of them are right, or that never have a token.

    A policy that learns to answer briefly also gets shorter, but more of its answers are right.
    """
    before, now = window.at_first(LENGTH), window.now(LENGTH)
    if before == 0 and not now > 0:
        return f"no token was sampled ({LENGTH}), so nothing is trained: episodes may not call their session"
    right_before, right_now = window.at_first(ANSWER), window.now(ANSWER)
    if not (now <= 0.5 * before and right_now <= min(right_before + 0.05, 0.95)) or window.learns:
        return None
    return (
        f"responses shrank from {before:.1f} to {now:.1f} tokens ({LENGTH}) and {right_now:.0%} are right, "
        f"{right_before:.0%} at the start: the reward may pay for short outputs"
    )


def _wrong_mask(window: RecentSteps) -> str | None:
    """Find tokens that should have a gradient and have none. In a right loss only clipped ones have none."""
    share = window.newest(UNTRAINED)
    if not share >= 0.02 or window.newest(SKIPPED, 0.0):
        return None
    return f"{share:.1%} of the tokens with an advantage have no gradient ({UNTRAINED}): check the loss's mask"


def _mismatched_logprobs(window: RecentSteps) -> str | None:
    """Find logprobs of the sampler that are not those of the trained tokens, while both have the same weights.

    In a good run both differ by rounding alone: 1e-5 nats in float32, more in bfloat16.
    """
    kl, lag = window.newest(KL), window.newest(MAX_LAG)
    if not (lag == 0 and abs(kl) >= 0.05):
        return None
    return (
        f"sampler and Learner have the same weights and differ by {kl:.2f} nats per token ({KL}): the logprobs "
        "may be of other tokens than those that are trained"
    )


def _wrong_normalizer(window: RecentSteps) -> str | None:
    """Find a gradient of another size than the aggregation gives; clipping and ratios change it by far less."""
    scale, clipped = window.newest(SCALE), window.newest(CLIPPED, 0.0)
    if not (scale <= 0.5 or scale >= 2) or clipped > 0.1 or window.newest(SKIPPED, 0.0):
        return None
    return (
        f"the loss's gradient is {scale:.2g} times that of its aggregation over the whole batch ({SCALE}): "
        "check what each micro-batch divides by"
    )


def _stale_old_logprobs(window: RecentSteps) -> str | None:
    """Find ratios far from 1 in the only update on a batch, although sampler and policy agree on it.

    Good runs clip up to 2% of their tokens there, and with tokens of a lag of 2 up to 6%: such batches are left
    out, as are losses with a clip range of less than 0.1, such as GSPO, which clip many tokens by design.
    """
    clipped, ess = window.now(CLIPPED), window.now(ESS)  # one batch of a few tokens may clip many of them
    updates, lag = window.now(NUM_UPDATES), window.now(MAX_LAG)
    if window.clip_epsilon < 0.1 or not (updates == 1 and lag <= 1 and clipped >= 0.05 and ess >= 0.9):
        return None
    return (
        f"{clipped:.0%} of the tokens are clipped ({CLIPPED}) in the only update on their batch, although "
        f"sampler and Learner agree ({ESS} {ess:.2f}). The loss may use the logprobs of an earlier batch, or "
        "the learning rate is too large"
    )


def _satisfied_reward(window: RecentSteps) -> str | None:
    """Find a reward that nearly every response earned from the first steps on."""
    reward, no_signal = window.at_first(REWARD), window.silent_share(window.first)
    if not (reward >= 0.9 and no_signal >= 0.9):
        return None
    return (
        f"the first steps' reward was {reward:.2f}, and {no_signal:.0%} of the groups gave no signal "
        f"({NO_SIGNAL}): an empty response may earn the reward too"
    )


def _entropy_collapse(window: RecentSteps) -> str | None:
    """Find a policy that has stopped exploring without having learned.

    Its entropy fell to a fifth and its answers are hardly better; or most groups have come to hold equal
    responses, and neither entropy nor answers rose. A policy that has solved its task has right answers.
    """
    before, now = window.at_first(ENTROPY), window.now(ENTROPY)
    right_before, right_now = window.at_first(ANSWER), window.now(ANSWER)
    equal_before, equal_now = window.silent_share(window.first), window.silent_share(window.latest)
    has_fallen = now <= 0.2 * before and right_now <= right_before + 0.1
    are_equal = now <= before and equal_before <= 0.4 and equal_now >= 0.6 and right_now <= right_before
    if math.isnan(before + now) or not (has_fallen or are_equal) or window.learns:
        return None
    equal = "" if math.isnan(equal_now) else f", {equal_now:.0%} of the groups give no signal ({NO_SIGNAL})"
    return (
        f"the entropy went from {before:.3g} to {now:.3g} nats per token ({ENTROPY}){equal}, and "
        f"{right_now:.0%} of the responses are right, {right_before:.0%} at the start: the policy no longer "
        "explores"
    )


def _large_lag(window: RecentSteps) -> str | None:
    """Find tokens so old that many are clipped, or that half of the batch's weight is lost.

    One version behind a good run clips about 1% of its tokens with a range of 0.2, and loses almost no weight.
    """
    ess, lag, clipped = window.now(ESS), window.now(MEAN_LAG), window.now(CLIPPED, 0.0)
    clips_many = clipped >= 0.05 and window.clip_epsilon >= 0.1
    if math.isnan(ess) or not (lag >= 1.5 and (ess <= 0.5 or clips_many)):
        return None
    return (
        f"tokens are {lag:.1f} versions old ({MEAN_LAG}), {clipped:.0%} of them are clipped ({CLIPPED}), and a "
        f"batch is worth {ess:.0%} of a fresh one ({ESS}). The policy moves too far within that lag"
    )


def _narrow_clip(window: RecentSteps) -> str | None:
    """Find a range for ratios of whole responses so narrow that it clips most of them.

    The mean log ratio of a response spreads by 1 / sqrt(length), and GSPO's range was published for responses
    of thousands of tokens: on short ones the noise between two engines alone is outside of it.
    """
    clipped = window.now(CLIPPED)
    if not clipped > 0.5 or window.clip_epsilon >= 0.1:
        return None
    return (
        f"{clipped:.0%} of the tokens are clipped ({CLIPPED}) by a range of {window.clip_epsilon:g}. "
        "Widen algorithm.cliprange for responses of this length, or set old_log_probs to `proximal`, with "
        "several updates per batch and `mask_geometric`"
    )


def _reward_errors(window: RecentSteps) -> str | None:
    """Find a reward function that fails; an answer that is too much to grade now and then is no failure."""
    errors, ungradable = window.newest(ERRORS, 0.0), window.newest(UNGRADABLE, 0.0)
    if FINISHED in (window.latest or window.first)[-1]:  # an episode may run out of time now and then
        if errors >= 0.1 * window.num_sampled:
            return f"{errors:.0f} episodes ended without a reward ({ERRORS}): episodes/status/ says how"
    elif errors:
        return f"{errors:.0f} responses could not be graded ({ERRORS}): the reward fails on them"
    if ungradable < 0.1 * window.num_sampled or not ungradable:
        return None
    return f"{ungradable:.0f} responses were too costly to grade ({UNGRADABLE}): the reward may hang on them"


class Detector(NamedTuple):
    """A detector by its name in `run.silent_detectors`."""

    find: Callable[[RecentSteps], str | None]
    anchor: str  # the section of docs/failures.md


DETECTORS: Mapping[DetectorName, Detector] = {
    "short_outputs": Detector(_short_outputs, "short-outputs"),
    "wrong_mask": Detector(_wrong_mask, "a-wrong-mask"),
    "mismatched_logprobs": Detector(_mismatched_logprobs, "re-tokenized-logprobs"),
    "wrong_normalizer": Detector(_wrong_normalizer, "a-wrong-normalizer"),
    "stale_old_logprobs": Detector(_stale_old_logprobs, "stale-old-logprobs"),
    "satisfied_reward": Detector(_satisfied_reward, "a-reward-that-the-prompt-satisfies"),
    "entropy_collapse": Detector(_entropy_collapse, "entropy-collapse"),
    "narrow_clip": Detector(_narrow_clip, "a-clip-range-narrower-than-the-noise"),
    "reward_errors": Detector(_reward_errors, "a-reward-that-fails"),
    "large_lag": Detector(_large_lag, "too-large-a-lag"),
}


class Detection(NamedTuple):
    """A warning of one detector."""

    name: DetectorName
    step: int
    text: str  # ends with the address of the page that explains it

    @property
    def kind(self) -> str:
        """The kind of its event."""
        return f"{KIND}{self.name}"


class FailureWatch:
    """The detectors of one run; `step` takes the metrics of each step, in order."""

    def __init__(self, config: Config, silent: Iterable[DetectorName] = ()) -> None:
        self._config = config
        self._detectors = {name: d for name, d in DETECTORS.items() if name not in set(silent)}
        self._first: list[Row] = []
        self._latest: deque[Row] = deque(maxlen=NUM_STEPS)
        self._last_found: dict[DetectorName, int] = {}  # the newest step of each finding

    @classmethod
    def of_run(cls, config: Config, metrics_path: str | Path) -> "FailureWatch":
        """Return the watch as it was after the lines of the metrics file, of which it warned already."""
        watch = cls(config, config.run.silent_detectors)
        for row in readable_rows(metrics_path):
            watch.step(row["step"] if isinstance(row.get("step"), int) else 0, row)
        return watch

    def step(self, step: int, metrics: Row) -> list[Detection]:
        """Take a step's metrics; return the warnings that are new. A metric that is missing is skipped."""
        (self._first if len(self._first) < NUM_STEPS else self._latest).append(dict(metrics))
        window = RecentSteps(self._config, tuple(self._first), tuple(self._latest))
        found = []
        for name, detector in self._detectors.items():
            if text := detector.find(window):
                last = self._last_found.get(name)
                if last is None or step > last + NUM_CLEAR_STEPS:
                    text = f"{text}; see docs/failures.md#{detector.anchor}"
                    found.append(Detection(name, step, text))
                self._last_found[name] = step
        return found


def detections(config: Config, rows: Iterable[Row]) -> list[Detection]:
    """Return the warnings of a whole run from its rows of metrics, also of detectors that were silent in it."""
    watch = FailureWatch(config)
    return [found for row in rows for found in watch.step(row["step"], row)]
