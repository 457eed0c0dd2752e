"""The configuration of on-policy distillation: a teacher that judges every token of the policy's responses."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt, field_validator

from grpo_ray.config.sampling import EngineConfig


class DistillationConfig(EngineConfig):
    """Used if `teacher` is given. With `engine: torch` the micro-batches are `learner.micro_batch_tokens`."""

    _other_fields: ClassVar[Mapping[str, str]] = {
        "generator.": "distillation.",
        "model.path": "distillation.teacher",
    }

    teacher: str | None = None
    """Teacher model: a folder in Hugging Face format, such as a checkpoint of a run, or a hub name. It must
    have the policy's vocabulary; code beside it is never run."""
    coefficient: PositiveFloat = 1.0
    """Factor of log(teacher / policy), which is added to each token's advantage."""
    max_gap: PositiveFloat = 10.0
    """Largest |log(teacher / policy)| of a token, in nats."""
    use_reward: bool = True
    """Train on the rewards' advantages as well; if false, rewards are only measured."""
    num_teachers: PositiveInt = 1
    """Teacher actors, each with its own engine."""

    @field_validator("engine")
    @classmethod
    def _engine_has_teachers(cls, engine: str) -> str:
        if ":" in engine:
            raise ValueError(f"{engine!r} is not valid; allowed: vllm, torch")
        return engine
