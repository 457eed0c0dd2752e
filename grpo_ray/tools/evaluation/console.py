"""Progress of `grpo-ray evaluate`: a bar on a terminal, elsewhere a line per tenth of the prompts."""

from grpo_ray.records.evaluation_summary import Category
from grpo_ray.tools.evaluation.responses import response_rows
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.console import RunConsole


class EvaluationConsole(RunConsole):
    """The console of `grpo-ray evaluate`."""

    def __init__(self) -> None:
        super().__init__(num_steps=0)
        self._num_done = self._num_correct = self._num_responses = self._total = 0

    def begin(self, text: str, total: int, num_done: int) -> None:
        """Start a bar of `total` prompts, of which `num_done` are done already."""
        self._total, self._num_done = total, num_done
        self._num_correct = self._num_responses = 0
        self._progress.update(self._bar, description=text, total=total, completed=num_done, details="")
        if not self.console.is_terminal:
            self.print(f"{text}: {num_done} of {total} prompts are done")

    def advance(self, group: ScoredGroup) -> None:
        """Count one more prompt as done."""
        categories = [row["category"] for row in response_rows(group)]
        self._num_done += 1
        self._num_correct += categories.count(Category.CORRECT)
        self._num_responses += len(categories)
        accuracy = f"accuracy {self._num_correct / self._num_responses:.3f}"
        if self.console.is_terminal:
            self._progress.update(self._bar, completed=self._num_done, details=accuracy)
        elif self._num_done % max(1, self._total // 10) == 0 or self._num_done == self._total:
            self.print(f"{self._num_done:>6}/{self._total} prompts  {accuracy} so far")
