"""What holds a run up, in one sentence: docs/tuning.md's table, read by a function.

Everything is a share of the time of the last steps. Stages come from the actors' own clocks
(`time/<actor>/<stage>_s`); runs from before those have `timing/*` and `utilization/*` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_ray.telemetry.activity import TRAINING
from grpo_ray.telemetry.metrics_catalog import STAGE, SYNC

Row = Mapping[str, float | None]

WAITS = 0.25  # a share of the time worth a sentence
BUSY = 0.8
WELL_BUSY = 0.9
OVERLAP = "weight_sync.max_lag: 1 (and generator.colocated: false)"


@dataclass(frozen=True)
class Shares:
    """Of the last steps' time, 0 to 1."""

    learner_waits: float  # for its batch
    learner_trains: float
    generators_sample: float  # mean over them
    scores: float
    syncs: float
    evaluates: float
    copies_state: float  # for a checkpoint, while the Learner stands still
    is_synchronous: bool  # no token was older than the weights it trained


def bottleneck(rows: Sequence[Row]) -> str:
    """The sentence, from some of the newest steps' metrics; the first of them are best left out."""
    shares = measure(rows)
    if shares is None:
        return "No step has been timed yet."
    return _from_outside(shares) or _from_waiting(shares) or _from_training(shares)


def hints(rows: Sequence[Row]) -> list[str]:
    """What else is not as it should be."""
    found = []
    truncated, rejected = _mean(rows, "rollout/truncated_frac"), _total(rows, "lag/rejected")
    if truncated >= WAITS:
        found.append(
            f"{truncated:.0%} of the responses are cut off at sampling.max_tokens: raise it, or look at what "
            "they say"
        )
    if rejected:
        found.append(f"{rejected:.0f} groups were refused as older than weight_sync.max_lag, and sampled again")
    if skipped := _total(rows, "optim/skipped_updates"):
        found.append(f"{skipped:.0f} updates were not finite and were skipped: lower learner.learning_rate")
    if errors := _total(rows, "reward/errors"):
        found.append(f"{errors:.0f} responses could not be graded: the column error of rollouts/ says why")
    return found


def measure(rows: Sequence[Row]) -> Shares | None:
    """None when no step has its seconds."""
    timed = [row for row in rows if row.get("timing/step_s")]
    step_s = _total(timed, "timing/step_s")
    if not step_s:
        return None

    def share(name: str, actor: str, *stages: str) -> float:
        """By the actors' clocks; else of what `timing/*` has."""
        by_clock = _by_clock(timed, actor, stages)
        return _total(timed, name) / step_s if by_clock is None else by_clock

    generators = _by_clock(timed, "generator", ("generate",))
    if generators is None:
        used = [(row.get("utilization/generators") or 0.0) * (row["timing/step_s"] or 0.0) for row in timed]
        generators = sum(used) / step_s
    return Shares(
        learner_waits=share("timing/wait_for_batch_s", "learner", "wait_for_batch"),
        learner_trains=share("timing/train_s", "learner", *TRAINING),
        generators_sample=generators,
        scores=share("timing/score_s", "scorer", "score"),
        syncs=sum(_total(timed, name) for name in SYNC) / step_s,
        evaluates=_total(timed, "timing/evaluate_s") / step_s,
        copies_state=_total(timed, "timing/checkpoint/capture_s") / step_s,
        is_synchronous=max((row.get("lag/max") or 0.0) for row in timed) == 0,
    )


def _by_clock(rows: Sequence[Row], actor: str, stages: Sequence[str]) -> float | None:
    """The stages' share of the time of all actors whose name begins so; None without their clocks."""
    spent = whole = 0.0
    for row in rows:
        for name, seconds in row.items():
            match = STAGE.fullmatch(name)
            if match and match["actor"].startswith(actor):
                whole += seconds or 0.0
                spent += (seconds or 0.0) if match["stage"] in stages else 0.0
    return spent / whole if whole else None


def _from_outside(shares: Shares) -> str | None:
    """What is neither sampling nor training, if it is worth a sentence, and at least half of a side's own."""
    others = {
        "evaluates": f"Validation takes {shares.evaluates:.0%} of the time: "
        "raise evaluation.every_num_steps, or validate on fewer prompts.",
        "syncs": f"Weight syncs take {shares.syncs:.0%} of the time: {_how_to_sync_faster(shares)}.",
        "copies_state": f"Copying the state for checkpoints takes {shares.copies_state:.0%} of the time: "
        "raise checkpoint.every_num_steps.",
    }
    largest = max(others, key=lambda name: getattr(shares, name))
    beside = 0.0 if shares.is_synchronous else shares.learner_trains  # nothing stands still for it
    own = max(shares.learner_waits, beside)
    return others[largest] if getattr(shares, largest) >= max(WAITS, 0.5 * own) else None


def _how_to_sync_faster(shares: Shares) -> str:
    if shares.is_synchronous:
        return f"let training go on beside them with {OVERLAP}"
    return "try a faster weight_sync.transport, or weight_sync.checksum: false"


def _from_waiting(shares: Shares) -> str | None:
    """The Learner waits: for whom?"""
    if shares.learner_waits < WAITS:
        return None
    waits = f"Learner waits {shares.learner_waits:.0%} of the time"
    if shares.scores >= BUSY and shares.scores >= shares.generators_sample:
        return f"{waits} and the Scorer grades {shares.scores:.0%} of it: add scorer.num_workers."
    if shares.is_synchronous and shares.learner_trains >= WAITS:
        return (
            f"{waits} and trains {shares.learner_trains:.0%} of it: the two sides take turns; "
            f"let them overlap with {OVERLAP}."
        )
    if shares.generators_sample >= BUSY:
        return f"{waits}: add Generators (generator.num_generators), or let each run more at a time."
    return (
        f"{waits}, and Generators sample only {shares.generators_sample:.0%} of it: a batch waits for its last "
        "groups; try buffer.lookahead, algorithm.oversample_frac, or weight_sync.in_flight: true."
    )


def _from_training(shares: Shares) -> str:
    trains, samples = shares.learner_trains, shares.generators_sample
    if trains >= BUSY and samples < WELL_BUSY:
        return (
            f"Learner trains {trains:.0%} of the time and Generators sample {samples:.0%}: the Learner is the "
            "limit; try a larger learner.micro_batch_tokens. More Generators bring nothing."
        )
    if trains >= BUSY:
        return f"Both sides are busy: Learner {trains:.0%} of the time, Generators {samples:.0%}."
    return (
        f"Nothing stands out: Learner trains {trains:.0%} of the time and waits {shares.learner_waits:.0%}, "
        f"Generators sample {samples:.0%}."
    )


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def _mean(rows: Sequence[Row], name: str) -> float:
    known = [value for row in rows if (value := row.get(name)) is not None]
    return sum(known) / len(known) if known else 0.0
