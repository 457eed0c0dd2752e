"""What `grpo-ray evaluate` prints while it works: a bar on a terminal, elsewhere a line every tenth."""

from grpo_ray.telemetry.console import RunConsole
from grpo_ray.telemetry.evaluation_summary import Category
from grpo_ray.tools.evaluation.responses import rows_of
from grpo_ray.types import ScoredGroup


class EvaluationConsole(RunConsole):
    def __init__(self) -> None:
        super().__init__(num_steps=0)
        self._num_done = self._num_correct = self._num_responses = self._total = 0

    def begin(self, text: str, total: int, num_done: int) -> None:
        """The first of `total` prompts; so many were done before."""
        self._total, self._num_done = total, num_done
        self._num_correct = self._num_responses = 0
        self._progress.update(self._bar, description=text, total=total, completed=num_done, figures="")
        if not self.console.is_terminal:
            self.print(f"{text}: {num_done} of {total} prompts are done")

    def advance(self, group: ScoredGroup) -> None:
        """One prompt more is done."""
        categories = [row["category"] for row in rows_of(group)]
        self._num_done += 1
        self._num_correct += categories.count(Category.CORRECT)
        self._num_responses += len(categories)
        accuracy = f"accuracy {self._num_correct / self._num_responses:.3f}"
        if self.console.is_terminal:
            self._progress.update(self._bar, completed=self._num_done, figures=accuracy)
        elif self._num_done % max(1, self._total // 10) == 0 or self._num_done == self._total:
            self.print(f"{self._num_done:>6}/{self._total} prompts  {accuracy} so far")
