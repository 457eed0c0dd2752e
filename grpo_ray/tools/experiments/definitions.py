"""The bundled experiments: those of the course handout, and comparisons of schedules, losses and group sizes.

Their sizes suit `configs/quickstart.yaml` (32 prompts x 8 responses per step); for another configuration,
overrides change what all variants have in common. Stanford CS336's assignment 5, spring 2026, is `cs336-2026`;
`docs/lab/experiments.md` maps its comparisons to the variants.
"""

from grpo_ray.tools.experiments.experiment import Experiment

SYNCHRONOUS = "weight_sync.max_lag=0"
ONE_BEHIND = "weight_sync.max_lag=1"
COLOCATED = ("generator.colocated=true", SYNCHRONOUS)
# Two updates per batch of 256, so that ratios differ from 1 in the second one even in a synchronous run.
TWO_UPDATES = "algorithm.train_batch_size=128"
REPLAY = (ONE_BEHIND, "buffer.replay.frac=0.5")
INITIAL = "algorithm.kl.reference=initial"
CONSTANT = "algorithm.aggregation=constant"
# On policy, the handout's loss without importance weights.
ON_POLICY = "algorithm.loss=reinforce_with_baseline"
# 32 updates per batch of 256 responses move the policy further than one: hence the lower rate.
OFF_POLICY = ("algorithm.train_batch_size=8", "learner.learning_rate=5e-5")

