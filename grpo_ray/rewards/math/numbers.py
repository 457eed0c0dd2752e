r"""Rational numbers as people write them: `1,000`, `\frac12`, `1.5 \times 10^{-3}`, `0.\overline{3}`."""

import re
from collections.abc import Sequence
from fractions import Fraction

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
DECIMAL = rf"(?:{INTEGER}(?:\.\d*)?|\.\d+)"
EXPONENT = r"\^ ?(?:\{ ?([+-]?\d{1,3}) ?\}|([+-]?\d{1,3}))"  # short, so that the power stays cheap
SIGN = r"(?P<sign>[+-]?) ?"

SCIENTIFIC = re.compile(
    rf"{SIGN}({DECIMAL})(?:[eE]([+-]?\d{{1,3}})| ?(?:\\times|\\cdot|\*|x) ?10 ?{EXPONENT})?", re.ASCII
)
POWER_OF_TEN = re.compile(rf"{SIGN}10 ?{EXPONENT}", re.ASCII)
WHOLE = rf"(?:(?P<whole>{INTEGER})(?: | ?(?=\\)))?"
BRACED = rf"(?:\{{ ?([+-]? ?{DECIMAL}) ?\}}|(\d))"
FRACTION = re.compile(rf"{SIGN}{WHOLE}(?:({DECIMAL}) ?/ ?({DECIMAL})|\\frac ?{BRACED} ?{BRACED})", re.ASCII)
REPEATING = re.compile(rf"{SIGN}(\d*)\.(\d*)(?:\\overline|\\bar|\\dot) ?\{{? ?(\d+) ?\}}?", re.ASCII)

RATIO = re.compile(r"(\d{1,9}) ?: ?(\d{1,9})", re.ASCII)
TIME = re.compile(r"\d{1,2} ?: ?[0-5]\d", re.ASCII)
QUOTIENT = re.compile(
    r"(\d{1,9}) ?/ ?(\d{1,9})|\\frac ?(?:\{ ?(\d{1,9}) ?\}|(\d)) ?(?:\{ ?(\d{1,9}) ?\}|(\d))", re.ASCII
)


def is_ratio_of(ratio: str, quotient: str) -> bool:
    r"""Return True for `3:4` and `\frac{3}{4}`, the same two numbers; `5:30` may be a time, and is none."""
    terms, parts = RATIO.fullmatch(ratio), QUOTIENT.fullmatch(quotient)
    if terms is None or parts is None or TIME.fullmatch(ratio):
        return False
    numbers = [int(part) for part in parts.groups() if part is not None]
    return numbers == [int(term) for term in terms.groups()] and numbers[1] != 0


def read_number(text: str) -> Fraction | None:
    """Return the exact value of the whole text; None when it is not one rational number."""
    for pattern, read in (
        (SCIENTIFIC, lambda match: _decimal(match[2]) * _power_of_ten(match.groups()[2:])),
        (FRACTION, _fraction),
        (POWER_OF_TEN, lambda match: _power_of_ten(match.groups()[1:])),
        (REPEATING, _repeating),
    ):
        match = pattern.fullmatch(text)
        if match:
            value = read(match)
            return -value if value is not None and match["sign"] == "-" else value
    return None


def _fraction(match: re.Match[str]) -> Fraction | None:
    r"""Read `a/b`, `\frac{a}{b}`, `\frac12`; after a whole number it must be a proper one: `1\frac{1}{2}`."""
    _, whole, *parts = match.groups()
    numerator, denominator = (_decimal(part) for part in parts if part is not None)
    if denominator == 0:
        return None
    value = numerator / denominator
    if whole is None:
        return value
    return _decimal(whole) + value if 0 < value < 1 else None


def _repeating(match: re.Match[str]) -> Fraction:
    _, whole, fixed, period = match.groups()
    cycle = Fraction(int(period), 10 ** len(period) - 1)
    return int(whole or 0) + (int(fixed or 0) + cycle) / Fraction(10 ** len(fixed))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _power_of_ten(exponents: Sequence[str | None]) -> Fraction:
    exponent = next((exponent for exponent in exponents if exponent is not None), "0")
    return Fraction(10) ** int(exponent)
