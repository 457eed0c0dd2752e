"""The charts of the web page, a bounded number of points for them, stages of actors, and totals of ranks."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import mode
from typing import Any

from grpo_ray.watch.metrics_catalog import COLLECTIVES, IMBALANCE, SLOWEST, STAGE, by_number, rank_name


@dataclass(frozen=True)
class Panel:
    """One chart over steps; `series` are (metric, label) pairs, drawn as in `metrics.jsonl`.

    A `*` in a metric stands for what the run has there, such as the number of each rank, also in the label.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    is_share: bool = False  # drawn from 0 to 1, unless a value is outside
    bands: bool = False  # drawn for the series that have standard errors
    is_number: bool = False  # numbers of ranks: drawn as dots from 0, as nothing lies between two of them
    scale: float = 1.0  # number of the metric's units in one of `unit`


GIB = 2.0**30
RANKS = "Ranks"  # the section of the Learner's ranks, if there are several
REWARD, VALIDATION = "reward/mean", "eval/reward"  # the series with standard errors

PANELS: dict[str, tuple[Panel, ...]] = {
    "Reward": (
        Panel("Training reward", "mean over a step's responses", ((REWARD, "training"),), True, True),
        Panel("Validation reward", "mean", ((VALIDATION, "validation"),), True, True),
        Panel("Format and answer", "share", (("reward/format", "format"), ("reward/answer", "answer")), True),
    ),
    "Lag and staleness": (
        Panel("Age of trained tokens", "versions", (("lag/mean", "mean"), ("lag/max", "max"))),
        Panel("Age of trained tokens in updates", "updates", (("lag/updates/max", "max"),)),
        Panel("Groups waiting and refused", "groups",
              (("buffer/groups", "waiting in the buffer"), ("lag/rejected", "refused as too old"))),
    ),
    "KL and entropy": (
        Panel("Entropy", "nats per token", (("policy/entropy", "entropy"),)),
        Panel("KL divergence", "nats per token",
              (("mismatch/kl", "sampler to Learner"), ("loss/kl_ref_k3", "policy to reference"))),
        Panel("Clipped tokens", "share", (("loss/clip_frac", "clipped"),)),
    ),
    "Response length": (
        Panel("Response tokens", "tokens",
              (("rollout/response_tokens/mean", "mean"), ("rollout/response_tokens/max", "max"))),
        Panel("Truncated responses", "share", (("rollout/truncated_frac", "truncated"),), True),
    ),
    "Episodes": (
        Panel("Turns", "turns", (("episodes/turns/mean", "mean"), ("episodes/turns/max", "max"))),
        Panel("How episodes ended", "share",
              (("episodes/status/finished", "finished"), ("episodes/status/truncated_turns", "out of turns"),
               ("episodes/status/truncated_tokens", "out of tokens"),
               ("episodes/status/truncated_time", "out of time"),
               ("episodes/status/environment_error", "environment error")), True),
        Panel("Time per episode", "s", (("episodes/seconds/mean", "mean"), ("episodes/seconds/max", "max"))),
        Panel("Context", "tokens per episode", (("episodes/context_tokens/mean", "not sampled"),)),
        Panel("Branches", "per episode", (("episodes/branches/mean", "mean"),)),
        Panel("Metrics of the episodes", "mean", (("episodes/metrics/*", "*"),)),
    ),
    "Throughput": (
        Panel("Tokens per second", "tokens/s",
              (("throughput/sampled_tokens_per_s", "sampled"), ("throughput/trained_tokens_per_s", "trained"))),
        Panel("Utilization", "share",
              (("utilization/learner", "Learner"), ("utilization/generators", "Generators")), True),
        Panel("Model FLOPs utilization", "share of the peak", (("perf/mfu", "Learner"),), True),
        Panel("Training rate", "tokens/s per device", (("perf/tokens_per_s_per_device", "trained"),)),
        Panel("Computed tokens", "share",
              (("perf/prompt_frac", "prompts"), ("perf/padding_frac", "padding")), True),
        Panel("Peak memory of the Learner's GPU", "GiB",
              (("memory/learner_device_peak_bytes", "peak"),), scale=GIB),
    ),
    RANKS: (
        Panel("Time in collectives", "s per step", (("ranks/learner-*/collectives_s", "learner-*"),)),
        Panel("Slowest rank", "its number", ((SLOWEST, "slowest"),), is_number=True),
        Panel("Imbalance", "largest planned cost / mean", ((IMBALANCE, "imbalance"),)),
        Panel("Memory of each rank's process", "GiB", (("memory/learner-*_bytes", "learner-*"),), scale=GIB),
        Panel("Peak memory of each rank's GPU", "GiB",
              (("memory/learner-*_device_peak_bytes", "learner-*"),), scale=GIB),
    ),
    "Optimizer": (
        Panel("Gradient norm", "", (("optim/grad_norm", "norm"),)),
        Panel("Loss", "", (("loss/policy", "loss"),)),
    ),
}  # fmt: skip


def expanded(panel: Panel, names: Collection[str]) -> Panel:
    """Return the panel with each `*` filled in from the metrics' names; series without `*` stay as they are."""
    return replace(panel, series=tuple(pair for each in panel.series for pair in _filled_in(*each, names)))


