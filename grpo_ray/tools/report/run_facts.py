"""A run in a few facts, for the top of the web page."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ray.tools.report.panels import REWARD
from grpo_ray.tools.report.rollout_sample import StepFiles
from grpo_ray.tools.top.run_view import NUM_STEPS

Row = Mapping[str, Any]
LAG, AGE = "lag/max", "lag/updates/max"


class RunTotals:
    """Sums and extremes over all steps, and the last ones, noted while the steps are read."""

    def __init__(self) -> None:
        self.last_step: int | None = None
        self.rewards: tuple[float, float] | None = None  # of the first and of the last step that have one
        self.seconds = self.tokens = 0.0
        self.largest: dict[str, float] = {}
        self.latest: deque[Row] = deque(maxlen=NUM_STEPS)

    def noted(self, row: Row) -> Row:
        """Note a step, and return its row."""
        self.last_step = row["step"]
        self.latest.append(row)
        if (reward := row.get(REWARD)) is not None:
            self.rewards = (self.rewards or (reward,))[0], reward
        self.seconds += row.get("timing/step_s") or 0.0
        self.tokens += row.get("throughput/trained_tokens") or 0.0
        for name in (LAG, AGE):
            if (value := row.get(name)) is not None:
                self.largest[name] = max(value, self.largest.get(name, value))
        return row


def run_facts(totals: RunTotals, evaluations: Sequence[Row], files: StepFiles) -> dict[str, str]:
    """Summarize the run as labels and texts."""
    facts = {"steps": f"{totals.last_step:,}" if totals.last_step is not None else "none yet"}
    validated = [(row["step"], row["reward"]) for row in evaluations if row.get("reward") is not None]
    if validated:
        best_step, best = max(validated, key=lambda point: point[1])
        facts["validation reward"] = f"{validated[0][1]:.3f} → {validated[-1][1]:.3f}"
        facts["best"] = f"{best:.3f} at step {best_step:,}"
    if totals.rewards is not None:
        facts["training reward"] = f"{totals.rewards[0]:.3f} → {totals.rewards[1]:.3f}"
    about = "about " if files.are_sampled else ""
    facts["rollouts"] = f"{about}{files.num_rollouts:,}" if files.num_rollouts else "not saved"
    if totals.seconds:
        facts["time in steps"] = _duration(totals.seconds)
        facts["trained"] = f"{totals.tokens / totals.seconds:,.0f} tokens/s"
    if LAG in totals.largest:
        age = f" ({totals.largest[AGE]:g} updates)" if AGE in totals.largest else ""
        facts["largest lag"] = f"{totals.largest[LAG]:g}{age}"
    return facts


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
