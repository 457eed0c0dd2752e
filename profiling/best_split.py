"""The best split of 8, 64 and 1,024 GPUs between Learner and Generators, by simulation; see docs/lab/scale.md.

    python profiling/best_split.py splits --gpus 64 --out split-64.json
    python profiling/best_split.py schedules --gpus 64 --learner 16 --out schedules-64.json
    python profiling/best_split.py draw docs/lab/scale split-*.json

Every point is a run of the package's own controller on simulated actors (`grpo-ray simulate`). The speeds are
those that the planner assumes for a model of 7.6 billion parameters (Qwen2.5-7B) on H100; their sources
are in tools/planning/hardware.py. None was measured with this project.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

from benchmarks.tiny_learner import QUICKSTART

from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.drawing.figures import COLORS, MARKERS, new_figure, save, tidy
from grpo_ray.tools.planning.hardware import (
    ENGINE_STEP_S,
    GPU_TYPES,
    IMBALANCE,
    MEMORY_UTILIZATION,
    SAMPLING_UTILIZATION,
    TRAINING_UTILIZATION,
)
from grpo_ray.tools.simulation.simulate import simulate
from grpo_ray.tools.simulation.speeds import LognormalLengths, Speeds
from grpo_ray.watch.memory import imports_left_alone

PARAMETERS, KEY_VALUE_BYTES = 7.6e9, 57_344  # Qwen2.5-7B: 28 layers, 4 heads of 128 keys and values, bfloat16
PROMPT, MEAN, LIMIT = 256, 1024.0, 8192  # tokens of a prompt, and of responses: their mean, and the limit
SAMPLES = 16
GROUPS = {8: 64, 64: 256, 1024: 1024}  # per step: batches grow more slowly than clusters
LEARNERS = {8: (1, 2, 3, 4, 5), 64: (8, 16, 24, 32), 1024: (128, 256, 384)}
LAGS = (0, 1, 2, 4)
DOUBLING = 0.97  # speed per GPU of the Learner, for each doubling of its GPUs beyond a node of 8
MEASURED = {8: 8, 64: 4, 1024: 4}  # steps, after those that fill the pipeline


@dataclass(frozen=True)
class Point:
    """One simulated run, and its result."""

    gpus: int
    learner: int
    """GPUs of the Learner; with `colocated` all GPUs are both sides'."""
    max_lag: int = 1
    name: str = "in flight"
    changes: tuple[str, ...] = ()
    step_s: float = math.nan
    groups_per_s: float = math.nan
    learner_busy: float = math.nan
    generators_busy: float = math.nan
    cpu_s: float = field(default=math.nan, compare=False)

    @property
    def is_colocated(self) -> bool:
        return "generator.colocated=true" in self.changes

    @property
    def generators(self) -> int:
        return self.gpus if self.is_colocated else self.gpus - self.learner


def speeds_of(point: Point) -> Speeds:
    """Return the planner's speeds for one H100 per engine, and for the Learner's GPUs together."""
    gpu = GPU_TYPES["H100"]
    bandwidth, ranks = MEMORY_UTILIZATION * gpu.bandwidth, point.learner
    doublings = max(0.0, math.log2(ranks / 8))
    rank_flops = TRAINING_UTILIZATION * gpu.bfloat16_flops * DOUBLING**doublings
    imbalance = IMBALANCE if ranks > 1 else 1.0
    return Speeds(
        decode_s=ENGINE_STEP_S + 2 * PARAMETERS / bandwidth,
        decode_sequence_s=(PROMPT + MEAN) * KEY_VALUE_BYTES / bandwidth,
        prefill_token_s=2 * PARAMETERS / (SAMPLING_UTILIZATION * gpu.bfloat16_flops),
        prompt_tokens=PROMPT,
        stage_s=4.0,
        load_s=2.5,
        snapshot_s=1.0,
        train_s=1.0,
        train_token_s=6 * PARAMETERS * imbalance / (rank_flops * ranks),
    )


def measured(point: Point) -> Point:
    """Simulate the point, and return it with its result: means over the steps after the pipeline is full."""
    steps, skipped = MEASURED[point.gpus], 2 + 2 * point.max_lag
    changes = [
        f"generator.num_generators={point.generators}",
        f"algorithm.prompts_per_step={GROUPS[point.gpus]}",
        f"algorithm.samples_per_prompt={SAMPLES}",
        f"algorithm.num_steps={steps + skipped}",
        f"sampling.max_tokens={LIMIT}",
        f"weight_sync.max_lag={point.max_lag}",
        "weight_sync.in_flight=true",
        "generator.max_num_seqs=256",
        "scorer.num_workers=64",
        "run.save_rollouts=false",
        "evaluation.every_num_steps=1000000",
        "checkpoint.every_num_steps=1000000",
        *point.changes,
    ]
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run, lengths = RunDirectory(Path(folder) / "run"), LognormalLengths(MEAN, 1.0)
        result = simulate(load_config(QUICKSTART, changes), run, speeds_of(point), lengths)
    assert result.faults.is_none, result.faults
    rows = result.steps[skipped:]
    step_s = fmean(row["timing/step_s"] for row in rows)
    return replace(
        point,
        step_s=step_s,
        groups_per_s=GROUPS[point.gpus] / step_s,
        learner_busy=fmean(row["utilization/learner"] for row in rows),
        generators_busy=fmean(row["utilization/generators"] for row in rows),
        cpu_s=time.process_time() - began,
    )


