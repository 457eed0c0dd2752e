r"""An exact value before its decimal: `\frac{1}{3} \approx 0.333`, `12\pi (\approx 37.7)`, `1/3 = 0.333...`."""

import re
from dataclasses import dataclass
from fractions import Fraction

from grpo_ray.rewards.math.algebra import real_value
from grpo_ray.rewards.math.numbers import read_number
from grpo_ray.rewards.math.structure import read_equation
from grpo_ray.rewards.math.units import PERCENT, read_quantity

SIGN = r"\\(?:approx|simeq)(?![A-Za-z])"
DOTS = r"(?: ?(?:\.\.\.|\\l?dots(?![A-Za-z])))"
INLINE = re.compile(rf"(?P<exact>.+?) ?{SIGN} ?(?P<rest>.+)", re.DOTALL)
IN_PARENTHESES = re.compile(rf"(?P<exact>.+?) ?\( ?{SIGN} ?(?P<rest>[^()]+)\)", re.DOTALL)
ENDLESS = re.compile(rf"(?P<exact>.+) ?= ?(?P<rest>[^=]+?{DOTS})", re.DOTALL)
MARK = re.compile(f"{SIGN}|{DOTS}")
APPROXIMATELY = re.compile(SIGN)
DECIMAL = re.compile(r"[+-]? ?\d{1,15}(?:,\d{3}){0,4}(?:\.(?P<places>\d{1,15}))?", re.ASCII)
MIN_TRUNCATED_PLACES = 2  # 0.66 is 2/3 cut off; 1 is no value of sqrt(3)


@dataclass(frozen=True)
class Approximated:
    """An exact value, and a decimal that its writer calls about as large."""

    exact: str  # with the unit, also if only the decimal had one
    value: str  # of the exact value, without name and unit
    decimal: str
    is_cut_off: bool  # `0.333...`: the digits go on


def read_approximation(text: str) -> Approximated | None:
    """Read normalized text; None unless it is an exact value and one decimal of the same unit."""
    if not MARK.search(text):
        return None
    match = IN_PARENTHESES.fullmatch(text) or INLINE.fullmatch(text) or ENDLESS.fullmatch(text)
    if match is None:
        return None
    exact = match["exact"].strip()
    dots = re.search(DOTS + "$", match["rest"])
    rest = match["rest"][: dots.start()] if dots else match["rest"]
    quantity, written = read_quantity(read_equation(exact)[1][-1]), read_quantity(rest.strip())
    if not DECIMAL.fullmatch(written.value) or (quantity.multiplier, written.multiplier) != (1, 1):
        return None
    if written.unit and not quantity.unit:
        if written.unit == PERCENT or not rest.startswith(written.value):  # `\$5`
            return None
        exact += rest.removeprefix(written.value)
    elif (written.unit, written.factor) != (quantity.unit, quantity.factor):
        return None
    return Approximated(exact, quantity.value, written.value, is_cut_off=dots is not None)


def is_rounded(approximated: Approximated) -> bool:
    """Return True if the decimal is the exact value, rounded or cut off at its last place, and not 0."""
    match, decimal = DECIMAL.fullmatch(approximated.decimal), read_number(approximated.decimal)
    exact = read_number(approximated.value)
    exact = real_value(approximated.value) if exact is None else exact
    if match is None or decimal is None or exact is None:
        return False
    num_places = len(match["places"] or "")
    last_place = Fraction(1, 10**num_places)
    is_same_sign = decimal * exact > 0
    is_cut_off = is_same_sign and 0 <= abs(exact) - abs(decimal) < last_place
    if is_cut_off and num_places >= MIN_TRUNCATED_PLACES:
        return True
    return not approximated.is_cut_off and is_same_sign and abs(exact - decimal) <= last_place / 2
