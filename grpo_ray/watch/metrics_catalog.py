"""Unit and meaning of every metric, for the report, the docs, and the test that no other is logged; ranks."""

import re

STAGE = re.compile(r"time/(?P<actor>[^/]+)/(?P<stage>.+)_s")
"""Metric of an actor's clock."""
SENT = "weight_sync/sent_frac"
PAUSED = "timing/weight_sync/paused_s"
SYNC = tuple(f"timing/weight_sync/{phase}_s" for phase in ("stage", "pause", "load", "finish", "resume"))
"""Seconds of a weight sync, without the join before it, during which running groups are still sampled."""

_CATALOG = {  # "[unit] meaning"; what is a plain number has its meaning alone
    "reward/mean": "mean reward of the step's responses",
    "reward/mean/*": "mean reward of a mixture part's responses",
    "reward/format": "[share] responses in the required format",
    "reward/answer": "[share] responses with a correct answer; the default rewards ask for the format, too",
    "reward/*/mean": "mean reward of a named term of task.reward, without its weight, where it applies",
    "rollout/response_tokens/mean": "[tokens] mean response length, in sampled tokens",
    "rollout/response_tokens/max": "[tokens] longest response of the step, in sampled tokens",
    "rollout/truncated_frac": "[share] responses cut off at sampling.max_tokens, or episodes at a limit",
    "rollout/zero_variance_groups": "[groups] groups in which every advantage is 0, before "
    "algorithm.advantage_scale and a KL in the reward",
    "rollout/retried_groups": "[groups] groups sampled again in the step: aborted, or their Generator died",
    "rollout/set_aside_groups": "[groups] groups given up so far without a response; others replaced them",
    "rollout/dropped_groups": "[groups] groups replaced for lack of signal (algorithm.dynamic_sampling_tries)",
    "rollout/cut_groups": "[groups] groups cut off, to be sampled again (algorithm.oversample_frac)",
    "rollout/response_tokens/cut_before_ratio": "mean response length for prompts that were cut off before, "
    "relative to all other prompts",
    # Of the step's fresh groups, dropped ones included; only if they have episodes.
    "episodes/turns/mean": "[turns] mean number of turns that an episode sampled",
    "episodes/turns/max": "[turns] most turns that an episode of the step sampled",
    "episodes/branches/mean": "[branches] mean number of an episode's turns that did not continue the tokens "
    "before them: each begins another trained sequence",
    "episodes/context_tokens/mean": "[tokens] mean number of tokens between an episode's turns that the policy "
    "did not sample: messages, tool results, and the template",
    "episodes/seconds/mean": "[s] mean time from an episode's start to its end",
    "episodes/seconds/max": "[s] time from start to end of the step's longest episode",
    "episodes/status/finished": "[share] episodes in which the function returned",
    "episodes/status/truncated_turns": "[share] episodes ended by the limit of turns",
    "episodes/status/truncated_tokens": "[share] episodes ended by the limit of tokens",
    "episodes/status/truncated_time": "[share] episodes ended by the limit of time: they have no reward",
    "episodes/status/environment_error": "[share] episodes in which the function raised an error or returned "
    "no valid reward: they have no reward",
    "episodes/status/generator_error": "[share] episodes without a reward, as a Generator failed in a turn",
    "episodes/status/cancelled": "[share] cancelled episodes: they have no reward",
    "episodes/metrics/*": "a metric that the episodes return, mean over those that return it",
    "curriculum/seen_frac": "[share] training prompts that have been seen",
    "curriculum/settled_frac": "[share] training prompts with a group without signal when last seen",
    "curriculum/skipped": "[prompts] prompts left out of their epochs since the start of the run",
    "curriculum/*": "a curriculum metric of a mixture part",
    "loss/policy": "loss with KL penalty and entropy bonus, mean over the updates",
    "loss/clip_frac": "[share] tokens with a clipped ratio, or in a response with a clipped ratio, of those "
    "with an advantage other than 0, over all updates",
    "loss/clip_frac/low": "[share] the same, with a ratio below 1",
    "loss/clip_frac/high": "[share] the same, with a ratio above 1",
    "loss/gradient_scale": "sum of the absolute derivatives of the loss by the tokens' logprobs, over that "
    "of the plain policy gradient with the same advantages, weights and aggregation. Near 1 "
    "with ratios near 1; absent with a KL in the loss, algorithm.token_selection, `vespo` or `kl_tau`",
    "loss/untrained_frac": "[share] tokens without any gradient although advantage and weight are not 0, "
    "less loss/clip_frac; absent where loss/gradient_scale is",
    "loss/kl_ref": "[nats per token] KL of the policy to the reference, estimator k1",
    "loss/kl_ref_k3": "[nats per token] KL of the policy to the reference, estimator k3",
    "loss/entropy_bonus": "weight of the entropy in effect, only with algorithm.entropy_target",
    "distillation/kl": "[nats per token] KL of the sampler's policy to the teacher: mean of log(sampler / "
    "teacher) over the sampled tokens of the step's fresh groups",
    "policy/entropy": "[nats per token] entropy of the next-token distribution, estimated at the sampler's "
    "policy: mean of -log p over all sampled tokens of the step's fresh groups, dropped ones included",
    "policy/entropy/exact": "[nats per token] mean entropy of the Learner's next-token distributions at the "
    "tokens with an advantage other than 0, with algorithm.entropy_target at all tokens in the loss, over all "
    "updates",
    "optim/grad_norm": "gradient norm before clipping",
    "optim/lr": "learning rate of the step",
    "optim/skipped_updates": "[updates] updates skipped because the loss or the gradient was not finite",
    "optim/skipped_in_a_row": "[steps] consecutive steps without a finite update, up to and including this one",
    "optim/num_updates": "[updates] optimizer updates on the batch",
    "reward/baseline_variance": "estimated variance of the mean of a group's graded rewards, mean over groups",
    "reward/errors": "[responses] responses that the grader failed on: reward 0, and left out of their groups",
    "reward/ungradable": "[responses] responses too long, too deep or too costly to grade: they count as wrong",
    "reward/kl_penalty": "mean reward that algorithm.kl.placement reward or reward_to_go takes off a response",
    "advantage/batch_std": "what algorithm.advantage_scale divides by: standard deviation of the batch's "
    "rewards (batch) or advantages (whiten_responses, whiten_tokens)",
    # Of the same tokens in every configuration: those with an advantage other than 0 in the first update on a
    # batch (with a train_batch_size a random share of the batch), by the policy before this update.
    "mismatch/kl": "[nats per token] KL of the sampler to the Learner before its first update on the batch, on "
    "that update's tokens with an advantage other than 0",
    "mismatch/kl/after_switch": "[nats per token] the same, only on tokens sampled after their response's "
    "first switch of versions (weight_sync.in_flight); absent without any",
    "mismatch/tokens_after_switch": "[tokens] number of these tokens",
    "mismatch/logprob_diff/max": "[nats] largest difference of behaviour and Learner logprobs of these tokens",
    "mismatch/ess_frac": "[share] Kish's effective sample size of these tokens with weights Learner / sampler",
    "correction/limited_frac": "[share] tokens with a weight that algorithm.off_policy_correction truncated "
    "or masked, of those with an advantage other than 0, over all updates",
    "correction/dropped_frac": "[share] tokens with weight 0, of the same tokens",
    "correction/weight/mean": "mean weight of algorithm.off_policy_correction, over the same tokens",
    "correction/weight/min": "smallest weight of algorithm.off_policy_correction",
    "correction/weight/max": "largest weight of algorithm.off_policy_correction",
    "replay/groups": "[groups] groups kept for replay",
    "replay/bytes": "[bytes] size of the groups kept for replay",
    "replay/evicted_age": "[groups] groups evicted because they exceed buffer.replay.max_age",
    "replay/evicted_uses": "[groups] groups evicted after buffer.replay.max_uses batches",
    "replay/evicted_room": "[groups] groups evicted to make room for newer ones",
    "lag/mean": "[versions] mean lag of the batch's sampled tokens, truncated responses too; 0 without any",
    "lag/masked_tokens": "[tokens] sampled tokens of episodes that are too old and so not trained",
    "lag/max": "[versions] largest lag of the batch's sampled tokens",
    "lag/updates/max": "[updates] largest number of updates between those that sampled a token and the one "
    "that trains on it, over the step; skipped updates do not count. It equals lag/max "
    "with one update per step, and exceeds it with algorithm.epochs_per_batch or "
    "algorithm.train_batch_size",
    "lag/rejected": "[groups] groups refused because their lag exceeds weight_sync.max_lag",
    "buffer/groups": "[groups] scored groups waiting to be trained",
    "buffer/bytes": "[bytes] size of the scored groups waiting to be trained",
    "time/*/*_s": "[s] an actor's stage since the previous step; an actor's stages add up to its time",
    "timing/generate_s": "[s] sampling in the busiest Generator, for training and validation",
    "timing/score_s": "[s] computing rewards and advantages",
    "timing/wait_for_batch_s": "[s] waiting for the step's batch",
    "timing/train_s": "[s] training in the Learner",
    "timing/weight_sync/join_s": "[s] waiting for running groups to end (weight_sync.in_flight: false)",
    "timing/weight_sync/pause_s": "[s] time until the slowest Generator had paused",
    "timing/weight_sync/stage_s": "[s] time until the slowest Generator had received the weights",
    "timing/weight_sync/load_s": "[s] time until the slowest Generator had replaced its weights",
    "timing/weight_sync/finish_s": "[s] time until the slowest Generator had committed the version",
    "timing/weight_sync/resume_s": "[s] time until the slowest Generator sampled again",
    SENT: "[share] bytes sent to a Generator, over those of all weights; only with weight_sync.delta",
    "timing/weight_sync/paused_s": "[s] time that the slowest Generator stood still",
    "timing/evaluate_s": "[s] validation",
    "timing/checkpoint/capture_s": "[s] time the Learner was blocked while its state was copied",
    "timing/checkpoint/write_s": "[s] writing a checkpoint, in parallel with training",
    "timing/step_s": "[s] the whole step",
    "utilization/learner": "[share] time the Learner spent training, mean over its ranks",
    "utilization/generators": "[share] time the Generators spent sampling, mean over Generators",
    "throughput/trained_tokens": "[tokens] response tokens with a computed gradient, over all epochs",
    "throughput/sampled_tokens_per_s": "[tokens/s] response tokens sampled",
    "throughput/teacher_tokens_per_s": "[tokens/s] response tokens that Teachers looked up",
    "throughput/trained_tokens_per_s": "[tokens/s] response tokens trained on",
    "perf/mfu": "[share] model FLOPs utilization: the FLOPs that a step's training needs (each prompt once, no "
    "padding, no recomputation) per second of timing/train_s, relative to the peak of the Learner's device",
    "perf/tokens_per_s_per_device": "[tokens/s] tokens with a forward and a backward pass per second of "
    "timing/train_s: those of responses, and of each prompt once per update",
    "perf/flash_attention": "1 if FlashAttention computes the Learner's attention, 0 if sdpa; only on GPUs",
    "perf/prompt_frac": "[share] prompt tokens, repeated ones too, of the tokens computed for the gradient",
    "perf/padding_frac": "[share] padding of the tokens computed for the gradient",
    "perf/loop_lag_s": "[s] how late the driver's event loop runs what is due, 99th percentile",
    # With more than 16 Generators, which share the actors `generators` (their mean) and `slowest-generator`.
    "generators/slowest": "number of the Generator that sampled longest",
    # With several ranks of the Learner only.
    "ranks/*/collectives_s": "[s] time of a rank of the Learner in the step's collectives, waiting included",
    "ranks/slowest": "number of the rank with the least time in collectives: the others waited for it",
    "ranks/imbalance": "largest planned cost of a rank's share of the last update over the mean; 1 is even",
    "recovery/restarts": "[restarts] Generators, Scorers, Teachers and EnvironmentWorkers restarted so far",
    "recovery/restores": "[restores] restores from the last checkpoint so far",
    "memory/object_store_spilled_bytes": "[bytes] bytes that Ray's object store has spilled to disk so far",
    "memory/learner_device_peak_bytes": "[bytes] most memory of torch on the Learner's GPU since the last step",
    "memory/*": "[bytes] memory of a process or device",
    "eval/reward": "mean validation reward; what could not be graded has the least of its part, or 0",
    "eval/reward/*": "eval/reward of a mixture part",
    "eval/format": "[share] validation responses in the required format",
    "eval/answer": "[share] validation responses with a correct answer, as reward/answer",
    "eval/response_tokens/mean": "[tokens] mean length of a validation response, in sampled tokens",
    "eval/truncated_frac": "[share] validation responses cut off so, or episodes at a limit",
    "eval/episodes/*": "the metric episodes/* of the validation's episodes",
}


