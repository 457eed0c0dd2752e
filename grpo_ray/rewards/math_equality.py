"""Whether an answer and a ground truth are the same value."""

import logging
import re
from decimal import Decimal

# math-verify warns once that timeouts are off, and logs whatever a model's odd LaTeX makes it raise.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# 1,000 or 1000, 1000.0, .5, 1e3; the exponent is short, so that Decimal stays cheap.
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.|\.\d+)?(?:(?<=[\d.])[eE][+-]?\d{1,3})?")
WORDS = r"[A-Za-z:,.!'\s$\\]*"
NUMBER_AMONG_WORDS = re.compile(rf"{WORDS}(?<![\w.,])([+-]?\d[\d,]*(?:\.\d+)?%?)(?![\w^*/+-]){WORDS}")

# LaTeX would read `7 2` as a sum or drop the 2.
ADJACENT_NUMBERS = re.compile(r"\d\s+\d")
# sympy evaluates these for hours, and no timeout works here: signal.alarm needs the main thread.
# In order: powers of powers, exponents of 4 digits, big factorials, and 16 or more brackets, because
# parsing takes exponential time in their depth.
ENDLESS = re.compile(
    r"\^\s*(?:[{(][^})]*|\w|\d+)\s*\^|\^\s*[{(]*\s*[+-]?\d{4,}|(?:\d{4,}|[)}])\s*!|(?:[({\[][^({\[]*){16,}"
)


def is_equal(answer: str, truth: str) -> bool:
    """The same text, the same number, or LaTeX expressions that math-verify finds equal."""
    if answer == truth:
        return True
    answer, truth = _undress(answer), _undress(truth)
    numbers = _number(answer), _number(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _is_equal_latex(answer, truth)


def number_in_prose(answer: str) -> str | None:
    """`72` of `She has 72 eggs.`; None when there is no number or more than one."""
    match = NUMBER_AMONG_WORDS.fullmatch(answer)
    return match[1] if match else None


def _undress(text: str) -> str:
    r"""Without the marks that say nothing about the value: `$72$`, `\$72`, `72.`"""
    return text.strip().removesuffix(".").removeprefix(r"\$").strip("$").strip()


def _number(text: str) -> Decimal | None:
    if not NUMBER.fullmatch(text) or not any(character.isdigit() for character in text):
        return None
    return Decimal(text.replace(",", ""))


def _is_equal_latex(answer: str, truth: str) -> bool:
    # Here, because sympy takes a quarter of a second to import, and not every run grades LaTeX.
    from math_verify import LatexExtractionConfig, parse, verify

    if "$" in answer or ADJACENT_NUMBERS.search(answer) or ENDLESS.search(answer):
        return False
    try:
        # In dollars the whole text is one expression; without, math-verify takes the last number it sees.
        parsed = [
            parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
            for text in (truth, answer)
        ]
        return bool(verify(parsed[0], parsed[1], timeout_seconds=None))
    except MemoryError:  # no verdict: ends the worker, and is counted
        raise
    except Exception:  # sympy raises whatever it likes on odd expressions; such an answer is not right
        return False
