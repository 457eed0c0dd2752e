"""The arguments of `grpo-ray evaluate`."""

import argparse

from grpo_ray.tools.arguments import add_overrides, fraction, non_negative, positive


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="CONFIG|RUN|MODEL",
        help="a YAML file, a run's folder, a model's folder, or a model on the hub (owner/name)",
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--task", help="a kind such as gsm8k, a .jsonl or .parquet file, or a hub dataset")
    asked.add_argument("--question-field", metavar="NAME", help="of the file; default: as in GSM8K or MATH")
    asked.add_argument("--answer-field", metavar="NAME")
    asked.add_argument("--prompt", metavar="NAME|FILE", help="r1_zero, question_only, chat, or a template")
    asked.add_argument(
        "--reward",
        metavar="NAME",
        help="default: the task's; with a named --prompt, mathematics takes the one that reads it",
    )
    asked.add_argument("--limit", type=positive, metavar="N", help="the first N prompts only")
    sampling = parser.add_argument_group("how it is sampled")
    sampling.add_argument("--checkpoint", metavar="NAME", help="of a run: last, best, all, initial or its name")
    sampling.add_argument("--n", type=positive, metavar="N", help="responses a prompt, for pass@k")
    sampling.add_argument("--temperature", type=non_negative, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-p", type=fraction, metavar="P", help="nucleus sampling (default: 1)")
    sampling.add_argument("--max-tokens", type=positive, metavar="N", help="longest response")
    parser.add_argument("--output", metavar="FOLDER", help="default: evaluations/<name>-<time>")
    add_overrides(parser, "generator.engine=torch")
    parser.set_defaults(command=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    from grpo_ray.tools.evaluation.evaluate import evaluate
    from grpo_ray.tools.evaluation.evaluation_plan import EvaluationOptions
    from grpo_ray.tools.evaluation.task_choice import TaskChoice

    evaluate(
        EvaluationOptions(
            target=options.target,
            choice=TaskChoice(
                options.task, options.question_field, options.answer_field, options.prompt, options.reward,
                options.limit,
            ),
            checkpoint=options.checkpoint,
            num_samples=options.n,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.max_tokens,
            output=options.output,
            overrides=tuple(options.overrides),
            command=options.typed,
        )
    )  # fmt: skip
    return 0
