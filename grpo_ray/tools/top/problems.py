"""The problems of a run that its metrics count, the worst first: errors, then responses that are cut off."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_ray.tools.top.bottleneck import WAITS

COUNTED = {
    "reward/ungradable": "{:,.0f} responses were too much to grade, and count as wrong",
    "optim/skipped_updates": "{:,.0f} updates were skipped as not finite: lower learner.learning_rate",
    "lag/rejected": "{:,.0f} groups exceeded weight_sync.max_lag, and were refused and sampled again",
}
ERRORS, CUT_OFF, DROPPED = "reward/errors", "rollout/truncated_frac", "rollout/dropped_groups"
STEPS = "steps"


class Problems:
    """Counts over steps, noted one by one."""

    def __init__(self, config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Note the rows; `config` is the run's `config.yaml`, with the number of responses per step."""
        algorithm = config.get("algorithm", {})
        self._num_prompts = algorithm.get("prompts_per_step", 0)
        self._num_samples = algorithm.get("samples_per_prompt", 0)
        self._sums: Counter[str] = Counter()
        for row in rows:
            self.noted(row)

    def noted(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note a step, and return its row."""
        self._sums.update({name: row.get(name) or 0 for name in (ERRORS, CUT_OFF, DROPPED, *COUNTED)})
        self._sums[STEPS] += 1
        return row

    def errors(self) -> list[str]:
        """Return a sentence about each kind of error."""
        return [text.format(count) for name, text in self._errors.items() if (count := self._sums[name])]

    @property
    def _errors(self) -> dict[str, str]:
        num_groups = self._sums[STEPS] * self._num_prompts + self._sums[DROPPED]
        whole = round(num_groups * self._num_samples)
        counted = f"{{:,.0f}} of {whole:,} responses could not" if whole else "{:,.0f} responses could not"
        if whole and self._sums[ERRORS] >= whole:
            counted = f"None of the {whole:,} responses could"
        return {ERRORS: f"{counted} be graded: the column error of rollouts/ says why", **COUNTED}

    def cut_off(self) -> list[str]:
        """Return a hint if many responses are cut off."""
        share = self._sums[CUT_OFF] / (self._sums[STEPS] or 1)
        hint = f"{share:.0%} of the responses are cut off at sampling.max_tokens: raise it, or read some"
        return [hint] if share >= WAITS else []
