"""Whether two LaTeX expressions are equal, by computer algebra: math-verify's parser and judgement, sympy."""

import logging
import re
from functools import lru_cache
from typing import Any

from grpo_ray.rewards.math_structure import RELATION, ascending
from grpo_ray.rewards.math_text import VARIABLES

# math-verify warns once that timeouts are off, and logs whatever a model's odd LaTeX makes it raise.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

CACHED_VERDICTS, CACHED_EXPRESSIONS = 4096, 256  # a group's answers are alike, and its truth is the same
MAX_EXPRESSION_CHARACTERS = 300  # parsing takes more than linear time; lists and matrices come in parts
FLOAT_DIGITS = 12  # digits after the point in which decimal numbers must agree: 1.414214 is not sqrt(2)

# LaTeX would read `7 2` as a sum, or drop the 2; a time as a quotient, `5:30`; and forget the base of `17_8`.
NO_EXPRESSION = re.compile(r"\$|(?<![_\d])\d+\s+\d|:|\d\s*_")
# sympy evaluates these for hours; the pool would end the worker, at a second each. In order: powers of powers,
# exponents of 4 digits, big factorials and binomials.
ENDLESS = re.compile(
    r"\^\s*(?:[{(][^})]*|\w|\d+)\s*\^|\^\s*[{(]*\s*[+-]?\d{4,}|(?:\d{4,}|[)}!])\s*!|\\[dt]?binom\D*\d{4,}"
)
COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"[A-Za-z]{3,}")
IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![A-Za-z])")


@lru_cache(maxsize=CACHED_VERDICTS)
def is_equal_latex(answer: str, truth: str) -> bool:
    """Normalized expressions, equations or inequalities; False for what is not one."""
    texts = (truth, answer)
    if max(map(len, texts)) > MAX_EXPRESSION_CHARACTERS:
        return False
    if any(NO_EXPRESSION.search(text) or ENDLESS.search(text) for text in texts):
        return False
    if any(_has_words(text) for text in texts) or not _is_same_case(answer, truth):
        return False
    from math_verify import verify  # here, because sympy takes a quarter of a second to import

    try:
        is_complex = any(map(IMAGINARY.search, texts))
        gold, given = (_parse(ascending(text), is_complex) for text in texts)
        if _differ_at_a_point(gold, given):
            return False
        return bool(
            verify(
                gold,
                given,
                FLOAT_DIGITS,
                allow_set_relation_comp=bool(RELATION.search(answer)),
                timeout_seconds=None,
            )
        )
    except MemoryError:  # no verdict: ends the worker, and is counted
        raise
    except Exception:  # sympy raises whatever it likes on odd expressions; such an answer is not right
        return False


def _has_words(text: str) -> bool:
    """Whether it is prose, which LaTeX would read as a product of letters: `east` is `seat`."""
    return any(not VARIABLES.issuperset(word) for word in WORD.findall(COMMAND.sub(" ", text)))


def _is_same_case(answer: str, truth: str) -> bool:
    """math-verify takes `N` for `n`."""
    given, wanted = (set(filter(str.isalpha, COMMAND.sub(" ", text))) for text in (answer, truth))
    return not any(letter.swapcase() in wanted for letter in given - wanted)


@lru_cache(maxsize=CACHED_EXPRESSIONS)
def _parse(text: str, is_complex: bool) -> Any:
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from sympy import I

    spelling = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    expression = latex2sympy(
        text.replace("°", r"^{\circ}"),
        is_real=not is_complex,
        convert_degrees=bool(TRIGONOMETRIC.search(text)),
        normalization_config=spelling,
    )
    if is_complex:
        # The index of a sum is no free symbol.
        expression = expression.subs({symbol: I for symbol in expression.free_symbols if symbol.name == "i"})
    return expression


def _differ_at_a_point(left: Any, right: Any) -> bool:
    """Whether two expressions have different values somewhere, which spares `simplify` most wrong answers."""
    from sympy import Expr, Rational

    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {symbol: Rational(17 + 6 * index, 11 + 4 * index) for index, symbol in enumerate(symbols)}
    values = [side.subs(point).evalf(20) for side in (left, right)]
    distance, size = (abs(value).evalf(20) for value in (values[0] - values[1], values[0]))
    if not all(value.is_Number and value.is_finite for value in (distance, size)):
        return False
    return bool(distance > 1e-9 * max(1, size))
