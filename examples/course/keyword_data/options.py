"""The options of `python -m examples.course data`."""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from grpo_ray.tools.arguments import Option, above_zero, natural, positive

ByModel = partial(Option, group="answers by a model (default: sentences of a small grammar)")


def keyword_range(text: str) -> tuple[int, int]:
    """Convert `3` or `2-4`."""
    fewest, _, most = text.partition("-")
    numbers = [int(part) if part.isdecimal() else 0 for part in (fewest, most or fewest)]
    if not 0 < numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 3, or two such as 2-4")
    return numbers[0], numbers[1]


@dataclass(frozen=True)
class DataOptions:
    """No options: each dataset is a subcommand."""


@dataclass(frozen=True)
class KeywordOptions:
    output: Annotated[Path, Option("FOLDER", "the folder to create")]
    num_pairs: Annotated[int, Option("N", "pairs to make (default: %(default)s)", type=positive)] = 1000
    keywords: Annotated[str | None, Option("FILE", "one word per line (default: 256 bundled nouns)")] = None
    num_keywords: Annotated[
        tuple[int, int], Option("MIN-MAX", "keywords per prompt (default: 2-4)", type=keyword_range)
    ] = (2, 4)
    seed: Annotated[int, Option("N", "seed of the draw of keywords (default: %(default)s)", type=natural)] = 0
    model: Annotated[str | None, ByModel("MODEL", "a model's folder, or a model on the hub (owner/name)")] = (
        None
    )
    engine: Annotated[Literal["vllm", "torch"], ByModel(None, "the engine (default: %(default)s)")] = "vllm"
    prompt: Annotated[
        str | None,
        ByModel(
            "NAME|FILE", "question_only, chat, or a template (default: chat if the model has a chat template)"
        ),
    ] = None
    temperature: Annotated[float, ByModel("T", "(default: %(default)s)", type=above_zero)] = 1.0
    max_tokens: Annotated[int, ByModel("N", "longest answer (default: %(default)s)", type=positive)] = 64
    max_attempts: Annotated[
        int, ByModel("N", "answers to try before a prompt is dropped (default: %(default)s)", type=positive)
    ] = 4
