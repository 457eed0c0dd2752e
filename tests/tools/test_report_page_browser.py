"""The run's web page in a browser: it loads, its filters work, and it is readable on every screen."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import DESKTOP, NEEDS_CHROMIUM, PHONE, Browser, browser
from builders import TinyModel, changed, make_completion, make_group, make_item, write_rows
from matplotlib.image import imread
from report_runs import HOSTILE, NEAR_DEFAULT, add_checkpoint, group, make_run, metrics_of, ranks_of

from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import RunDirectory, step_name
from grpo_ray.tools.report.run_data import run_data
from grpo_ray.tools.report.write_report import ReportOptions, make_page, report
from grpo_ray.watch.metrics_catalog import METRICS

__all__ = ["browser"]

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
SCREENS = [(size, scheme) for size in (PHONE, DESKTOP) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    """Make a page of two runs: 6 steps with hostile texts, and 4 steps with another rate and no such texts."""
    folder = tmp_path_factory.mktemp("runs")
    steps = [[group(step), group(step, [*HOSTILE, "long"], group_id=100 + step)] for step in range(6)]
    first = make_run(folder / "first", NEAR_DEFAULT, 6, steps)
    add_checkpoint(first, 6, tiny_model())
    second = make_run(folder / "second", changed(NEAR_DEFAULT, learner={"learning_rate": 3e-4}), 4)
    return report(ReportOptions((str(first.path), str(second.path))))


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.look(DESKTOP)
    browser.open(page)
    return browser


def open_runs(browser: Browser, folder: Path, *runs: RunDirectory) -> None:
    show(browser, folder, *(run_data(run, run.path.name) for run in runs))


def show(browser: Browser, folder: Path, *data: dict[str, Any]) -> None:
    """Write the page of the runs with this data, and open it without errors."""
    (folder / "page.html").write_text(make_page([*data]), encoding="utf-8")
    browser.look(DESKTOP)
    browser.open(folder / "page.html")
    assert browser.errors() == []


def rows(browser: Browser, column: int) -> list[str]:
    """Return the texts of a column of the table of rollouts."""
    return browser.texts(f".rollouts tbody tr:not(.detail) td:nth-child({column})", kind="innerText")


def field(label: str) -> str:
    """Return an expression for the control with this label in the section of rollouts."""
    return (
        f"[...document.querySelectorAll('#rollouts label.field')]"
        f".find(label => label.querySelector('span').textContent === {label!r}).querySelector('select, input')"
    )


def choose(browser: Browser, label: str, value: str) -> None:
    enter(browser, field(label), value)


def enter(browser: Browser, control: str, value: str) -> None:
    """Give the control that the expression returns a value, as a user does."""
    browser.run(f"""(() => {{
      const box = {control};
      box.value = {value!r};
      for (const kind of ["input", "change"]) box.dispatchEvent(new Event(kind));
    }})()""")


def shown(browser: Browser) -> str:
    return browser.run("document.querySelector('#rollouts .count').textContent")  # type: ignore[no-any-return]


def test_it_loads_without_errors_or_other_requests_and_names_every_control(opened: Browser, page: Path) -> None:
    assert opened.errors() == []
    assert opened.requests() == [page.as_uri()]
    assert opened.run("document.getElementById('ranks')") is None  # there is one
    assert "Ranks" not in opened.run("document.getElementById('nav').textContent")
    assert opened.run("document.getElementById('episodes')") is None  # there are none
    assert len(opened.texts(".rollouts th", kind="innerText")) == 7  # none for turns
    assert "better" not in opened.run("document.querySelector('#rollouts .filters').innerText")
    nameless = opened.run("""[...document.querySelectorAll("input, select, button, [role=img], [role=region]")]
      .filter(node => !(node.labels?.length || node.textContent.trim() || node.getAttribute("aria-label")))
      .map(node => node.outerHTML)""")
    assert nameless == []
    levels = opened.run("[...document.querySelectorAll('h1, h2, h3, h4')].map(node => Number(node.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_hostile_texts_are_text_and_another_script_is_not_run(opened: Browser) -> None:
    choose(opened, "Search", "window.hacked")
    assert shown(opened) == "18 of 50 rollouts on this page"
    for place in range(3):
        opened.run(f"document.querySelectorAll('.rollouts .open')[{place}].click()")
    assert opened.run("window.hacked") is None
    assert opened.run("document.querySelectorAll('#rollouts img, #rollouts script').length") == 0
    assert HOSTILE[0] in rows(opened, 3)
    choose(opened, "Search", "right")
    assert any("right ⟨U+202E⟩to left" in text and "⟨U+0000⟩ nothing" in text for text in rows(opened, 3))
    assert opened.errors() == []
    # No script but the page's own can run.
    script = "Object.assign(document.createElement('script'), {textContent: 'window.hacked = 1'})"
    opened.run(f"document.body.append({script})")
    image = "<img src='https://example.invalid/x.png' onerror='window.hacked = 2'>"
    opened.run(f'document.body.insertAdjacentHTML("beforeend", "{image}")')
    opened.settle()
    assert opened.run("window.hacked") is None
    assert any("Content Security Policy" in str(error) for error in opened.errors())


def test_a_run_that_has_only_begun_and_one_of_a_single_step(browser: Browser, tmp_path: Path) -> None:
    begun = RunDirectory(tmp_path / "begun")
    begun.create(NEAR_DEFAULT)
    single = make_run(tmp_path / "single", NEAR_DEFAULT, num_steps=1)
    for runs in ([begun], [single], [begun, single]):
        open_runs(browser, tmp_path, *runs)
        colors = browser.run(f"[...{field('Colour tokens by')}.options].map(option => option.value)")
        assert colors == ["none"]  # no tokenizer, so no tokens
        assert browser.run("document.querySelector('#rollouts .legend').textContent") == ""


@pytest.mark.parametrize(
    ("filters", "number"),
    [  # 6 steps of 2 + 5 rollouts, and 4 of 2
        ({"Run": "0"}, 42), ({"Step": "3"}, 9), ({"Reward from": "0.5"}, 16), ({"to": "0.5"}, 34),
        ({"Outcome": "truncated"}, 6), ({"Outcome": "error"}, 0), ({"Search": "prompt 3"}, 4),
        ({"Search": "WRONG", "Step": "2", "Run": "1"}, 1),
    ],
)  # fmt: skip
def test_filters_of_rollouts(opened: Browser, filters: dict[str, str], number: int) -> None:
    for label, value in filters.items():
        choose(opened, label, value)
    assert shown(opened) == f"{number} of 50 rollouts on this page"
    assert len(rows(opened, 1)) == min(25, number)


def test_the_shared_start_of_prompts_is_left_out_of_the_table(browser: Browser, tmp_path: Path) -> None:
    lead = "Think first, and then answer in tags, as in an example.\n"
    data = run_data(make_run(tmp_path / "run", NEAR_DEFAULT, num_steps=2), "run")
    for row in data["rollouts"]:
        row["prompt"] = f"{lead}Sort {row['step']}{row['sample']}"
    show(browser, tmp_path, data)
    assert rows(browser, 2) == ["… Sort 10", "… Sort 11", "… Sort 20", "… Sort 21"]
    open_first(browser, "think first")
    assert browser.run("document.querySelector('.detail pre').textContent") == f"{lead}Sort 10"


def sort_by(browser: Browser, text: str) -> None:
    buttons = "[...document.querySelectorAll('.rollouts th button')]"
    browser.run(f"{buttons}.find(button => button.textContent === {text!r}).click()")


def test_sorting_and_pages_of_rollouts(opened: Browser) -> None:
    sort_by(opened, "Reward")
    rewards = [float(text) for text in rows(opened, 4)]
    assert rewards == sorted(rewards)
    sort_by(opened, "Reward ↑")
    assert float(rows(opened, 4)[0]) == 1
    assert opened.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    pager = "document.querySelectorAll('.pager button')"
    assert opened.run(f"{pager}[0].disabled") is True
    first = rows(opened, 1)
    opened.run(f"{pager}[1].click()")
    assert len(first) == len(rows(opened, 1)) == 25
    assert first != rows(opened, 1)
    assert opened.run(f"{pager}[1].disabled") is True
    choose(opened, "Run", "1")  # a filter goes back to the first page
    assert len(rows(opened, 1)) == 8


def open_first(browser: Browser, search: str) -> None:
    choose(browser, "Search", search)
    browser.run("document.querySelector('.rollouts .open').click()")
    browser.settle()


def test_a_rollouts_tokens_are_coloured_by_their_log_ratio(opened: Browser, page: Path) -> None:
    open_first(opened, "prompt 105")
    ratios = opened.run("DATA.runs[0].rollouts.find(row => row.prompt === 'prompt 105').ratios")
    painted = "[...document.querySelectorAll('.tokens .token')].map(token => token.style.backgroundColor)"
    for color, ratio in zip(opened.run(painted), ratios, strict=True):
        strength = round(60 * min(1, abs(ratio)))
        assert f"var({'--less' if ratio < 0 else '--more'}) {strength}%" in color
    choose(opened, "Colour tokens by", "none")
    assert opened.run(painted) == [""] * 3
    choose(opened, "Colour tokens by", "logprob")
    assert all("var(--more) 8%" in color for color in opened.run(painted))  # logprobs of -0.5, of 4 nats
    assert opened.texts(".tokens sup") == ["v4", "v5"]
    # They can be read by keyboard.
    opened.run("document.querySelector('.tokens').focus()")
    for _ in range(4):
        opened.press("ArrowRight")
    readout = opened.run("document.querySelector('.detail .readout').textContent")
    assert readout.startswith("token 3 ")
    assert "logprob -0.5, log-ratio " in readout
    assert readout.endswith("version 5")


def figure(title: str) -> str:
    is_it = f"figure => figure.querySelector('h3').textContent.startsWith({title!r})"
    return f"[...document.querySelectorAll('figure')].find({is_it})"


def test_curves_of_any_metric_have_the_runs_values_and_a_run_can_be_hidden(opened: Browser) -> None:
    reward = figure("Training reward")
    lines = opened.run(f"[...{reward}.querySelectorAll('polyline')].map(line => line.getAttribute('points'))")
    assert [len(line.split()) for line in lines] == [6, 4]
    points = np.array([[float(value) for value in point.split(",")] for point in lines[0].split()])
    assert np.ptp(np.diff(points[:, 0])) < 0.2  # equal steps
    rise = np.diff(points[:, 1]) / (224 - 10 - 38)  # of an axis from 0 to 1
    np.testing.assert_allclose(rise, -0.1, atol=0.001)
    bands = opened.run(f"{reward}.querySelectorAll('.band polygon').length")
    assert bands == 1  # the second run has one group per step, and so no standard errors
    enter(opened, "document.querySelector('#any-metric select')", "policy/entropy")
    opened.settle()
    unit, meaning = METRICS["policy/entropy"]
    assert opened.run("document.querySelector('#any-metric h3').textContent") == "policy/entropy"
    assert opened.texts("#any-metric svg text")[-2:] == ["step", unit]
    assert opened.run("document.querySelectorAll('#any-metric polyline').length") == 2
    assert meaning in opened.run("document.querySelector('#any-metric .meaning').textContent")
    opened.run("document.querySelectorAll('.cards input')[0].click()")  # hides the first
    opened.settle()
    assert opened.run(f"{reward}.querySelectorAll('polyline').length") == 1
    assert opened.run(f"{figure('Entropy')}.querySelector('.legend').textContent") == "entropy"


def test_a_chart_can_be_read_by_keyboard_and_by_pointer(opened: Browser) -> None:
    chart = figure("Validation reward")
    opened.run(f"{chart}.querySelector('.plot').focus()")
    opened.press("End")
    opened.press("ArrowLeft")
    readout = f"{chart}.querySelector('.readout').textContent"
    assert opened.run(readout) == "step 4: first 0.4 ± 0.098; second 0.4 ± 0.098"
    place = opened.run(
        f"(() => {{ const plot = {chart}.querySelector('.plot'); plot.scrollIntoView({{block: 'center'}}); "
        "const box = plot.getBoundingClientRect(); return [box.left + 60, box.top + 100] })()"
    )
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    opened.settle()
    assert opened.run(readout) == "step 0: first 0 ± 0.098; second 0 ± 0.098"
    label = opened.run(f"{chart}.querySelector('.plot').getAttribute('aria-label')")
    assert "first: from 0 to 0.6 over 4 points." in label


def test_stacked_bars_add_up_to_the_step(opened: Browser) -> None:
    bars = f"[...{figure('Step by step')}.querySelectorAll('rect')]"
    heights, tops = (opened.run(f"{bars}.map(bar => +bar.getAttribute('{name}'))") for name in ("height", "y"))
    assert len(heights) == 6 * 3
    bottoms = [top + height for top, height in zip(tops, heights, strict=True)]
    assert bottoms[:3] == pytest.approx([224 - 38, tops[0], tops[1]])  # stacked
    assert sum(heights[:3]) == pytest.approx(2.0 / 2.0 * (224 - 10 - 38), rel=0.01)  # 2 s, an axis to 2 s
    assert heights[:3] == pytest.approx([sum(heights[:3]) * share for share in (0.375, 0.5, 0.125)])
    label = opened.run("document.querySelector('.actor .shares').getAttribute('aria-label')")
    assert label == "learner: train 50%, snapshot 38%, wait for batch 13%"


def test_stages_have_colours_of_their_own_and_the_largest_is_first(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", NEAR_DEFAULT, num_steps=2)
    stages = ["train", "sync", "pause", "load_weights", "write", "wait_for_batch", "snapshot"]
    times = {f"time/learner/{stage}_s": 1.0 for stage in stages} | {"time/scorer/wait_for_groups_s": 7.0}
    times |= {"time/weight_sync/wait_for_version_s": 3.0, "time/weight_sync/wait_for_learner_s": 4.0}
    of_generator = {"generate": 9.0, "pause": 0.01, "wait_for_prompts": 20.0}
    times |= {f"time/generator-0/{stage}_s": seconds for stage, seconds in of_generator.items()}
    write_rows(run.metrics_path, [metrics_of(step) | times for step in (1, 2)])
    open_runs(browser, tmp_path, run)
    bars = "[...document.querySelectorAll('.actor .shares')]"
    colors = browser.run(f"{bars}.map(bar => [...bar.children].map(part => part.style.backgroundColor))")
    generator, learner, (waiting,), weight_sync = colors
    assert len(set(learner)) == len(stages)
    assert waiting == "var(--wait)"
    assert learner.count(waiting) == 1
    assert len(set(weight_sync)) == 2  # two kinds of waiting, one of them paler
    assert waiting in weight_sync[1]
    assert browser.run("document.querySelector('#time select').value") == "learner"
    first = "document.querySelector('.actor')"
    assert browser.texts(".legend > span", first) == ["wait for prompts 69%", "generate 31%"]
    swatches = browser.run(f"[...{first}.querySelectorAll('.swatch')].map(swatch => swatch.style.cssText)")
    assert swatches == [f"--color: {color};" for color in generator]


@pytest.mark.parametrize(("size", "scheme"), SCREENS)
@pytest.mark.kept("size0-light")
def test_ranks_have_curves_and_a_table(browser: Browser, tmp_path: Path, size: Any, scheme: str) -> None:
    run = make_run(tmp_path / "ranks", NEAR_DEFAULT)
    write_rows(run.metrics_path, [ranks_of(step) for step in range(1, 7)])
    open_runs(browser, tmp_path, run)
    browser.look(size, scheme)
    browser.settle()
    assert browser.run(f"{figure('Time in collectives')}.querySelectorAll('polyline').length") == 2
    slowest = figure("Slowest rank")
    assert browser.run(f"{slowest}.querySelectorAll('polyline').length") == 0
    heights = browser.run(f"[...{slowest}.querySelectorAll('circle')].map(dot => dot.getAttribute('cy'))")
    assert len(set(heights)) == 2
    assert heights == heights[:2] * 3
    assert browser.texts(".tick", slowest)[:2] == ["0", "1"]  # no rank 0.5
    table = "[...document.querySelectorAll('#ranks tr')].map(row => [...row.children].map(c => c.textContent))"
    memory = ["Process memory", "GPU memory, peak"]
    assert browser.run(table) == [
        ["Rank", "In collectives per step", "Of the step", "Steps as the slowest", *memory],
        ["learner-0", "0.25 s", "12.5%", "50%", "1.75 GiB", "10 GiB"],
        ["learner-1", "0.255 s", "12.8%", "50%", "2.75 GiB", "11 GiB"],
    ]
    assert browser.texts(".tick", figure("Memory of each rank's process"))[:4] == ["0", "1", "2", "3"]  # GiB
    assert browser.run("document.documentElement.scrollWidth") == size[0]
    contrasts: dict[str, Any] = browser.run(CONTRASTS)
    assert {name: value for name, value in contrasts.items() if value < 4.5} == {}


def test_a_run_with_ranks_is_compared_with_one_without(browser: Browser, tmp_path: Path) -> None:
    one, two = (make_run(tmp_path / name, NEAR_DEFAULT) for name in ("one", "two"))
    rows = [ranks_of(step) for step in range(1, 7)]
    on_a_cpu = [{name: value for name, value in row.items() if "device_peak" not in name} for row in rows]
    write_rows(two.metrics_path, on_a_cpu)
    open_runs(browser, tmp_path, one, two)
    names = browser.run("[...document.querySelectorAll('#ranks h3')].map(heading => heading.firstChild.data)")
    assert names[-1] == "two"
    assert "Peak memory of each rank's GPU" not in names
    assert browser.run("document.querySelectorAll('#ranks table').length") == 1
    assert "GPU" not in browser.run("document.querySelector('#ranks table').textContent")
    legend = f"{figure('Time in collectives')}.querySelector('.legend').textContent"
    assert browser.run(legend) == "two, learner-0two, learner-1"


def test_the_configurations_differences_come_first_then_changed_keys_then_the_rest(opened: Browser) -> None:
    tables = "[...document.querySelectorAll('#configuration .scroll')]"
    assert opened.run(f"{tables}.map(table => table.getAttribute('aria-label'))") == [
        "Differences between the runs", "Changed from the defaults", "Defaults",
    ]  # fmt: skip
    keys = f"{tables}.map(table => [...table.querySelectorAll('tbody th')].map(cell => cell.textContent))"
    differing, changed_keys, others = opened.run(keys)
    assert differing == ["learner.learning_rate"]
    followed = [f"sampling.{key}" for key in ("max_tokens", "min_tokens", "stop")]  # from prompts and model
    assert changed_keys == ["generator.num_gpus", "model.dtype", *followed]
    assert len(others) > 100
    assert opened.texts("td", f"{tables}[0]") == ["1e-05", "0.0003"]
    is_whole = "table => table.scrollHeight === table.clientHeight"
    assert opened.run(f"{tables}.slice(0, 2).every({is_whole})")  # no changed key is hidden below the edge
    assert opened.run(f"{tables}[2].checkVisibility()") is False
    opened.run("document.querySelector('#configuration summary').click()")
    enter(opened, "document.querySelector('#configuration input')", "cliprange_h")
    assert opened.run(f"{tables}[2].checkVisibility()") is True
    assert opened.run(keys)[2] == ["algorithm.cliprange_high"]


def test_errors_are_at_the_top_and_prompts_are_shown_before_and_after(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", NEAR_DEFAULT, num_steps=2)
    num_answers = NEAR_DEFAULT.rollouts_per_step
    write_rows(run.metrics_path, [metrics_of(step) | {"reward/errors": num_answers} for step in (1, 2)])
    event = {"time": 1.0, "kind": "detected_reward_errors", "step": 1, "text": f"failed\n on {HOSTILE[0]}"}
    write_rows(run.events_path, [event])
    for step in (0, 2):
        groups = [make_group(make_item(0), [make_completion([5], text=f"{HOSTILE[1]} at {step}")], [step / 2])]
        if step == 0:
            groups[0].errors[0] = "ValueError: no number"
        write_rollouts(run.evaluations / f"{step_name(step)}.parquet", step, groups)
    open_runs(browser, tmp_path, run)
    texts = browser.texts(".notice.error")
    assert texts[0].startswith(f"None of the {2 * num_answers:,} responses could be graded")
    assert texts[1] == event["text"]
    assert browser.run("document.querySelector('main article').firstElementChild.className") == "notice error"
    rows = "[...document.querySelectorAll('.samples tr')].map(row => [...row.children].map(c => c.innerText))"
    head, row = browser.run(rows)
    assert head == ["Prompt", "Ground truth", "Step 0", "Step 2"]
    assert row[0] == "prompt 0"
    assert [text.split() for text in row[2:]] == [
        [*HOSTILE[1].split(), "at", "0", "not", "graded:", "ValueError:", "no", "number"],
        [*HOSTILE[1].split(), "at", "2", "reward", "1"],
    ]
    assert browser.run("window.hacked") is None


CONTRASTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true}), parsed = {};
  const parse = (color) => parsed[color] ??= (() => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255);
  })();
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const ground = (node) => { const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [1, 1, 1]); };
  const light = (rgb) => rgb.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    if (node.closest("select, script, noscript") || !node.getClientRects().length || node.disabled) continue;
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())) continue;
    const style = getComputedStyle(node), below = ground(node);
    const ink = over(parse(node instanceof SVGElement ? style.fill : style.color), below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
    const name = `${node.tagName}.${node.getAttribute("class") ?? ""}`;
    found[name] = Math.min(found[name] ?? 99, (a + 0.05) / (b + 0.05));
  }
  return found;
})()"""


