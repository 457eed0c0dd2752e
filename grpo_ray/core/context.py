"""The objects that all parts of a run share, from its start (or its last restore) to its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.core.clients import RunActors, ServingActors
from grpo_ray.tasks.prompt_order import PromptStream
from grpo_ray.types import PromptItem, StartingModel
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.run_log import RunLog
from grpo_ray.watch.stage_clock import StageClock


@dataclass(frozen=True)
class ServingContext:
    """The context of anything that samples and grades, a run or an evaluation."""

    config: Config
    actors: ServingActors
    calls: OpenCalls
    log: RunLog


@dataclass(frozen=True)
class RunContext(ServingContext):
    """The context of a training run."""

    actors: RunActors
    clock: StageClock
    """The clock of the driver process."""


@dataclass(frozen=True, kw_only=True)
class PreparedServing:
    """The model that Generators start from, and the prompts that it is evaluated on."""

    model: StartingModel
    validation: Sequence[PromptItem]
    longest_prompt: int  # tokens
    notices: tuple[str, ...] = ()  # the task's, complete now that the tokenizer is loaded


@dataclass(frozen=True, kw_only=True)
class Prepared(PreparedServing):
    """Everything that the actors and the controller of a run start from."""

    prompts: PromptStream
