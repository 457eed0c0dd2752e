"""The command `grpo-ray evaluate`."""

from grpo_ray.tools.arguments import Command
from grpo_ray.tools.evaluation.options import EvaluationOptions


def _evaluate(options: EvaluationOptions) -> int:
    from grpo_ray.tools.evaluation.evaluate import evaluate

    evaluate(options)
    return 0


EVALUATE = Command(
    "evaluate", EvaluationOptions, _evaluate, "sample and grade a model's answers",
    "Sample and grade answers of a model, of a run's checkpoint, or of all its checkpoints.",
    group="Look",
)  # fmt: skip