@pytest.mark.parametrize(("size", "scheme"), SCREENS)
@pytest.mark.kept("size0-light", "size3-dark")
def test_every_text_has_enough_contrast_and_nothing_is_wider_than_the_window(
    browser: Browser, page: Path, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    """All text meets WCAG 2.2, success criterion 1.4.3: a contrast of 4.5 to 1."""
    browser.look(size, scheme)
    browser.open(page)
    open_first(browser, "prompt 105")
    contrasts: dict[str, Any] = browser.run(CONTRASTS)
    assert len(contrasts) > 20
    assert {name: value for name, value in contrasts.items() if value < 4.5} == {}
    assert browser.run("document.documentElement.scrollWidth") == size[0]
    box = "(plot => { const box = plot.getBoundingClientRect(); return [box.left, box.right] })"
    plots = browser.run(f"[...document.querySelectorAll('.plot svg')].map{box}")
    assert len(plots) > 8
    assert all(left >= 0 and right <= size[0] and right - left > 250 for left, right in plots)
    browser.screenshot(tmp_path / "page.png")
    picture = imread(tmp_path / "page.png")[..., :3]
    assert picture.shape[:2] == (size[1], size[0])
    assert picture.mean() < 0.3 if scheme == "dark" else picture.mean() > 0.8
    assert picture.std() > 0.03  # it is not blank


def test_a_long_runs_page_is_quick_and_a_few_megabytes(browser: Browser, tmp_path: Path) -> None:
    steps = [[group(0, ["a response of many words " * 400] * 500, size=2000)]]
    open_runs(browser, tmp_path, make_run(tmp_path / "long", NEAR_DEFAULT, num_steps=6_000, steps=steps))
    assert browser.run("performance.now()") < 10_000
    assert 500_000 < (tmp_path / "page.html").stat().st_size < 5_000_000
    assert "each point is the mean of 2 steps" in browser.run("document.querySelector('.cards').textContent")
    sampled = browser.run("document.querySelector('#rollouts').textContent")
    assert "a random sample, 400 of 500 rollouts" in sampled
    assert 300 < browser.run(f"{figure('Step by step')}.querySelectorAll('rect').length") < 3 * 1440 / 4
