"""The configuration: a tree of frozen pydantic models, read from YAML, changed by dotted overrides.

The defaults are the course handout's, for real models; `configs/` holds one YAML per use case.
"""

from grpo_ray.config.config import (
    MAX_PROFILED_STEPS,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    GeneratorConfig,
    LearnerConfig,
    RecoveryConfig,
    RunConfig,
    SamplingConfig,
    ScorerConfig,
)

__all__ = [
    "MAX_PROFILED_STEPS",
    "CheckpointConfig",
    "Config",
    "EvaluationConfig",
    "GeneratorConfig",
    "LearnerConfig",
    "RecoveryConfig",
    "RunConfig",
    "SamplingConfig",
    "ScorerConfig",
]
