"""The command `grpo-ray evaluate`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from grpo_ray.tools.arguments import (
    Argument,
    Command,
    Local,
    Option,
    TypedCommand,
    fraction,
    non_negative,
    positive,
)
from grpo_ray.tools.trust import RunRewardCode, TrustRemoteCode

Asked = partial(Option, group="questions")
Sampled = partial(Option, group="sampling")


@dataclass(frozen=True)
class TaskChoice:
    """The options that choose the questions; None keeps what the configuration has."""

    task: Annotated[
        str | None, Asked("TASK", "a kind such as gsm8k, a .jsonl or .parquet file, or a hub dataset")
    ] = None
    question_field: Annotated[
        str | None, Asked("NAME", "the file's field with the question (default: as in GSM8K or MATH)")
    ] = None
    answer_field: Annotated[
        str | None, Asked("NAME", "the file's field with the answer (default: as in GSM8K or MATH)")
    ] = None
    prompt: Annotated[str | None, Asked("NAME|FILE", "r1_zero, question_only, chat, or a template")] = None
    reward: Annotated[
        str | None, Asked("NAME", "default: the task's; in mathematics, the one that reads a named --prompt")
    ] = None
    limit: Annotated[
        int | None, Asked("N", "only the first N prompts (of each part of a mixture)", type=positive)
    ] = None


NO_CHOICE = TaskChoice()


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of `grpo-ray evaluate`; None keeps what the configuration has."""

    target: Annotated[
        str,
        Argument(
            "CONFIG|RUN|MODEL",
            "a YAML file, a run's directory, a model's folder, or a model on the hub (owner/name)",
        ),
    ]
    choice: TaskChoice = NO_CHOICE
    checkpoint: Annotated[str | None, Sampled("NAME", "of a run: last, best, all, initial or its name")] = None
    num_samples: Annotated[
        int | None, Sampled("N", "responses per prompt, for pass@k", name="--n", type=positive)
    ] = None
    temperature: Annotated[float | None, Sampled("T", "0 is greedy", type=non_negative)] = None
    top_p: Annotated[float | None, Sampled("P", "nucleus sampling (default: 1)", type=fraction)] = None
    max_tokens: Annotated[int | None, Sampled("N", "longest response", type=positive)] = None
    local: Local = False
    trust_remote_code: TrustRemoteCode = False
    run_reward_code: RunRewardCode = False
    output: Annotated[str | None, Option("FOLDER", "default: evaluations/<name>-<time>")] = None
    overrides: Annotated[tuple[str, ...], Argument("KEY=VALUE", "changes, such as generator.engine=torch")] = ()
    command: Annotated[str, TypedCommand] = ""


def _evaluate(options: EvaluationOptions) -> int:
    from grpo_ray.tools.evaluation.evaluate import evaluate

    evaluate(options)
    return 0


EVALUATE = Command(
    "evaluate", EvaluationOptions, _evaluate, "sample and grade a model's answers",
    "Sample and grade answers of a model, of a run's checkpoint, or of all its checkpoints.",
    group="Look",
)  # fmt: skip
