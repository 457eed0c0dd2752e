"""The command `grpo-ray report`."""

from grpo_ray.errors import shown_plainly
from grpo_ray.telemetry.visible_text import print_visible
from grpo_ray.tools.arguments import Command
from grpo_ray.tools.report.options import ReportOptions
from grpo_ray.tools.trust import stay_offline


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
