"""Equality of two LaTeX expressions by computer algebra: math-verify's parser and judgement, on sympy."""

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from grpo_ray.rewards.base import NotGraded, Ungradable
from grpo_ray.rewards.math.numbers import read_number
from grpo_ray.rewards.math.structure import RELATION, ascending
from grpo_ray.rewards.math.text import VARIABLES

# math-verify warns once that timeouts are off, and logs every exception that a model's odd LaTeX causes.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

CACHED_VERDICTS, CACHED_EXPRESSIONS = 4096, 256  # a group's answers are similar, and share their truth
MAX_EXPRESSION_CHARACTERS = 300  # parsing takes more than linear time; lists and matrices come in parts
FLOAT_DIGITS = 12  # decimal places in which numbers must agree: 1.414214 is not sqrt(2)

# The parser would read `7 2` as a sum or drop the 2, read the time `5:30` as a quotient, ignore the base of
# `17_8`, and accept an approximation as equal.
NO_EXPRESSION = re.compile(r"\$|\\approx|(?<![_\d])\d+\s+\d|:|\d\s*_")
MAX_DIGITS = 10_000  # of an intermediate result; larger ones would take sympy hours
TOWER = re.compile(r"\^ ?\d+ ?\^")  # not valid LaTeX, so its size cannot be bounded
BIG_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{?\s*\d{4,}[\s{}]+\d{4,}")  # the parser computes it at once
# The parser reads `1/2 x` as 1/(2x); people do not.
SLASH = re.compile(r"(?<![\w.)}^])(\d+) ?/ ?(\d+)(?=\s*[A-Za-z\\(])")
FACTORS = re.compile(r"[\d+*/^(). -]+")  # the parser takes `3(2)` for a mixed number; not `\log_2(8)`
IMPLICIT_PRODUCT = re.compile(r"(?<=[\d)]) ?\(")
COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"[A-Za-z]{3,}")
IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![A-Za-z])")


@lru_cache(maxsize=CACHED_VERDICTS)
def is_equal_latex(answer: str, truth: str) -> bool:
    """Compare normalized expressions, equations or inequalities; False for an answer that is none of these.

    Raises:
        NotGraded: the truth is too long or too large a number, or cannot be parsed.
        Ungradable: the answer is too long or too large a number.
    """
    texts = (truth, answer)
    if any(NO_EXPRESSION.search(text) or _has_words(text) for text in texts):
        return False
    if not _is_same_case(answer, truth):
        return False
    for text, blame in ((truth, NotGraded), (answer, Ungradable)):
        if len(text) > MAX_EXPRESSION_CHARACTERS:
            raise blame(f"an expression of more than {MAX_EXPRESSION_CHARACTERS} characters")
        if TOWER.search(text) or BIG_BINOMIAL.search(text):
            raise blame("a power of a power, or a binomial coefficient of numbers of four digits or more")
    from math_verify import verify  # imported here, because importing sympy takes a quarter of a second

    is_complex = any(map(IMAGINARY.search, texts))
    try:
        gold = _parse(ascending(truth), is_complex)
    except MemoryError:  # ends the worker, and is counted
        raise
    except Exception as error:
        raise NotGraded(f"the ground truth {truth!r} cannot be parsed: {error}") from None
    try:
        given = _parse(ascending(answer), is_complex)
        for expression, blame in ((gold, NotGraded), (given, Ungradable)):
            if _num_digits(expression) > MAX_DIGITS:
                raise blame(f"a number of more than {MAX_DIGITS} digits")
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
    except (MemoryError, NotGraded, Ungradable):
        raise
    except Exception:  # sympy raises all kinds of errors on odd expressions; such an answer is not right
        return False


def real_value(text: str) -> Fraction | None:
    """Return the value of a normalized expression to 30 digits; None unless it is one real number."""
    is_too_large = len(text) > MAX_EXPRESSION_CHARACTERS or TOWER.search(text) or BIG_BINOMIAL.search(text)
    if is_too_large or NO_EXPRESSION.search(text) or _has_words(text):
        return None
    try:
        expression = _parse(text, False)
        if _num_digits(expression) > MAX_DIGITS:
            return None
        return Fraction(str(expression.evalf(30)))
    except MemoryError:  # ends the worker, and is counted
        raise
    except Exception:  # not an expression, or not a real number
        return None


def _has_words(text: str) -> bool:
    """Return True for prose, which the parser would read as a product of letters: `east` equals `seat`."""
    return any(not VARIABLES.issuperset(word) for word in WORD.findall(COMMAND.sub(" ", text)))


def _is_same_case(answer: str, truth: str) -> bool:
    """Return False if a letter differs in case only, because math-verify treats `N` as `n`."""
    given, wanted = (set(filter(str.isalpha, COMMAND.sub(" ", text))) for text in (answer, truth))
    return not any(letter.swapcase() in wanted for letter in given - wanted)


@lru_cache(maxsize=CACHED_EXPRESSIONS)
def _parse(text: str, is_complex: bool) -> Any:
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from sympy import I, Rational

    number = read_number(text)  # it reads `0.\overline{3}` too
    if number is not None:
        return Rational(number.numerator, number.denominator)
    spelling = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    text = SLASH.sub(r"\\frac{\1}{\2}", text)
    text = IMPLICIT_PRODUCT.sub(r"\\cdot (", text) if FACTORS.fullmatch(text) else text
    expression = latex2sympy(
        text.replace("°", r"^{\circ}"),
        is_real=not is_complex,
        convert_degrees=bool(TRIGONOMETRIC.search(text)),
        normalization_config=spelling,
    )
    if is_complex:
        # The index of a sum is not a free symbol.
        expression = expression.subs({symbol: I for symbol in expression.free_symbols if symbol.name == "i"})
    return expression


def _num_digits(node: Any) -> float:
    """Return an upper bound on the digits of the intermediate results of computing its value exactly."""
    from sympy import Pow, Rational, binomial, factorial, factorial2

    if isinstance(node, Rational):
        return math.log10(max(1, abs(node.p), node.q))
    sizes = [_num_digits(part) for part in getattr(node, "args", ())]
    if isinstance(node, Pow | binomial):
        size = sizes[0] if isinstance(node, Pow) and node.base.is_Rational else max(1, sizes[0])
        return size * 10 ** min(sizes[1], 9)
    if isinstance(node, factorial | factorial2):
        return max(1, sizes[0]) * 10 ** min(sizes[0], 9)
    return sum(sizes)


def _differ_at_a_point(left: Any, right: Any) -> bool:
    """Return True if two expressions differ at one point, which spares most wrong answers a `simplify`."""
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
