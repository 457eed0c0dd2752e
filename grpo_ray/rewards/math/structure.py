r"""The structure of an answer's text: brackets, lists, unions, matrices and equations."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from grpo_ray.rewards.math.numbers import read_number
from grpo_ray.rewards.math.text import ANOTHER_NUMBER

MAX_PARTS = 32  # of an unordered list: every part is compared with every other

OPENING, CLOSING = ("(", "[", r"\{", r"\langle"), (")", "]", r"\}", r"\rangle")
# Plain braces group in LaTeX: they nest as brackets do, but are none.
NESTING = {**dict.fromkeys([*OPENING, "{"], 1), **dict.fromkeys([*CLOSING, "}"], -1)}
TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
# In `1,000, 2,000` only the middle comma separates.
BETWEEN_NUMBERS = r",(?!\d{3}(?!\d))|(?<!\d),|;"
SEPARATOR = re.compile(BETWEEN_NUMBERS + r"|(?:\\text\{)? *\b(?:and|or)\b *\}?")
COMMA, SPACED_COMMA = re.compile("[,;]"), re.compile(BETWEEN_NUMBERS)
EQUALS = re.compile(r"(?<![<>!:])=")
UNION = re.compile(r"\\cup(?![A-Za-z])")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
AND = re.compile(r"(?:\\text\{)? *\band\b *\}?")
OR = re.compile(r"\bor\b")
UNKNOWN = re.compile(r"[A-Za-z]|\\(?:alpha|beta|theta|phi|lambda)")
UNBOUNDED = re.compile(r"- ?\\infty < (?P<lower>.+)|(?P<upper>.+) < \+? ?\\infty")
REVERSED = {">": "<", r"\ge": r"\le"}
ARGUMENTS = r"(?: ?\( ?[A-Za-z](?: ?, ?[A-Za-z])* ?\))?"
VARIABLE = rf"\\?[A-Za-z]+(?:_(?:\w|\{{\w+\}}))?'*(?:\^\{{-1\}})?{ARGUMENTS}"
NAME = re.compile(rf"\\text\{{[A-Za-z ]*\}}|{VARIABLE}|\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\)")
LETTER = re.compile(r"[A-Za-z](?:_\w+)?")
# Commands and letters that stand for nothing unknown.
CONSTANT = re.compile(
    r"\\(?!alpha|beta|gamma|delta|theta|phi|lambda|mu|omega|angle|triangle|overline|text)[A-Za-z]+"
    r"|\\text(?![A-Za-z])|(?<![A-Za-z])[ei](?![A-Za-z(])"
)
MULTIPLE = re.compile(r"[+-]? ?(?:\d|\\frac ?\{? ?\d)")
MATRIX = re.compile(r"[(\[]?\\begin\{([pb]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}[)\]]?", re.DOTALL)


@dataclass(frozen=True)
class Bracketed:
    r"""Parts in brackets: `(1, 2]` is ("(", "]", ("1", "2")); `\langle` counts as `(`."""

    opening: str
    closing: str
    parts: tuple[str, ...]


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split the text at the separators outside all brackets; the parts are stripped."""
    cuts, level = [], 0
    ends = {match.start(): match.end() for match in separator.finditer(text)}
    for token in TOKEN.finditer(text):
        if level <= 0 and token.start() in ends:
            cuts.append((token.start(), ends[token.start()]))
        level += NESTING.get(token[0], 0)
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    return [text[start:end].strip() for start, end in zip(edges[::2], edges[1::2], strict=True)]


def bracket_depth(text: str) -> int:
    """Return the largest number of brackets that are open at once."""
    return max(accumulate((NESTING.get(token[0], 0) for token in TOKEN.finditer(text)), initial=0))


def read_brackets(text: str) -> Bracketed | None:
    """Read the pair of brackets around the whole text; None without one."""
    tokens = [token[0] for token in TOKEN.finditer(text)]
    if len(tokens) < 2 or tokens[0] not in OPENING or tokens[-1] not in CLOSING:
        return None
    levels = accumulate(NESTING.get(token, 0) for token in tokens[:-1])
    if 0 in levels:  # the first bracket closes before the end
        return None
    opening, closing = tokens[0].replace(r"\langle", "("), tokens[-1].replace(r"\rangle", ")")
    inner = text[len(tokens[0]) : -len(tokens[-1])]
    return Bracketed(opening, closing, tuple(split(inner, SPACED_COMMA if ", " in inner else COMMA)))


def read_list(text: str) -> list[str]:
    r"""Split a list: `1, 2 and 3` has three parts, `2 \pm x` two."""
    parts = split(text, SEPARATOR)
    return [sign for part in parts for sign in _signs(part)] if all(parts) else [text]


def _signs(part: str) -> Sequence[str]:
    if r"\pm" not in part and r"\mp" not in part:
        return (part,)
    plus = re.sub(r"\\pm *", "+", re.sub(r"\\mp *", "-", part))
    minus = re.sub(r"\\pm *", "-", re.sub(r"\\mp *", "+", part))
    return tuple(re.sub(r"(^|=) *\+", r"\1", text) for text in (plus, minus))


