"""The mkdocs hook that turns each file linked outside of docs/ into a page of the site.

`[x](../grpo_ray/x.py)` works in the repository; in the site it leads to `source/grpo_ray/x.py`, highlighted.
Neither these pages nor the lab notes are in the search.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".md": "markdown"}


def on_files(files: Files, config: Any) -> Files:
    pages = [file for file in files.documentation_pages() if file.abs_src_path]
    linked = {path for page in pages for path in _outside(page.src_uri).findall(page.content_string)}
    for path in sorted({path for name in linked for path in _with_content(ROOT / name)}):
        name = path.relative_to(ROOT).as_posix()
        if path.exists():  # a link to a missing file stays broken, which fails the build
            content = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n{_page(path)}\n"
            source = File.generated(config, f"source/{name}.md", content=content)
            source.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(source)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("lab/"):
        page.meta["search"] = {"exclude": True}
    return markdown if uri.startswith("source/") else _outside(uri).sub(rf"]({_up(uri)}source/\1.md)", markdown)


def _outside(uri: str) -> re.Pattern[str]:
    """Return the pattern of a page's links to files outside of docs/."""
    return re.compile(rf"\]\(\.\./{re.escape(_up(uri))}([^)#\s]+?)/?\)")


def _up(uri: str) -> str:
    return "../" * uri.count("/")


def _with_content(path: Path) -> Iterator[Path]:
    """Yield the path, and the modules of a folder."""
    yield path
    if path.is_dir():
        yield from sorted(path.glob("*.py"))


def _page(path: Path) -> str:
    if path.is_dir():
        modules = [module for module in _with_content(path) if module != path]
        return "\n".join(
            f"- [`{module.name}`]({path.name}/{module.name}.md): {_summary(module)}" for module in modules
        )
    return f'`````{LANGUAGES.get(path.suffix, "text")} linenums="1"\n{path.read_text()}`````'


def _summary(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")
