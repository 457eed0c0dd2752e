"""The documentation: the site builds without a warning, its tables are complete, and its examples work."""

import ast
import html
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch
from browser import NEEDS_CHROMIUM, Browser, browser
from run_process import output_of
from test_layout import ORDER

from examples.course import __main__ as course
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.config.schema import leaves
from grpo_ray.config.section import Section
from grpo_ray.objectives import CorrectionInputs, Objective, check_algorithm
from grpo_ray.objectives.comparison import advantages_of
from grpo_ray.rewards import get_reward_fn
from grpo_ray.rewards.configured import check_reward
from grpo_ray.tasks import load_examples
from grpo_ray.tools.cli import COMMANDS, parse
from grpo_ray.watch.detectors import DETECTORS
from grpo_ray.watch.metrics_catalog import METRICS

__all__ = ["browser"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (language, title, text) of the page's fenced blocks."""
    return BLOCK.findall((DOCS / page).read_text())


@pytest.fixture(scope="module")
def reference() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(DOCS / "hooks" / "reference.py")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a dead link, or a page missing from the menu, is an error."""
    folder = tmp_path_factory.mktemp("site")
    output_of(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT)
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_field_and_metric_and_the_sources_and_fetches_nothing(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    assert not (site / "hooks").exists()
    fetched = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^>]+>")
    for page in site.rglob("*.html"):
        assert not fetched.findall(page.read_text()), page
    assert "source/grpo_ray/types.py.html" in (site / "concepts.html").read_text()
    source, step = (
        re.sub(r"<[^>]+>", "", (site / page).read_text())
        for page in ("source/grpo_ray/types.py.html", "one-step.html")
    )
    assert "class PromptItem" in source
    for line in (DOCS / "one_step.py").read_text().splitlines():
        assert html.escape(line, quote=False) in step, line
    tables = (site / "configuration.html").read_text()
    assert tables.count("<details") > 25
    assert not re.search("<details[^>]* open", tables)
    assert "<code>on_preemption_s</code></td>" in tables.partition("<details")[2]
    metrics = (site / "metrics.html").read_text()
    assert all(f"<code>{name}</code>" in metrics for name in METRICS)


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_the_site_works_from_disk(site: Path, browser: Browser) -> None:
    browser.call("Page.navigate", url=(site / "index.html").as_uri())
    browser.wait_for("window.__index")
    browser.run("""{
        const field = document.querySelector(".md-search__input")
        document.querySelector("[data-md-toggle=search]").click()
        field.value = "learning rate"
        field.dispatchEvent(new Event("keyup"))
    }""")
    results = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    browser.wait_for(f"{results}.length")
    found = browser.run(results)
    hit = next(link for link in found if "/learner.html?h=learning+rate" in link)
    assert [link for link in found if "/lab/" in link or "/source/" in link] == []
    addresses = [
        found[0],
        *browser.run("[...document.querySelectorAll('.md-nav__link[href]')].map(a => a.href)"),
    ]
    assert len({address for address in addresses if "/lab/" in address}) > 5  # the menu shows its sections
    assert [a for a in addresses if not Path(urlsplit(unquote(a)).path).is_file()] == []
    browser.run(f"location.href = {hit!r}")
    browser.wait_for("document.querySelector('mark')")
    assert all(address.startswith(("file:", "data:")) for address in browser.requests())
    assert browser.errors() == []


def test_links_between_files_of_the_repository_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", BLOCK.sub("", page.read_text())):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


# ---- the reference pages ----


def rows(markdown: str) -> dict[str, dict[str, list[str]]]:
    """Return the cells of each table's rows, by heading and the name in the first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in map(str.strip, markdown.splitlines()):
        if line.startswith("## "):
            heading = found.setdefault(line.removeprefix("## ").strip("`"), {})
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            heading[cells[0].strip("`")] = cells[1:]
    return found


def sections(base: type[Section] = Section) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from sections(section)


def test_every_field_of_every_section_stands_in_the_reference_with_its_use(reference: SimpleNamespace) -> None:
    tables = rows(reference.configuration_reference())
    cells = {(path, name): cells for path, table in tables.items() for name, cells in table.items()}
    assert [place for place, (_, _, meaning) in cells.items() if not meaning] == []
    field_sets = [set(table) for table in tables.values()]
    for section in sections():
        is_part_of_config = section.__module__.startswith("grpo_ray.config") and not section.__subclasses__()
        if is_part_of_config and section is not Config:
            assert set(section.model_fields) in field_sets, section.__name__
    for path, value in leaves(load_config(ROOT / "configs/quickstart.yaml").model_dump()).items():
        heading, _, name = path.rpartition(".")
        if not heading:  # a section that is null
            assert path in tables
            continue
        if heading.startswith("task"):
            heading = heading.replace("task", "task (kind: sorting)", 1)
        assert name in tables[heading], (path, value)


def test_values_defaults_and_meanings_of_fields_follow_the_basic_keys(reference: SimpleNamespace) -> None:
    markdown = reference.configuration_reference()
    tables = rows(markdown)
    assert tables["learner"]["learning_rate"] == ["number >= 0", "`1e-05`", "Peak AdamW learning rate."]
    assert tables["algorithm"]["advantage_scale"][0] == "group, batch, whiten_responses or whiten_tokens"
    assert tables["algorithm.kl"]["ema_decay"][:2] == ["number >= 0 and < 1", "`0.99`"]
    assert tables["task (kind: math)"]["answer_is_boxed"][1] == "`true`"
    assert tables["task (kind: file)"]["train_path"][1] == "required"
    assert tables["task.parts.NAME"]["weight"][1] == "`1.0`"
    assert tables["task.reward[N]"]["reward"][1] == "required"
    assert tables["model"]["tiny"][0] == "a section, below, or null"
    assert tables["sampling"]["stop"][1] == "`[]`"
    assert tables["model.adapter (kind: lora)"]["kind"][2].startswith("`lora` adds")
    assert [line for line in markdown.partition("\n## `run`")[2].splitlines() if line.startswith("|")] == []
    basic = tables[f"The {len(reference.BASIC)} keys that most runs need"]
    assert list(basic) == list(reference.BASIC)
    assert 20 <= len(basic) <= 30
    assert basic["algorithm.num_steps"][:2] == ["integer > 0", "`200`"]


def test_every_command_stands_in_the_reference_with_its_help(reference: SimpleNamespace) -> None:
    text = reference.command_reference()
    for command in COMMANDS:
        assert f"## grpo-ray {command.name}\n\n```text\nusage: grpo-ray {command.name} " in text


def test_every_metric_stands_in_the_reference(reference: SimpleNamespace) -> None:
    tables = rows(reference.metrics_reference())
    listed = {name: tuple(cells) for table in tables.values() for name, cells in table.items()}
    assert listed == {name: (unit, meaning.replace("|", "\\|")) for name, (unit, meaning) in METRICS.items()}


def test_metrics_to_look_at_first_and_their_detectors_exist() -> None:
    table = (DOCS / "metrics.md").read_text().partition("## Look at these first")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    names = [name for line in lines for name in re.findall(r"`([a-z_/]+/[a-z_/]+)`", line)]
    assert len(names) > 15
    assert set(names) <= set(METRICS)
    assert set(re.findall(r"\(`(\w+)`\)", table)) <= set(DETECTORS)


# ---- the architecture page ----


def test_the_architecture_page_counts_lines_and_names_entries() -> None:
    text = (DOCS / "architecture.md").read_text()
    entries = re.findall(r"^\| \**\[`(.+?)/?`\].*\| ([\d,]+) \|$", text, re.M)
    assert [entry.removesuffix(".py") for entry, _ in entries] == ORDER
    heart = 0
    for entry, stated in entries:
        path = ROOT / "grpo_ray" / entry
        files = path.rglob("*.py") if path.is_dir() else [path]
        counted = sum(len(file.read_text().splitlines()) for file in files)
        assert abs(int(stated.replace(",", "")) - counted) <= 0.15 * counted + 20, (entry, counted)
        heart += counted if f"**[`{entry}" in text else 0
    for page in (text, (ROOT / "README.md").read_text()):
        said = re.search(r"about\s([\d,]+)\slines", page)
        assert said is not None
        assert abs(int(said[1].replace(",", "")) - heart) <= 0.06 * heart, heart


def test_functions_and_files_that_the_architecture_page_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    package = "\n".join(path.read_text() for path in (ROOT / "grpo_ray").rglob("*.py"))
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        assert f"class {owner}" in package, owner
        assert re.search(rf"def {name}\b", package), f"{owner}.{name}"


# ---- what the pages say ----


def test_the_readme_has_at_most_900_words_without_code_and_pictures() -> None:
    text = re.sub(r"(?ms)^```.*?^```$|^ {4}[^\n]*$|^!\[[^\n]*$|<img.*?>", "", (ROOT / "README.md").read_text())
    assert 300 < len(text.split()) <= 900


def test_the_files_to_train_on_ones_own_data(here: Path) -> None:
    for _, title, text in blocks("own-data.md"):
        Path(title).write_text(text)
    runpy.run_path("make_data.py")
    sets = load_examples(load_config("mine.yaml").task, seed=0)
    assert (len(sets.train), len(sets.validation)) == (360, 40)
    assert runpy.run_path("my_rewards.py")["reward"](" 24", parity=0) == 1


def commands(page: Path, program: str = "grpo-ray") -> Iterator[list[str]]:
    """Yield the arguments of every `grpo-ray ...` in the page's code blocks."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for line in re.findall(rf"^(?:    |\t)?\$? ?(?:\.venv/bin/)?{program} (.+)$", text, re.M):
        yield shlex.split(line, comments=True)


@pytest.mark.slow
def test_every_command_in_the_pages_is_one() -> None:
    found = [(page.name, arguments) for page in PAGES for arguments in commands(page)]
    assert len(found) > 15
    for name, arguments in found:
        try:
            _, options = parse(arguments)
        except SystemExit as error:
            raise AssertionError(f"{name}: grpo-ray {shlex.join(arguments)}") from error
        if arguments[0] in ("train", "check") and (ROOT / options.config).exists():
            load_config(ROOT / options.config, options.overrides)


def test_every_command_of_the_course_in_the_pages_is_one() -> None:
    found = [arguments for page in PAGES for arguments in commands(page, course.PROGRAM)]
    assert {arguments[0] for arguments in found} == {"data", "playground"}
    for arguments in found:
        parse(arguments, course.COMMANDS)


def literals() -> str:
    """Return every string in the package's code, with `…` for each interpolated value."""
    texts = []
    for path in (ROOT / "grpo_ray").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(map(str, parts)))
    return "\n".join(texts)


