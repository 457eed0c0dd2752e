"""The run's web page and its command: one run's data, safe JSON, refusals; and the reward curve."""

import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion, make_group, make_item, write_rows
from commands import Capture, printed, refused
from matplotlib.figure import Figure
from matplotlib.image import imread
from report_runs import HOSTILE, NEAR_DEFAULT, Rows, group, make_run, metrics_of
from test_top import NOW, make_state

from grpo_ray.config import Config
from grpo_ray.records.checkpoint import CheckpointState, CheckpointStore
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import RunDirectory, step_name
from grpo_ray.tools.drawing.figures import draw_reward_curve
from grpo_ray.tools.drawing.terminal_curve import terminal_curve
from grpo_ray.tools.report.ending import OWN, print_ending
from grpo_ray.tools.report.rollout_sample import StepFiles
from grpo_ray.tools.report.run_data import run_data
from grpo_ray.tools.report.run_header import RunTotals, about, run_facts, warnings_in
from grpo_ray.tools.report.write_report import embedded_json, make_page, names_of
from grpo_ray.tools.top.bottleneck import bottleneck
from grpo_ray.watch.run_state import Ending, LiveStatus


def test_data_of_a_run(tmp_path: Path, tiny_config: Config) -> None:
    steps = [[group(step), group(step, ["a", "b", "c", "d"], group_id=100 + step)] for step in range(6)]
    data = run_data(make_run(tmp_path / "run", tiny_config, steps=steps), "a run", "none")
    training, validation = data["series"]
    assert training["columns"]["reward/mean"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert training["standard_errors"]["reward/mean"] == [0.125] * 6  # groups of means 1/2 and 1/4
    assert (validation["steps"], validation["columns"]["eval/reward"]) == ([0, 2, 4, 6], [0.0, 0.2, 0.4, 0.6])
    assert validation["standard_errors"]["eval/reward"] == [0.05] * 4
    assert "mismatch/kl" not in training["columns"]  # null in every line
    assert data["facts"] == {
        "steps": "6", "validation reward": "0.000 → 0.600", "best": "0.600 at step 6",
        "training reward": "0.100 → 0.600", "rollouts": "36", "time in steps": "12 s",
        "trained": "100 tokens/s", "largest lag": "1",
    }  # fmt: skip
    assert data["config"]["algorithm.loss"] == "grpo_clip"
    assert data["config"]["model.tiny.tie_embeddings"] in ("true", "false")
    assert data["config"]["algorithm.cliprange"] == "null"
    assert {"generator.engine", "sampling.max_tokens"} <= set(data["changed"]) <= data["config"].keys()
    assert "algorithm.loss" not in data["changed"]
    equal = [{"step": step, "reward": 1.0} for step in (20, 40)]
    assert run_facts(RunTotals(), equal, StepFiles([], []))["best"] == "1.000 at step 40"  # as it is kept


def test_a_runs_settings_and_ending(run: RunDirectory, tiny_config: Config) -> None:
    run.create(tiny_config)
    assert about(run, None) == {"state": "unknown (there is no state.json)"}
    data = run_data(run, "run")  # of a run that has only begun
    assert data["facts"] == {"steps": "none yet", "rollouts": "not saved"}
    assert (data["rollouts"], data["stages"], data["ranks"]) == ([], {}, [])
    state = make_state(time=NOW + 60, began=NOW, host="node-1", num_steps=1000, now=LiveStatus(step=12))
    run.state_path.write_text(state.model_dump_json())
    shown = about(run, tiny_config)
    assert shown["state"] == "not finished: training, step 12 of 1,000, 2023-11-14 22:14 UTC"
    assert shown["last start"] == "2023-11-14 22:13 UTC, on node-1"
    assert shown["task"] == "sorting"
    assert shown["run"].endswith(f"grpo_clip, learning rate {tiny_config.learner.learning_rate:g}")
    failed = state.model_copy(update={"ending": Ending(kind="failed", text="no GPU")})
    run.state_path.write_text(failed.model_dump_json())
    data = run_data(run, "run")
    assert data["errors"] == ["failed at step 12 of 1,000, 2023-11-14 22:14 UTC: no GPU"]
    assert next(iter(data["about"])) == "last start"


def test_facts_problems_and_the_bottleneck_are_of_all_steps(tmp_path: Path, tiny_config: Config) -> None:
    run = make_run(tmp_path / "run", tiny_config, num_steps=2)
    rows = [metrics_of(step) | {"reward/errors": 1.0, "rollout/truncated_frac": 0.5} for step in range(1, 31)]
    write_rows(run.metrics_path, rows)
    summary = {"step": 6, "reward": 0.5, "num_errors": 3, "num_examples": 4, "num_samples": 2}
    write_rows(run.evaluations_summary_path, [summary])
    data = run_data(run, "run", "none")
    whole = 30 * tiny_config.rollouts_per_step  # of all steps, not of the last ones alone
    assert data["errors"][0].startswith(f"30 of {whole:,} responses could not be graded")
    assert data["errors"][1] == "3 of 8 responses of the validation at step 6 could not be graded"
    assert data["hints"][0].startswith("50% of the responses are cut off")
    assert data["hints"][1] == bottleneck(rows)
    # 200 tokens in each step: the mean of the steps' rates is 111. An earlier release wrote no age.
    timed = [{"timing/step_s": seconds, "lag/updates/max": age} for seconds, age in ((1.0, 3.0), (9.0, None))]
    write_rows(run.metrics_path, [metrics_of(step) | row for step, row in enumerate(timed, start=1)])
    facts = run_data(run, "run", "none")["facts"]
    assert (facts["trained"], facts["time in steps"]) == ("40 tokens/s", "10 s")
    assert facts["largest lag"] == "1 (3 updates)"


def script_data(page: str) -> Any:
    """Return the page's JSON as a browser finds it: up to the first `</script`."""
    inside = page.partition('<script type="application/json" id="data">')[2]
    return json.loads(re.split("</script", inside, maxsplit=1, flags=re.I)[0])


def test_hostile_texts_arrive_intact_and_add_no_script(tmp_path: Path, tiny_config: Config) -> None:
    embedded = embedded_json({text: [text, math.nan] for text in HOSTILE})
    assert not re.search("[<>&\u2028\u2029]", embedded)
    assert json.loads(embedded) == {text: [text, None] for text in HOSTILE}
    run = make_run(tmp_path / "run", tiny_config, num_steps=1, steps=[[group(0, HOSTILE)]])
    page = make_page([run_data(run, HOSTILE[0])])
    assert [row["response"] for row in script_data(page)["runs"][0]["rollouts"]] == HOSTILE
    assert len(re.findall("<script", page)) == 2
    assert "<title>&lt;/script&gt;" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)