_ALL = (
    Experiment(
        "learning-rate",
        "How large may the learning rate be?",
        {
            rate: (f"learner.learning_rate={value}",)
            for rate, value in {"5e-5": 5e-5, "2e-4": 2e-4, "1e-3": 1e-3, "1e-2": 1e-2}.items()
        },
        ("optim/grad_norm", "policy/entropy", "loss/clip_frac"),
        problem=9,
    ),
    Experiment(
        "baselines",
        "Does a baseline help REINFORCE?",
        {loss: (f"algorithm.loss={loss}",) for loss in ("no_baseline", "reinforce_with_baseline")},
        ("optim/grad_norm", "policy/entropy"),
        common=(SYNCHRONOUS,),
        problem=10,
    ),
    Experiment(
        "length-normalization",
        "Divide each response's loss by its length, by a constant, or by all tokens?",
        {
            "masked_mean": ("algorithm.aggregation=sequence_mean",),
            "masked_normalize": ("algorithm.aggregation=constant",),
            "token_mean": ("algorithm.aggregation=token_mean",),
        },
        ("optim/grad_norm", "rollout/response_tokens/mean", "policy/entropy"),
        problem=11,
    ),
    Experiment(
        "group-std",
        "Divide advantages by the group's standard deviation?",
        {"mean_std": ("algorithm.advantage=mean_std",), "mean": ("algorithm.advantage=mean",)},
        ("optim/grad_norm", "policy/entropy"),
        problem=12,
    ),
    Experiment(
        "colocate",
        "Colocated on one device with one or four updates per rollout batch, against one version behind",
        {
            "colocated-1-update": COLOCATED,
            "colocated-4-updates": (*COLOCATED, "algorithm.epochs_per_batch=2", TWO_UPDATES),
            "one-version-behind": (ONE_BEHIND,),
        },
        ("loss/clip_frac", "optim/grad_norm", "policy/entropy"),
        common=("algorithm.loss=grpo_clip",),
        problem=13,
    ),
    Experiment(
        "async",
        "How old may a trained token be?",
        {
            "synchronous": (SYNCHRONOUS,),
            "one-version-behind": (ONE_BEHIND,),
            "bounded-4": ("weight_sync.max_lag=4",),
            **{f"replay-age-{age}": (*REPLAY, f"buffer.replay.max_age={age}") for age in (2, 4, 8)},
            "replay-age-8-memory-32": (*REPLAY, "buffer.replay.max_age=8", "buffer.replay.max_groups=32"),
        },
        ("lag/mean", "lag/max", "loss/clip_frac", "mismatch/ess_frac", "optim/grad_norm", "policy/entropy"),
        problem=14,
    ),
    Experiment(
        "kl-drift",
        "How far does the policy drift from its initial weights, and what does a penalty change?",
        {
            "measured": (INITIAL, "algorithm.kl.coefficient=0"),
            "penalty-0.01": (INITIAL, "algorithm.kl.coefficient=0.01"),
            "penalty-0.1": (INITIAL, "algorithm.kl.coefficient=0.1"),
            "penalty-0.1-refreshed": (
                INITIAL,
                "algorithm.kl.coefficient=0.1",
                "algorithm.kl.refresh_every_num_steps=10",
            ),
            "penalty-0.1-ema": ("algorithm.kl.reference=ema", "algorithm.kl.coefficient=0.1"),
        },
        ("loss/kl_ref", "loss/kl_ref_k3", "policy/entropy"),
        problem=15,
    ),
    Experiment(
        "group-size",
        "Few prompts with many responses each, or many with few?",
        {
            f"G={size}": (
                f"algorithm.samples_per_prompt={size}",
                f"algorithm.prompts_per_step={256 // size}",
            )
            for size in (2, 4, 8, 16, 32)
        },
        ("rollout/zero_variance_groups", "reward/baseline_variance", "optim/grad_norm"),
    ),
    Experiment(
        "lora",
        "All weights or an adapter, and of what rank?",
        {
            "full": ("model.adapter=null", "learner.learning_rate=2e-4"),
            **{
                f"rank-{rank}": (f"model.adapter={{rank: {rank}, alpha: 32}}", f"learner.learning_rate={rate}")
                for rank, rate in {1: "1e-3", 4: "2e-3", 16: "2e-3"}.items()
            },
        },
        ("optim/grad_norm", "policy/entropy", "mismatch/kl"),
    ),
    Experiment(
        "prompt",
        "The R1-Zero prompt and its tags, or the question alone and a box?",
        {
            "r1_zero": ("task.prompt=r1_zero", "task.reward=r1_zero", 'sampling.stop=["</answer>"]'),
            "question_only": ("task.prompt=question_only", "task.reward=question_only", "sampling.stop=[]"),
        },
        ("reward/format", "rollout/response_tokens/mean", "policy/entropy"),
    ),
    Experiment(
        "loss-zoo",
        "Every loss, with two updates per rollout batch",
        {
            "no_baseline": ("algorithm.loss=no_baseline",),
            "reinforce_with_baseline": ("algorithm.loss=reinforce_with_baseline",),
            "unclipped": ("algorithm.loss=unclipped",),
            "grpo_clip": ("algorithm.loss=grpo_clip",),
            "clip-higher": ("algorithm.loss=grpo_clip", "algorithm.cliprange_high=0.28"),
            "gspo": ("algorithm.loss=gspo",),
            "cispo": ("algorithm.loss=cispo",),
            # The same with a floor at 0.8, which some trainers have: it keeps pushing improbable tokens down.
            "cispo-floor": ("algorithm.loss=cispo", "algorithm.cliprange=0.2", "algorithm.cliprange_high=4"),
            "proximal": (
                "algorithm.loss=grpo_clip",
                "algorithm.old_log_probs=proximal",
                "algorithm.off_policy_correction=truncate_token",
            ),
            "max_only": ("algorithm.loss=grpo_clip", "algorithm.advantage=max_only"),
            "leave_one_out": ("algorithm.loss=grpo_clip", "algorithm.advantage=leave_one_out"),
        },
        ("loss/clip_frac", "optim/grad_norm", "policy/entropy"),
        common=("algorithm.epochs_per_batch=1", TWO_UPDATES),
    ),
    Experiment(
        "schedules",
        "Every way to order sampling and training",
        {
            "synchronous": (SYNCHRONOUS,),
            "one-behind": (ONE_BEHIND, "weight_sync.in_flight=false"),
            "one-behind-in-flight": (ONE_BEHIND, "weight_sync.in_flight=true"),
            "bounded-4": ("weight_sync.max_lag=4",),
            # In flight, since otherwise every sync would wait for the stragglers that look-ahead skips.
            "lookahead": (ONE_BEHIND, "buffer.lookahead=9", "weight_sync.in_flight=true"),
            # over_age counts with episodes only
            "oversample": (SYNCHRONOUS, "algorithm.oversample_frac=0.25", "episodes.over_age=drop"),
            "dynamic-sampling": (ONE_BEHIND, "algorithm.dynamic_sampling_tries=2"),
            **{
                f"replay-{sampling}": (*REPLAY, f"buffer.replay.sampling={sampling}")
                for sampling in ("uniform", "recent", "advantage")
            },
            "colocated-1-update": COLOCATED,
            "colocated-4-updates": (*COLOCATED, "algorithm.epochs_per_batch=2", TWO_UPDATES),
        },
        ("lag/mean", "utilization/learner", "utilization/generators", "rollout/zero_variance_groups"),
    ),
    Experiment(
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
    ),
)

EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}
