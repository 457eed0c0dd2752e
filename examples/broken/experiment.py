"""The experiment `failures`: eight faults that runs really have, one switch each, beside a good run.

    grpo-ray experiment examples.broken.experiment:failures

docs/lab/measurements-operations.md has the results. Its size suits the task of `configs/quickstart.yaml`.
"""

from functools import partial

from examples.broken.gallery import plot_gallery
from grpo_ray.tools.experiments.experiment import Experiment

BROKEN = "examples.broken"
PROMPTS, SAMPLES = 16, 8

TELLING = {
    "short-outputs": "rollout/response_tokens/mean",
    "wrong-mask": "loss/untrained_frac",
    "re-tokenized": "mismatch/kl",
    "wrong-normalizer": "loss/gradient_scale",
    "stale-old-logprobs": "loss/clip_frac",
    "prompt-satisfies-reward": "rollout/zero_variance_groups",
    "entropy-collapse": "rollout/zero_variance_groups",
    "large-lag": "loss/clip_frac",
}
"""By variant, the metric that shows its difference."""

FAILURES = Experiment(
    "failures",
    "Eight failures, each beside a good run: what do the metrics show?",
    {
        "good": (),
        # Each token after the fourth costs reward, and the model, not warmed up, is never right.
        "short-outputs": (
            "algorithm.overlong_buffer_tokens=20",
            "model.tiny.warmup=null",
            "learner.learning_rate=5e-3",
            "algorithm.num_steps=30",
        ),
        "wrong-mask": (f"algorithm.loss={BROKEN}.losses:mask_off_by_one",),
        "re-tokenized": (f"generator.engine={BROKEN}.engine:RetokenizingEngine",),
        "wrong-normalizer": (
            f"algorithm.loss={BROKEN}.losses:mean_per_micro_batch",
            f"algorithm.loss_options={{num_responses: {PROMPTS * SAMPLES}}}",
        ),
        "stale-old-logprobs": (f"algorithm.loss={BROKEN}.losses:stale_old_log_probs",),
        "prompt-satisfies-reward": (f"task.reward={BROKEN}.rewards:digits_in_transcript",),
        # The shortest text is that of the habit which copies the number; a right answer earns almost nothing.
        "entropy-collapse": (
            "task.reward=[{reward: exact_match, weight: 0.001}, "
            "{reward: brevity, arguments: {free: 0, span: 60}}]",
            "learner.learning_rate=6e-4",
            "algorithm.num_steps=30",
        ),
        "large-lag": ("weight_sync.max_lag=10",),
    },
    (
        "reward/answer", "rollout/response_tokens/mean", "policy/entropy", "rollout/zero_variance_groups",
        "loss/gradient_scale", "loss/untrained_frac", "loss/clip_frac", "mismatch/kl", "mismatch/ess_frac",
        "optim/grad_norm", "lag/mean",
    ),
    common=(
        "generator.engine=torch",  # starts in seconds
        f"algorithm.prompts_per_step={PROMPTS}",
        f"algorithm.samples_per_prompt={SAMPLES}",
        "algorithm.num_steps=16",
        "evaluation.every_num_steps=16",
        "learner.learning_rate=3e-4",
        "learner.micro_batch_tokens=768",  # several micro-batches per step, so that a normalizer matters
    ),
    draw=partial(plot_gallery, TELLING),
)  # fmt: skip


def failures() -> Experiment:
    """Return the experiment, for the command line."""
    return FAILURES
