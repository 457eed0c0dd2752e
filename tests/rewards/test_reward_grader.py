r"""The grader's verdicts on the table of hand-checked pairs, in tags and in boxes, and what always holds."""

import time
from contextlib import suppress
from fractions import Fraction

import pytest
from grader_table import PAIRS, TABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Matrix, latex, sqrt

from grpo_ray.rewards.base import NotGraded, Ungradable
from grpo_ray.rewards.builtin import question_only_reward_fn, r1_zero_reward_fn
from grpo_ray.rewards.math.algebra import is_equal_latex, real_value
from grpo_ray.rewards.math.approximation import read_approximation
from grpo_ray.rewards.math.equality import is_equal
from grpo_ray.rewards.math.numbers import read_number
from grpo_ray.rewards.math.structure import read_brackets, read_chain, read_equation, read_list, read_tuple
from grpo_ray.rewards.math.text import normalize
from grpo_ray.rewards.math.units import as_radians, read_quantities, read_quantity


@pytest.mark.slow
@pytest.mark.parametrize("group", TABLE)
def test_verdicts_in_tags(group: str) -> None:
    disagreements = [
        (answer, truth, is_right)
        for name, answer, truth, is_right in PAIRS
        if name == group
        and r1_zero_reward_fn(f" So. </think> <answer> {answer} </answer>", truth)
        != {"reward": is_right, "format_reward": 1.0, "answer_reward": is_right}
    ]
    assert not disagreements


@pytest.mark.slow
def test_verdicts_in_boxes() -> None:
    """Return the pairs with balanced braces, as LaTeX requires; an empty box is no answer."""
    balanced = [pair for pair in PAIRS if _is_balanced(pair[1])]
    assert len(balanced) > 950
    disagreements = [
        (answer, truth, is_right)
        for _, answer, truth, is_right in balanced
        if question_only_reward_fn(rf"So it is $\boxed{{{answer}}}$.", truth)["reward"] != is_right
    ]
    assert not disagreements


def _is_balanced(answer: str) -> bool:
    text = answer.replace(r"\{", "").replace(r"\}", "")
    return text.count("{") == text.count("}") and not answer.endswith("\\") and "}{" not in answer[:2]


def test_the_table_is_as_large_as_it_should_be() -> None:
    assert len({(answer, truth) for _, answer, truth, _ in PAIRS}) >= 1000
    assert min(sum(is_right for *_, is_right in PAIRS), sum(not is_right for *_, is_right in PAIRS)) >= 400


def test_every_truth_is_right_for_itself() -> None:
    for rows in TABLE.values():
        for truth, *_ in rows:
            assert is_equal(truth, truth)
            assert is_equal(f"${truth}$" if "$" not in truth else truth, truth)


# ---- properties ----

INTEGERS = st.integers(-(10**12), 10**12)


@settings(deadline=None)  # the first import of sympy is slow
@given(INTEGERS)
def test_an_integer_in_every_spelling(number: int) -> None:
    for answer in (
        f"{number:,}",
        f"{number}.0",
        f"${number}$",
        f"x = {number}",
        rf"\boxed{{{number}}}",
        f"{number} km",
    ):
        assert is_equal(answer, str(number))
    for wrong in (number + 1, -number - 1, number * 10 + 5):
        assert not is_equal(str(wrong), str(number))


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 50))
def test_a_fraction_is_what_it_reduces_to(numerator: int, denominator: int, factor: int) -> None:
    truth = rf"\frac{{{numerator}}}{{{denominator}}}"
    assert is_equal(f"{numerator * factor}/{denominator * factor}", truth)
    assert not is_equal(f"{numerator * factor + 1}/{denominator * factor}", truth)


@pytest.mark.slow
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True), st.randoms())
def test_order_matters_in_tuples_alone(numbers: list[int], random: object) -> None:
    shuffled = list(reversed(numbers))
    wanted, given_ = ", ".join(map(str, numbers)), ", ".join(map(str, shuffled))
    assert is_equal(given_, wanted)
    assert is_equal(rf"\{{{given_}\}}", rf"\{{{wanted}\}}")
    assert not is_equal(f"({given_})", f"({wanted})")
    assert not is_equal(rf"\{{{wanted}\}}", f"({wanted})")
    assert not is_equal(f"{given_}, 100", wanted)


