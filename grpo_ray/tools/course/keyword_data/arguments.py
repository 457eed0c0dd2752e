"""The arguments of `grpo-ray data`."""

import argparse
from pathlib import Path

from grpo_ray.tools.arguments import above_zero, positive


def add_data(parser: argparse.ArgumentParser) -> None:
    datasets = parser.add_subparsers(required=True, metavar="DATASET")
    _add_keywords(datasets.add_parser(
        "keywords",
        help="sentences with given words",
        description="Make prompt/answer pairs for keyword inclusion. Every answer is checked for its keywords; "
        "80% of the pairs are for training, 20% for validation, and no two ask for the same words. "
        "Run the same command again to resume after an interruption.",
    ))  # fmt: skip


def _add_keywords(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FOLDER", required=True, help="the folder to make")
    parser.add_argument("--num-pairs", type=positive, default=1000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--keywords", metavar="FILE", help="one word per line (default: bundled nouns)")
    parser.add_argument(
        "--num-keywords", type=_range, default=(2, 4), metavar="MIN-MAX", help="per prompt (default: 2-4)"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="(default: %(default)s)")
    model = parser.add_argument_group("answers by a model (default: sentences of a small grammar)")
    model.add_argument("--model", help="a model's folder, or a model on the hub (owner/name)")
    model.add_argument("--engine", choices=("vllm", "torch"), default="vllm", help="(default: %(default)s)")
    model.add_argument(
        "--prompt",
        metavar="NAME|FILE",
        help="question_only, chat, or a template (default: chat if the model has a chat template)",
    )
    model.add_argument(
        "--temperature", type=above_zero, default=1.0, metavar="T", help="(default: %(default)s)"
    )
    model.add_argument(
        "--max-tokens", type=positive, default=64, metavar="N", help="longest answer (default: %(default)s)"
    )
    model.add_argument(
        "--max-attempts",
        type=positive,
        default=4,
        metavar="N",
        help="answers to try before a prompt is dropped (default: %(default)s)",
    )
    parser.set_defaults(command=_keywords)


def _keywords(options: argparse.Namespace) -> int:
    from grpo_ray.tools.course.keyword_data.generate import KeywordOptions, make_keyword_dataset

    names = KeywordOptions.__dataclass_fields__
    make_keyword_dataset(KeywordOptions(**{name: getattr(options, name) for name in names}))
    return 0


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    """Read `3` or `2-4`."""
    fewest, _, most = text.partition("-")
    numbers = [int(part) if part.isdecimal() else 0 for part in (fewest, most or fewest)]
    if not 0 < numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 3, or two such as 2-4")
    return numbers[0], numbers[1]