# The points of each question


def splits(gpus: int, lags: Sequence[int] = LAGS) -> Iterator[Point]:
    """Yield every split with every lag, and all GPUs as both sides in turns."""
    for learner in LEARNERS[gpus]:
        for max_lag in lags:
            yield Point(gpus, learner, max_lag)
    yield Point(gpus, gpus, 0, "colocated", ("generator.colocated=true",))


def schedules(gpus: int, learner: int) -> Iterator[Point]:
    """Yield what else a schedule can change, at one split."""
    batch = GROUPS[gpus]
    for max_lag in (1, 2):
        yield Point(gpus, learner, max_lag)
        yield Point(gpus, learner, max_lag, "drained", ("weight_sync.in_flight=false",))
    for max_lag in (2, 4):
        yield Point(gpus, learner, max_lag, "look-ahead of a batch", (f"buffer.lookahead={batch}",))
    for max_lag in (0, 1):
        yield Point(gpus, learner, max_lag, "oversampled by 25%", ("algorithm.oversample_frac=0.25",))


def run_all(points: Iterable[Point], out: Path) -> None:
    """Simulate the points, print a row of each, and keep them in a file that a later call continues."""
    done = read(out) if out.exists() else []
    print(
        "| GPUs | Learner | Generators | max_lag | schedule | s per step | groups/s "
        "| Learner trains | Generators sample |\n|---:|---:|---:|---:|---|---:|---:|---:|---:|"
    )
    for point in points:
        known = next((each for each in done if _question(each) == _question(point)), None)
        result = known or measured(point)
        if known is None:
            done.append(result)
            out.write_text(json.dumps([asdict(each) for each in done], indent=1) + "\n")
        print(_row(result), flush=True)


def _question(point: Point) -> Point:
    nothing = dict.fromkeys(("step_s", "groups_per_s", "learner_busy", "generators_busy"), 0.0)
    return replace(point, **nothing)


def _row(point: Point) -> str:
    return (
        f"| {point.gpus:,} | {point.learner:,} | {point.generators:,} | {point.max_lag} | {point.name} "
        f"| {point.step_s:.1f} | {point.groups_per_s:.2f} "
        f"| {point.learner_busy:.0%} | {point.generators_busy:.0%} |"
    )


def read(path: Path) -> list[Point]:
    return [Point(**{**row, "changes": tuple(row["changes"])}) for row in json.loads(path.read_text())]


# Pictures


def draw(folder: Path, points: Sequence[Point]) -> None:
    """Draw throughput by split: a panel per number of GPUs with a line per lag."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sorted({point.gpus for point in points})
    figure = new_figure(4.4 * len(sizes), 3.6)
    for column, gpus in enumerate(sizes):
        axis = figure.add_subplot(1, len(sizes), column + 1)
        ours = [point for point in points if point.gpus == gpus]
        for index, lag in enumerate(LAGS):
            _line(
                axis, [p for p in ours if p.name == "in flight" and p.max_lag == lag], index, f"max_lag {lag}"
            )
        for point in (p for p in ours if p.is_colocated):
            axis.axhline(
                point.groups_per_s / gpus, color="#777777", linestyle=":", label="colocated, max_lag 0"
            )
        axis.set_title(f"{gpus:,} GPUs, {GROUPS[gpus]:,} groups of {SAMPLES} per step", fontsize=9)
        tidy(axis, "Learner's share of GPUs", "groups per second and GPU" if not column else "")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, frameon=False)
    save(figure, folder / "splits.png")


def _line(axis: object, points: Sequence[Point], index: int, label: str) -> None:
    ordered = sorted(points, key=lambda point: point.learner)
    shares = [point.learner / point.gpus for point in ordered]
    rates = [point.groups_per_s / point.gpus for point in ordered]
    style = {"color": COLORS[index], "marker": MARKERS[index], "label": label}
    axis.plot(shares, rates, linewidth=1.4, markersize=4, **style)  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("splits", "schedules"):
        command = commands.add_parser(name)
        command.add_argument("--gpus", type=int, choices=tuple(GROUPS), required=True)
        command.add_argument("--lags", type=int, nargs="+", default=LAGS, help="of `splits`")
        command.add_argument("--learner", type=int, help="GPUs of the Learner, for `schedules`")
        command.add_argument("--out", type=Path, required=True, metavar="FILE")
    drawing = commands.add_parser("draw")
    drawing.add_argument("folder", type=Path)
    drawing.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "draw":
        draw(options.folder, [point for file in options.files for point in read(file)])
        return 0
    if options.command == "schedules" and options.learner is None:
        parser.error("schedules: give --learner, the Learner's number of GPUs")
    if options.command == "splits":
        points = splits(options.gpus, options.lags)
    else:
        points = schedules(options.gpus, options.learner)
    with imports_left_alone():
        run_all(points, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