@pytest.mark.slow
def test_the_messages_under_troubleshooting_are_the_programs() -> None:
    known, page = literals(), (DOCS / "troubleshooting.md").read_text()
    symptoms = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    quoted = [
        part.strip() for cell in symptoms for code in re.findall(r"`(.+?)`", cell) for part in code.split("…")
    ]
    assert len(quoted) > 40
    assert [part for part in quoted if part not in known] == []


def test_config_keys_in_the_pages_exist() -> None:
    """Check that anything on a page that looks like `section.key` is one."""
    data = load_config(ROOT / "configs/quickstart.yaml").model_dump()
    known = set(leaves(data))
    known |= {f"{top}.{key}" for top, section in data.items() if section for key in section}  # also an empty {}
    tops = "|".join(name for name in Config.model_fields if name not in ("task", "model"))
    for page in DOCS.rglob("*.md"):
        for path in re.findall(rf"`((?:{tops})\.[a-z_]+(?:\.[a-z_]+)*)(?:[:=][^`]*)?`(?!\])", page.read_text()):
            assert path in known or any(name.startswith(f"{path}.") for name in known), f"{page.name}: {path}"


def test_what_the_page_on_choosing_an_algorithm_says_to_set_is_valid() -> None:
    table = (DOCS / "choosing.md").read_text().partition("## Where to start")[2].partition("\n## ")[0]
    settings = [re.findall(r"`([a-z_.]+): (.+?)`", line) for line in table.splitlines()]
    assert sum(map(bool, settings)) > 5
    for row in settings:
        places = [key if key.split(".")[0] in Config.model_fields else f"algorithm.{key}" for key, _ in row]
        overrides = [f"{place}={value}" for place, (_, value) in zip(places, row, strict=True)]
        load_config(ROOT / "configs/quickstart.yaml", overrides)


