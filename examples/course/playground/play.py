"""`python -m examples.course playground`: run an example, print its results, and write them with a picture.

torch and matplotlib take seconds to import, so the functions import them after checking their arguments.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from examples.course.playground.settings import make_settings
from grpo_ray.errors import INTERRUPTED, RunError
from grpo_ray.records.durable import write_text
from grpo_ray.run.machine import describe_machine

if TYPE_CHECKING:
    from examples.course.playground.comparison import Run
    from examples.course.playground.policy_gradient import Point

MAX_SAMPLES = 1000  # 20,000 estimates from more would not fit into memory


def run_sorting(
    given: Mapping[str, str], compare: str | None, num_seeds: int, output: str, command: str
) -> int:
    """Train every setting with every seed; after Ctrl-C the finished runs are written too.

    Args:
        given: settings as typed.
        compare: one of `COMPARISONS`, or None for one setting.
        num_seeds: runs per setting.
        output: the folder for results.
        command: the command as typed.

    Returns:
        The exit status.

    Raises:
        RunError: a setting or the folder is not valid, before anything starts.
    """
    settings = make_settings(given, compare)
    folder = _make_folder(output, f"sorting-{compare}" if compare else "sorting")
    from examples.course.playground.comparison import summarize, table, train_all, variants
    from examples.course.playground.pictures import plot_runs
    from examples.course.playground.task import make_task

    task, tried = make_task(settings.reward, settings.numbers), variants(settings, compare)
    num_runs, started = len(tried) * num_seeds, perf_counter()
    runs: list[Run] = []
    print(
        f"sorting {settings.numbers} numbers: {num_runs} runs of {settings.steps} steps, each of "
        f"{settings.responses} responses to {len(task.prompts)} prompts and {settings.updates} gradient steps; "
        f"the sorted response has reward {task.best_reward:g}"
    )
    try:
        for run in train_all(tried, task, num_seeds):
            runs.append(run)
            end = run.points[-1]
            print(f"  seed {run.seed}, {run.label}: reward {end.reward:.2f}, right {end.right:.0%}", flush=True)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(runs)} of {num_runs} runs" + ("" if runs else "; nothing was written"))
    if runs:
        rows = summarize(runs)
        print(f"\n{table(rows)}\n")
        plot_runs(runs, settings, compare, task.best_reward, folder / "rewards.png")
        figures = {
            "settings": settings.model_dump(),
            "compare": compare,
            "best_reward": task.best_reward,
            "seconds": round(perf_counter() - started, 1),
            "summary": [asdict(row) for row in rows],
            "runs": [{"label": run.label, "seed": run.seed, **_columns(run.points)} for run in runs],
        }
        _finish(folder, "rewards.png", command, figures)
    return 0 if len(runs) == num_runs else INTERRUPTED


def run_baseline(num_samples: int, output: str, command: str) -> None:
    """Show what the baseline does to the two states' deltas, and to estimates from `num_samples` samples."""
    if num_samples > MAX_SAMPLES:
        raise RunError(f"--samples {num_samples}: give at most {MAX_SAMPLES}")
    folder = _make_folder(output, "baseline")
    from examples.course.playground.baseline import make_estimates
    from examples.course.playground.pictures import plot_baseline

    kinds = {"rewards": make_estimates("raw"), "minus the state's mean": make_estimates("mean")}
    draws = {label: estimates.draw(num_samples) for label, estimates in kinds.items()}
    figures = {
        label: {
            "deltas": estimates.deltas.tolist(),
            "delta_std": estimates.delta_std,
            "gradient_mean": estimates.mean.tolist(),
            "gradient_variance": estimates.variance,
            "wrong_sign_frac": (draws[label] < 0).float().mean().item(),
        }
        for label, estimates in kinds.items()
    }
    for label, figure in figures.items():
        print(
            f"{label}: {figure['deltas']}\n"
            f"  standard deviation of the deltas: {figure['delta_std']:.2f}\n"
            f"  gradient of one sample: mean {figure['gradient_mean']}, "
            f"variance {figure['gradient_variance']:.2f}\n"
            f"  estimates from {num_samples} samples that make s1's better action less likely: "
            f"{figure['wrong_sign_frac']:.1%}"
        )
    plot_baseline(kinds, draws, num_samples, folder / "baseline.png")
    _finish(folder, "baseline.png", command, {"samples": num_samples, "deltas": figures})


def run_frozen(output: str, command: str) -> None:
    """Show the three ratios' gradients at the lecture's w, and where ascent on them ends."""
    folder = _make_folder(output, "frozen")
    from examples.course.playground.frozen import LECTURE_W, RATIOS, ascend, slope
    from examples.course.playground.pictures import plot_frozen

    print(f"p = sigmoid(w); at w = {LECTURE_W:g}, where every ratio is 1:")
    figures = {}
    for label, ratio in RATIOS.items():
        p = ascend(ratio)
        figures[label] = {"gradient": slope(ratio, LECTURE_W), "p_at_start": p[0], "p_at_end": p[-1]}
        print(
            f"  {label}: gradient {figures[label]['gradient']:+.4f}; "
            f"ascent takes p from {p[0]:.2f} to {p[-1]:.2f}"
        )
    plot_frozen(folder / "frozen.png")
    _finish(folder, "frozen.png", command, {"w": LECTURE_W, "ratios": figures})


def _make_folder(output: str, name: str) -> Path:
    folder = Path(output) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--output {output}: cannot write there ({error.strerror}); give a folder") from error
    return folder


def _columns(points: Sequence["Point"]) -> dict[str, list[float]]:
    """Return a list for each of a point's fields; 6 digits are more than a picture shows."""
    names = [field.name for field in fields(points[0])]
    return {name: [float(f"{getattr(point, name):.6g}") for point in points] for name in names}


def _finish(folder: Path, picture: str, command: str, figures: Mapping[str, Any]) -> None:
    text = json.dumps({"command": command, "machine": describe_machine(), **figures})
    write_text(folder / "figures.json", text + "\n")
    print(f"written: {folder / picture}, {folder / 'figures.json'}")
