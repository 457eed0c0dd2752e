"""A finished run's own records, as a calibration reads them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.simulation.speeds import lengths_by_group
from grpo_ray.watch.run_log import Metrics

ROLLOUT = re.compile(r"group (?P<group>\d+), (?P<samples>\d+) samples")  # as in Generator.generate
FIRST_STEPS = 3  # left out: the first batches of an engine and of a Learner are slow


@dataclass(frozen=True)
class Rollout:
    """A group's time with a Generator, in seconds since the epoch."""

    group_id: int
    generator: str
    begin: float
    end: float


@dataclass(frozen=True)
class Turn:
    """A stage of an actor, in seconds since the epoch."""

    stage: str
    begin: float
    end: float
    label: str


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run; steps count from 1."""

    path: Path
    config: Config
    steps: Mapping[int, Metrics]
    turns: Mapping[str, list[Turn]]
    """The stages of each actor, in order."""
    rollouts: list[Rollout]
    """In the order in which they began."""
    lengths: Mapping[int, np.ndarray]
    """The lengths of each group's responses, int64 `[samples]`, by the group's id."""
    prompts: Mapping[int, int]
    """The number of tokens of each group's prompt, by the group's id."""

    @cached_property
    def groups(self) -> dict[int, list[Rollout]]:
        """The rollouts of each step's fresh groups."""
        of_step: dict[int, list[Rollout]] = {}
        for rollout in self.rollouts:
            of_step.setdefault(rollout.group_id // self.config.fresh_per_step + 1, []).append(rollout)
        return of_step

    @cached_property
    def measured(self) -> list[int]:
        """The steps to fit: without the first ones, the last, and those beside a validation."""
        return [
            step
            for step in range(FIRST_STEPS + 1, max(self.steps))
            if step in self.groups and step in self.training
            if not any(self.steps[n].get("time/driver/evaluate_s", 0.0) > 0 for n in (step - 1, step))
        ]

    @cached_property
    def training(self) -> dict[int, tuple[float, float]]:
        """The times at which the Learner began and ended each step, in seconds since the epoch."""
        found: dict[int, tuple[float, float]] = {}
        for turn in (turn for name in self.turns if name.startswith("learner") for turn in self.turns[name]):
            if turn.stage == "train" and turn.label.startswith("step "):
                step = int(turn.label.removeprefix("step ").partition(",")[0])
                begin, end = found.get(step, (turn.begin, turn.end))
                found[step] = min(begin, turn.begin), max(end, turn.end)
        return found


def read_run(path: str) -> RecordedRun:
    """Read a finished run.

    Raises:
        ValueError: names the file that is missing or cannot be read, and the fix.
    """
    run = RunDirectory(path)
    for file, fix in {
        run.config_path: "give the directory of a run",
        run.metrics_path: "give a run that has finished some steps",
        run.timeline_path: "give a run that has finished some steps",
    }.items():
        if not file.is_file():
            raise ValueError(f"--calibrate {path}: {file} is missing; {fix}")
    config = load_config(str(run.config_path))
    steps = {int(row["step"]): row for row in read_metrics(run.metrics_path)}
    num_needed = FIRST_STEPS + 3
    if len(steps) < num_needed:
        raise ValueError(
            f"--calibrate {path}: {run.metrics_path} has {len(steps)} steps; a calibration leaves out the "
            f"first {FIRST_STEPS} and the last, and needs {num_needed} or more"
        )
    lengths = lengths_by_group(run)
    if not lengths:
        raise ValueError(f"--calibrate {path}: {run.rollouts} is empty; give a run with run.save_rollouts=true")
    turns, rollouts = _read_timeline(run.timeline_path, path, config.algorithm.samples_per_prompt)
    kept = [rollout for rollout in rollouts if rollout.group_id in lengths]
    return RecordedRun(run.path, config, steps, turns, kept, lengths, _prompts(run))


def _read_timeline(file: Path, path: str, num_samples: int) -> tuple[dict[str, list[Turn]], list[Rollout]]:
    try:
        events: list[dict[str, Any]] = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"--calibrate {path}: {file}: {error}; give a run that is not being written") from None
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    turns: dict[str, list[Turn]] = {name: [] for name in names.values()}
    begun: dict[tuple[int, int], dict[str, Any]] = {}
    rollouts: list[Rollout] = []
    for event in events:
        actor = names[event["tid"]]
        key = event["tid"], event.get("id", 0)
        if event["ph"] == "X":
            begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            turns[actor].append(Turn(event["name"], begin, end, event.get("args", {}).get("what", "")))
        elif event["ph"] == "b":
            begun[key] = event
        elif event["ph"] == "e" and event["cat"] == "rollout":
            label = ROLLOUT.match(begun[key]["args"]["what"])
            if label and int(label["samples"]) == num_samples:  # not a validation's, which has other numbers
                begin, end = begun[key]["ts"] / 1e6, event["ts"] / 1e6
                rollouts.append(Rollout(int(label["group"]), actor, begin, end))
    return turns, sorted(rollouts, key=lambda rollout: (rollout.begin, rollout.group_id))


def _prompts(run: RunDirectory) -> dict[int, int]:
    found: dict[int, int] = {}
    for file in sorted(run.rollouts.glob("step-*.parquet")):
        table = pq.read_table(file, columns=["group_id", "prompt_token_ids"])
        lengths = pc.list_value_length(table["prompt_token_ids"]).to_pylist()
        found |= dict(zip(table["group_id"].to_pylist(), lengths, strict=True))
    return found
