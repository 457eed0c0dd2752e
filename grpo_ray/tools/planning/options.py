"""The options of `grpo-ray plan`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.tools.arguments import Argument, ConfigFile, Option, above_zero, positive


@dataclass(frozen=True)
class PlanOptions:
    config: ConfigFile
    overrides: Annotated[
        tuple[str, ...], Argument("KEY=VALUE", "changes, such as learner.micro_batch_tokens=4096")
    ] = ()
    gpus: Annotated[
        int | None, Option("N", "number of GPUs (default: as many as the run uses)", type=positive)
    ] = None
    gpu_memory: Annotated[
        float, Option("GIB", "memory of each GPU (default: %(default)g)", type=above_zero)
    ] = 80.0
    prompt_tokens: Annotated[
        int | None,
        Option("N", "longest prompt (default: what generator.max_model_len leaves, else 256)", type=positive),
    ] = None
    response_tokens: Annotated[
        float | None, Option("N", "mean response (default: that of the run in --from)", type=above_zero)
    ] = None
    from_run: Annotated[
        str | None, Option("RUN", "a run's directory, for the time of a step at its rates", name="--from")
    ] = None
