"""`grpo-ray evaluate`, and `evaluate_vllm` for an existing `vllm.LLM`.

The command samples and grades with a run's actors, without the Learner (evaluate.py). The summary is the
same as that of validation during training: telemetry/evaluation_summary.py.
"""

from grpo_ray.tools.evaluation.offline import EvaluationResults, evaluate_vllm

__all__ = ["EvaluationResults", "evaluate_vllm"]
