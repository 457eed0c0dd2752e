"""The cost of an objective's options for the Learner: a step with them relative to a step without.

The variants of advantages over the batch, with a KL in the reward and without, follow the losses.
"""

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import time_steps

TITLE = "a Learner's step with every loss, advantage, KL, entropy bonus, several updates (quickstart's shapes)"
PLAIN = "one update"
IN_REWARD = [
    "algorithm.kl.reference=ema",
    "algorithm.kl.coefficient=0.1",
    "algorithm.kl.placement=reward",
    "algorithm.advantage=mean",
]
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    "reinforce_with_baseline": ["algorithm.loss=reinforce_with_baseline"],
    **{
        loss: [f"algorithm.loss={loss}"]
        for loss in ("gspo", "luspo", "cispo", "dppo_tv", "dppo_kl", "ipo", "sapo", "gmpo", "vespo")
    },
    "dppo_tv, squared log ratio": ["algorithm.loss=dppo_tv", "algorithm.loss_options={kl_tau: 0.001}"],
    "prompt_mean": ["algorithm.aggregation=prompt_mean"],
    "geometric mask and veto": ["algorithm.off_policy_correction=[mask_geometric, veto]"],
    "opsm": ["algorithm.off_policy_correction=opsm", "algorithm.correction_options={delta: 0.5}"],
    "proximal, truncated weights": [
        "algorithm.old_log_probs=proximal",
        "algorithm.off_policy_correction=truncate_token",
    ],
    "KL measured": ["algorithm.kl.reference=initial"],
    "KL penalty, ema": ["algorithm.kl.reference=ema", "algorithm.kl.coefficient=0.1"],
    "unbiased KL penalty, ema": [
        "algorithm.kl.reference=ema",
        "algorithm.kl.coefficient=0.1",
        "algorithm.kl.estimator=unbiased",
    ],
    "scale of the batch": ["algorithm.advantage=mean", "algorithm.advantage_scale=batch"],
    "whitened responses": ["algorithm.advantage=mean", "algorithm.advantage_scale=whiten_responses"],
    "whitened tokens (REINFORCE++-baseline)": [
        "algorithm.advantage=mean",
        "algorithm.advantage_scale=whiten_tokens",
    ],
    "KL in the reward, ema (RLOO)": [*IN_REWARD, "algorithm.advantage=leave_one_out"],
    "KL to go, whitened tokens, ema (REINFORCE++)": [
        *IN_REWARD,
        "algorithm.kl.placement=reward_to_go",
        "algorithm.advantage=raw",
        "algorithm.advantage_scale=whiten_tokens",
    ],
    "entropy bonus": ["algorithm.entropy_bonus=0.01"],
    "top entropy": ["algorithm.token_selection=top_entropy"],
    "two epochs": ["algorithm.epochs_per_batch=2"],
    "two epochs, proximal": ["algorithm.epochs_per_batch=2", "algorithm.old_log_probs=proximal"],
}


def run(options: Options) -> list[Row]:
    half = 4 if options.quick else 128  # of a batch's responses
    variants = {**VARIANTS, "two updates": [f"algorithm.train_batch_size={half}"]}
    return [Row(name, values, PLAIN) for name, values in time_steps(variants, options, rounds=8).items()]