def test_planted_links_are_not_followed(tmp_path: Path, tiny_config: Config, capsys: Capture) -> None:
    run, mine = make_run(tmp_path / "run", tiny_config, num_steps=1), tmp_path / ".bashrc"
    mine.write_text("mine")
    for name in ("report.html", ".report.html.partial"):
        (run.path / name).symlink_to(mine)
    printed(capsys, "report", run.path, "--log-ratio", "none")
    assert mine.read_text() == "mine"
    assert "<html" in (run.path / "report.html").read_text()


@pytest.mark.slow
def test_the_command_writes_a_page_into_the_run(tmp_path: Path, tiny_config: Config, capsys: Capture) -> None:
    runs = [make_run(tmp_path / name, tiny_config).path for name in ("first", "second")]
    assert f"{runs[0] / 'report.html'}  (" in printed(capsys, "report", runs[0])
    page = (runs[0] / "report.html").read_text(encoding="utf-8")
    assert [run["name"] for run in script_data(page)["runs"]] == ["first"]
    printed(capsys, "report", *runs, "--rollouts", "4", "--seed", "-1")
    data = script_data((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [len(run["rollouts"]) for run in data["runs"]] == [2, 2]
    printed(capsys, "report", runs[1], "--output", tmp_path / "other.html")
    assert (tmp_path / "other.html").exists()
    assert not (runs[1] / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{folder}"], "{folder}: no run to report on (it has no config.yaml)"),
        (["{run}", "{run}/."], "{run}: given 2 times; give each run once"),
        (["{run}", "--output", "{folder}"], "--output: {folder} is a folder; give a file such as report.html"),
        (["{run}", "--output", "{folder}/no/x.html"], "there is no folder {folder}/no; give a file"),
        (["{run}", "--log-ratio", "last"], "{run} has no checkpoint yet"),
    ],
)
def test_wrong_arguments(tmp_path: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    run = make_run(tmp_path / "run", NEAR_DEFAULT).path
    given = [argument.format(run=run, folder=tmp_path) for argument in arguments]
    assert message.format(run=run, folder=tmp_path) in refused(capsys, "report", *given)
    assert not list(tmp_path.rglob("*.html"))


def test_a_damaged_file_is_named(tmp_path: Path, tiny_config: Config, capsys: Capture) -> None:
    run = make_run(tmp_path / "run", tiny_config)
    whole = run.rollouts_path(3).read_bytes()
    for damaged in (b"no parquet", whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :]):
        run.rollouts_path(3).write_bytes(damaged)
        assert f"{run.rollouts_path(3)}: not a Parquet file" in refused(capsys, "report", run.path)
    run.rollouts_path(3).unlink()
    run.metrics_path.write_text('{"step": 1}\nno json\n{"step": 2}\n')
    assert f"{run.metrics_path}, line 2: not valid JSON" in refused(capsys, "report", run.path)


def test_runs_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    assert names_of([tmp_path / n for n in ("a/run", "b/run", "b/other")]) == ["a/run", "b/run", "other"]


# ---- the run's reward curve as PNG and as text, and the ending that shows it ----


TIMES = {"timing/wait_for_batch_s": 0.5, "timing/train_s": 1.0, "timing/step_s": 1.6}
METRICS = [{"step": step, "reward/mean": step / 10, **TIMES} for step in range(1, 6)]
EVALUATIONS = [{"step": step, "reward": 0.2 + step / 20, "reward_standard_error": 0.05} for step in (0, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metrics", "evaluations"),
    [
        ([*METRICS, {"step": 3, "reward/mean": 9.0, **TIMES, "timing/step_s": 90.0}], EVALUATIONS),  # 3 twice
        ([{"step": 1, "reward/mean": None, "timing/step_s": 0.0}], [{"step": 0, "reward": -3.0}]),
        (None, None),  # no files
    ],
)
def test_plot_is_written(tmp_path: Path, metrics: Rows | None, evaluations: Rows | None) -> None:
    paths = tmp_path / "metrics.jsonl", tmp_path / "summary.jsonl"
    for path, rows in zip(paths, (metrics, evaluations), strict=True):
        if rows is not None:
            write_rows(path, rows)
    draw_reward_curve(*paths).savefig(tmp_path / "curve.png")
    image = imread(tmp_path / "curve.png")
    assert image.shape[:2] == (800, 1200)
    assert image.std() > 0.01  # it is not blank


def test_terminal_curve_exactly() -> None:
    text = terminal_curve([(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.0)], "reward", width=4, height=4)
    assert text.splitlines() == [
        "reward",
        "1.00 ┤   █",
        "     │   █",
        "0.50 ┤  ██",
        "     │ ███",
        "0.00 └────",
        "      0  3",
    ]
    # Points are averaged, and interpolated.
    many = terminal_curve([(step, float(step % 2)) for step in range(100)], width=10, height=2)
    assert many.splitlines()[:2] == ["1.00 ┤", "0.50 ┤██████████"]
    few = terminal_curve([(0, 0.0), (90, 0.9)], width=10, height=1).splitlines()
    assert few[0].endswith("┤ ▁▂▃▃▄▅▅▆▇")


@pytest.mark.parametrize(
    ("points", "part"),
    [([], "(no points yet)"), ([(1, float("nan"))], "(no points yet)"), ([(7, 17.0)], "17.50 ┤"),
     ([(5, -2.0), (1, 3.0)], "-2.00 └"), ([(10**9, 0.1), (10**9 + 1, 0.2)], "1000000000 1000000001")],
)  # fmt: skip
def test_terminal_curve_of_odd_points(points: list[tuple[int, float]], part: str) -> None:
    assert part in terminal_curve(points, width=12)


def finished_run(folder: Path) -> RunDirectory:
    """Write a run of five steps with two evaluations."""
    run = RunDirectory(folder)
    run.evaluations.mkdir()
    write_rows(run.metrics_path, METRICS)
    write_rows(run.evaluations_summary_path, EVALUATIONS)
    for step in (0, 5):
        groups = [make_group(make_item(0), [make_completion([5], text=f"response at {step}")], [1.0])]
        write_rollouts(run.evaluations / f"{step_name(step)}.parquet", step, groups)
    return run


def ending(run: RunDirectory, is_local: bool = False) -> list[str]:
    lines: list[str] = []
    print_ending(lines.append, RunDirectory(run.path, is_local))
    return lines


@pytest.mark.slow
def test_ending_shows_samples_warnings_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path)
    text = "\n".join(ending(run))
    assert "Set aside" not in text
    assert "Samples at step 0:\n  reward 1  'prompt 0' -> 'response at 0'" in text
    assert "Samples at step 5:\n  reward 1  'prompt 0' -> 'response at 5'" in text
    page, _, anchor = OWN.partition("#")
    assert f"## {anchor.replace('-', ' ').capitalize()}" in Path(page).read_text()
    assert f"resume {tmp_path} algorithm.num_steps=10 " in text.splitlines()[-1]
    assert (tmp_path / "reward_curve.png").exists()
    assert OWN in text
    monkeypatch.chdir(tmp_path)
    text = "\n".join(ending(RunDirectory(tmp_path), is_local=True))
    assert OWN not in text
    assert f"resume {tmp_path} --local algorithm.num_steps=10 " in text
    monkeypatch.setattr(Figure, "savefig", lambda *_: None)  # slow, and drawn by now
    text = "step 3: 6% of the tokens have no gradient; see docs/failures.md#a-wrong-mask"
    kinds = [("set_aside", 19), ("group_failed", 7), ("set_aside", 4), ("set_aside", 19)]
    events = [{"kind": kind, "step": 1, "text": "?", "group_id": group_id} for kind, group_id in kinds]
    events += [{"kind": kind, "step": 3, "text": text} for kind in ("restored", "detected_wrong_mask")]
    write_rows(run.events_path, events)
    told = [line for line in ending(run) if "Set aside" in line or "Warning" in line]
    aside = f"\nSet aside, never finished: groups 4, 19 (see {run.events_path})"
    assert told == [f"\nWarning at {text}", aside]
    assert warnings_in(run.events_path) == [text]
    store = CheckpointStore(run)
    store.begin(3)
    store.commit(3, CheckpointState(3, {"set_aside": [4]}, {}), {})  # 19 was trained after a restore
    assert aside.replace("4, 19", "4") in ending(run)
    run.evaluations_summary_path.unlink(missing_ok=True)
    assert "All 5 steps are done" in "".join(ending(run))


@pytest.mark.slow
def test_ending_of_a_long_run_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda *_: None)  # slow while memory is traced
    many = {f"time/generator-{index}/generate_s": 0.125 for index in range(300)}
    with run.metrics_path.open("w") as file:
        for step in range(1, 301):
            file.write(json.dumps({"step": step, "reward/mean": 0.5, **TIMES, **many}) + "\n")
    ending(run)  # imports and caches what the drawing needs
    tracemalloc.start()
    text = "\n".join(ending(run))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "algorithm.num_steps=600" in text
    assert peak < run.metrics_path.stat().st_size  # 3 MB
