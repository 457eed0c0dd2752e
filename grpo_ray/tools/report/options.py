"""The options of `grpo-ray report`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.tools.arguments import Argument, Option, positive
from grpo_ray.tools.trust import TrustRemoteCode


@dataclass(frozen=True)
class ReportOptions:
    runs: Annotated[tuple[str, ...], Argument("RUN", "a run's directory; several runs are overlaid")]
    output: Annotated[
        str | None,
        Option(
            "FILE",
            "default: report.html in the run's directory; for several runs, in the parent folder of the first",
        ),
    ] = None
    num_rollouts: Annotated[
        int,
        Option(
            "N", "rollouts on the page in total; runs with more are sampled (default: %(default)s)",
            name="--rollouts", type=positive,
        ),
    ] = 400  # fmt: skip
    seed: Annotated[int, Option("N", "seed of the rollout sample (default: %(default)s)")] = 0
    log_ratio: Annotated[
        str | None,
        Option(
            "CHECKPOINT",
            "colour tokens by their log-ratio to this policy: last, best, a checkpoint's name, or none "
            "(default: last, if its weights are smaller than 500 MB)",
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False
