"""Speeds fitted to the records of finished runs, for `grpo-ray simulate --calibrate`.

Engines: least squares over the time that each engine needed for its groups of each step. The model is the
simulated engine itself, given the recorded requests at the recorded times (Gauss-Newton, with derivatives by
finite differences). The Learner: least squares over its steps. Everything else is a median over the steps of
the first run.
"""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from grpo_ray.core.dispatch import SURPLUS
from grpo_ray.tools.simulation.engine import SimulatedEngine
from grpo_ray.tools.simulation.records import RecordedRun
from grpo_ray.tools.simulation.speeds import Speeds
from grpo_ray.tools.simulation.virtual_time import VirtualClock
from grpo_ray.types import SamplingSettings
from grpo_ray.watch.run_log import Metrics

NO_LIMIT = 2**31 - 1  # of a response's tokens
NUM_ITERATIONS = 20
MAX_HALVINGS = 8
TOLERANCE = 1e-6  # relative
SIMILAR = 0.05  # relative standard deviation
CHANGE = 1e-4  # relative, for derivatives
ROUNDING = 1e-5
SCORING = re.compile(r"time/scorer(-\d+)?/score_s")
SNAPSHOT = re.compile(r"time/learner(-\d+)?/snapshot_s")
CUTOFF = 0.01  # relative effect on the measurements, below which there is none


@dataclass(frozen=True)
class Calibration:
    """Fitted speeds, and how well they fit."""

    speeds: dict[str, float]
    """By field of `Speeds`; fields that the runs say nothing about are absent."""
    sampling_error: float
    """Median relative error of an engine's time for its groups of a step."""
    training_error: float
    """Median relative error of the Learner's time for a step."""
    warnings: list[str]


@dataclass(frozen=True)
class Burst:
    """The groups of one step that one engine sampled, in seconds since the epoch."""

    step: int
    group_ids: Sequence[int]
    arrivals: Sequence[float]
    end: float
    """The time at which its last group ended."""


def lines_of(calibration: Calibration) -> Iterator[str]:
    """Yield the lines of the calibration's summary."""
    yield "speeds          " + ", ".join(f"{name} {value:.4g}" for name, value in calibration.speeds.items())
    yield (
        f"fit             median error {calibration.sampling_error:.1%} of a Generator's time for its groups "
        f"of a step, {calibration.training_error:.1%} of the Learner's time for a step"
    )
    for warning in calibration.warnings:
        yield f"not known       {warning}"


def calibrate(runs: Sequence[RecordedRun]) -> Calibration:
    """Fit the speeds to all runs together.

    Args:
        runs: the first one should be the most like the runs to simulate: what is no fit comes from it alone.

    Raises:
        ValueError: syncs interrupted a run's requests, or it has too few steps.
    """
    for run in runs:
        _check(run)
    warnings: list[str] = []
    engine, sampling_error = _engine(runs, warnings)
    learner, training_error = _learner(runs, warnings)
    speeds = {**engine, **learner, **_medians(runs[0])}
    prompts = np.concatenate([list(run.prompts.values()) for run in runs])
    speeds["prompt_tokens"] = max(1, round(float(np.mean(prompts))))
    return Calibration(speeds, sampling_error, training_error, warnings)


def _check(run: RecordedRun) -> None:
    if run.config.weight_sync.max_lag > 0 and run.config.weight_sync.in_flight:
        raise ValueError(
            f"--calibrate {run.path}: its syncs interrupted requests, so a request's time is not only the "
            "engine's; give a run with weight_sync.in_flight=false"
        )
    if not run.measured:
        raise ValueError(f"--calibrate {run.path}: no step is left to measure; give a longer run")


# The engines


def _engine(runs: Sequence[RecordedRun], warnings: list[str]) -> tuple[dict[str, float], float]:
    names = ["decode_s", "decode_sequence_s", "request_s", "prefill_token_s"]
    prompts = np.concatenate([list(run.prompts.values()) for run in runs])
    if np.std(prompts) < SIMILAR * np.mean(prompts):
        names.pop()
        warnings.append(
            "prefill_token_s: prompts of one length do not tell it from request_s, which includes it; give "
            "it yourself if a sync recomputes keys and values (weight_sync.in_flight and recompute_kv)"
        )
    series = [(run, bursts) for run in runs for bursts in bursts_of(run)]
    measured = np.concatenate([_durations(run, bursts, [b.end for b in bursts]) for run, bursts in series])

    def predicted(values: np.ndarray) -> np.ndarray:
        speeds = Speeds.model_validate({"prefill_token_s": 0.0, **dict(zip(names, values, strict=True))})
        ends = [_durations(run, bursts, replayed_ends(run, bursts, speeds)) for run, bursts in series]
        return np.concatenate(ends)

    values, is_open = _least_squares(predicted, measured, _first_guess(runs[0], len(names)))
    if is_open:
        warnings.append(
            f"{', '.join(names)}: these runs do not tell them apart, so their sum is right for batches of "
            "this size only; add a run with another algorithm.prompts_per_step"
        )
    error = float(np.median(np.abs(predicted(values) / measured - 1)))
    return {"prefill_token_s": 0.0, **dict(zip(names, values.tolist(), strict=True))}, error


