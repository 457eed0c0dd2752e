"""The losses by name, one record each: the facts that configuration, library and Learner go by.

The functions are in `grpo_ray.objectives`; this module needs no torch.
"""

from dataclasses import dataclass
from typing import Literal

LossType = Literal[
    "no_baseline", "reinforce_with_baseline", "unclipped", "grpo_clip", "gspo", "cispo", "luspo", "dppo_tv",
    "dppo_kl", "ipo", "sapo", "gmpo", "vespo",
]  # fmt: skip
Aggregation = Literal["sequence_mean", "token_mean", "constant", "sequence_sum", "prompt_mean"]
Epsilons = tuple[float, float]

PLAIN: Epsilons = (0.2, 0.2)


@dataclass(frozen=True)
class LossRecord:
    """The facts about one loss; the defaults are those of a loss of the user's own."""

    has_ratio: bool = True
    """It compares with old log-probabilities."""
    is_of_responses: bool = False
    """Its ratio is one per response, so it needs the mask."""
    epsilons: Epsilons | None = PLAIN
    """Default epsilon below and above a ratio of 1; None: it has no clip range."""
    aggregation: Aggregation = "sequence_mean"
    """Default aggregation."""


# GSPO's ratio is averaged over a response, GMPO's range is of the log ratio. CISPO's ratio is a weight, capped
# at 5 and with no floor: a floor would keep pushing down a token however improbable it has become.
LOSS_RECORDS: dict[LossType, LossRecord] = {
    "no_baseline": LossRecord(has_ratio=False, epsilons=None),
    "reinforce_with_baseline": LossRecord(has_ratio=False, epsilons=None),
    "unclipped": LossRecord(epsilons=None),
    "grpo_clip": LossRecord(),
    "gspo": LossRecord(is_of_responses=True, epsilons=(3e-4, 4e-4)),
    "cispo": LossRecord(epsilons=(1.0, 4.0), aggregation="token_mean"),
    "luspo": LossRecord(is_of_responses=True, epsilons=(3e-4, 4e-4), aggregation="sequence_sum"),
    "dppo_tv": LossRecord(epsilons=None),
    "dppo_kl": LossRecord(epsilons=None),
    "ipo": LossRecord(epsilons=None),
    "sapo": LossRecord(epsilons=None),
    "gmpo": LossRecord(is_of_responses=True, epsilons=(0.4, 0.4)),
    "vespo": LossRecord(is_of_responses=True, epsilons=None, aggregation="token_mean"),
}
RATIO_LOSSES = tuple(name for name, record in LOSS_RECORDS.items() if record.has_ratio)


def loss_record(name: str) -> LossRecord:
    """Return the record of a loss; of one of the user's own, the defaults."""
    return next((record for known, record in LOSS_RECORDS.items() if known == name), LossRecord())


def clip_epsilons(loss: str, low: float | None, high: float | None) -> Epsilons:
    """Return the epsilons in effect, below and above: those given, else the loss's own.

    A `low` alone is also the one above. Of a loss without a clip range they are 0.2.
    """
    below, above = loss_record(loss).epsilons or PLAIN
    return below if low is None else low, high if high is not None else above if low is None else low


def refuse_clip_range(loss: str, **given: float | None) -> None:
    """Refuse a clip range that the loss would ignore.

    Raises:
        ValueError: names the first of those given.
    """
    if loss_record(loss).epsilons is None:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: the loss `{loss}` has no clip range; leave {name} out")
