"""The run's reward curve as PNG and as text, and the ending that shows it."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion, make_group, make_item
from matplotlib.figure import Figure
from matplotlib.image import imread
from report_runs import write_lines

from grpo_ray.records.checkpoint import CheckpointState, CheckpointStore
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import RunDirectory, step_name
from grpo_ray.tools.drawing.figures import draw_reward_curve
from grpo_ray.tools.drawing.terminal_curve import terminal_curve
from grpo_ray.tools.report.ending import OWN, print_ending
from grpo_ray.tools.report.run_header import warnings_in

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
def test_plot_is_written(
    tmp_path: Path, metrics: list[dict[str, Any]] | None, evaluations: list[dict[str, Any]] | None
) -> None:
    paths = tmp_path / "metrics.jsonl", tmp_path / "summary.jsonl"
    for path, rows in zip(paths, (metrics, evaluations), strict=True):
        if rows is not None:
            write_lines(path, rows)
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


def test_terminal_curve_averages_and_interpolates() -> None:
    many = terminal_curve([(step, float(step % 2)) for step in range(100)], width=10, height=2)
    assert many.splitlines()[:2] == ["1.00 ┤", "0.50 ┤██████████"]
    few = terminal_curve([(0, 0.0), (90, 0.9)], width=10, height=1).splitlines()
    assert few[0].endswith("┤ ▁▂▃▃▄▅▅▆▇")


@pytest.mark.parametrize(
    ("points", "part"),
    [
        ([], "(no points yet)"),
        ([(1, float("nan"))], "(no points yet)"),
        ([(7, 17.0)], "17.50 ┤"),
        ([(5, -2.0), (1, 3.0)], "-2.00 └"),
        ([(10**9, 0.1), (10**9 + 1, 0.2)], "1000000000 1000000001"),
    ],
)
def test_terminal_curve_of_odd_points(points: list[tuple[int, float]], part: str) -> None:
    assert part in terminal_curve(points, width=12)


# ---- the ending ----


def finished_run(folder: Path, events: list[dict[str, Any]] | None) -> RunDirectory:
    """Write a run of five steps with two evaluations, and without an events file if `events` is None."""
    run = RunDirectory(folder)
    run.evaluations.mkdir()
    write_lines(run.metrics_path, METRICS)
    write_lines(run.evaluations_summary_path, EVALUATIONS)
    for step in (0, 5):
        groups = [make_group(make_item(0), [make_completion([5], text=f"response at {step}")], [1.0])]
        write_rollouts(run.evaluations / f"{step_name(step)}.parquet", step, groups)
    if events is not None:
        write_lines(run.events_path, events)
    return run


def ending(run: RunDirectory, is_local: bool = False) -> list[str]:
    lines: list[str] = []
    print_ending(lines.append, RunDirectory(run.path, is_local))
    return lines


@pytest.mark.slow
def test_ending_shows_the_first_and_last_samples_and_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(ending(finished_run(tmp_path, None)))
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


@pytest.mark.slow
def test_ending_of_a_long_run_does_not_hold_its_metrics_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path, None)
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


@pytest.mark.slow
def test_ending_lists_the_groups_set_aside_and_the_warnings_of_detectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *_: None)  # slow, and drawn in other tests
    text = "step 3: 6% of the tokens have no gradient; see docs/failures.md#a-wrong-mask"
    kinds = [("set_aside", 19), ("group_failed", 7), ("set_aside", 4), ("set_aside", 19)]
    events = [{"kind": kind, "step": 1, "text": "?", "group_id": group_id} for kind, group_id in kinds]
    events += [{"kind": kind, "step": 3, "text": text} for kind in ("restored", "detected_wrong_mask")]
    run = finished_run(tmp_path, events)
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
