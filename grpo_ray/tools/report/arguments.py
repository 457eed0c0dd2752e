"""The arguments of `grpo-ray report`."""

import argparse

from grpo_ray.tools.arguments import positive


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder; several runs are overlaid")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="default: report.html in the run's folder; for several runs, in the parent folder of the first",
    )
    parser.add_argument(
        "--rollouts",
        type=positive,
        default=400,
        metavar="N",
        help="rollouts on the page in total; runs with more are sampled (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the rollout sample (default: %(default)s)")
    parser.add_argument(
        "--log-ratio",
        metavar="CHECKPOINT",
        help="colour tokens by their log-ratio to this policy: last, best, a checkpoint's name, or none "
        "(default: last, if its weights are smaller than 500 MB)",
    )
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from grpo_ray.errors import shown_plainly
    from grpo_ray.tools.report.write_report import ReportOptions, report

    with shown_plainly():
        page = report(
            ReportOptions(
                tuple(options.runs), options.output, options.rollouts, options.seed, options.log_ratio
            )
        )
    print(f"{page}  ({page.stat().st_size / 1e6:.1f} MB; open it in a browser)")
    return 0
