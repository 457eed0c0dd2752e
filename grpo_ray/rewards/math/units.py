r"""Units of a value: `72 km`, `\$5`, `90°`, `50%`, `12 \text{ cm}^2`, `5 million`."""

import re
from dataclasses import dataclass
from fractions import Fraction

from grpo_ray.rewards.math.numbers import read_number
from grpo_ray.rewards.math.text import ANOTHER_NUMBER, VARIABLES, plain

PERCENT = "%"

# By base unit: each unit's number of base units, and its spellings. 1 km is 1000 m.
SPELLINGS: dict[str, dict[int | str, str]] = {
    "m": {"0.001": "mm millimeter millimetre", "0.01": "cm centimeter centimetre", 1: "m meter metre",
          1000: "km kilometer kilometre"},
    "inch": {1: "inch inches in", 12: "ft foot feet", 36: "yd yard", 63360: "mi mile"},
    "g": {"0.001": "mg milligram", 1: "g gram", 1000: "kg kilogram"},
    "ounce": {1: "oz ounce", 16: "lb pound"},
    "ton": {1: "ton tonne"},
    "s": {1: "s sec second", 60: "min minute", 3600: "h hr hour", 86400: "d day", 604800: "wk week"},
    "month": {1: "mo month", 12: "yr year"},
    "liter": {"0.001": "ml mL milliliter millilitre", 1: "l L liter litre"},
    "cup": {1: "cup", 2: "pt pint", 4: "qt quart", 16: "gal gallon"},
    "dollar": {1: "$ dollar USD buck", "0.01": "¢ cent"},
    "euro": {1: "€ euro"}, "£": {1: "£"}, "₹": {1: "₹ rupee"}, "¥": {1: "¥ yen"},
    "degree": {1: "° degree deg"}, "radian": {1: "rad radian"},
    "°C": {1: "°C celsius"}, "°F": {1: "°F fahrenheit"}, "K": {1: "K kelvin"},
    "N": {1: "N newton"}, "J": {1: "J joule"}, "W": {1: "W watt"}, "V": {1: "V volt"}, "Hz": {1: "Hz hertz"},
    PERCENT: {1: "% percent percentage pct"},
}  # fmt: skip
UNITS = {
    spelling: (base, Fraction(factor))
    for base, units in SPELLINGS.items()
    for factor, words in units.items()
    for spelling in words.split()
}
PHRASES = {"mph": "mile/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h", "cc": "cm^3"}
MULTIPLIERS = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip

