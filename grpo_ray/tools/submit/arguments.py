"""The command `grpo-ray submit`."""

from grpo_ray.tools.arguments import Command
from grpo_ray.tools.submit.options import SubmitOptions


def _submit(options: SubmitOptions) -> int:
    from grpo_ray.tools.submit.submit import submit

    return submit(options)


SUBMIT = Command(
    "submit", SubmitOptions, _submit, "run a job on a Ray cluster",
    "Submit a training run to a Ray cluster, follow it, stop it; see docs/cluster.md.",
)  # fmt: skip
