"""The losses by name, with the facts that configuration, library and Learner go by; and published algorithms.

The functions are in `grpo_ray.objectives`; this module needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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

    def clip_epsilons(self, low: float | None, high: float | None) -> Epsilons:
        """Return the epsilons in effect, below and above: those given, else the loss's own.

        A `low` alone is also the one above. Of a loss without a clip range they are 0.2.
        """
        below, above = self.epsilons or PLAIN
        return below if low is None else low, high if high is not None else above if low is None else low


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


def refuse_clip_range(loss: str, **given: float | None) -> None:
    """Refuse a clip range that the loss would ignore; raises ValueError, which names the first given."""
    if loss_record(loss).epsilons is None:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: the loss `{loss}` has no clip range; leave {name} out")


PresetName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "trl_rloo", "reinforce_pp", "reinforce_pp_baseline", "scale_rl",
    "prime_rl",
]  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """The fields that one algorithm sets, and its publication."""

    source: str
    fields: Mapping[str, Any]


PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset("arXiv:2402.03300", {"kl": {"reference": "initial", "coefficient": 0.04}}),
    "dr_grpo": Preset("arXiv:2503.20783", {"advantage": "mean", "aggregation": "constant"}),
    "dapo": Preset("arXiv:2503.14476", {
        "cliprange_high": 0.28, "aggregation": "token_mean",
        "dynamic_sampling_tries": 3, "dynamic_sampling_metric": "answer",
    }),
    # The correction changes nothing if no token is older than the policy.
    "rloo": Preset("arXiv:2402.14740", {
        "advantage": "leave_one_out", "loss": "reinforce_with_baseline", "aggregation": "constant",
        "off_policy_correction": "truncate_sequence",
    }),
    "trl_rloo": Preset("TRL's RLOOTrainer", {
        "advantage": "leave_one_out", "loss": "reinforce_with_baseline", "aggregation": "sequence_sum",
        "kl": {"reference": "initial", "coefficient": 0.05, "placement": "reward"},
        "off_policy_correction": "truncate_sequence",
    }),
    "reinforce_pp": Preset("arXiv:2501.03262", {
        "advantage": "raw", "advantage_scale": "whiten_tokens", "aggregation": "token_mean",
        "kl": {"reference": "initial", "coefficient": 0.01, "placement": "reward_to_go"},
    }),
    "reinforce_pp_baseline": Preset("arXiv:2501.03262", {
        "advantage": "mean", "advantage_scale": "whiten_tokens", "aggregation": "token_mean"}),
    "scale_rl": Preset("arXiv:2510.13786", {
        "loss": "cispo", "advantage": "mean", "advantage_scale": "whiten_responses",
        "aggregation": "prompt_mean",
    }),
    "prime_rl": Preset("prime-rl's default loss", {"loss": "ipo", "aggregation": "token_mean"}),
}  # fmt: skip
