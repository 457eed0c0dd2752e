"""Every metric's unit and meaning: for the report, the docs, and a test that nobody logs another."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

STAGE = re.compile(r"time/(?P<actor>[^/]+)/(?P<stage>.+)_s")
"""A figure of an actor's clock."""
SYNC = tuple(f"timing/weight_sync/{phase}_s" for phase in ("pause", "transfer", "resume"))
"""A weight sync's seconds; not the join before it, in which running groups are still being sampled."""

METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("share", "mean reward of the step's responses"),
    "reward/mean/*": ("share", "the same of a mixture's part"),
    "reward/format": ("share", "responses in the format"),
    "reward/answer": ("share", "responses with a right answer, in the format"),
    "rollout/response_tokens/mean": ("tokens", "mean length of a response"),
    "rollout/response_tokens/max": ("tokens", "longest response of the step"),
    "rollout/truncated_frac": ("share", "responses cut off at sampling.max_tokens"),
    "rollout/zero_variance_groups": (
        "groups",
        "groups whose advantages are all 0: they have no policy gradient",
    ),
    "rollout/retried_groups": ("groups", "sampled again since the last step: aborted, or their Generator died"),
    "rollout/set_aside_groups": (
        "groups",
        "given up so far: no try gave a response, others took their places",
    ),
    "rollout/dropped_groups": ("groups", "replaced for lack of signal (algorithm.dynamic_sampling_tries)"),
    "rollout/cut_groups": ("groups", "cut off, to be asked again (algorithm.oversample_frac)"),
    "rollout/response_tokens/cut_before_ratio": (
        "",
        "mean length of responses to prompts that were cut off before, to those of the others",
    ),
    "curriculum/pass_rate/mean": ("share", "right responses when a prompt was last seen, mean over those seen"),
    "curriculum/seen_frac": ("share", "training prompts that have been seen"),
    "curriculum/settled_frac": ("share", "training prompts whose group had no signal when last seen"),
    "curriculum/weight/mean": ("share", "epochs in which a training prompt is asked, mean over all"),
    "curriculum/weight/min": ("share", "the same, of the prompt that is asked least"),
    "curriculum/skipped": ("prompts", "left out of their epochs since the run began"),
    "curriculum/*": ("", "a figure of the curriculum, of a mixture's part"),
    "loss/policy": (
        "",
        "the loss, with KL penalty and entropy bonus; mean over the updates",
    ),
    "loss/clip_frac": ("share", "tokens whose ratio, or whose response's ratio, was clipped"),
    "loss/kl_ref": ("nats a token", "KL of the policy to the reference, estimator k1"),
    "loss/kl_ref_k3": ("nats a token", "KL of the policy to the reference, estimator k3"),
    "policy/entropy": ("nats a token", "mean entropy of the next-token distribution"),
    "optim/grad_norm": ("", "norm of the gradient before it is clipped"),
    "optim/lr": ("", "learning rate of the step"),
    "optim/skipped_updates": ("updates", "loss or gradient was not finite, and the weights were left alone"),
    "optim/skipped_in_a_row": ("updates", "steps up to this one without a finite update"),
    "optim/num_updates": ("updates", "optimizer updates on the batch"),
    "reward/baseline_variance": ("", "estimated variance of a group's mean reward, mean over the groups"),
    "reward/errors": ("responses", "could not be graded; reward 0, but left out of their groups"),
    "mismatch/kl": ("nats a token", "KL of the sampler to the Learner, on the sampled tokens"),
    "mismatch/logprob_diff/max": ("nats", "largest |behaviour - Learner's logprob| of a token"),
    "mismatch/ess_frac": ("share", "effective sample size of the weights Learner / sampler, of the tokens"),
    "replay/groups": ("groups", "kept to be replayed"),
    "replay/bytes": ("bytes", "size of the groups that are kept to be replayed"),
    "replay/evicted_age": ("groups", "no longer kept: older than buffer.replay.max_age"),
    "replay/evicted_uses": ("groups", "no longer kept: trained on buffer.replay.max_uses times"),
    "replay/evicted_room": ("groups", "no longer kept: they made room for newer ones"),
    "lag/mean": ("versions", "mean age of a trained token"),
    "lag/max": ("versions", "largest age of a trained token"),
    "lag/rejected": ("groups", "groups refused as older than weight_sync.max_lag"),
    "buffer/groups": ("groups", "scored groups that wait to be trained"),
    "buffer/bytes": ("bytes", "size of the scored groups that wait to be trained"),
    "time/*/*_s": ("s", "an actor's stage since the step before; its stages add up to its time"),
    "timing/generate_s": ("s", "busiest Generator: it sampled groups, or an evaluation's"),
    "timing/score_s": ("s", "computing rewards and advantages"),
    "timing/wait_for_batch_s": ("s", "the step's batch was waited for"),
    "timing/train_s": ("s", "the Learner trained"),
    "timing/weight_sync/join_s": ("s", "waiting for running groups to end (weight_sync.in_flight: false)"),
    "timing/weight_sync/pause_s": ("s", "until the slowest Generator had paused"),
    "timing/weight_sync/transfer_s": ("s", "until the slowest Generator had the weights"),
    "timing/weight_sync/resume_s": ("s", "until the slowest Generator sampled again"),
    "timing/evaluate_s": ("s", "validation"),
    "timing/checkpoint/capture_s": ("s", "the Learner stood still while its state was copied"),
    "timing/checkpoint/write_s": ("s", "a checkpoint was written beside the training"),
    "timing/step_s": ("s", "the whole step"),
    "utilization/learner": ("share", "time in which the Learner trained"),
    "utilization/generators": ("share", "time in which the Generators sampled, mean over them"),
    "throughput/trained_tokens": ("tokens", "response tokens that gradients were computed for, in all epochs"),
    "throughput/sampled_tokens_per_s": ("tokens/s", "response tokens sampled"),
    "throughput/trained_tokens_per_s": ("tokens/s", "response tokens trained on"),
    "recovery/restarts": ("restarts", "Generators and Scorers restarted so far"),
    "recovery/restores": ("restores", "times the run went back to its last checkpoint so far"),
    "memory/object_store_spilled_bytes": ("bytes", "that Ray's object store moved to disk so far"),
    "memory/*": ("bytes", "memory of a process or device"),
    "eval/reward": ("share", "mean validation reward"),
    "eval/reward/*": ("share", "the same of a mixture's part"),
    "eval/format": ("share", "validation responses in the format"),
    "eval/answer": ("share", "validation responses with a right answer, in the format"),
    "eval/response_tokens/mean": ("tokens", "mean length of a validation response"),
    "eval/truncated_frac": ("share", "validation responses cut off at sampling.max_tokens"),
}


def check_names(metrics: Iterable[str]) -> list[str]:
    """The names that the catalogue does not know, sorted."""
    patterns = [name for name in METRICS if "*" in name]
    return sorted(
        name
        for name in metrics
        if name not in METRICS and not any(fnmatchcase(name, pattern) for pattern in patterns)
    )