def write_files(folder: Path) -> None:
    """Write the page's named files, and those of examples/ that it shows."""
    for name in re.findall(r"<!-- file (\S+) -->", (DOCS / "extending.md").read_text()):
        shutil.copy(ROOT / name, folder)
    for _, title, text in blocks("extending.md"):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(text)


@pytest.fixture
def in_written_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(here)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("in_written_folder")
def test_a_reward_of_ones_own() -> None:
    config = load_config("my_reward.yaml")
    check_reward(config.rewards[""])
    reward_fn = get_reward_fn(config.rewards[""])
    assert [reward_fn(" word" * n, "3")["reward"] for n in range(7)] == [0, 0.5, 1, 1, 1, 0.5, 0]
    assert reward_fn("one two three four five", "3")["answer_reward"] == 0


@pytest.mark.usefixtures("in_written_folder")
def test_a_task_from_a_file() -> None:
    runpy.run_path("squares.py", run_name="__main__")
    sets = load_examples(load_config("squares.yaml").task, seed=0)
    assert (len(sets.train), len(sets.validation)) == (900, 100)
    every = {example.question: example.ground_truth for example in [*sets.train, *sets.validation]}
    assert len(every) == 1000
    assert every["What is 12 squared?"] == "144"
    reward_fn = get_reward_fn(load_config("squares.yaml").rewards[""])
    assert [reward_fn(answer, "144")["reward"] for answer in ("144", " 145", "about 144")] == [1, 0.1, 0]


