"""What several commands take: a configuration, changes to it, and numbers, refused with what is allowed."""

import argparse
import math
from collections.abc import Callable


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")


def add_overrides(parser: argparse.ArgumentParser, example: str = "learner.learning_rate=1e-4") -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"changes, such as {example}")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def non_negative(text: str) -> float:
    return _number(text, lambda value: 0 <= value < math.inf, "of at least 0")


def above_zero(text: str) -> float:
    return _number(text, lambda value: 0 < value < math.inf, "above 0")


def fraction(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, "above 0 and at most 1")


def _number(text: str, is_good: Callable[[float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {words}")
    return value
