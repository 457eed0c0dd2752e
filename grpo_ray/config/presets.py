"""Published algorithms by name: the fields of `algorithm` that each of them sets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PresetName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "trl_rloo", "reinforce_pp", "reinforce_pp_baseline", "scale_rl",
    "prime_rl",
]  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """The fields that one algorithm sets, and its publication."""

    fields: Mapping[str, Any]
    source: str


PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset({"kl": {"reference": "initial", "coefficient": 0.04}}, "arXiv:2402.03300"),
    "dr_grpo": Preset({"advantage": "mean", "aggregation": "constant"}, "arXiv:2503.20783"),
    "dapo": Preset(
        {
            "cliprange_high": 0.28,
            "aggregation": "token_mean",
            "dynamic_sampling_tries": 3,
            "dynamic_sampling_metric": "answer",
        },
        "arXiv:2503.14476",
    ),
    "rloo": Preset(
        {
            "advantage": "leave_one_out",
            "loss": "reinforce_with_baseline",
            "aggregation": "constant",
            "off_policy_correction": "truncate_sequence",  # changes nothing with weight_sync.max_lag 0
        },
        "arXiv:2402.14740",
    ),
    "trl_rloo": Preset(
        {
            "advantage": "leave_one_out",
            "loss": "reinforce_with_baseline",
            "aggregation": "sequence_sum",
            "kl": {"reference": "initial", "coefficient": 0.05, "placement": "reward"},
            "off_policy_correction": "truncate_sequence",
        },
        "TRL's RLOOTrainer",
    ),
    "reinforce_pp": Preset(
        {
            "advantage": "raw",
            "advantage_scale": "whiten_tokens",
            "aggregation": "token_mean",
            "kl": {"reference": "initial", "coefficient": 0.01, "placement": "reward_to_go"},
        },
        "arXiv:2501.03262",
    ),
    "reinforce_pp_baseline": Preset(
        {"advantage": "mean", "advantage_scale": "whiten_tokens", "aggregation": "token_mean"},
        "arXiv:2501.03262",
    ),
    "scale_rl": Preset(
        {"loss": "cispo", "advantage": "mean", "advantage_scale": "batch", "aggregation": "prompt_mean"},
        "arXiv:2510.13786",
    ),
    "prime_rl": Preset({"loss": "ipo", "aggregation": "token_mean"}, "prime-rl's default loss"),
}


def with_preset(given: Any) -> Any:
    """Return the section `algorithm` with its preset's fields, under those that are given.

    A resolved section gives them all, so expanding it again changes nothing. An unknown preset is left to the
    field's own check.
    """
    name = given.get("preset") if isinstance(given, dict) else None
    preset = next((preset for known, preset in PRESETS.items() if known == name), None)
    if preset is None:
        return given
    expanded = {**preset.fields, **given}
    if "kl" in preset.fields and isinstance(given.get("kl"), dict):
        expanded["kl"] = {**preset.fields["kl"], **given["kl"]}
    return expanded
