"""The two guards that bound how old a trained token can be.

The Learner is at version n - 1 while it trains step n, which produces version n. Without look-ahead, drops or
replay, the batch of step n holds groups `(n - 1) * fresh_per_step` to `n * fresh_per_step - 1`.

1. Admission: a group may be dispatched only while fewer than `(published + 1 + max_lag) * fresh_per_step`
   groups have been, where `published` is the version that every serving Generator already runs. The batch of
   step n is therefore sampled by versions `n - 1 - max_lag` and later.
2. Consumption: a batch holds no fresh token older than `max_lag`, and the Learner at version v refuses
   one older than `v - max_lag` (with replay, than `v - max_age`).

The first implies the second; the second would catch a mistake in the first. The first stays exact when

- a batch takes fewer fresh groups because others are replayed: `fresh_per_step` then counts the fresh ones;
- a group leaves without being trained (set aside, or dropped for lack of signal): its slot goes to one more
  group (`extra_slots`), and all groups admitted earlier come before that one;
- a look-ahead lets a group come d steps late: `max_lag - d` then replaces `max_lag`;
- more groups are started than a step needs (oversampling, `extra_slots` again): those that the next step could
  not train on are cut off and sampled again, so none comes late.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ray.config import Config
from grpo_ray.types import NO_VERSION, ScoredGroup

COUNTS = "updates/"  # begins the names of a checkpoint's counters


@dataclass
class Admission:
    """The first guard; its limit is computed only here."""

    max_lag: int
    """Maximum lag in versions, less the steps that a look-ahead lets a group come late."""
    fresh_per_step: int
    """Fresh groups per step."""
    num_steps: int
    """Steps of the run; later steps have no batch, so nothing is admitted for them."""
    extra_slots: int = 0
    """Groups admitted beyond those of the steps, in place of groups that will not be trained."""

    def limit(self, published_version: int) -> int:
        """Return how many groups may have been dispatched since the beginning of the run."""
        last_step = min(published_version + 1 + self.max_lag, self.num_steps)
        return last_step * self.fresh_per_step + self.extra_slots


def version_trained_at(step: int) -> int:
    """Return the Learner's version while it trains on the batch of `step`, which turns version n - 1 into n."""
    return step - 1


def oldest_allowed(learner_version: int, max_lag: int) -> int:
    """Return the oldest token version that the Learner may train on."""
    return learner_version - max_lag


class StaleBatchError(RuntimeError):
    """A batch that reached the Learner with a token older than the schedule allows."""


def lag_metrics(groups: Sequence[ScoredGroup], version: int, config: Config) -> dict[str, float]:
    """Apply the second guard; return lag/mean and lag/max over all sampled tokens, replayed ones too.

    Both are 0 if there is no such token.

    Raises:
        StaleBatchError: a token is older than the schedule allows.
    """
    versions = np.concatenate([group.rollout.sampled_versions for group in groups])
    if not len(versions):
        return {"lag/mean": 0.0, "lag/max": 0.0}
    max_age = config.max_token_age
    if versions.min() < oldest_allowed(version, max_age):
        name = "buffer.replay.max_age" if config.replayed_per_step else "weight_sync.max_lag"
        raise StaleBatchError(
            f"a token of version {versions.min()} reached the Learner at version {version}; {name} is {max_age}"
        )
    lag = version - versions
    return {"lag/mean": float(lag.mean()), "lag/max": float(lag.max())}


class UpdateCounts:
    """The optimizer updates behind each version's weights: a token's age in updates, where lag counts versions.

    At each update that a token takes part in, its age is the number of updates taken since the weights that
    sampled it. One that was skipped as not finite changed no weights, and does not count.
    """

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age  # of a token, in versions
        self._of_version = {0: 0}
        self.now = 0  # updates that changed the weights so far

    def age(self, oldest_version: int) -> int | None:
        """Return the present age of a token of that version; None if it is unknown, 0 without a token."""
        before = self.now if oldest_version == NO_VERSION else self._of_version.get(oldest_version)
        return None if before is None else self.now - before

    def complete(self, version: int) -> None:
        """Make the current weights those of `version`."""
        self._of_version[version] = self.now
        oldest = oldest_allowed(version, self._max_age)
        self._of_version = {v: count for v, count in self._of_version.items() if v >= oldest}

    def state(self) -> dict[str, float]:
        """Return the counts for a checkpoint, by name."""
        return {f"{COUNTS}{version}": count for version, count in self._of_version.items()}

    def restore(self, state: Mapping[str, float], version: int) -> None:
        """Adopt a checkpoint's counts; one of an earlier release has none, so ages are counted from there."""
        counts = {
            int(name.removeprefix(COUNTS)): int(n) for name, n in state.items() if name.startswith(COUNTS)
        }
        self._of_version = counts or {version: 0}
        self.now = self._of_version[version]
