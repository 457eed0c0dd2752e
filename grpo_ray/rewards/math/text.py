r"""The text of an answer in one spelling: `$\left( \dfrac{1}{2} \right)$` and `½` become `\frac{1}{2}`."""

import re

VARIABLES = frozenset("abcxyzABCXYZ")  # a word of these alone is a product
MAX_WRAPPERS = 8  # `$\boxed{\text{72}}$.` has four

# Words after, before or around a number that change it, or make it doubtful.
ONES = (
    "zero|one|two|three|four|five|six|seven|eight|nine|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
)
ONES += "|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
POWERS = "hundred|thousand|million|billion|trillion|dozen|score|gross|lakh|crore"
PARTS = "half|halves|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|twentieth"
PARTS += "|hundredth|thousandth|millionth|percent"
OPERATIONS = "minus|negative|plus|times|twice|thrice|doubled?|tripled?|halved|squared|cubed|(?:square|cube) of"
OPERATIONS += "|root|factorial|divided|multiplied|mod|modulo|point|reciprocal|inverse"
HEDGES = "or|not|no|never|cannot|neither|nor|except|unless|without|instead|wrong|incorrect|false|maybe|perhaps"
HEDGES += "|possibly|probably|about|around|roughly|approximately|nearly|almost|versus|vs|over|under|above|below"
HEDGES += "|less|fewer|more|least|most|between"
ANOTHER_NUMBER = re.compile(
    rf"\b(?:{ONES}|{OPERATIONS}|{HEDGES}|(?:{POWERS}|{PARTS}|ten)s?)\b|n't", re.IGNORECASE
)

SIGNS = {
    "−": "-", "–": "-", "—": "-", "÷": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "≈": r"\approx ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "√": r"\sqrt", "∞": r"\infty ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "º": "°",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    r"\lbrace": r"\{", r"\rbrace": r"\}",
}  # fmt: skip
FUNCTIONS = "sqrt|pi|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp"
END = "(?![A-Za-z])"  # of a command's name

# Applied in this order; a replacement may rely on an earlier one.
SPELLINGS = [
    (r"(?<!\\)\$([^$]+)(?<!\\)\$", r"\1"),
    (rf"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits){END}", ""),
    (r"(?<!\\)\\!", ""),
    (rf"(?<!\\)\\[ ,;:]|\\q?quad{END}|(?<!\\)~|\s+", " "),
    (rf"\\[dtc]frac{END}", r"\\frac"),
    (r"\\(?:(?:math|text)(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?)\s*\{", r"\\text{"),
    (r"\{\\(?:rm|bf|it)\s", r"\\text{"),
    (rf"\s*(?:\^\s*(?:\{{\s*\\circ\s*\}}|\\circ)|\\degree{END})", "°"),
    (r"\\%", "%"),
    (r"(?<=\d)\{,\}(?=\d)", ","),
    (rf"\\(?:leqslant|leq|le){END}|<=", r"\\le "),
    (rf"\\(?:geqslant|geq|ge){END}|>=", r"\\ge "),
    (rf"\\(?:neq|ne){END}|!=", r"\\ne "),
    (rf"\\lt{END}", "<"),
    (rf"\\gt{END}", ">"),
    (rf"\\varnothing{END}|\\\{{\s*\\\}}", r"\\emptyset "),
    (rf"(?<![\\A-Za-z])(?:infinity|inf){END}", r"\\infty "),
    (rf"(?<![\\A-Za-z])({FUNCTIONS}){END}", r"\\\1 "),
    (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"_ ?\{ ?(\w) ?\}", r"_\1"),
    (r"\*\*", "^"),
    (r"\^ ?([+-]\d+)", r"^{\1}"),
    (r" +", " "),
]
SIGN = re.compile("|".join(map(re.escape, SIGNS)))
SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
RAISED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
REPLACEMENTS = [(re.compile(pattern), replacement) for pattern, replacement in SPELLINGS]

AROUND = (
    r"\$\$([^$]+)\$\$", r"\$((?:\\\$|[^$])+)\$", r"\\\((.*)\\\)", r"\\\[(.*)\\\]",
    r"\*\*([^*]+)\*\*", "`([^`]+)`", '"([^"]+)"',
)  # fmt: skip
LIST_COMMA = re.compile(r",(?!\d{3}(?!\d))")
WRAPPERS = [re.compile(pattern, re.DOTALL) for pattern in AROUND]
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` and `\}` are signs
COMMANDS_AROUND = (r"\boxed{", r"\fbox{", r"\text{")


def normalize(text: str) -> str:
    r"""Return the text unwrapped, with one spelling of every sign; `\text{...}` inside it stays, for units."""
    text = SIGN.sub(lambda match: SIGNS[match[0]], unwrap(text))
    text = SUPERSCRIPT.sub(lambda found: f"^{{{found[0].translate(RAISED)}}}", text)
    for pattern, replacement in REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return unwrap(_without_double_braces(text))


def _without_double_braces(text: str) -> str:
    """Replace `{{x}}` by `{x}`."""
    if "{{" not in text:
        return text
    closed = brace_pairs(text)
    doubled = {start for start, end in closed.items() if closed.get(start + 1) == end - 1}
    doubled |= {closed[start] for start in doubled}
    return "".join(character for index, character in enumerate(text) if index not in doubled)


def unwrap(text: str) -> str:
    r"""Remove dollars, `\( \)`, bold, `\boxed{}` and `\text{}` around the whole text, and a final full stop."""
    for _ in range(MAX_WRAPPERS):
        before, text = text, text.strip()
        text = text.removesuffix(".") if not text.endswith("..") else text
        for wrapper in WRAPPERS:
            match = wrapper.fullmatch(text)
            text = match[1] if match else text
        for command in COMMANDS_AROUND:
            if text.startswith(command) and _ends_with_the_brace_at(len(command) - 1, text):
                text = text[len(command) : -1]
        if text.startswith("{") and _ends_with_the_brace_at(0, text):
            text = rf"\{{{text[1:-1]}\}}" if LIST_COMMA.search(text) else text[1:-1]  # `{1, 2}` is a set
        if text == before:
            break
    return text


def _ends_with_the_brace_at(start: int, text: str) -> bool:
    return brace_pairs(text).get(start) == len(text) - 1


def brace_pairs(text: str) -> dict[int, int]:
    r"""Return the place of each closed brace's other end; `\{` and `\}` are signs, not braces."""
    opened, closed = [], {}
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closed[opened.pop()] = match.start()
    return closed


def plain(text: str) -> str:
    r"""Replace each `\text{...}` by its contents."""
    return re.sub(r" +", " ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)).strip()