@pytest.mark.usefixtures("in_written_folder")
def test_an_advantage_of_ones_own() -> None:
    algorithm = load_config("my_advantage.yaml").algorithm
    check_algorithm(algorithm)
    rewards, formats = np.array([1, 0, 7], np.float32), np.array([1, 0, 1])
    found = advantages_of(rewards, np.ones(3), np.ones(3, bool), algorithm, None, formats)
    assert found.tolist() == pytest.approx([0, -1.2, 6])


@pytest.mark.usefixtures("in_written_folder")
def test_a_loss_and_a_correction_of_ones_own() -> None:
    algorithm = load_config("my_loss.yaml").algorithm
    check_algorithm(algorithm)
    objective = Objective.from_config(algorithm)
    old = torch.zeros(2, 2)
    new = torch.log(torch.tensor([[1.2, 1.0], [0.92, 1.05]])).requires_grad_()
    advantages, mask = torch.tensor([[2.0], [-1.0]]), torch.ones(2, 2, dtype=torch.bool)
    loss, details = objective.policy_gradient_loss(new, mask, advantages, old)
    by_hand = torch.tensor(
        [[0.5 * 2 / 0.2 * 0.04 - 2.4, -2.0], [0.5 / 0.2 * 0.0064 + 0.92, 0.5 / 0.2 * 0.0025 + 1.05]]
    )
    torch.testing.assert_close(loss, by_hand)
    (gradient,) = torch.autograd.grad(loss.sum(), new)  # none at the optimum, REINFORCE's at the old policy
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -2.0], [0.6 * 0.92, 1.25 * 1.05]]))
    assert details["clipped"].tolist() == [[True, False], [False, False]]
    inputs = CorrectionInputs.of(torch.tensor([[0.0, 2.5], [0.0, 1.5]]), old, mask, advantages)
    assert objective.correction_weights(inputs)[0].tolist() == [[0, 0], [1, 1]]


@pytest.mark.slow
def test_a_task_a_loss_an_engine_a_transport_and_a_command_of_ones_own(tmp_path: Path) -> None:
    """Apply the page's diffs to a copy of the package, and use them there (extended_job.py)."""
    shutil.copytree(ROOT / "grpo_ray", tmp_path / "grpo_ray")  # compiled files too: they save seconds
    write_files(tmp_path)
    changes = "".join(text for language, _, text in blocks("extending.md") if language == "diff")
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    output_of("git", "apply", "-", input=changes, cwd=tmp_path, env=environment)
    environment |= {"PYTHONPATH": str(tmp_path), "GRPO_RAY_CACHE": str(tmp_path / "cache")}
    output = output_of(sys.executable, ROOT / "tests/extended_job.py", tmp_path, cwd=ROOT, env=environment)
    assert re.search(r"^\d+ tokens: ", output, re.M), output  # of the command `longest`
