r"""The grader's verdicts on the table of hand-checked pairs, and what always holds."""

from contextlib import suppress

import pytest
from grader_table import PAIRS, TABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Matrix, latex, sqrt

from grpo_ray.rewards.base import NotGraded, Ungradable
from grpo_ray.rewards.builtin import r1_zero_reward_fn
from grpo_ray.rewards.math.algebra import is_equal_latex, real_value
from grpo_ray.rewards.math.equality import is_equal


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


def test_every_truth_is_right_for_itself() -> None:
    for rows in TABLE.values():
        for truth, *_ in rows:
            assert is_equal(truth, truth)
            assert is_equal(f"${truth}$" if "$" not in truth else truth, truth)


INTEGERS = st.integers(-(10**12), 10**12)


@settings(deadline=None)  # the first import of sympy is slow
@given(INTEGERS)
def test_an_integer_in_every_spelling(number: int) -> None:
    answers = [f"{number:,}", f"{number}.0", f"${number}$", f"x = {number}", f"{number} km"]
    for answer in (*answers, rf"\boxed{{{number}}}"):
        assert is_equal(answer, str(number))
    for wrong in (number + 1, -number - 1, number * 10 + 5):
        assert not is_equal(str(wrong), str(number))


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 50))
def test_a_fraction_is_what_it_reduces_to(numerator: int, denominator: int, factor: int) -> None:
    truth = rf"\frac{{{numerator}}}{{{denominator}}}"
    assert is_equal(f"{numerator * factor}/{denominator * factor}", truth)
    assert not is_equal(f"{numerator * factor + 1}/{denominator * factor}", truth)


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


def test_a_power_has_as_many_digits_as_its_base_says() -> None:
    assert is_equal(r"2 \cdot 2^{29999}", "2^{30000}")
    with pytest.raises(Ungradable, match="more than 10000 digits"):
        is_equal("2^{34000}", "5")


@pytest.mark.parametrize("depth", [1, 7, 8, 15])
def test_nested_brackets(depth: int) -> None:
    """Redundant braces add no depth; others have a limit below which parsing is quick."""
    for number, is_right in (("5", True), ("6", False)):
        assert is_equal("{" * depth + number + "}" * depth, "5") == is_right
    nested, truth = "(x+" * depth + "1" + ")" * depth, f"{depth}x+1"
    if depth <= 7:
        assert is_equal(nested, truth)
        assert not is_equal(nested, f"{depth}x+2")
        return
    for blame, pair in ((Ungradable, (nested, truth)), (NotGraded, (truth, nested))):
        with pytest.raises(blame, match="more than 7 deep"):
            is_equal(*pair)


@pytest.mark.parametrize("truth", [r"50\%", r"90^\circ", r"\frac{\pi}{2}", "3:4", "(-2, 3)", "x = 1, y = 2"])
@pytest.mark.parametrize(
    "form", ["{}", r"{}\%", r"{}^\circ", r"{} \approx 0.33", "x > {} and x < 3", "({}, 2)"]
)
def test_an_answer_that_cannot_be_read_is_the_answers_fault(form: str, truth: str) -> None:
    """A NotGraded would blame the truth, and the answer would not count as wrong."""
    for unreadable in (r"\pi ^^ _", r"\frac{\pi}{", "2^3^4", r"\pi)", r"\pi" + "+x" * 200):
        with suppress(Ungradable):
            assert not is_equal(form.replace("{}", unreadable), truth)


def test_the_value_of_an_expression_is_that_of_one_real_number() -> None:
    assert str(real_value(r"\sqrt{2}")).startswith("1414213562373095")
    assert [real_value(text) for text in ("x", "i", "2^3^4", "east", "9^{9^9}", r"\frac{")] == [None] * 6


def test_algebra_is_asked_once_for_the_same_pair() -> None:
    is_equal_latex.cache_clear()
    for _ in range(3):
        assert is_equal(r"\sqrt{12}", r"2\sqrt{3}")
    assert is_equal_latex.cache_info().misses == 1