@settings(max_examples=50)
@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 6), st.integers(2, 9))
def test_the_decimal_after_a_fraction_is_its_rounding(
    numerator: int, denominator: int, places: int, off: int
) -> None:
    truth, unit = rf"\frac{{{numerator}}}{{{denominator}}}", Fraction(1, 10**places)
    rounded = round(Fraction(numerator, denominator), places)
    for decimal, is_right in (
        (rounded, rounded != 0),
        (rounded + off * unit, False),
        (rounded - off * unit, False),
    ):
        digits = f"{abs(decimal * 10**places).numerator:0{places + 1}d}"
        written = f"{'-' if decimal < 0 else ''}{digits[:-places]}.{digits[-places:]}"
        is_exact = decimal == Fraction(numerator, denominator) and decimal != 0
        assert is_equal(rf"{truth} \approx {written}", truth) == (is_right or is_exact)


@settings(max_examples=12)
@given(st.integers(-359, 359))
def test_degrees_are_their_share_of_pi(degrees: int) -> None:
    radians = rf"\frac{{{degrees} \pi}}{{180}}"
    assert is_equal(rf"{degrees}^\circ", radians)
    assert is_equal(radians, rf"{degrees}^\circ")
    assert not is_equal(rf"{degrees + 1}^\circ", radians)
    assert not is_equal(rf"{degrees + 360}^\circ", radians)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(-99, 98), st.integers(1, 99), st.sampled_from("<≤"), st.sampled_from("<≤"))
def test_two_bounds_are_their_interval_and_no_other(low: int, size: int, left: str, right: str) -> None:
    high, reversed_left = low + size, {"<": ">", "≤": "≥"}[left]
    brackets = {("<", "<"): "()", ("≤", "≤"): "[]", ("<", "≤"): "(]", ("≤", "<"): "[)"}
    bounds = f"x {reversed_left} {low} and x {right} {high}"
    for signs, (opening, closing) in brackets.items():
        assert is_equal(bounds, f"{opening}{low}, {high}{closing}") == (signs == (left, right))
    assert not is_equal(bounds.replace("and", "or"), f"{low} {left} x {right} {high}")
    assert not is_equal(bounds, f"({low}, {high + 1})")


@given(st.text(alphabet=r"0123456789xyab .,;:=+-*/^_\{}()[]<>|!&%$#'~", max_size=14))
def test_random_characters_are_not_right_and_raise_nothing(soup: str) -> None:
    with suppress(Ungradable):  # such as 9^9^9
        assert not is_equal(soup, "123456789")
        assert not is_equal(soup, r"\frac{17}{31}")


@pytest.mark.parametrize(
    ("expression", "text"),
    [(sqrt(8), r"2\sqrt{2}"), (Matrix([[1, sqrt(2)], [3, 4]]), r"\begin{pmatrix}1&\sqrt{2}\\3&4\end{pmatrix}")],
)
def test_latex_that_sympy_writes_is_read(expression: object, text: str) -> None:
    assert is_equal(latex(expression), text)


@pytest.mark.parametrize("depth", range(1, 16))
def test_nested_brackets(depth: int) -> None:
    """Redundant braces add no depth; others have a limit below which parsing is quick."""
    for number, is_right in (("5", True), ("6", False)):
        assert is_equal("{" * depth + number + "}" * depth, "5") == is_right
    start = time.monotonic()
    nested = "(x+" * depth + "1" + ")" * depth
    if depth > 7:
        for blame, pair in ((Ungradable, (nested, f"{depth}x+1")), (NotGraded, (f"{depth}x+1", nested))):
            with pytest.raises(blame, match="more than 7 deep"):
                is_equal(*pair)
    else:
        assert is_equal(nested, f"{depth}x+1")
        assert not is_equal(nested, f"{depth}x+2")
    assert time.monotonic() - start < 60  # seconds; without the limit, hours


