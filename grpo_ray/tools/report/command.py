"""The command `grpo-ray report`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.errors import shown_plainly
from grpo_ray.records.visible_text import print_visible
from grpo_ray.tools.arguments import Argument, Command, Option, positive
from grpo_ray.tools.trust import TrustRemoteCode, stay_offline


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


def _report(options: ReportOptions) -> int:
    stay_offline()
    from grpo_ray.tools.report.write_report import report

    with shown_plainly():
        page = report(options)
    print_visible(f"{page}  ({page.stat().st_size / 1e6:.1f} MB; open it in a browser)")
    return 0


REPORT = Command(
    "report", ReportOptions, _report, "write a web page of a run, or of several",
    "Write a web page of a run, or of several overlaid: one file that needs no network.",
    group="Look",
)  # fmt: skip