def _filled_in(metric: str, label: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    if "*" not in metric:
        yield metric, label
        return
    # A name at the end is whole; in between, such as a rank's, it ends before what follows.
    name = r"(.+)" if metric.endswith("*") else r"([^/_]+)"
    pattern = re.compile(re.escape(metric).replace(r"\*", name))
    matches = filter(None, map(pattern.fullmatch, names))
    for match in sorted(matches, key=lambda match: by_number(label.replace("*", match[1]))):
        yield match[0], label.replace("*", match[1])


Row = Mapping[str, Any]
Errors = Mapping[int, float | None]  # by step
DIGITS = 5  # significant digits; no chart shows more
Stages = dict[str, list[float]]
MEMORY = re.compile(r"memory/(?P<actor>learner-\d+)_(?P<kind>device_peak_)?bytes")


@dataclass(frozen=True)
class Series:
    """Columns over steps; if a run has too many steps, each point is a bin of `bin_size` steps."""

    steps: list[float]
    columns: dict[str, list[float | None]]
    standard_errors: dict[str, list[float | None]]
    bin_size: int


def make_series(
    rows: Iterable[Row], num_rows: int, standard_errors: Mapping[str, Errors], max_points: int
) -> Series:
    """Make one point per step, or per bin of consecutive steps.

    A bin's value is the mean over its steps, placed at their middle; for names that end in `/max` it is the
    maximum, so that no peak is lost, and for the slowest rank the number that occurs most often. Its standard
    error is that of a mean of independent steps, `sqrt(sum(se^2)) / n`. Only one bin's rows are in memory.

    Args:
        rows: in the order of their steps, each with a `step`; a value that was not finite is None.
        num_rows: their number.
        standard_errors: by metric and step; None, like a missing one, is not known.
        max_points: at least 1.
    """
    bin_size = max(1, math.ceil(num_rows / max_points))
    steps: list[float] = []
    columns: dict[str, list[float | None]] = {}
    errors: dict[str, list[float | None]] = {name: [] for name in standard_errors}
    for place, of_bin in enumerate(_bins(rows, bin_size)):
        steps.append((of_bin[0]["step"] + of_bin[-1]["step"]) / 2)
        for name, values in _numbers(of_bin).items():
            column = columns.setdefault(name, [])
            column += [None] * (place - len(column))
            column.append(_value(name, values))
        for name, column in errors.items():
            known = [e for row in of_bin if (e := standard_errors[name].get(row["step"])) is not None]
            is_known = len(known) == len(of_bin)
            column.append(rounded(math.hypot(*known) / len(known)) if is_known else None)
    for column in columns.values():
        column += [None] * (len(steps) - len(column))
    return Series(steps, dict(sorted(columns.items())), errors, bin_size)


def _bins(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    rows = iter(rows)
    while of_bin := list(islice(rows, size)):
        yield of_bin


def _numbers(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the numbers of each metric."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[name].append(value)
    found.pop("step", None)
    return found


def rounded(value: float) -> float:
    """Round to the digits that the page needs."""
    return float(f"{value:.{DIGITS}g}")


def _value(name: str, numbers: Sequence[float]) -> float | None:
    values = [value for value in numbers if math.isfinite(value)]
    if not values:
        return None
    if name == SLOWEST:
        return mode(values)
    return rounded(max(values) if name.endswith("/max") else math.fsum(values) / len(values))


def stage_times(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Stages]:
    """Return seconds per step, by actor and stage; an actor's stages add up to its time, 0 where unknown."""
    actors: dict[str, Stages] = defaultdict(dict)
    for name, column in columns.items():
        if match := STAGE.fullmatch(name):
            actors[match["actor"]][match["stage"]] = [value or 0.0 for value in column]
    return dict(sorted(actors.items(), key=lambda item: by_number(item[0])))


class RankTotals:
    """Each rank's time in collectives, the steps in which it was the slowest, and its memory."""

    def __init__(self) -> None:
        self._num_steps: Counter[str] = Counter()  # by rank, like the next two; only steps with its seconds
        self._collectives_s: dict[str, float] = defaultdict(float)
        self._step_s: dict[str, float] = defaultdict(float)
        self._num_slowest: Counter[str] = Counter()
        self._memory: dict[tuple[str, bool], float] = {}  # the most, by rank; True: of its device

    def noted(self, row: Row) -> Row:
        """Note a step, and return its row."""
        for name, value in row.items():
            if value is None:  # it was not finite
                continue
            if rank := COLLECTIVES.fullmatch(name):
                self._num_steps[rank["actor"]] += 1
                self._collectives_s[rank["actor"]] += value
                self._step_s[rank["actor"]] += row.get("timing/step_s") or 0.0
            elif memory := MEMORY.fullmatch(name):
                of = memory["actor"], memory["kind"] is not None
                self._memory[of] = max(value, self._memory.get(of, 0.0))
        if (number := row.get(SLOWEST)) is not None:
            self._num_slowest[rank_name(number)] += 1
        return row

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per rank; empty for a run with one rank.

        `collectives_frac` is the share of the steps' time, `slowest_frac` that of the steps in which the rank
        was the slowest; None stands for values that were not measured.
        """
        return [self._row(name) for name in sorted(self._num_steps, key=by_number)]

    def _row(self, name: str) -> dict[str, Any]:
        seconds, whole, num_steps = self._collectives_s[name], self._step_s[name], self._num_steps[name]
        return {
            "name": name,
            "collectives_s": seconds / num_steps,
            "collectives_frac": seconds / whole if whole else None,
            "slowest_frac": self._num_slowest[name] / num_steps,
            "process_bytes": self._memory.get((name, False)),
            "device_bytes": self._memory.get((name, True)),
        }
