"""Refuse prose that a pattern can recognise as unidiomatic. Run in the repository's root by `make lint`.

It reads docstrings and comments of Python files, and every line of Markdown, YAML and launch files, except
what stands in backticks. CONTRIBUTING.md has all the rules, also those that no pattern finds. `who` and its
forms are allowed right after a word for a person, as in "users who".
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
Finding = tuple[int, str]


def findings(path: Path, text: str) -> list[Finding]:
    """Return the line and the complaint of each finding, in the order of lines."""
    if path.suffix == ".py":
        return sorted({*_in_docstrings(ast.parse(text)), *_in_comments(text)})
    return list(_in_text(text, 1))


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
        for line, complaint in findings(path, path.read_text()):
            print(f"{path.relative_to(root)}:{line}: {complaint}")
            num_findings += 1
    if num_findings:
        print(f"{num_findings} findings; CONTRIBUTING.md, 'English', says what to write instead")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
