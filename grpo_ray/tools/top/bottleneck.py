"""The bottleneck of a run and its problems, in sentences: the table of docs/tuning.md as a function.

All figures are shares of the time of the last steps. Shares of an actor's stages come from its own clock
(`time/<actor>/<stage>_s`), the others from the Controller's (`timing/*`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from grpo_ray.config.schema import leaves
from grpo_ray.watch.activity import GENERATOR, TRAINING
from grpo_ray.watch.metrics_catalog import COLLECTIVES, IMBALANCE, SLOWEST, STAGE, SYNC, rank_name

Row = Mapping[str, float | None]
T = TypeVar("T", bound=Mapping[str, Any])

WAITS = 0.25  # the smallest share of the time that is worth a sentence
BUSY = 0.8
WELL_BUSY = 0.9
FASTER = "try a faster weight_sync.transport, or weight_sync.checksum: false"
OVERLAP = "weight_sync.max_lag: 1 (and generator.colocated: false)"
COUNTED = {
    "reward/ungradable": "{:,.0f} responses were too costly to grade, and count as wrong",
    "optim/skipped_updates": "{:,.0f} updates were skipped as not finite: lower learner.learning_rate",
    "lag/rejected": "{:,.0f} groups exceeded weight_sync.max_lag, and were refused and sampled again",
}
SIZES = "algorithm.prompts_per_step", "algorithm.samples_per_prompt", "buffer.replay.frac"
ERRORS, CUT_OFF, DROPPED = "reward/errors", "rollout/truncated_frac", "rollout/dropped_groups"
STEPS = "steps"
FIGURES = (
    ("perf/mfu", fmean, "{:.1%} MFU"),
    ("perf/tokens_per_s_per_device", fmean, "{:,.0f} tokens/s per device"),
    ("memory/learner_device_peak_bytes", lambda peaks: max(peaks) / 2**30, "up to {:.1f} GiB"),
    ("perf/prompt_frac", fmean, "{:.0%} of the computed tokens are prompts"),
    ("perf/padding_frac", fmean, "{:.0%} are padding"),
)
UNEVEN = 1.2  # a largest share of the batch, over the mean, that explains long waits


@dataclass(frozen=True)
class Shares:
    """Shares of the last steps' time, 0 to 1."""

    learner_waits: float  # for a batch; mean over the ranks, like the next
    learner_trains: float  # with the waits of ranks for each other
    generators_sample: float  # mean over the Generators
    scores: float
    looks_up: float  # mean over the Teachers
    syncs: float
    evaluates: float  # by the driver's clock: `timing/evaluate_s` is mostly time of the next step
    copies_state: float  # for a checkpoint, during which the Learner is blocked
    is_synchronous: bool  # every token was sampled by the weights that it trained, also after the first step
    num_generators: int  # with a clock of their own in these steps

    @property
    def saved_by_a_generator(self) -> float:
        """Share of a step that one more Generator would save at most, if it does not slow the others down.

        It takes its part of the sampling, and a step still takes the time in which the Learner does not wait.
        """
        return min(self.learner_waits, self.generators_sample / (self.num_generators + 1))


def bottleneck(rows: Sequence[Row]) -> str:
    """Describe the bottleneck by the metrics of recent steps, without a run's slow first one."""
    shares = time_shares(rows)
    if shares is None:
        return "No step has been timed yet."
    return _from_outside(shares) or _from_waiting(shares) or _from_training(shares)


def steady(rows: Sequence[T]) -> Sequence[T]:
    """Leave out the run's first step, which warms up the engines, if there are others."""
    return [row for row in rows if row["step"] > 1] or rows


def time_shares(rows: Sequence[Row]) -> Shares | None:
    """Measure the shares of the steps' time; None if no step has its seconds."""
    timed = [row for row in rows if row.get("timing/step_s")]
    step_s = _total(timed, "timing/step_s")
    if not step_s:
        return None
    seconds = stage_seconds(timed)

    def share(kind: str, *stages: str) -> float:
        """Return the stages' share of the time of all actors with names that start with `kind`."""
        own = [of_actor for actor, of_actor in seconds.items() if actor.startswith(kind)]
        whole = sum(sum(of_actor.values()) for of_actor in own)
        return sum(of_actor.get(stage, 0.0) for of_actor in own for stage in stages) / (whole or 1.0)

    return Shares(
        learner_waits=share("learner", "wait_for_batch"),
        learner_trains=share("learner", *TRAINING),
        generators_sample=share("generator", "generate"),
        scores=share("scorer", "score"),
        looks_up=share("teacher", "look_up"),
        syncs=sum(_total(timed, name) for name in SYNC) / step_s,
        evaluates=share("driver", "evaluate"),
        copies_state=_total(timed, "timing/checkpoint/capture_s") / step_s,
        is_synchronous=not any(row.get("lag/max") for row in timed) and (timed[-1]["step"] or 0) > 1,
        num_generators=sum(actor.startswith(GENERATOR) for actor in seconds),
    )


