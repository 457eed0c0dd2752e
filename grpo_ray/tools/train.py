"""`grpo-ray train`, `resume` and `check`: the run itself, and a look at its configuration before it."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.config.loading import load_config
from grpo_ray.errors import shown_plainly
from grpo_ray.telemetry.visible_text import print_visible
from grpo_ray.tools.arguments import Argument, Command, ConfigFile, Overrides


@dataclass(frozen=True)
class TrainOptions:
    config: ConfigFile
    overrides: Overrides = ()


@dataclass(frozen=True)
class ResumeOptions:
    run: Annotated[str, Argument("RUN", "the run's directory, such as runs/quickstart-20260101-120000")]
    overrides: Overrides = ()


def _train(options: TrainOptions) -> int:
    config = load_config(
        options.config, options.overrides
    )  # refuses a mistake before Ray and torch are imported
    from grpo_ray.run.training import train
    from grpo_ray.tools.report.ending import print_ending

    print_ending(print_visible, train(config, options.config))
    return 0


def _resume(options: ResumeOptions) -> int:
    from grpo_ray.run.training import resume
    from grpo_ray.tools.report.ending import print_ending

    print_ending(print_visible, resume(options.run, options.overrides))
    return 0


def _check(options: TrainOptions) -> int:
    config = load_config(options.config, options.overrides)
    from grpo_ray.run.preflight import check_files
    from grpo_ray.telemetry.trackers import check_trackers

    with shown_plainly():
        task = check_files(config)
        check_trackers(config)
    print(f"{options.config}: good; {len(task.train)} training and {len(task.validation)} validation prompts")
    for notice in task.notices:
        print_visible(f"  {notice}")
    return 0


TRAIN = Command("train", TrainOptions, _train, "run a training job")
RESUME = Command("resume", ResumeOptions, _resume, "resume a run from its last checkpoint")
CHECK = Command("check", TrainOptions, _check, "check a configuration and its files")