SCALE = re.compile(r"(?:degrees? |°) ?([CF])(?:elsius|ahrenheit)?", re.IGNORECASE)
CURRENCY = re.compile(r"(?P<sign>[+-]?) ?(?:\\?\$|(?P<symbol>[€£¥₹])|(?:Rs\.?|USD) ?) ?(?P<value>[^$€£¥₹]+)")
POWER = r"(?: ?\^ ?(?:\{ ?[23] ?\}|[23]))"
SYMBOL = r"(?:\\text\{[^{}]*\}|° ?[CF](?![A-Za-z])|[°%])"
MARKED = re.compile(rf"(?P<value>.*?) ?(?P<unit>{SYMBOL}(?: ?/ ?{SYMBOL}| ?{SYMBOL}|{POWER})*)", re.DOTALL)
WORD = rf"[A-Za-z$°¢€£%]+{POWER}?"
TRAILING = re.compile(
    rf"(?P<value>.*(?:[\d)}}]|\\[a-z]+(?= )))(?P<space> ?)(?P<unit>{WORD}(?:(?: ?/ ?| ){WORD})*)", re.DOTALL
)
ATTACHED_LETTER = re.compile(r"^(-?[\d.,]+)([A-Za-z])$")
PLAIN_NUMBER = re.compile(r"[+-]? ?[\d., /]*\d")
COUNTED = re.compile(r"[A-Za-z'-]{3,20}\.?(?: [A-Za-z'-]{3,20}\.?){0,2}")  # shorter ones are variables
NAME_AND_POWER = re.compile(r"([^^]+?)(?: ?\^ ?(?:\{ ?([23]) ?\}|([23])))?")
PI = re.compile(r"\\pi(?![A-Za-z])")
NO_UNIT = re.compile(r"\b(?:and|to|of|is|if|then|else|where|when|for|but|from|base|[ap]\.?m)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """The text of a value, and its unit."""

    value: str
    unit: str = ""  # "" for none, `m^2` for an area, `m/s` for a speed
    factor: Fraction = Fraction(1)  # number of `unit` in one of the written unit
    multiplier: int = 1  # of `5 million`


def read_quantities(answer: str, truth: str) -> tuple[Quantity, Quantity]:
    """Read two normalized texts to compare: `3m` means 3 meters next to `3 meters`, and a product next to 3."""
    given, wanted = read_quantity(answer), read_quantity(truth)
    if given.unit and not wanted.unit:
        wanted = read_quantity(ATTACHED_LETTER.sub(r"\1 \2", truth))
    elif wanted.unit and not given.unit:
        given = read_quantity(ATTACHED_LETTER.sub(r"\1 \2", answer))
    return given, wanted


def read_quantity(text: str) -> Quantity:
    """Read the value and the unit of normalized text."""
    currency = CURRENCY.fullmatch(text)
    if currency:
        inner = read_quantity(currency["value"].strip())
        if not inner.unit or inner.unit == "dollar":
            unit = UNITS[currency["symbol"] or "$"][0]
            return Quantity(currency["sign"] + inner.value, unit, multiplier=inner.multiplier)
    marked = MARKED.fullmatch(text)
    if marked and marked["value"]:
        return _quantity(marked["value"], plain(marked["unit"]), text)
    trailing = TRAILING.fullmatch(text)
    if trailing:
        is_letter = len(trailing["unit"]) == 1 and trailing["unit"].isalpha()  # of `2\pi h`
        is_unit = trailing["space"] or _may_be_attached(trailing["unit"])
        is_unit = is_unit and (not is_letter or PLAIN_NUMBER.fullmatch(trailing["value"]))
        return _quantity(trailing["value"], trailing["unit"], text) if is_unit else Quantity(text)
    return Quantity(text)


def as_radians(angle: Quantity) -> str | None:
    r"""Return `\frac{90 \pi}{180}` for 90°, and a value in radians as it is; a pi implies them."""
    number = read_number(angle.value) if angle.unit == "degree" else None
    if angle.multiplier > 1:
        return None
    if number is not None:
        return rf"\frac{{{number.numerator} \pi}}{{{180 * number.denominator}}}"
    is_in_radians = angle.unit == "radian" or (not angle.unit and PI.search(angle.value))
    return angle.value if is_in_radians else None


def _may_be_attached(unit: str) -> bool:
    """Return True for the units of `72km` and `5m/s`; `3m`, `3m^2` and `3xyz` are products."""
    word = re.split(r"[ /^]", unit)[0]
    is_product = word.isalpha() and len(word) == 1 and "/" not in unit
    return not is_product and (word in PHRASES or _named(word) is not None)


def _quantity(value: str, words: str, text: str) -> Quantity:
    """Read `words` as a unit; if they are none, the whole text is the value."""
    multiplier = 1
    first, _, rest = words.partition(" ")
    power = first.lower().removesuffix("s")
    if power in MULTIPLIERS:
        multiplier, words = MULTIPLIERS[power], rest
    if not words:
        return Quantity(value, multiplier=multiplier)
    unit = _unit(words)
    return Quantity(value, unit[0], unit[1], multiplier) if unit else Quantity(text)


def _unit(words: str) -> tuple[str, Fraction] | None:
    """Return the base unit and its factor: `m/s` and 5/18 for `km per hour`."""
    text = re.sub(r"\bsquared\b", "^2", re.sub(r"\bcubed\b", "^3", words.strip()))
    text = re.sub(r"\b(?:square|sq\.?) (\S+)", r"\1^2", re.sub(r"\b(?:cubic|cu\.?) (\S+)", r"\1^3", text))
    text = re.sub(r" ?(?:\bper\b|/) ?", "/", text)
    text = PHRASES.get(text.removesuffix("s"), text)
    base, factor = "", Fraction(1)
    for index, part in enumerate(text.split("/")):
        match = NAME_AND_POWER.fullmatch(part.strip())
        found = (_named(match[1]) or _own(match[1])) if match else None
        if match is None or found is None:
            return None
        exponent = int(match[2] or match[3] or 1)
        base += ("/" if index else "") + found[0] + (f"^{exponent}" if exponent > 1 else "")
        factor = factor / found[1] ** exponent if index else found[1] ** exponent
    return base, factor


def _named(name: str) -> tuple[str, Fraction] | None:
    scale = SCALE.fullmatch(name)
    name = f"°{scale[1].upper()}" if scale else name
    for candidate in (name, name.lower(), name.removesuffix("s"), name.lower().removesuffix("s")):
        if candidate in UNITS:
            return UNITS[candidate]
    return None


def _own(name: str) -> tuple[str, Fraction] | None:
    """Read a noun for things that are counted: `apples`."""
    if NO_UNIT.search(name) or ANOTHER_NUMBER.search(name) or VARIABLES.issuperset(name):
        return None
    if not COUNTED.fullmatch(name):
        return None
    return name.lower().removesuffix("s"), Fraction(1)
