"""The plan of a configuration: the budgets of its GPUs, and a run with measured rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.tools.experiments.resources import gpus_of
from grpo_ray.tools.planning.gpu_memory import GIB, Budget, generator_budget
from grpo_ray.tools.planning.learner_memory import learner_budget
from grpo_ray.tools.planning.model_shape import ModelShape, find_shape
from grpo_ray.tools.planning.options import PlanOptions
from grpo_ray.tools.planning.step_time import MeasuredRun, measure

DEFAULT_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class MemoryPlan:
    """The figures that `print_plan` shows."""

    config: Config
    shape: ModelShape
    num_gpus: int
    """Number of GPUs that there are."""
    prompt_tokens: int
    """Length of the longest prompt."""
    budgets: Sequence[Budget]
    run: MeasuredRun | None
    response_tokens: float
    """Mean length of a response."""

    @property
    def has_enough_gpus(self) -> bool:
        return self.num_gpus >= gpus_of(self.config)

    @property
    def fits(self) -> bool:
        return self.has_enough_gpus and all(budget.fits for budget in self.budgets)


def plan_memory(options: PlanOptions) -> MemoryPlan:
    """Return the plan; nothing is started, and no hub is asked.

    Raises:
        ConfigError: the configuration is wrong.
        ValueError: the model's shape is not known, the run has no rates, or there is no run for an option.
    """
    config = load_config(options.config, options.overrides)
    shape = find_shape(config.model)
    run = measure(options.from_run) if options.from_run is not None else None
    if run is None and options.response_tokens is not None:
        raise ValueError("--response-tokens: the time of a step needs the rates of a run; give --from RUN too")
    max_tokens, max_model_len = config.sampling.max_tokens, config.generator.max_model_len
    left = max(1, max_model_len - max_tokens) if max_model_len is not None else DEFAULT_PROMPT_TOKENS
    prompt_tokens = options.prompt_tokens or left
    gpu_bytes = options.gpu_memory * GIB
    budgets = [budget(shape, config, prompt_tokens, gpu_bytes) for budget in (generator_budget, learner_budget)]
    mean_tokens = options.response_tokens or (run.response_tokens if run else max_tokens)
    num_gpus = gpus_of(config) if options.gpus is None else options.gpus
    return MemoryPlan(config, shape, num_gpus, prompt_tokens, budgets, run, min(mean_tokens, max_tokens))
