"""The run's pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from grpo_ray.report.plots import plot_reward_curve
from grpo_ray.report.terminal_curve import terminal_curve


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TIMES = {"timing/wait_for_batch_s": 0.5, "timing/train_s": 1.0, "timing/step_s": 1.6}
METRICS = [{"step": step, "reward/mean": step / 10, **TIMES} for step in range(1, 6)]
EVALUATIONS = [{"step": step, "reward": 0.2 + step / 20, "reward_standard_error": 0.05} for step in (0, 5)]


@pytest.mark.parametrize(
    ("metrics", "evaluations"),
    [
        (METRICS, EVALUATIONS),
        ([{"step": 1, "reward/mean": 0.5}], []),  # no timings, no evaluation yet
        ([], EVALUATIONS[:1]),
        ([], []),
        ([{"step": 1, "reward/mean": None, "timing/step_s": 0.0}], [{"step": 0, "reward": -3.0}]),
        (
            [*METRICS, {"step": 3, "reward/mean": 9.0, **TIMES, "timing/step_s": 90.0}],
            EVALUATIONS,
        ),  # step 3 again
    ],
)
def test_plot_is_written(
    tmp_path: Path, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> None:
    out = tmp_path / "curve.png"
    plot_reward_curve(
        write_lines(tmp_path / "metrics.jsonl", metrics),
        write_lines(tmp_path / "summary.jsonl", evaluations),
        out,
    )
    image = imread(out)
    assert image.shape[:2] == (800, 1200)
    assert image.std() > 0.01  # something is drawn


def test_plot_of_a_run_without_files(tmp_path: Path) -> None:
    plot_reward_curve(tmp_path / "none.jsonl", tmp_path / "none.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()


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
