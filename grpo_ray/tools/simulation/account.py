"""The account of a simulated run, kept by its Learner and independent of the run's own GroupBook."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_ray.core.groups import GroupBook
from grpo_ray.types import ScoredGroup


@dataclass(frozen=True)
class Faults:
    """Mistakes that a run must never make, as counts of groups."""

    num_stale: int  # trained with a token older than the schedule allows
    num_repeated: int  # trained twice as fresh groups, or trained and given up
    num_lost: int  # taken from the order of prompts, and neither trained, given up nor waiting

    @property
    def is_none(self) -> bool:
        return not (self.num_stale or self.num_repeated or self.num_lost)


@dataclass
class Account:
    """The groups that the Learner trained, and the lag of their tokens; a restored run forgets later steps."""

    max_age: int
    """Largest allowed lag, in versions."""
    trained: list["array[int]"] = field(default_factory=list)
    """Ids of the fresh groups, by step."""
    lags: list[Counter[int]] = field(default_factory=list)
    """Number of tokens by lag, by step."""
    num_stale: int = 0

    def rewind(self, version: int) -> None:
        """Forget the steps after `version`."""
        del self.trained[version:], self.lags[version:]

    def note(self, version: int, fresh: Sequence[ScoredGroup], replayed: Sequence[ScoredGroup]) -> None:
        """Note the batch that the Learner trains on at `version`."""
        lags: Counter[int] = Counter()
        for group in (*fresh, *replayed):
            found, counts = np.unique(version - group.rollout.sampled_versions, return_counts=True)
            lags.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
            self.num_stale += bool(found.max(initial=0) > self.max_age)
        self.trained.append(array("q", (group.group_id for group in fresh)))
        self.lags.append(lags)

    def faults(self, book: GroupBook) -> Faults:
        """Compare with the book at the end of the run."""
        times = Counter(group_id for step in self.trained for group_id in step)
        others = book.unfinished | book.given_up
        num_repeated = sum(count - 1 for count in times.values()) + len(others & times.keys())
        num_lost = book.next_id - len(times.keys() | others) - book.num_dropped
        return Faults(self.num_stale, num_repeated, abs(num_lost))

    def lag_shares(self) -> dict[int, float]:
        """Return the share of the trained tokens by lag, over all steps."""
        total: Counter[int] = sum(self.lags, Counter())
        return {lag: count / total.total() for lag, count in sorted(total.items())}