def stage_seconds(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the seconds over all steps, by actor and stage."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        for name, seconds in row.items():
            if match := STAGE.fullmatch(name):
                found[match["actor"]][match["stage"]] += seconds or 0.0
    return found


def _from_outside(shares: Shares) -> str | None:
    """Describe time that goes neither to sampling nor to training, if that is the main problem."""
    faster = f"overlap them with training by {OVERLAP}" if shares.is_synchronous else FASTER
    others = {
        "evaluates": f"Validation takes {shares.evaluates:.0%} of the time: "
        "raise evaluation.every_num_steps, or validate on fewer prompts.",
        "syncs": f"Weight syncs take {shares.syncs:.0%} of the time: {faster}.",
        "copies_state": f"Copying the state for checkpoints takes {shares.copies_state:.0%} of the time: "
        "raise checkpoint.every_num_steps.",
    }
    largest = max(others, key=lambda name: getattr(shares, name))
    overlapped = 0.0 if shares.is_synchronous else shares.learner_trains  # training that it does not block
    usual = max(shares.learner_waits, overlapped)
    return others[largest] if getattr(shares, largest) >= max(WAITS, 0.5 * usual) else None


def _from_waiting(shares: Shares) -> str | None:
    """Describe what the Learner waits for, if it waits."""
    if shares.learner_waits < WAITS:
        return None
    waits = f"Learner waits {shares.learner_waits:.0%} of the time"
    if shares.scores >= BUSY and shares.scores >= shares.generators_sample:
        return f"{waits} and the Scorer grades {shares.scores:.0%} of it: add scorer.num_workers."
    if shares.looks_up >= BUSY and shares.looks_up >= shares.generators_sample:
        return f"{waits} and Teachers work {shares.looks_up:.0%} of it: add distillation.num_teachers."
    if shares.is_synchronous and shares.learner_trains >= WAITS:
        return (
            f"{waits} and trains {shares.learner_trains:.0%} of it: sampling and training take turns; "
            f"let them overlap with {OVERLAP}."
        )
    if shares.generators_sample >= BUSY:
        saved = f"; one more saves at most {shares.saved_by_a_generator:.0%} of a step"
        names = f"generator.num_generators{saved if shares.num_generators else ''}"
        return f"{waits}: add Generators ({names}), or let each sample more in parallel."
    return (
        f"{waits}, and Generators sample only {shares.generators_sample:.0%} of it: batches wait for their "
        "last groups; try buffer.lookahead, algorithm.oversample_frac, or weight_sync.in_flight (if false)."
    )


def _from_training(shares: Shares) -> str:
    trains, samples = shares.learner_trains, shares.generators_sample
    if trains >= BUSY and samples < WELL_BUSY:
        return (
            f"Learner trains {trains:.0%} of the time and Generators sample {samples:.0%}: the Learner is the "
            "bottleneck; try a larger learner.micro_batch_tokens. More Generators would not help."
        )
    if trains >= BUSY:
        return f"Both are busy: the Learner {trains:.0%} of the time, the Generators {samples:.0%}."
    return (
        f"No clear bottleneck: Learner trains {trains:.0%} of the time and waits {shares.learner_waits:.0%}, "
        f"Generators sample {samples:.0%}."
    )


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


class Problems:
    """Counts over steps, noted one by one."""

    def __init__(self, config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Note the rows; `config` is the run's `config.yaml`, with the number of responses per step."""
        given = map(leaves(config).get, SIZES)  # whatever stands there, as the file may be of another release
        num_prompts, self._num_samples, replayed = (v if isinstance(v, int | float) else 0 for v in given)
        self._num_prompts = num_prompts - round(num_prompts * replayed)  # `Config.fresh_per_step`
        self._sums: Counter[str] = Counter()
        for row in rows:
            self.noted(row)

    def noted(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note a step, and return its row."""
        self._sums.update({name: row.get(name) or 0 for name in (ERRORS, CUT_OFF, DROPPED, *COUNTED)})
        self._sums[STEPS] += 1
        return row

    def errors(self) -> list[str]:
        """Return a sentence about each kind of error."""
        num_groups = self._sums[STEPS] * self._num_prompts + self._sums[DROPPED]
        whole = round(num_groups * self._num_samples)
        counted = f"{{:,.0f}} of {whole:,} responses could not" if whole else "{:,.0f} responses could not"
        if whole and self._sums[ERRORS] >= whole:
            counted = f"None of the {whole:,} responses could"
        texts = {ERRORS: f"{counted} be graded: the column error of rollouts/ says why", **COUNTED}
        return [text.format(count) for name, text in texts.items() if (count := self._sums[name])]

    def cut_off(self) -> list[str]:
        """Return a hint if many responses are cut off."""
        share = self._sums[CUT_OFF] / (self._sums[STEPS] or 1)
        hint = f"{share:.0%} of the responses are cut off at sampling.max_tokens, or at a limit of their "
        return [f"{hint}episodes (turns, tokens, time): raise it, or read some"] if share >= WAITS else []


def learner_figures(rows: Sequence[Row]) -> str:
    """Return the line, with the figures that the steps have; empty if there are none."""
    texts = []
    for name, combined, form in FIGURES:
        if known := [value for row in rows if (value := row.get(name)) is not None]:
            texts.append(form.format(combined(known)))
    return f"Learner: {', '.join(texts)}" if texts else ""


@dataclass(frozen=True)
class RankFigures:
    """Figures of the last steps that had the newest step's ranks."""

    collectives: Mapping[str, float]
    """By rank: the share of time that it spent in collectives, moving data or waiting for other ranks."""
    slowest: str
    """Rank that was the slowest most often."""
    num_slowest: int
    """Number of steps in which it was."""
    num_steps: int
    imbalance: float
    """Mean over the steps of the largest planned cost of a rank over the mean cost."""

    @property
    def of_others(self) -> float:
        """Mean share of the other ranks' time in collectives."""
        return fmean(share for name, share in self.collectives.items() if name != self.slowest)

    @property
    def of_slowest(self) -> float:
        """The slowest rank's share: it waits the least, so most of its time in collectives moves data."""
        return self.collectives[self.slowest]


def rank_figures(rows: Sequence[Row]) -> RankFigures | None:
    """Measure the ranks over the steps; None if the Learner has only one rank."""
    timed = [row for row in rows if row.get("timing/step_s") and _slowest(row) in _seconds(row)]
    ranks = _seconds(timed[-1]).keys() if timed else ()
    if len(ranks) < 2:
        return None
    of_ranks = [row for row in timed if _seconds(row).keys() == ranks]  # a run may resume with other ranks
    whole = sum(row["timing/step_s"] or 0.0 for row in of_ranks)
    slowest, num_slowest = Counter(map(_slowest, of_ranks)).most_common(1)[0]
    return RankFigures(
        collectives={name: sum(_seconds(row)[name] for row in of_ranks) / whole for name in ranks},
        slowest=slowest,
        num_slowest=num_slowest,
        num_steps=len(of_ranks),
        imbalance=fmean(row.get(IMBALANCE) or 1.0 for row in of_ranks),
    )


def ranks_line(ranks: RankFigures) -> str:
    """Summarize the ranks in one line."""
    return (
        f"Ranks: slowest {ranks.slowest} ({ranks.num_slowest} of {ranks.num_steps} steps), with "
        f"{ranks.of_slowest:.0%} of the time in collectives, the others {ranks.of_others:.0%}; imbalance "
        f"{ranks.imbalance:.2f}"
    )


def rank_hint(ranks: RankFigures | None) -> str | None:
    """Name the cause and the remedy if ranks spend much of their time in collectives."""
    if ranks is None or ranks.of_others < WAITS:
        return None
    spent = f"{ranks.of_others:.0%} of the time of most ranks is in collectives"
    if ranks.imbalance >= UNEVEN:
        return (
            f"{spent}, because batches cannot be dealt evenly: raise algorithm.prompts_per_step, or lower "
            "learner.num_ranks"
        )
    if ranks.of_slowest < ranks.of_others / 2 and ranks.num_slowest >= BUSY * ranks.num_steps:
        return f"{spent}, waiting for {ranks.slowest}, which has no more work: its device or node is slower"
    return (
        f"{spent}: raise learner.micro_batch_tokens, so that there are fewer; keep ranks on one node "
        "(learner.ranks_per_node), or in learner.replicas"
    )


def _slowest(row: Row) -> str:
    number = row.get(SLOWEST)
    return "" if number is None else rank_name(number)


def _seconds(row: Row) -> dict[str, float]:
    """Return each rank's seconds in collectives."""
    matches = ((COLLECTIVES.fullmatch(name), seconds) for name, seconds in row.items())
    return {match["actor"]: seconds or 0.0 for match, seconds in matches if match}