@pytest.mark.parametrize("truth", [r"50\%", r"90^\circ", r"\frac{\pi}{2}", "3:4", "(-2, 3)", "x = 1, y = 2"])
@pytest.mark.parametrize(
    "form", ["{}", r"{}\%", r"{}^\circ", r"{} \approx 0.33", "x > {} and x < 3", "({}, 2)"]
)
def test_an_answer_that_cannot_be_read_is_the_answers_fault(form: str, truth: str) -> None:
    """A NotGraded would blame the truth, and the answer would not count as wrong."""
    for unreadable in (r"\pi ^^ _", r"\frac{\pi}{", "2^3^4", r"\pi)", r"\pi" + "+x" * 200):
        with suppress(Ungradable):
            assert not is_equal(form.replace("{}", unreadable), truth)


# ---- the parts ----


def test_parts_by_hand() -> None:
    assert normalize(r"$\left( \dfrac{1}{2}, −3 \right)$.") == r"( \frac{1}{2}, -3 )"
    assert str(read_number("-2 1/4")) == "-9/4"
    assert str(read_number(r"1.5 \times 10^{-3}")) == "3/2000"
    assert str(read_number(r"0.1\overline{6}")) == "1/6"
    assert [read_number(text) for text in ("7 2", "1/0", "1,00", "--1", "١٢", "")] == [None] * 6
    assert read_number(r"3\frac{5}{2}") is None  # a product, or a mixed number gone wrong
    quantity = read_quantity("60 km/h")
    assert (quantity.value, quantity.unit, str(quantity.factor)) == ("60", "m/s", "5/18")
    assert [quantity.unit for quantity in read_quantities("3m", "3 meters")] == ["m", "m"]
    assert [quantity.unit for quantity in read_quantities("3m", "3")] == ["", ""]
    assert read_quantity("3 wrong").unit == ""
    assert read_list(r"1,000, f(1, 2) and 3 \pm x") == ["1,000", "f(1, 2)", "3 +x", "3 -x"]
    assert read_equation("x = 2 + 3 = 5") == ("x", ["2 + 3", "5"])
    assert read_equation("2x = 5") == (None, ["2x", "5"])
    assert read_brackets("(1, 2] + [3, 4)") is None
    assert read_chain(r"3 \ge x and x > -2") == r"-2 < x \le 3"
    assert read_chain(r"-\infty < x < 3") == "x < 3"
    assert [read_chain(text) for text in ("x > 1 or x < 3", "x > 3 and x < 1", "x < 3")] == [None] * 3
    assert read_tuple("(y, x) = (2, 1)", ["x = 1", "y = 2"]) == ["1", "2"]
    assert read_tuple("(2, 1)", ["y = 2", "x = 1"]) is None
    assert [as_radians(read_quantity(text)) for text in ("90°", r"\pi", "2")] == [
        r"\frac{90 \pi}{180}",
        r"\pi",
        None,
    ]
    approximated = read_approximation(r"x = 12\pi \approx 37.69... \text{ cm}")
    assert approximated is None  # the unit stands behind the dots
    approximated = read_approximation(r"x = 12\pi \approx 37.7 \text{ cm}")
    assert approximated is not None
    assert (approximated.exact, approximated.value, approximated.decimal) == (
        r"x = 12\pi \text{ cm}",
        r"12\pi",
        "37.7",
    )
    assert str(real_value(r"\sqrt{2}")).startswith("1414213562373095")
    assert [real_value(text) for text in ("x", "i", "2^3^4", "east", "9^{9^9}", r"\frac{")] == [None] * 6
    brackets = read_brackets(r"[1, \frac{1}{2})")
    assert brackets is not None
    assert (brackets.opening, brackets.closing, brackets.parts) == ("[", ")", ("1", r"\frac{1}{2}"))


def test_algebra_is_asked_once_for_the_same_pair() -> None:
    is_equal_latex.cache_clear()
    for _ in range(3):
        assert is_equal(r"\sqrt{12}", r"2\sqrt{3}")
    assert is_equal_latex.cache_info().misses == 1
