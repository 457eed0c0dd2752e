"""The problems of a run that its metrics count, the worst first: errors, then responses that are cut off."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Self

from grpo_ray.tools.top.bottleneck import WAITS

COUNTED = {
    "reward/ungradable": "{:,.0f} responses were too much to grade, and count as wrong",
    "optim/skipped_updates": "{:,.0f} updates were skipped as not finite: lower learner.learning_rate",
    "lag/rejected": "{:,.0f} groups exceeded weight_sync.max_lag, and were refused and sampled again",
}
ERRORS, CUT_OFF, DROPPED = "reward/errors", "rollout/truncated_frac", "rollout/dropped_groups"


class Problems:
    """Counts over steps, noted one by one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: the run's `config.yaml` as it is; the number of responses is unknown without it.
        """
        algorithm = config.get("algorithm") or {}
        self._num_prompts = algorithm.get("prompts_per_step") or 0
        self._num_samples = algorithm.get("samples_per_prompt") or 0
        self._sums: Counter[str] = Counter()
        self._num_steps = self._num_with_lengths = self._num_groups = 0

    def noted(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note a step, and return its row."""
        self._num_steps += 1
        self._num_with_lengths += row.get(CUT_OFF) is not None
        self._num_groups += self._num_prompts + int(row.get(DROPPED) or 0)
        for name in (ERRORS, CUT_OFF, *COUNTED):
            self._sums[name] += row.get(name) or 0
        return row

    def all_of(self, rows: Iterable[Mapping[str, Any]]) -> Self:
        """Note all of the rows."""
        for row in rows:
            self.noted(row)
        return self

    def errors(self) -> list[str]:
        """Return a sentence about each kind of error."""
        counted = [text.format(count) for name, text in COUNTED.items() if (count := self._sums[name])]
        return [*self._not_graded(), *counted]

    def _not_graded(self) -> list[str]:
        number, whole = self._sums[ERRORS], self._num_groups * self._num_samples
        if not number:
            return []
        counted = (
            f"{number:,.0f} of {whole:,} responses could not" if whole else f"{number:,.0f} responses could not"
        )
        if whole and number >= whole:
            counted = f"None of the {whole:,} responses could"
        return [f"{counted} be graded, because the reward failed: the column error of rollouts/ says why"]

    def cut_off(self) -> list[str]:
        """Return a hint if many responses are cut off."""
        share = self._sums[CUT_OFF] / (self._num_with_lengths or 1)
        hint = f"{share:.0%} of the responses are cut off at sampling.max_tokens: raise it, or read some"
        return [hint] if share >= WAITS else []
