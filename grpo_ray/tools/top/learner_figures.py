"""The Learner over recent steps: its use of its device, and its ranks' time in collectives and slow ranks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_ray.tools.top.bottleneck import BUSY, WAITS
from grpo_ray.watch.metrics_catalog import COLLECTIVES, IMBALANCE, SLOWEST, rank_name

Row = Mapping[str, float | None]
FIGURES = (
    ("perf/mfu", fmean, "{:.1%} MFU"),
    ("perf/tokens_per_s_per_device", fmean, "{:,.0f} tokens/s per device"),
    ("memory/learner_device_peak_bytes", lambda peaks: max(peaks) / 2**30, "up to {:.1f} GiB"),
    ("perf/prompt_frac", fmean, "{:.0%} of the computed tokens are prompts"),
    ("perf/padding_frac", fmean, "{:.0%} are padding"),
)
UNEVEN = 1.2  # a largest share of the batch, over the mean, that explains long waits


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


def rank_hint(ranks: RankFigures) -> str | None:
    """Name the cause and the remedy if ranks spend much of their time in collectives."""
    if ranks.of_others < WAITS:
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
