"""Refuse prose that a pattern can recognise as unidiomatic. Run in the repository's root by `make lint`.

It reads docstrings and comments of Python files, and every line of Markdown, YAML and launch files, except
what stands in backticks. CONTRIBUTING.md has all the rules, also those that no pattern finds. `who` and its
forms are allowed right after a word for a person, as in "users who".

What users read has more rules, IDIOMS (except in quotes) and at most LIMIT words per sentence: README, docs,
the package's help texts and messages, and the docstrings of configuration fields.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCES = [
    *("grpo_ray/**/*.py", "examples/**/*.py", "tests/**/*.py", "profiling/**/*.py", "docs/**/*.py", ".ci/*.py"),
    *("*.md", "docs/**/*.md", "configs/*.yaml", "examples/*/*.md", "examples/*/*.yaml", "launch/*"),
]
PERSON = r"(?:anyone|authors?|people|persons?|readers?|somebody|someone|users?)"
RULES = {
    re.compile(rf"(?<!\w)(?:{PERSON},? )?(who|whose|whom|whoever|nobody|everybody)\b", re.I): "is for persons",
    re.compile(r"\b(so\s+many)\b", re.I): "say N, or how many",
}
OPENING = re.compile(r"(What|Whether|How|Of|Who|Nobody|As|That)\b")
START = r"(?:^|[.:;?!] |, )"
IDIOMS = {
    "begin with the actor": [
        rf"{START}((?:Tested|Needed|Measured|Printed|Refused|Tried|Undivided)(?: is\b| are\b|,))",
        rf"{START}([Oo]f (?:an?|the|these|those|each|all|every)\b[^.;:()]{{,60}}\b(?:only|it|they|one)\b)",
    ],
    "things neither know nor promise: say what happens": [
        r"\b(vouch\w*|(?<!you )believe[ds]?|asks? no|(?:is|are) (?:told|not asked)|its word|(?<!who )knows)\b",
        r"\b(promise[ds]? (?:it|no|that|to)|holds (?:that|it there)|answers for (?:it|its\w*|them\w*))\b",
        r"\b(happened to) (?!an?\b|each|it\b|the)",
    ],
    "say `is not a ...`": [
        r"(?<!(?i:there) )\b((?:is|are|was|were) no (?!longer|more|less|fewer|other\b|\w+er than)\w+)"
    ],
    "say what grows with what": [r"\b(the (?:more|less|fewer|larger)\b[^.;]{,60}\bthe (?:more|less|fewer))\b"],
    "take the everyday word": [
        r"\b([Mm]end(?:s|ed|ing)?|[Bb]eside|[Hh]ardly|[Aa]new|[Ii]n vain|[Ll]ikewise|as well(?! as))\b"
    ],
}
COURSE = r"\b([Tt]he (?:lecture|handout|course))\b(?!-)"
TITLE = r"^(to|read)$"
LINKED = r"\b((?:[Ww]hat|[Aa]nything that) (?:no|the|it))\b"
LIMIT = 30
"""Words per sentence; what stands in backticks is one word."""
Finding = tuple[int, str]


def findings(path: Path, text: str) -> list[Finding]:
    """Return the line and the complaint of each finding, in the order of lines."""
    if path.suffix == ".py":
        return sorted({*_in_docstrings(ast.parse(text)), *_in_comments(text)})
    return list(_in_text(text, 1))


def findings_for_readers(path: Path, text: str) -> list[Finding]:
    """Return the findings of the rules for what users read, in the order of lines."""
    if path.suffix == ".py":
        checks = (_in_text, _idioms, _long)
        return sorted(
            {
                found
                for line, words in _texts(ast.parse(text))
                for check in checks
                for found in check(words, line)
            }
        )
    found: set[Finding] = set()
    for line, words, is_linked in _units(text):
        found |= {*_idioms(words, line), *_long(words, line), *_matches(TITLE, words, line, "name the column")}
        if "CS336" not in text:
            found.update(_matches(COURSE, words, line, "say first of which course: CS336"))
        if is_linked:
            found.update(_matches(LINKED, words, line, "name the thing"))
    return sorted(found)


def _idioms(text: str, line: int) -> Iterator[Finding]:
    text = re.sub(r'`[^`]*`|"[^"]*"', _as_word, text)
    for advice, rules in IDIOMS.items():
        for rule in rules:
            yield from _matches(rule, text, line, advice)


def _matches(rule: str, text: str, line: int, advice: str) -> Iterator[Finding]:
    for match in re.finditer(rule, text.replace("\n", " ")):
        yield line + text.count("\n", 0, match.start(1)), f"`{match[1]}`: {advice}"


def _as_word(code: re.Match[str]) -> str:
    return "`" + "\n" * code[0].count("\n")


def _long(text: str, line: int) -> Iterator[Finding]:
    """Find sentences of a paragraph, an item or a cell; a link is its text."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", _as_word, text))
    for sentence in re.finditer(r"[^\s.?!](?:[^.?!]|[.?!](?![)\"'*_]*\s))*", text):
        number = len(re.findall(r"\S*[\w`]\S*", sentence[0]))
        if number > LIMIT:
            beginning = " ".join(sentence[0].replace("`", "_").split()[:6])
            yield line + text.count("\n", 0, sentence.start()), f"{number} words in `{beginning} ...`: split it"


