"""The objects that all parts of a run share, from its start (or its last restore) to its end."""

from dataclasses import dataclass

from grpo_ray.actors.clients import RunActors, ServingActors
from grpo_ray.config import Config
from grpo_ray.run.open_calls import OpenCalls
from grpo_ray.telemetry.run_log import RunLog
from grpo_ray.telemetry.stage_clock import StageClock


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
