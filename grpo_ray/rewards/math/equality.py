"""Grades of answers: their equality to a ground truth, to a mathematician; docs/grading.md states the rules."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from grpo_ray.rewards.base import NotGraded, Scores, Ungradable, verdict
from grpo_ray.rewards.math.algebra import is_equal_latex, real_value
from grpo_ray.rewards.math.numbers import is_ratio_of, read_number
from grpo_ray.rewards.math.structure import (
    MAX_PARTS,
    OR,
    UNION,
    Bracketed,
    bracket_depth,
    is_asked_for,
    read_assignments,
    read_brackets,
    read_chain,
    read_equation,
    read_list,
    read_matrix,
    read_tuple,
    split,
)
from grpo_ray.rewards.math.text import ANOTHER_NUMBER, VARIABLES, normalize, plain
from grpo_ray.rewards.math.units import PERCENT, Quantity, as_radians, read_quantities, read_quantity

SIGN = r"\\(?:approx|simeq)(?![A-Za-z])"
DOTS = r"(?: ?(?:\.\.\.|\\l?dots(?![A-Za-z])))"
INLINE = re.compile(rf"(?P<exact>.+?) ?{SIGN} ?(?P<rest>.+)", re.DOTALL)
IN_PARENTHESES = re.compile(rf"(?P<exact>.+?) ?\( ?{SIGN} ?(?P<rest>[^()]+)\)", re.DOTALL)
ENDLESS = re.compile(rf"(?P<exact>.+) ?= ?(?P<rest>[^=]+?{DOTS})", re.DOTALL)
MARK = re.compile(f"{SIGN}|{DOTS}")
APPROXIMATELY = re.compile(SIGN)
DECIMAL = re.compile(r"[+-]? ?\d{1,15}(?:,\d{3}){0,4}(?:\.(?P<places>\d{1,15}))?", re.ASCII)
MIN_TRUNCATED_PLACES = 2  # 0.66 is 2/3 cut off; 1 is no value of sqrt(3)
MAX_ANSWER_CHARACTERS = 1000  # parsing a longer one would take long
NO_TRUTH = ""  # no answer equals it, which takes no time to find out
SIMPLE_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
MAX_DEPTH = 7  # of nested brackets: parsing time is exponential in it
CHOICE = re.compile(r"\(?([A-J])\)?")
CHOSEN = re.compile(r"(?:option|choice)? ?[(\[]?([A-J])(?:[)\].:]|[)\].:]+ (?P<content>.+))?", re.IGNORECASE)
ANOTHER_CHOICE = re.compile(r"\b[A-J]\b")
# `AB`, `up` and `\angle ABC` are not products, so the order of the letters matters.
LABEL = re.compile(r"(?:\\(?P<kind>angle|triangle|overline) ?)?\{?(?P<letters>[A-Z]{2,}|[A-Za-z]{2,})\}?")
PHRASE = re.compile(r"[A-Za-z][A-Za-z' .,-]*[A-Za-z.]")
CLOCK = re.compile(r"(?<=\d) ?([ap])\.? ?m\b\.?", re.IGNORECASE)
RANGE = re.compile(r"[<>]|\\(?:le|ge|mathbb|emptyset)(?![A-Za-z])")
MEMBER = re.compile(r"[A-Za-z] ?\\in(?![A-Za-z]) ?")
PROSE = r"[A-Za-z:,.!'\s$\\]*"
NUMBER_IN_PROSE = re.compile(rf"{PROSE}(?<![\w.,])([+-]?\d[\d,]*(?:\.\d+)?%?)(?![\w^*/+-]){PROSE}", re.ASCII)


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


def grade(answer: str | None, ground_truth: str, fast: bool = True) -> Scores:
    """Grade an answer as right if `is_equal` finds it equal to the truth.

    The whole answer must be the expression: `71 or 72` is not 72.

    Args:
        answer: None for a response that is not in the format.
        fast: False also accepts words around a single number (`She has 72 eggs`), for evaluations.

    Raises:
        NotGraded: the truth is too long, too deeply nested, too large a number or unreadable.
        Ungradable: the truth is well, but the answer is one of these; it counts as wrong.
    """
    return verdict(
        has_format=answer is not None, is_right=answer is not None and is_right(answer, ground_truth, fast)
    )


def is_right(answer: str, ground_truth: str, fast: bool = True) -> bool:
    """Return True if the answer equals the truth; arguments and errors as for `grade`."""
    truth = ground_truth.strip()
    if truth == NO_TRUTH:
        return False
    if max(len(answer), len(truth)) > MAX_ANSWER_CHARACTERS:
        if answer == truth:
            return True
        blame = NotGraded if len(truth) > MAX_ANSWER_CHARACTERS else Ungradable
        raise blame(f"longer than {MAX_ANSWER_CHARACTERS} characters, and not the truth itself")
    if is_equal(answer, truth):
        return True
    # `72` in `She has 72 eggs.`; nothing with more than one number, or with one that words change.
    prose = None if fast or ANOTHER_NUMBER.search(answer) else NUMBER_IN_PROSE.fullmatch(answer)
    return prose is not None and is_equal(prose[1], truth)


def is_equal(answer: str, truth: str) -> bool:
    """Return True for the same text, number, quantity or list, or expressions with the same value.

    Raises:
        NotGraded, Ungradable: they cannot be compared; see `is_equal_latex`.
    """
    if answer == truth:
        return bool(answer)
    if SIMPLE_NUMBER.fullmatch(answer) and SIMPLE_NUMBER.fullmatch(truth):
        return Fraction(answer) == Fraction(truth)
    answer, truth = normalize(answer), normalize(truth)
    for text, blame in ((truth, NotGraded), (answer, Ungradable)):
        if bracket_depth(text) > MAX_DEPTH:
            raise blame(f"brackets nested more than {MAX_DEPTH} deep")
    if is_ratio_of(answer, truth) or is_ratio_of(truth, answer):
        return True
    return bool(answer and truth) and _is_equal(answer, truth)


def _is_equal(answer: str, truth: str) -> bool:
    """Compare normalized texts, or parts of them."""
    if _spelling(answer) == _spelling(truth):
        return True
    numbers = read_number(answer), read_number(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    choice = CHOICE.fullmatch(truth)
    if choice and (chosen := _chosen(plain(answer))):
        return chosen == choice[1]
    if _is_phrase(truth):
        return _phrase(answer) == _phrase(truth)
    labels = LABEL.fullmatch(answer), LABEL.fullmatch(truth)
    if labels[0] and labels[1] and _is_label(labels[1]):
        kinds = labels[0]["kind"], labels[1]["kind"]
        return (None in kinds or kinds[0] == kinds[1]) and labels[0]["letters"] == labels[1]["letters"]
    for compare in (
        _compare_matrices,
        _compare_chains,
        _compare_lists,
        _compare_approximations,
        _compare_equations,
        _compare_brackets,
        _compare_quantities,
    ):
        is_same = compare(answer, truth)
        if is_same is not None:
            return is_same
    return is_equal_latex(plain(answer), plain(truth))


def _spelling(text: str) -> str:
    text = CLOCK.sub(lambda match: f"{match[1].lower()}m", plain(text))
    return re.sub(r"(?<=\W) | (?=\W)", "", text)


def _is_phrase(text: str) -> bool:
    """Return True for words rather than a product of letters: three letters or more, or `no`."""
    words = plain(text)
    has_word = re.search(r"[A-Za-z]{3}|^no$", words, re.IGNORECASE)
    return bool(PHRASE.fullmatch(words)) and bool(has_word) and not VARIABLES.issuperset(words)


def _phrase(text: str) -> str:
    return " ".join(re.sub(r"[.,'\"*]", "", plain(text)).casefold().split())


def _chosen(text: str) -> str | None:
    """Read `B` from `(B)`, `Option B` and `B. 42`; None for `B. or A`."""
    match = CHOSEN.fullmatch(text)
    content = (match and match["content"]) or ""
    if match is None or ANOTHER_CHOICE.search(content) or ANOTHER_NUMBER.search(content):
        return None
    return match[1].upper()


def _is_label(label: re.Match[str]) -> bool:
    letters = label["letters"]
    return bool(label["kind"]) or letters.isupper() or not VARIABLES.issuperset(letters)


# ---- compound answers: each comparison returns None where it does not apply ----


def _compare_chains(answer: str, truth: str) -> bool | None:
    """Compare two bounds as one chain: `x > -2 and x < 3` is `-2 < x < 3`, and so the interval."""
    given, wanted = read_chain(answer), read_chain(truth)
    if wanted is not None and OR.search(answer):
        return False  # `x > -2 or x < 3`
    if given is None and (wanted is None or len(read_list(answer)) > 1):
        return None
    return _is_equal(given or answer, wanted or truth)


def _compare_lists(answer: str, truth: str) -> bool | None:
    r"""Compare lists and sets in any order: `1, 2`, `1 and 2`, `x = 1 or x = 2`, `1 \pm 2`, unions."""
    given, wanted = _members(answer), _members(truth)
    if len(given) == len(wanted) == 1:
        is_unchanged = (given[0], wanted[0]) == (answer, truth)
        return None if is_unchanged else _is_equal(given[0], wanted[0])
    if len(wanted) == 1 and (values := read_assignments(given)):
        return _is_equal(values, truth)
    if len(given) == 1 and not OR.search(truth) and (in_order := read_tuple(given[0], wanted)):
        return _is_equal_in_order(in_order, [read_equation(part)[1][0] for part in wanted])
    names = [read_equation(part)[0] for part in wanted]
    if len({*names} - {None}) > 1 and None in [read_equation(part)[0] for part in given]:
        return _is_equal_in_order(given, wanted)  # `x = 1, y = 2` asks for 1 and 2 in this order
    return _is_equal_in_any_order(given, wanted)


def _members(text: str) -> list[str]:
    text = MEMBER.sub("", text, count=1) if MEMBER.match(text) else text
    intervals = split(text, UNION)
    if len(intervals) > 1:
        return intervals
    parts = read_list(text)
    brackets = read_brackets(text) if len(parts) == 1 else None
    return list(brackets.parts) if brackets and brackets.opening == r"\{" else parts


def _is_equal_in_order(given: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(given) == len(wanted) and all(map(_is_equal, given, wanted))


def _is_equal_in_any_order(given: Sequence[str], wanted: Sequence[str]) -> bool:
    """Pair each part with an equal one of the others (equality is transitive, so the first one will do)."""
    if len(given) != len(wanted):
        return False
    if len(wanted) > MAX_PARTS:
        raise NotGraded(f"a list of more than {MAX_PARTS} parts")
    unpaired = list(given)
    for part in wanted:
        found = next((index for index, other in enumerate(unpaired) if _is_equal(other, part)), None)
        if found is None:
            return False
        del unpaired[found]
    return True


def _compare_approximations(answer: str, truth: str) -> bool | None:
    r"""Compare the exact value of `\frac{1}{3} \approx 0.333`; its decimal must be right as well."""
    if APPROXIMATELY.search(truth):
        return None
    approximated = read_approximation(answer)
    if approximated is None:  # not `33` for `33 \approx 33\%`, once the sign is read as a unit
        return False if APPROXIMATELY.search(answer) else None
    return _is_equal(approximated.exact, truth) and is_rounded(approximated)


def _compare_equations(answer: str, truth: str) -> bool | None:
    """Compare equations: `x = 5` is 5, and `2 + 3 = 5` is 5, but `4 = 5` is not: every side must be right."""
    (given_name, given), (wanted_name, wanted) = read_equation(answer), read_equation(truth)
    is_plain = not given_name and len(given) == 1
    if wanted_name:
        wanted = wanted[-1:]  # of `A = 3 \cdot 4 = 12`
        if given_name != wanted_name and not is_plain:
            return None  # `2x - y = 0` for `y = 2x`
    elif is_plain and len(wanted) == 1:
        return None if given[0] == answer else _is_equal(given[0], truth)  # `= 5`
    elif len(wanted) > 1:
        return False if is_plain else None  # `5` for `2x + 3y = 5`
    elif not given_name and is_asked_for(given[0]):
        given = given[1:]  # `f(3) = 5`, `x + y = 5`
    return all(_is_equal(side, wanted[0]) for side in given)


def _compare_brackets(answer: str, truth: str) -> bool | None:
    """Compare tuples and intervals: the brackets must be the same, and the parts equal in order."""
    given, wanted = _without_parentheses(answer), _without_parentheses(truth)
    if isinstance(given, Bracketed) and isinstance(wanted, Bracketed):
        is_same_kind = (given.opening, given.closing) == (wanted.opening, wanted.closing)
        return is_same_kind and _is_equal_in_order(given.parts, wanted.parts)
    if isinstance(given, str) and isinstance(wanted, str):
        return None if (given, wanted) == (answer, truth) else _is_equal(given, wanted)
    # An interval may equal an inequality or the set of all numbers; nothing else equals something in brackets.
    return None if RANGE.search(answer) or RANGE.search(truth) else False


def _without_parentheses(text: str) -> Bracketed | str:
    brackets = read_brackets(text)
    if brackets is None:
        return text
    is_value = (brackets.opening, brackets.closing) == ("(", ")") and len(brackets.parts) == 1
    return brackets.parts[0] if is_value else brackets


def _compare_matrices(answer: str, truth: str) -> bool | None:
    given, wanted = read_matrix(answer), read_matrix(truth)
    if given is None or wanted is None:
        return None
    return len(given) == len(wanted) and all(map(_is_equal_in_order, given, wanted))


def _compare_quantities(answer: str, truth: str) -> bool | None:
    """Compare quantities: a unit that one of them omits is implied; two units must measure the same thing."""
    given, wanted = read_quantities(answer, truth)
    if (given.value, wanted.value) == (answer, truth):
        return None
    if PERCENT in (given.unit, wanted.unit) and given.unit != wanted.unit:
        return _is_equal_percent(given, wanted)
    if "degree" in (given.unit, wanted.unit) and given.unit != wanted.unit:
        radians = as_radians(given), as_radians(wanted)
        if radians[0] and radians[1] and _is_equal(radians[0], radians[1]):
            return True
    if given.unit and wanted.unit and given.unit != wanted.unit:
        return False
    has_both = bool(given.unit and wanted.unit)
    numbers = [_number(quantity, has_both) for quantity in (given, wanted)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    is_same_scale = given.multiplier == wanted.multiplier and (not has_both or given.factor == wanted.factor)
    if is_same_scale and _is_equal(given.value, wanted.value):
        return True
    return False if has_both else None  # an apparent unit may be a variable: `3 m` is `3m`


def _number(quantity: Quantity, is_converted: bool) -> Fraction | None:
    number = read_number(quantity.value)
    if number is None:
        return None
    return number * quantity.multiplier * (quantity.factor if is_converted else 1)


def _is_equal_percent(given: Quantity, wanted: Quantity) -> bool:
    """Compare two values, one with a percent sign: `50%` equals 50 (the unit omitted) and 0.5 (its value)."""
    if given.unit and wanted.unit:
        return False
    # The answer comes first: if it cannot be parsed it is wrong, but a truth that cannot be is an error.
    values = [
        rf"\frac{{{quantity.value}}}{{100}}" if quantity.unit else quantity.value
        for quantity in (given, wanted)
    ]
    if _is_equal(*values):
        return True
    number = read_number(wanted.value)
    is_share = not wanted.unit and number is not None and abs(number) <= 1  # `0.5%` is not 0.5
    return not is_share and _is_equal(given.value, wanted.value)