def _units(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield paragraphs, items and cells with their lines, and True for a cell that another one links."""
    text = re.sub(r"^( *)(```|~~~)(.*?)^\1\2|<!--.*?-->|<[^<>]+>", _blank, text, flags=re.M | re.S)
    unit: list[str] = []
    first, is_code = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_row = line.lstrip().startswith("|")
        is_code = bool(re.match(r" {4}", line)) and (is_code or not unit)
        if is_row or is_code or not line.strip() or re.match(r" *([-*+]|\d+\.|#+|[!?]{3}) ", line):
            yield from [(first, "\n".join(unit), False)] if unit else []
            unit = []
        if is_row:
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            yield from ((number, cell.strip(), "](" in line and "](" not in cell) for cell in cells)
        elif line.strip() and not is_code:
            first = first if unit else number
            unit.append(line)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of several words, and of the docstrings those under a field of a section."""
    nodes = list(ast.walk(tree))
    in_f_strings = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    bodies = [node.body for node in nodes if isinstance(node, ast.ClassDef) and _is_section(node)]
    of_fields = {node.value for body in bodies for node in body if isinstance(node, ast.Expr)}
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)} - of_fields
    for node in nodes:
        if node in docstrings or node in in_f_strings:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_prose(node.value):
            yield node.lineno, node.value


def _is_prose(text: str) -> bool:
    return text.count(" ") > 1 and "{%" not in text


def _is_section(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith(("Section", "Config")) for base in node.bases)


def _in_text(text: str, first_line: int) -> Iterator[Finding]:
    text = re.sub(r"`[^`\n]+`", "`", text)
    for rule, advice in RULES.items():
        for match in rule.finditer(text):
            if not re.match(PERSON, match[0], re.I):
                yield first_line + text.count("\n", 0, match.start(1)), f"`{match[1]}`: {advice}"


def _in_docstrings(tree: ast.Module) -> Iterator[Finding]:
    """Check every string that stands alone: docstrings, also those under a field."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from _in_text(node.value.value, node.lineno)
            opening = OPENING.match(node.value.value)
            if opening:
                advice = "open with a verb (functions) or a noun phrase (classes, fields)"
                yield node.lineno, f"a docstring opens with `{opening[1]}`: {advice}"


def _in_comments(text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _in_text(token.string, token.start[0])


def main(root: Path) -> int:
    num_findings = 0
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()}):
        text = path.read_text()
        name = str(path.relative_to(root))
        found = findings(path, text)
        if re.match(r"README\.md|docs/.*\.md|grpo_ray/.*\.py", name):
            found += findings_for_readers(path, text)
        for line, complaint in sorted(found):
            print(f"{name}:{line}: {complaint}")
            num_findings += 1
    if num_findings:
        print(f"{num_findings} findings; CONTRIBUTING.md, 'English', says what to write instead")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
