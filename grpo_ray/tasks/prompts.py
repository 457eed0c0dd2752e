"""Prompt templates: text with `{question}` where the question goes."""

from pathlib import Path

TEMPLATES = Path(__file__).parent.parent / "prompts"
PLACEHOLDER = "{question}"


def template_names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.prompt"))


def load_template(name_or_path: str) -> str:
    """The template of that name, or else in the file at that path."""
    path = TEMPLATES / f"{name_or_path}.prompt" if name_or_path in template_names() else Path(name_or_path)
    try:
        template = path.read_bytes().decode("utf-8")  # bytes: no newline is translated
    except OSError as error:
        raise ValueError(
            f"task.prompt: cannot read {name_or_path!r} ({error.strerror}); "
            f"give one of {', '.join(template_names())}, or the path of a file"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the template as UTF-8 text") from None
    if PLACEHOLDER not in template:
        raise ValueError(f"{path}: the template has no {PLACEHOLDER}; write it where the question goes")
    return template


def render(template: str, question: str) -> str:
    # Not str.format: templates and questions are full of braces that mean LaTeX, code or JSON.
    return template.replace(PLACEHOLDER, question)