def read_matrix(text: str) -> list[list[str]] | None:
    """Return the rows of cells; None without a matrix."""
    match = MATRIX.fullmatch(text)
    if not match:
        return None
    rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def ascending(text: str) -> str:
    """Reverse a descending chain of inequalities: `3 > x` becomes `x < 3`."""
    signs = RELATION.findall(text)
    if not signs or not REVERSED.keys() >= set(signs):
        return text
    sides = split(text, RELATION)
    return sides[-1] + "".join(
        f" {REVERSED[sign]} {side}" for sign, side in zip(signs[::-1], sides[-2::-1], strict=False)
    )


def read_chain(text: str) -> str | None:
    r"""Return `-2 < x < 3` for `x > -2 and x < 3`, and `x < 3` for `-\infty < x < 3`; None for anything else.

    Only `and` joins two bounds: a comma may also separate two ranges.
    """
    if not RELATION.search(text):
        return None
    parts = [ascending(part) for part in split(text, AND)]
    if len(parts) == 1 and len(RELATION.findall(parts[0])) == 2:
        match = UNBOUNDED.fullmatch(parts[0])
        bounded = (match["lower"] or match["upper"]).strip() if match else r"\infty"
        return bounded if r"\infty" not in bounded else None
    sides = [(split(part, RELATION), RELATION.findall(part)) for part in parts]
    if len(parts) != 2 or any(len(signs) != 1 or signs[0] == r"\ne" for _, signs in sides):
        return None
    lower, upper = sorted(sides, key=lambda part: UNKNOWN.fullmatch(part[0][0]) is not None)
    unknown = lower[0][1]
    if unknown != upper[0][0] or not UNKNOWN.fullmatch(unknown) or UNKNOWN.fullmatch(lower[0][0]):
        return None
    ends = read_number(lower[0][0]), read_number(upper[0][1])
    if ends[0] is not None and ends[1] is not None and ends[0] > ends[1]:
        return None  # `x < -2 and x > 3` is meant as two ranges
    return f"{lower[0][0]} {lower[1][0]} {unknown} {upper[1][0]} {upper[0][1]}"


def is_asked_for(side: str) -> bool:
    r"""Return True if `side = 5` gives 5 as the answer: `f(3)`, `x + y`, `\sin\theta`; not `5x` or `2 + 3`."""
    letters = CONSTANT.sub(" ", side)
    is_multiple = MULTIPLE.match(side) and not re.search(r".[+-]", side)
    return bool(re.search("[A-Za-z]", letters)) and not is_multiple and not ANOTHER_NUMBER.search(side)


def read_assignments(parts: Sequence[str]) -> str | None:
    """Turn `y = 3` and `x = 5` into `(5, 3)`; None unless each of several names has one value."""
    equations = sorted((name or "", values) for name, values in map(read_equation, parts))
    names = {name for name, _ in equations}
    if (
        len(parts) < 2
        or "" in names
        or len(names) < len(parts)
        or any(len(values) > 1 for _, values in equations)
    ):
        return None
    return f"({', '.join(values[0] for _, values in equations)})"


def read_tuple(text: str, assignments: Sequence[str]) -> list[str] | None:
    """Return the values of a tuple in the order of the assignments; None unless it gives one for each.

    `(1, 2)` is read in the order of the names `x = 1, y = 2`, which must be letters in alphabetical order: of
    `y = 2, x = 1` it could be either. `(y, x) = (2, 1)` says which is which.
    """
    if read_assignments(assignments) is None:
        return None
    names = [read_equation(part)[0] or "" for part in assignments]
    name, sides = read_equation(text)
    brackets = read_brackets(sides[0]) if len(sides) == 1 else None
    if brackets is None or (brackets.opening, brackets.closing) != ("(", ")"):
        return None
    order = name.strip("()").split(",") if name else names
    is_clear = bool(name) or (names == sorted(names) and all(map(LETTER.fullmatch, names)))
    if not is_clear or sorted(order) != sorted(names) or len(brackets.parts) != len(names):
        return None
    values = dict(zip(order, brackets.parts, strict=True))
    return [values[name] for name in names]


def read_equation(text: str) -> tuple[str | None, list[str]]:
    """Return an equation's name and its other sides: ("x", ["2 + 3", "5"]) for `x = 2 + 3 = 5`."""
    sides = split(text, EQUALS)
    sides = sides[1:] if len(sides) > 1 and not sides[0] else sides  # `= 5`
    if len(sides) < 2 or "" in sides:
        return None, sides if "" not in sides else [text]
    names = [side for side in sides if NAME.fullmatch(side) and not ANOTHER_NUMBER.search(side)]
    if not names or len(names) == len(sides):
        return (sides[0], sides[1:]) if names else (None, sides)
    return re.sub(r"[ {}]", "", names[0]), [side for side in sides if side not in names]
