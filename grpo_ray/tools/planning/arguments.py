"""The command `grpo-ray plan`."""

from grpo_ray.errors import shown_plainly
from grpo_ray.tools.arguments import Command
from grpo_ray.tools.planning.options import PlanOptions


def _plan(options: PlanOptions) -> int:
    from grpo_ray.tools.planning.memory_plan import plan_memory
    from grpo_ray.tools.planning.print_plan import print_plan

    with shown_plainly():
        plan = plan_memory(options)
    print_plan(plan)
    return 0 if plan.fits else 1


PLAN = Command(
    "plan", PlanOptions, _plan, "check that a configuration fits its GPUs",
    "Compare the GPU memory that a run needs with the GPUs', without starting anything; with --from, estimate "
    "a step's time and the best split of the GPUs. Exits with 1 if something does not fit; see docs/plan.md.",
)  # fmt: skip
