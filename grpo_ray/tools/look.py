"""The commands that look at a run: `grpo-ray top`, `report`, `audit` and `evaluate`."""

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from grpo_ray.errors import shown_plainly
from grpo_ray.records.visible_text import print_visible
from grpo_ray.tools.arguments import (
    Argument,
    Command,
    Flag,
    Local,
    Option,
    above_zero,
    fraction,
    positive,
    vllm_temperature,
)
from grpo_ray.tools.trust import RunRewardCode, TrustRemoteCode, stay_offline


@dataclass(frozen=True)
class TopOptions:
    run: Annotated[str, Argument("RUN", "the run's directory")]
    once: Annotated[bool, Flag("print one frame and exit (the default without a terminal)")] = False
    every_s: Annotated[
        float, Option("SECONDS", "time between frames (default: %(default)g)", name="--every", type=above_zero)
    ] = 1.0


def _top(options: TopOptions) -> int:
    from grpo_ray.tools.top.frame import top

    with contextlib.suppress(KeyboardInterrupt):  # this command has no actors to shut down
        top(options)
    return 0


TOP = Command(
    "top", TopOptions, _top, "watch a run in the terminal",
    "Watch a run in the terminal: its actors, steps and bottleneck. q or Ctrl-C ends the view, not the run.",
    group="Look",
)  # fmt: skip


@dataclass(frozen=True)
class ReportOptions:
    runs: Annotated[tuple[str, ...], Argument("RUN", "a run's directory; several runs are overlaid")]
    output: Annotated[str | None, Option(
        "FILE",
        "default: report.html in the run's directory; for several runs, in the parent folder of the first",
    )] = None  # fmt: skip
    num_rollouts: Annotated[int, Option(
        "N", "rollouts on the page; of a run with more, a sample (default: %(default)s)",
        name="--rollouts", type=positive,
    )] = 400  # fmt: skip
    seed: Annotated[int, Option("N", "seed of the rollout sample (default: %(default)s)")] = 0
    log_ratio: Annotated[str | None, Option(
        "CHECKPOINT",
        "colour tokens by their log-ratio to this policy: last, best, a checkpoint's name, or none "
        "(default: last, if its weights are smaller than 500 MB)",
    )] = None  # fmt: skip
    trust_remote_code: TrustRemoteCode = False
    run_reward_code: RunRewardCode = False


def _report(options: ReportOptions) -> int:
    stay_offline()
    from grpo_ray.tools.report.write_report import report

    with shown_plainly():
        page = report(options)
    print_visible(f"{page}  ({page.stat().st_size / 1e6:.1f} MB; open it in a browser)")
    return 0


REPORT = Command(
    "report", ReportOptions, _report, "write a web page about a run",
    "Write a web page about a run, or about several overlaid: one file that works offline.",
    group="Look",
)  # fmt: skip


@dataclass(frozen=True)
class AuditOptions:
    run: Annotated[str, Argument("RUN", "the run's directory")]
    other: Annotated[str | None, Argument("OTHER", "another run: print where the two first differ")] = None
    hash: Annotated[bool, Flag("print the SHA-256 of weights, training state and rollouts")] = False
    trust_remote_code: TrustRemoteCode = False
    run_reward_code: RunRewardCode = False


def _audit(options: AuditOptions) -> int:
    stay_offline()
    from grpo_ray.records.run_files import RunDirectory
    from grpo_ray.tools.audit.audit import audit
    from grpo_ray.tools.audit.checkpoint import first_difference, hashes

    runs = [RunDirectory(path) for path in (options.run, options.other) if path is not None]
    for each in runs:
        each.check_is_run("to audit")
    with shown_plainly():
        if options.hash:
            for each in runs:
                for name, sha256 in hashes(each).items():
                    print_visible(f"{name:10}{sha256}  {each.path}")
        if options.other is not None:
            difference = first_difference(*runs)
            print_visible(difference or "the two runs are the same: weights, training state and rollouts")
            return int(difference is not None)
        if options.hash:
            return 0
        report = audit(runs[0], options.trust_remote_code, options.run_reward_code)
    print_visible(str(report))
    return 0 if report.is_clean else 1


AUDIT = Command(
    "audit", AuditOptions, _audit, "verify a run's records",
    "Verify a run's records: each prompt trained once, no token older than allowed, every reward correct. "
    "With OTHER or --hash, compare runs instead; the order in which groups arrived does not count.",
    group="Look",
)  # fmt: skip


Asked = partial(Option, group="questions")
Sampled = partial(Option, group="sampling")


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of `grpo-ray evaluate`; None keeps what the configuration has."""

    target: Annotated[str, Argument(
        "CONFIG|RUN|MODEL", "a YAML file, a run's directory, a model's folder, or a hub name (owner/name)"
    )]  # fmt: skip
    task: Annotated[
        str | None, Asked("TASK", "a kind such as gsm8k, a .jsonl, .parquet or .csv file, or a hub dataset")
    ] = None
    question_field: Annotated[
        str | None, Asked("NAME", "the file's field with the question (default: as in GSM8K or MATH)")
    ] = None
    answer_field: Annotated[
        str | None, Asked("NAME", "the file's field with the answer (default: as in GSM8K or MATH)")
    ] = None
    prompt: Annotated[str | None, Asked("NAME|FILE", "r1_zero, question_only, chat, or a template")] = None
    reward: Annotated[
        str | None, Asked("NAME", "default: the task's, or in mathematics the one that matches --prompt")
    ] = None
    limit: Annotated[
        int | None, Asked("N", "use only the first N prompts (of each part of a mixture)", type=positive)
    ] = None
    checkpoint: Annotated[str | None, Sampled("NAME", "of a run: last, best, all, initial, or a name")] = None
    num_samples: Annotated[
        int | None, Sampled("N", "responses per prompt, for pass@k", name="--n", type=positive)
    ] = None
    temperature: Annotated[float | None, Sampled("T", "0 is greedy", type=vllm_temperature)] = None
    top_p: Annotated[float | None, Sampled("P", "nucleus sampling (default: 1)", type=fraction)] = None
    max_tokens: Annotated[int | None, Sampled("N", "longest response", type=positive)] = None
    local: Local = False
    trust_remote_code: TrustRemoteCode = False
    run_reward_code: RunRewardCode = False
    output: Annotated[str | None, Option("FOLDER", "default: evaluations/<name>-<time>")] = None
    overrides: Annotated[tuple[str, ...], Argument("KEY=VALUE", "changes, such as generator.engine=torch")] = ()
    typed: str = ""


def _evaluate(options: EvaluationOptions) -> int:
    from grpo_ray.tools.evaluation.evaluate import evaluate

    evaluate(options)
    return 0


EVALUATE = Command(
    "evaluate", EvaluationOptions, _evaluate, "sample and grade a model's answers",
    "Sample and grade answers of a model, of a run's checkpoint, or of each of its checkpoints.",
    group="Look",
)  # fmt: skip
