"""The experiments of Stanford CS336's assignment 5, spring 2026, as variants of one job on the same machine.

They suit rollout batches of 256 responses, of which `train_batch_size=8` makes 32 updates: those of
`configs/cs336-2026.yaml`, their CPU twin, and of the quickstart. `docs/experiments.md` maps the handout's
comparisons to these variants.
"""

from grpo_ray.tools.experiments.experiment import Experiment

CONSTANT = "algorithm.aggregation=constant"
# On policy, the handout's loss without importance weights.
ON_POLICY = "algorithm.loss=reinforce_with_baseline"
# 32 updates move the policy further than one: hence the lower rate.
OFF_POLICY = ("algorithm.train_batch_size=8", "learner.learning_rate=5e-5")

CS336_2026 = Experiment(
    "cs336-2026",
    "Baselines and normalizations on policy, 32 updates per batch off policy, and a few-shot prompt",
    {
        "grpo": (ON_POLICY,),
        "grpo-constant": (ON_POLICY, CONSTANT),
        "dr-grpo": (ON_POLICY, CONSTANT, "algorithm.advantage=mean"),
        "max-rl": (ON_POLICY, CONSTANT, "algorithm.advantage=max_rl"),
        # Rewards of 0 and 1 as they are: wrong responses have advantage 0, so right ones alone are trained.
        "rft": (ON_POLICY, CONSTANT, "algorithm.advantage=raw"),
        "few-shot": (ON_POLICY, "task.prompt=few_shot_sorting"),
        "noclip-32": ("algorithm.loss=unclipped", *OFF_POLICY),
        "clip-32": ("algorithm.loss=grpo_clip", *OFF_POLICY),
        "gspo-32": ("algorithm.loss=gspo", *OFF_POLICY),
    },
    (
        "policy/entropy",
        "loss/clip_frac",
        "optim/grad_norm",
        "rollout/response_tokens/mean",
        "rollout/zero_variance_groups",
        "throughput/trained_tokens",
    ),
    common=("weight_sync.max_lag=0",),
)