def _durations(run: RecordedRun, bursts: Sequence[Burst], ends: Iterable[float]) -> np.ndarray:
    """Return the seconds from the first arrival to the end of each burst of a measured step."""
    pairs = zip(bursts, ends, strict=True)
    return np.array([end - min(burst.arrivals) for burst, end in pairs if burst.step in run.measured])


def _first_guess(run: RecordedRun, num_speeds: int) -> np.ndarray:
    """Return speeds of which each alone would take an equal part of the time of one step."""
    rollouts = run.groups[run.measured[0]]
    seconds = max(r.end for r in rollouts) - min(r.begin for r in rollouts)
    lengths = [run.lengths[rollout.group_id] for rollout in rollouts]
    longest = max(int(each.max()) for each in lengths)
    num_prompt_tokens = sum(run.prompts[rollout.group_id] for rollout in rollouts)
    counts = [longest, sum(int(each.sum()) for each in lengths), len(lengths), num_prompt_tokens]
    return np.array([seconds / num_speeds / count for count in counts[:num_speeds]])


def _least_squares(
    predicted: Callable[[np.ndarray], np.ndarray], measured: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Minimize the relative errors by Gauss-Newton over the values' logarithms, with step halving.

    Returns:
        The values `[values]`, and True if the measurements leave a combination of them open.
    """

    def errors_at(logarithms: np.ndarray) -> np.ndarray:
        errors: np.ndarray = predicted(np.exp(logarithms)) / measured - 1
        return errors

    values = np.log(start)
    errors = errors_at(values)
    is_open = False
    for _ in range(NUM_ITERATIONS):
        slopes = np.stack([errors_at(values + step) - errors for step in CHANGE * np.eye(len(values))], axis=1)
        slopes /= CHANGE
        is_open = _is_open(slopes)
        change = np.clip(np.linalg.lstsq(slopes, -errors, rcond=ROUNDING)[0], -1, 1)
        for halvings in range(MAX_HALVINGS):
            better = values + change / 2**halvings
            errors_there = errors_at(better)
            if np.sum(errors_there**2) < np.sum(errors**2):
                break
        else:
            break
        values, errors = better, errors_there
        if np.abs(change).max() < TOLERANCE:
            break
    return np.exp(values), is_open


def _is_open(slopes: np.ndarray) -> bool:
    """Return whether some values can change together without an effect on any measurement."""
    sizes = np.linalg.norm(slopes, axis=0)
    known = slopes[:, sizes > CUTOFF * sizes.max()]  # the others are too small to matter
    known = known / np.linalg.norm(known, axis=0)
    return bool(np.linalg.svd(known, compute_uv=False).min() < CUTOFF)


# A recorded run's requests, given again to simulated engines at the times at which they came


def bursts_of(run: RecordedRun) -> list[list[Burst]]:
    """Return the bursts of each Generator, in the order of steps."""
    bursts: dict[str, list[Burst]] = defaultdict(list)
    for step in sorted(run.groups):
        of_generator = defaultdict(list)
        for rollout in run.groups[step]:
            of_generator[rollout.generator].append(rollout)
        for name, rollouts in of_generator.items():
            ids, arrivals = [r.group_id for r in rollouts], [r.begin for r in rollouts]
            bursts[name].append(Burst(step, ids, arrivals, max(r.end for r in rollouts)))
    return list(bursts.values())


def replayed_ends(run: RecordedRun, bursts: Sequence[Burst], speeds: Speeds) -> np.ndarray:
    """Return the end of each burst on a simulated engine, float64 `[bursts]`, in seconds since the epoch.

    A fresh engine samples each series of bursts that follow one another without a gap.
    """
    return np.concatenate([_ends(run, series, speeds) for series in _series(bursts)])


def _series(bursts: Sequence[Burst]) -> list[list[Burst]]:
    """Split at each gap in which the engine had nothing to sample."""
    series: list[list[Burst]] = []
    end = -math.inf
    for burst in bursts:
        if min(burst.arrivals) >= end:
            series.append([])
        series[-1].append(burst)
        end = max(end, burst.end)
    return series


def _ends(run: RecordedRun, bursts: Sequence[Burst], speeds: Speeds) -> np.ndarray:
    first = min(arrival for burst in bursts for arrival in burst.arrivals)
    lengths = _NextLengths(run.lengths)
    engine = SimulatedEngine(speeds, lengths, run.config.generator.max_num_seqs, seed=0)

    async def sample(group_id: int, arrival: float) -> float:
        await asyncio.sleep(arrival - first)
        lengths.group_id = group_id
        prompt, num_samples = (0,) * run.prompts[group_id], len(run.lengths[group_id])
        await engine.generate(prompt, SamplingSettings(num_samples, 1.0, 1.0, 1, NO_LIMIT))
        return asyncio.get_running_loop().time() + first

    async def whole(burst: Burst) -> float:
        return max(await asyncio.gather(*map(sample, burst.group_ids, burst.arrivals)))

    async def main() -> list[float]:
        return list(await asyncio.gather(*map(whole, bursts)))

    return np.array(VirtualClock().run(main()))


class _NextLengths:
    """The lengths of the group that is sampled next."""

    def __init__(self, lengths: Mapping[int, np.ndarray]) -> None:
        self._lengths, self.group_id = lengths, 0

    def draw(self, rng: np.random.Generator, num_samples: int) -> np.ndarray:
        return self._lengths[self.group_id]


# The Learner


def _learner(runs: Sequence[RecordedRun], warnings: list[str]) -> tuple[dict[str, float], float]:
    pairs = [
        (sum(int(run.lengths[rollout.group_id].sum()) for rollout in run.groups[step]), end - begin)
        for run in runs
        for step in run.measured
        for begin, end in [run.training[step]]
    ]
    tokens, seconds = np.array(pairs, float).T

    def predicted(values: np.ndarray) -> np.ndarray:
        line: np.ndarray = values[0] + values[1] * tokens
        return line

    half = np.median(seconds) / 2
    values, is_open = _least_squares(predicted, seconds, np.array([half, half / np.median(tokens)]))
    if is_open:
        warnings.append(
            "train_s, train_token_s: every step of these runs has about the same number of tokens, so their "
            "sum is right for such steps only; add a run with another algorithm.prompts_per_step"
        )
    error = float(np.median(np.abs(predicted(values) / seconds - 1)))
    return {"train_s": float(values[0]), "train_token_s": float(values[1])}, error


# The rest


def _medians(run: RecordedRun) -> dict[str, float]:
    """Return the speeds that are medians over the measured steps."""
    found: dict[str, list[float]] = {}
    dispatch_s = median(_dispatch_s(run, [r.begin for r in run.groups[step]]) for step in run.measured)
    for step in run.measured:
        for name, seconds in _of_step(run, step, run.steps[step], dispatch_s).items():
            found.setdefault(name, []).append(seconds)
    score_s = fmean(found.pop("score_s"))  # a group may be scored in another step than it is trained in
    return {"score_s": score_s, **{name: max(0.0, median(seconds)) for name, seconds in found.items()}}


def _dispatch_s(run: RecordedRun, begins: Sequence[float]) -> float:
    """Return the seconds between two groups, of those that the engines had room for at once."""
    config = run.config
    room = SURPLUS * config.generator.max_num_seqs * config.generator.num_generators
    first = sorted(begins)[: max(2, room // config.algorithm.samples_per_prompt)]
    return (first[-1] - first[0]) / (len(first) - 1) if len(first) > 1 else 0.0


def _of_step(run: RecordedRun, step: int, metrics: Metrics, dispatch_s: float) -> dict[str, float]:
    """Return the step's seconds by field of `Speeds`."""
    scoring = [value for name, value in metrics.items() if SCORING.fullmatch(name)]
    score_s = sum(scoring) / run.config.fresh_per_step
    load_s = metrics["timing/weight_sync/paused_s"]  # no request waits for its current token then
    snapshot_s = max(value for name, value in metrics.items() if SNAPSHOT.fullmatch(name))
    seconds = {
        "dispatch_s": dispatch_s,
        "score_s": score_s,
        "load_s": load_s,
        "snapshot_s": snapshot_s,
        "stage_s": metrics["timing/weight_sync/stage_s"],
    }
    if run.config.weight_sync.max_lag == 0:
        begin, end = run.training[step]
        last = max(rollout.end for rollout in run.groups[step])
        seconds["gather_s"] = begin - last - score_s
        if step + 1 in run.groups:  # the sync and everything that the next groups wait for
            next_begin = min(rollout.begin for rollout in run.groups[step + 1])
            seconds["stage_s"] = next_begin - end - snapshot_s - load_s - dispatch_s
    return seconds
