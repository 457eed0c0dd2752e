"""Learner: one GRPO update a batch, on the policy's device."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from grpo_ray.actors.staleness import StaleBatchError, oldest_allowed
from grpo_ray.algorithms import (
    compute_entropy,
    logprob_mismatch,
    loss_denominator,
    policy_gradient_step,
    token_log_probs,
)
from grpo_ray.config import Config
from grpo_ray.engines.snapshot import pack_weights
from grpo_ray.policy.cores import hold_to_cores
from grpo_ray.policy.loading import load_policy, load_tokenizer
from grpo_ray.policy.microbatch import MicroBatch, TrainSequence, micro_batches, sequences_of
from grpo_ray.policy.response_logits import response_logits
from grpo_ray.policy.training_state import TrainingState, capture_state, restore_state, write_state
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.rollout_log import write_rollouts
from grpo_ray.telemetry.run_files import step_name
from grpo_ray.types import ScoredGroup, StepReport, TrainBatch, WeightSnapshot


class Learner:
    """Holds the policy (float32 master weights) and its optimizer; `version` counts completed steps."""

    def __init__(
        self,
        model_path: str,
        config: Config,
        end_token_ids: tuple[int, ...],
        checkpoint: Path | None = None,
        skipped_folder: Path | None = None,
    ) -> None:
        """Go on from `checkpoint`, the `training` folder in `model_path`, if it is given.

        Batches that could not be learned from are kept in `skipped_folder`.
        """
        self._config = config
        self._end_token_ids = end_token_ids
        self._device = torch.device("cuda" if config.learner.num_gpus else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(config.learner.num_threads)
            hold_to_cores(config.learner.cpu_cores)
        self._dtype = getattr(torch, config.model.dtype)
        self._tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
        self.model = load_policy(model_path, config.model.trust_remote_code).to(self._device)
        if config.learner.gradient_checkpointing:
            self.model.train()  # transformers checkpoints in training mode only; the models have no dropout
            self.model.gradient_checkpointing_enable()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learner.learning_rate,
            betas=config.learner.betas,
            eps=config.learner.adam_eps,
            weight_decay=config.learner.weight_decay,
        )
        torch.manual_seed(config.run.seed)  # a process begins with a state of its own
        self.version = 0
        self._skipped_in_a_row = 0
        self._skipped_folder = skipped_folder
        self._last_report: StepReport | None = None
        self._captured: TrainingState | None = None
        if checkpoint is not None:
            counters = restore_state(checkpoint, self.model, self._optimizer)
            self.version, self._skipped_in_a_row = counters["version"], counters["skipped_in_a_row"]

    def __repr__(self) -> str:
        return f"Learner(version={self.version})"

    def ready(self) -> bool:
        return True

    def train_step(self, batch: TrainBatch) -> StepReport:
        """One optimizer step on the whole batch.

        If its loss or gradient is not finite, weights and optimizer are left as they were and the batch is
        kept for inspection; the version counts on, as the batch is used up.

        Raises:
            StaleBatchError: a token is older than `max_lag` allows; nothing was changed.
            ValueError: the batch has no groups; nothing was changed.
        """
        if not batch.groups:
            raise ValueError(f"the batch of version {self.version} has no groups to train on")
        started = time.perf_counter()
        lag = self._check_lag(batch.groups)
        sums = self.accumulate_gradient(batch.groups)
        update = self._update(sums["loss"])
        if update["optim/skipped_updates"]:
            self._keep_skipped(batch.groups)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # or the step would be timed, and reported, before it is done
        self.version += 1
        if self._config.learner.slowdown_s:
            time.sleep(self._config.learner.slowdown_s)
        metrics = {**_means(sums), **lag, **update, "memory/learner_bytes": float(resident_bytes())}
        metrics["timing/train_s"] = time.perf_counter() - started
        self._last_report = StepReport(self.version, metrics)
        return self._last_report

    def _update(self, loss: float) -> dict[str, float]:
        """Take the optimizer's step, unless loss or gradient is not finite."""
        learning_rate = self._set_learning_rate()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.learner.max_grad_norm)
        grad_norm = float(norm)
        is_skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not is_skipped:
            self._optimizer.step()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
        return {
            "optim/grad_norm": grad_norm,
            "optim/lr": learning_rate,
            "optim/skipped_updates": float(is_skipped),
            "optim/skipped_in_a_row": float(self._skipped_in_a_row),
        }

    def _keep_skipped(self, groups: Sequence[ScoredGroup]) -> None:
        step = self.version + 1
        if self._skipped_folder is None:
            return
        try:
            self._skipped_folder.mkdir(parents=True, exist_ok=True)
            write_rollouts(self._skipped_folder / f"{step_name(step)}.parquet", step, groups)
        except OSError as error:
            logging.warning("step %d: its batch could not be kept: %s", step, error)

    def accumulate_gradient(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Leave the batch's gradient in `.grad`, whatever the micro-batch budget; returns summed metrics.

        The counts divided by are the whole batch's. Groups without signal have a zero gradient, so they are
        in the counts but not in the computation.
        """
        config = self._config.algorithm
        everything = sequences_of(groups)
        trained = sequences_of([group for group in groups if self._has_signal(group)])
        denominator = loss_denominator(
            config.aggregation, len(everything), self._num_tokens(everything), self._config.sampling.max_tokens
        )
        sums: dict[str, float] = defaultdict(float)
        sums["trained_tokens"] = float(sum(len(s.response_token_ids) for s in trained))
        self._optimizer.zero_grad(set_to_none=False)
        for batch in micro_batches(trained, self._config.learner.micro_batch_tokens):
            self._backward(batch.to(self._device), denominator, sums)
        return sums

    def _backward(self, batch: MicroBatch, denominator: float, sums: dict[str, float]) -> None:
        config = self._config.algorithm
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = response_logits(
                self.model,
                batch,
                self._config.sampling.temperature,
                self._config.sampling.min_tokens,
                self._end_token_ids,
            )  # [batch, resp, vocab]
        log_probs = token_log_probs(logits, batch.labels)  # [batch, resp]
        loss, metadata = policy_gradient_step(
            log_probs,
            batch.response_mask,
            loss_type=config.loss,
            aggregation=config.aggregation,
            denominator=denominator,
            raw_rewards=batch.rewards,
            advantages=batch.advantages,
            old_log_probs=batch.behaviour_logprobs,
            cliprange=config.cliprange,
        )
        loss.backward()
        with torch.no_grad():
            entropy = compute_entropy(logits.detach())
            mismatch = logprob_mismatch(log_probs, batch.behaviour_logprobs, batch.response_mask)
        sums["loss"] += loss.item()
        sums["tokens"] += metadata["num_tokens"].item()
        sums["clipped"] += metadata["num_clipped"].item() if "num_clipped" in metadata else 0.0
        sums["entropy"] += entropy[batch.response_mask].sum().item()
        sums["kl"] += mismatch["kl_sum"].item()
        sums["compared"] += mismatch["num_tokens"].item()
        # Python's max would lose a nan.
        sums["logprob_diff_max"] = float(np.maximum(sums["logprob_diff_max"], mismatch["abs_diff_max"].item()))

    def _has_signal(self, group: ScoredGroup) -> bool:
        weights = group.rewards if self._config.algorithm.loss == "no_baseline" else group.advantages
        return bool(np.any(weights != 0.0))

    def _num_tokens(self, sequences: Sequence[TrainSequence]) -> int:
        """Response tokens that the loss counts: GRPO-Clip drops those without a finite behaviour logprob."""
        if self._config.algorithm.loss != "grpo_clip":
            return sum(len(s.response_token_ids) for s in sequences)
        return sum(int(np.isfinite(s.behaviour_logprobs).sum()) for s in sequences)

    def _check_lag(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """lag/mean and lag/max over the batch's tokens, after the second guard."""
        versions = np.concatenate([c.versions for group in groups for c in group.rollout.completions])
        oldest = oldest_allowed(self.version, self._config.weight_sync.max_lag)
        if versions.min() < oldest:
            raise StaleBatchError(
                f"a token of version {versions.min()} reached the Learner at version {self.version}; "
                f"max_lag is {self._config.weight_sync.max_lag}"
            )
        lag = self.version - versions
        return {"lag/mean": float(lag.mean()), "lag/max": float(lag.max())}

    def _set_learning_rate(self) -> float:
        config = self._config.learner
        rate = config.learning_rate * min(1.0, (self.version + 1) / max(1, config.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def snapshot(self) -> tuple[WeightSnapshot, int]:
        """A copy of the weights in the served dtype, which outlives the next step, and its version."""
        parameters, checksum = self.model.named_parameters(), self._config.weight_sync.checksum
        return pack_weights(parameters, self.version, self._dtype, checksum), self.version

    def capture(self) -> StepReport | None:
        """Copy the whole state to host memory, for `write_captured`; returns the last step's report."""
        counters = {"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}
        self._captured = None  # what nobody wrote makes room first
        self._captured = capture_state(self.model, self._optimizer, counters)
        return self._last_report

    def write_captured(self, folder: Path) -> float:
        """Write what was captured to an existing folder, and forget it; returns the seconds it took.

        Another thread may train meanwhile: no live weight is looked at.

        Raises:
            OSError: it could not be written.
        """
        started = time.perf_counter()
        captured, self._captured = self._captured, None
        assert captured is not None, "capture first"
        write_state(captured, self.model, self._tokenizer, folder)
        return time.perf_counter() - started


def _means(sums: dict[str, float]) -> dict[str, float]:
    tokens, compared = max(1.0, sums["tokens"]), max(1.0, sums["compared"])
    return {
        "loss/policy": sums["loss"],
        "loss/clip_frac": sums["clipped"] / tokens,
        "policy/entropy": sums["entropy"] / max(1.0, sums["trained_tokens"]),
        "mismatch/kl": sums["kl"] / compared,
        "mismatch/logprob_diff/max": sums["logprob_diff_max"],
        "throughput/trained_tokens": sums["trained_tokens"],
    }
