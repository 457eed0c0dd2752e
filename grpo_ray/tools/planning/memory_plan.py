"""The plan of a configuration: the budgets of its GPUs, the time of a step, and the splits of the GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.run.machine import gpus_of
from grpo_ray.tools.planning.command import PlanOptions
from grpo_ray.tools.planning.gpu_memory import GIB, Budget, generator_budget
from grpo_ray.tools.planning.learner_memory import learner_budget
from grpo_ray.tools.planning.model_shape import GB, GPU_TYPES, Machine, find_shape
from grpo_ray.tools.planning.splits import Split, remedy_of, splits
from grpo_ray.tools.planning.step_time import MeasuredRun, StepTime, Workload, measure, step_time

DEFAULT_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class MemoryPlan:
    """The figures that `print_plan` shows."""

    config: Config
    work: Workload
    machine: Machine
    gpu_name: str
    num_gpus: int  # number of GPUs that there are
    budgets: Sequence[Budget]
    run: MeasuredRun | None
    time: StepTime | None  # None: neither a run measured the rates nor are there data sheets, as on a CPU
    splits: Sequence[Split]
    remedy: str  # changes with which the Learner would fit; empty if it does

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
        ValueError: the model's shape or the GPU is not known, the run has no rates, or an option needs a run.
    """
    config, machine = load_config(options.config, options.overrides), machine_of(options)
    shape = find_shape(config.model)
    prompt_tokens = options.prompt_tokens
    if config.episode_tasks:
        config, prompt_tokens = as_single_turns(config, prompt_tokens)
    run = measure(options.from_run) if options.from_run is not None else None
    is_on_gpus = bool(config.generator.num_gpus and config.learner.num_gpus)
    of_gpus = ("gpus", "gpu_type", "gpu_memory", "gpus_per_node", "network")
    given = [name for name in of_gpus if getattr(options, name) != getattr(PlanOptions, name)]
    if given and not (config.generator.num_gpus or config.learner.num_gpus):
        raise ValueError(f"--{given[0].replace('_', '-')}: the run uses no GPU; set generator.num_gpus first")
    if run is None and not is_on_gpus and options.response_tokens is not None:
        raise ValueError(
            "--response-tokens: without GPUs the time of a step needs the rates of a run; give --from RUN too"
        )
    max_tokens, max_model_len = config.sampling.max_tokens, config.generator.max_model_len
    left = max(1, max_model_len - max_tokens) if max_model_len is not None else DEFAULT_PROMPT_TOKENS
    mean_tokens = options.response_tokens or (run.response_tokens if run else max_tokens)
    work = Workload(shape, prompt_tokens or left, min(mean_tokens, max_tokens))
    gpu_bytes = machine.gpu.memory_gib * GIB
    of_learner = learner_budget(shape, config, work.prompt_tokens, gpu_bytes)
    num_gpus = gpus_of(config) if options.gpus is None else options.gpus
    return MemoryPlan(
        config=config,
        work=work,
        machine=machine,
        gpu_name=options.gpu_type.upper(),
        num_gpus=num_gpus,
        budgets=[generator_budget(shape, config, work.prompt_tokens, gpu_bytes), of_learner],
        run=run,
        time=step_time(config, work, machine, run) if run or is_on_gpus else None,
        splits=splits(config, work, machine, num_gpus, run),
        remedy="" if of_learner.fits else remedy_of(shape, config, work.prompt_tokens, gpu_bytes),
    )


def as_single_turns(config: Config, prompt_tokens: int | None) -> tuple[Config, int]:
    """Return a configuration in which an episode is one response that fills `episodes.max_tokens`.

    Args:
        prompt_tokens: with which episodes begin; None: the default, at most half of it.

    Raises:
        ValueError: the prompt leaves no room for a reply.
    """
    length, reply = config.episodes.max_tokens, config.sampling.max_tokens
    most = min(DEFAULT_PROMPT_TOKENS, length // 2, length - reply)
    prompt = most if prompt_tokens is None else prompt_tokens
    if prompt > length - reply:
        raise ValueError(
            f"--prompt-tokens {prompt}: with sampling.max_tokens ({reply}) it exceeds episodes.max_tokens "
            f"({length})"
        )
    return config.changed(sampling={"max_tokens": length - prompt}), prompt


def machine_of(options: PlanOptions) -> Machine:
    """Return the machine that the options describe; a ValueError names the GPUs that have a data sheet."""
    gpu = GPU_TYPES.get(options.gpu_type.upper())
    if gpu is None:
        raise ValueError(f"--gpu-type {options.gpu_type}: no data sheet; known are {', '.join(GPU_TYPES)}")
    if options.gpu_memory is not None:
        gpu = replace(gpu, memory_gib=options.gpu_memory)
    return Machine(gpu, options.gpus_per_node, options.network * GB)
