"""The ranks of a run's Learner over all steps, for a table of the web page."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from grpo_ray.watch.ranks import COLLECTIVES, SLOWEST, by_number, rank_name

Row = Mapping[str, Any]
MEMORY = re.compile(r"memory/(?P<actor>learner-\d+)_(?P<kind>device_peak_)?bytes")


class RankTotals:
    """Each rank's time in collectives, the steps in which it was the slowest, and its memory."""

    def __init__(self) -> None:
        self._num_steps: Counter[str] = Counter()  # by rank, like the next two; only steps with its seconds
        self._collectives_s: dict[str, float] = defaultdict(float)
        self._step_s: dict[str, float] = defaultdict(float)
        self._num_slowest: Counter[str] = Counter()
        self._memory: dict[tuple[str, bool], float] = {}  # the most, by rank; True: of its device

    def noted(self, row: Row) -> Row:
        """Note a step, and return its row."""
        for name, value in row.items():
            if value is None:  # it was not finite
                continue
            if rank := COLLECTIVES.fullmatch(name):
                self._num_steps[rank["actor"]] += 1
                self._collectives_s[rank["actor"]] += value
                self._step_s[rank["actor"]] += row.get("timing/step_s") or 0.0
            elif memory := MEMORY.fullmatch(name):
                of = memory["actor"], memory["kind"] is not None
                self._memory[of] = max(value, self._memory.get(of, 0.0))
        if (number := row.get(SLOWEST)) is not None:
            self._num_slowest[rank_name(number)] += 1
        return row

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per rank; empty for a run with one rank.

        `collectives_frac` is the share of the steps' time, `slowest_frac` that of the steps in which the rank
        was the slowest; None stands for values that were not measured.
        """
        return [self._row(name) for name in sorted(self._num_steps, key=by_number)]

    def _row(self, name: str) -> dict[str, Any]:
        seconds, whole, num_steps = self._collectives_s[name], self._step_s[name], self._num_steps[name]
        return {
            "name": name,
            "collectives_s": seconds / num_steps,
            "collectives_frac": seconds / whole if whole else None,
            "slowest_frac": self._num_slowest[name] / num_steps,
            "process_bytes": self._memory.get((name, False)),
            "device_bytes": self._memory.get((name, True)),
        }
