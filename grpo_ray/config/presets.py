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


def with_preset(given: Any) -> Any:
    """Return the section `algorithm` with its preset's fields, under those that are given.

    A resolved section gives them all, so expanding it again changes nothing. An unknown preset is left to the
    field's own check.
    """
    name = given.get("preset") if isinstance(given, dict) else None
    preset = next((preset for known, preset in PRESETS.items() if known == name), None)
    if preset is None:
        return given
    kl = given.get("kl", {})
    whole = {"kl": {**preset.fields.get("kl", {}), **kl}} if isinstance(kl, dict) else {}
    return {**preset.fields, **given, **whole}
