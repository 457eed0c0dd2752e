"""The command `grpo-ray plan`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.errors import shown_plainly
from grpo_ray.tools.arguments import Argument, Command, ConfigFile, Option, above_zero, positive


@dataclass(frozen=True)
class PlanOptions:
    config: ConfigFile
    overrides: Annotated[
        tuple[str, ...], Argument("KEY=VALUE", "changes, such as learner.micro_batch_tokens=4096")
    ] = ()
    gpus: Annotated[
        int | None, Option("N", "number of GPUs (default: as many as the run uses)", type=positive)
    ] = None
    gpu_type: Annotated[
        str, Option("NAME", "GPU type; its data sheet gives the times (default: %(default)s)")
    ] = "H100"
    gpu_memory: Annotated[
        float | None, Option("GIB", "memory of each GPU (default: that of --gpu-type)", type=above_zero)
    ] = None
    gpus_per_node: Annotated[int, Option("N", "GPUs per node (default: %(default)s)", type=positive)] = 8
    network: Annotated[
        float,
        Option("GBS", "bandwidth of a node's network, in 10^9 bytes/s (default: %(default)g)", type=above_zero),
    ] = 50.0
    prompt_tokens: Annotated[
        int | None,
        Option("N", "longest prompt (default: what generator.max_model_len leaves, else 256)", type=positive),
    ] = None
    response_tokens: Annotated[
        float | None,
        Option(
            "N", "mean response (default: that of the run in --from, else sampling.max_tokens)", type=above_zero
        ),
    ] = None
    from_run: Annotated[
        str | None, Option("RUN", "a run's directory; its rates replace the modelled ones", name="--from")
    ] = None


def _plan(options: PlanOptions) -> int:
    from grpo_ray.tools.planning.memory_plan import plan_memory
    from grpo_ray.tools.planning.print_plan import print_plan

    with shown_plainly():
        plan = plan_memory(options)
    print_plan(plan)
    return 0 if plan.fits else 1


PLAN = Command(
    "plan", PlanOptions, _plan, "check that a configuration fits its GPUs",
    "Compare the GPU memory that a run needs with the GPUs', and estimate a step's time and the best split of "
    "the GPUs, without starting anything. With --from, at a run's own speed, also without GPUs. Exit status 1: "
    "something does not fit; see docs/plan.md.",
)  # fmt: skip