def _unit_and_meaning(text: str) -> tuple[str, str]:
    unit, has_unit, meaning = text.removeprefix("[").partition("] ")
    return (unit, meaning) if has_unit else ("", text)


METRICS = {name: _unit_and_meaning(text) for name, text in _CATALOG.items()}
"""Unit and meaning of every metric by its name, or by a pattern of names."""

RANK = re.compile(r"learner(?:-(?P<number>\d+))?")
"""Name of a rank's actor: `learner` if there is only one, else `learner-0` and so on."""
COLLECTIVES = re.compile(r"ranks/(?P<actor>learner-\d+)/collectives_s")
SLOWEST = "ranks/slowest"
IMBALANCE = "ranks/imbalance"


def collectives_of(actor: str) -> str:
    """Return the name of an actor's metric that `COLLECTIVES` matches."""
    return f"ranks/{actor}/collectives_s"


def rank_name(number: float) -> str:
    """Return the actor's name of one of several ranks; `number` is a value of the metric `ranks/slowest`."""
    return f"learner-{number:.0f}"


def by_number(actor: str) -> tuple[str, int]:
    """Return a key that sorts `learner-2` before `learner-10`."""
    kind, _, number = actor.rpartition("-")
    return (kind, int(number)) if number.isdecimal() else (actor, -1)
