"""`grpo-ray plan`: from what was typed to the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.tools.experiments.resources import gpus_of
from grpo_ray.tools.planning.budget import GIB, Budget
from grpo_ray.tools.planning.devices import Hardware, device_budgets
from grpo_ray.tools.planning.known_shapes import find_shape
from grpo_ray.tools.planning.model_shape import ModelShape
from grpo_ray.tools.planning.rates import MeasuredRun, Rates, measure
from grpo_ray.tools.planning.remedies import remedy

ASSUMED_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class PlanOptions:
    """The command line; None is not given."""

    config: str
    overrides: Sequence[str] = ()
    num_gpus: int | None = None
    gpu_memory_gib: float = 80.0
    host_memory_gib: float | None = None
    model_shape: str | None = None
    prompt_tokens: int | None = None
    response_tokens: float | None = None
    sampled_tokens_per_s: float | None = None
    trained_tokens_per_s: float | None = None
    from_run: str | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that the report shows."""

    config: Config
    shape: ModelShape
    hardware: Hardware
    prompt_tokens: int
    is_prompt_assumed: bool
    response_tokens: float
    """Mean of a response: given, measured, or `sampling.max_tokens`."""
    budgets: Sequence[Budget]
    too_few_gpus: str
    """What to do about it, or nothing."""
    rates: Rates | None
    run: MeasuredRun | None
    run_shape: ModelShape | None
    """Of the model that the run measured."""

    @property
    def fits(self) -> bool:
        return not self.too_few_gpus and all(budget.fits for budget in self.budgets)

    def remedy(self, budget: Budget) -> str:
        """What would make the budget fit."""
        longest = self.prompt_tokens + self.config.sampling.max_tokens

        def judge(config: Config) -> list[Budget]:
            return device_budgets(self.shape, config, self.hardware, self.prompt_tokens)

        return remedy(self.config, budget, longest, judge)


def plan(options: PlanOptions) -> bool:
    """Print the plan; whether everything fits.

    Raises:
        ConfigError, RunError: the configuration, or an option; before anything is computed.
    """
    from grpo_ray.tools.planning.report import show

    with shown_plainly():
        made = make_plan(options)
    show(made)
    return made.fits


def make_plan(options: PlanOptions) -> Plan:
    """The plan; starts nothing, and asks nobody.

    Raises:
        ConfigError: the configuration.
        ValueError: the model's shape is not known, or the run has no rates.
        RunError: one rate was given without the other.
    """
    config = load_config(options.config, options.overrides)
    shape = find_shape(config, options.model_shape)
    run = measure(options.from_run) if options.from_run is not None else None
    prompt_tokens = _prompt_tokens(config, options.prompt_tokens)
    num_needed = gpus_of(config)
    num_gpus = num_needed if options.num_gpus is None else options.num_gpus
    hardware = Hardware(num_gpus, options.gpu_memory_gib * GIB, _host_bytes(config, options.host_memory_gib))
    measured_tokens = run.response_tokens if run else config.sampling.max_tokens
    known = prompt_tokens or ASSUMED_PROMPT_TOKENS
    return Plan(
        config=config,
        shape=shape,
        hardware=hardware,
        prompt_tokens=known,
        is_prompt_assumed=prompt_tokens is None,
        response_tokens=min(options.response_tokens or measured_tokens, config.sampling.max_tokens),
        budgets=device_budgets(shape, config, hardware, known),
        too_few_gpus=_too_few_gpus(config, num_gpus) if num_gpus < num_needed else "",
        rates=_rates(options, run),
        run=run,
        run_shape=find_shape(run.config) if run else None,
    )


def _prompt_tokens(config: Config, given: int | None) -> int | None:
    if given is not None:
        return given
    length = config.generator.max_model_len
    return max(1, length - config.sampling.max_tokens) if length is not None else None


def _host_bytes(config: Config, given: float | None) -> float | None:
    """Of this machine where the run computes on a CPU; the host of GPUs is another machine, as a rule."""
    if given is not None:
        return given * GIB
    return None if gpus_of(config) else float(psutil.virtual_memory().total)


def _too_few_gpus(config: Config, num_gpus: int) -> str:
    generator = config.generator
    text = (
        f"{gpus_of(config)} GPUs are needed and {num_gpus} {'is' if num_gpus == 1 else 'are'} there: "
        f"{generator.num_generators} x {generator.num_gpus} for Generators, {config.learner.num_gpus} for the "
        "Learner"
    )
    if num_gpus == 1:
        return f"{text}; on one GPU they take turns with generator.colocated=true weight_sync.max_lag=0"
    return f"{text}; lower generator.num_generators or generator.num_gpus"


def _rates(options: PlanOptions, run: MeasuredRun | None) -> Rates | None:
    """Those given take the place of the measured ones."""
    sampled, trained = options.sampled_tokens_per_s, options.trained_tokens_per_s
    if run is not None:
        measured = run.rates
        return Rates(
            sampled or measured.sampled_tokens_per_s,
            trained or measured.trained_tokens_per_s,
            measured.sync_s,
            measured.trained_frac,
        )
    if sampled is None and trained is None:
        return None
    if sampled is None or trained is None:
        missing = "--sampled-tokens-per-s" if sampled is None else "--trained-tokens-per-s"
        raise RunError(
            f"{missing}: a step's time needs both rates; give it too, or --from RUN for measured ones"
        )
    return Rates(sampled, trained)
