"""The configuration: a tree of frozen pydantic models, read from YAML and changed by dotted overrides.

`config.py` is the whole tree, with the checks across sections; the sections stand in one file per concern.
`loading.py` reads files, and `schema.py` tells error messages what the tree allows.
"""

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.config import Config
from grpo_ray.config.learner import LearnerConfig
from grpo_ray.config.sampling import GeneratorConfig, SamplingConfig

__all__ = ["AlgorithmConfig", "Config", "GeneratorConfig", "LearnerConfig", "SamplingConfig"]
