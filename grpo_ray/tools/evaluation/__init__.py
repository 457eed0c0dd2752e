"""Evaluation: what a policy's responses to a task are worth.

`grpo-ray evaluate` samples and grades with the actors of a run, but for the Learner (command.py); validation
while training adds up its groups with the same summary; `evaluate_vllm` does both in one call on a `vllm.LLM`.
"""

from grpo_ray.telemetry.evaluation_summary import EvaluationSummary, Outcomes, summarise
from grpo_ray.telemetry.validation_files import (
    ReadableRollout,
    sample_rollouts,
    summarise_groups,
    write_evaluation,
)
from grpo_ray.tools.evaluation.offline import EvaluationResults, evaluate_vllm

__all__ = [
    "EvaluationResults",
    "EvaluationSummary",
    "Outcomes",
    "ReadableRollout",
    "evaluate_vllm",
    "sample_rollouts",
    "summarise",
    "summarise_groups",
    "write_evaluation",
]
