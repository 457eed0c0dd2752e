"""Learner: the GRPO updates of one batch after another, on the policy's device."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function

from grpo_ray.actors.staleness import StaleBatchError, oldest_allowed
from grpo_ray.config import Config
from grpo_ray.engines.snapshot import pack_on_device, pack_weights
from grpo_ray.policy.device import hold_to_cores, move_optimizer
from grpo_ray.policy.forward_backward import MISMATCH, ForwardBackward, Sums, add, mean_metrics
from grpo_ray.policy.loading import load_policy, load_tokenizer
from grpo_ray.policy.microbatch import TrainSequence, minibatches, sequences_of
from grpo_ray.policy.model import PolicyModel
from grpo_ray.policy.reference import Reference
from grpo_ray.policy.training_state import TrainingState, capture_state, restore_state, write_state
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.rollout_log import write_rollouts
from grpo_ray.telemetry.run_files import step_name
from grpo_ray.telemetry.stage_clock import ActorStats, StageClock
from grpo_ray.telemetry.step_profile import StepProfiler
from grpo_ray.types import ScoredGroup, StepReport, TrainBatch, WeightSnapshot

STAGES = ("optimizer", "logprobs", "train", "snapshot", "capture", "move", "write_checkpoint", "write_profile")


class Learner:
    """Holds the policy (float32 master weights) and its optimizer; `version` counts completed steps."""

    def __init__(
        self,
        model_path: str,
        config: Config,
        end_token_ids: tuple[int, ...],
        checkpoint: Path | None = None,
        skipped_folder: Path | None = None,
        initial_path: str | None = None,
        profile_folder: Path | None = None,
    ) -> None:
        """Go on from `checkpoint`, the `training` folder in `model_path`, if it is given.

        Args:
            skipped_folder: where batches are kept that could not be learned from.
            initial_path: the model that the run began with, if it is another than `model_path`.
            profile_folder: where the traces of `learner.profile_steps` are written.
        """
        self._config = config
        self._device = torch.device("cuda" if config.learner.num_gpus else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(config.learner.num_threads)
            hold_to_cores(config.learner.cpu_cores)
        self._dtype = getattr(torch, config.model.dtype)
        self._forward_backward = ForwardBackward(config, end_token_ids, self._device)
        self._tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
        # Colocated, the first turn is the Generators'.
        self._home = torch.device("cpu") if config.generator.colocated else self._device
        self.model = self._load(model_path)
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
        self._reference = self._make_reference(initial_path or model_path, model_path)
        self._clock = StageClock(STAGES, rest="wait_for_batch")
        torch.manual_seed(config.run.seed)  # a process begins with a state of its own
        self.version = 0
        self._skipped_in_a_row = 0
        self._skipped_folder = skipped_folder
        self._profiler = StepProfiler(config.learner.profile_steps, profile_folder)
        self._last_report: StepReport | None = None
        self._captured: TrainingState | None = None
        self._shared: torch.Tensor | None = None  # the bytes of the last snapshot, on the device
        if checkpoint is not None:
            counters = restore_state(checkpoint, self.model, self._optimizer, self._reference)
            self.version, self._skipped_in_a_row = counters["version"], counters["skipped_in_a_row"]

    def _load(self, path: str) -> PolicyModel:
        model = self._config.model
        return load_policy(path, model.trust_remote_code, model.implementation).to(self._home)

    def _make_reference(self, initial_path: str, model_path: str) -> Reference | None:
        """A copy of the weights that the run began with; of a run that goes on they are loaded."""
        kl = self._config.algorithm.kl
        if kl.reference == "none":
            return None
        first = self.model
        if initial_path != model_path and kl.reference == "initial":
            first = self._load(initial_path)
        return Reference(first, kl, self._dtype)

    def __repr__(self) -> str:
        return f"Learner(version={self.version}, {self._clock.current})"

    def ready(self) -> bool:
        return True

    def take_stats(self) -> ActorStats:
        """What happened since the last call; another thread may train meanwhile."""
        return ActorStats(self._clock.take(), resident_bytes())

    def train_step(self, batch: TrainBatch) -> StepReport:
        """The updates of one batch: one, unless `epochs_per_batch` or `train_batch_size` asks for several.

        An update whose loss or gradient is not finite leaves weights and optimizer as they were, and the
        batch is kept for inspection; the version counts on, as the batch is used up.

        Raises:
            StaleBatchError: a token is older than the schedule allows; nothing was changed.
            ValueError: the batch has no groups; nothing was changed.
        """
        if not batch.groups:
            raise ValueError(f"the batch of version {self.version} has no groups to train on")
        with self._clock.stage("train", f"step {self.version + 1}, {len(batch.groups)} groups") as duration:
            metrics = self._train_on(batch.groups)
        metrics["timing/train_s"] = duration.seconds
        self._last_report = StepReport(self.version, metrics, self._write_profile())
        return self._last_report

    def _write_profile(self) -> str | None:
        """Why the step's trace could not be written, if it has one."""
        if not self._profiler.has_trace:
            return None
        with self._clock.stage("write_profile"):
            return self._profiler.write()

    def _train_on(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        metrics = self._check_lag(groups)
        with self._profiler.step(self.version + 1):
            metrics |= self._update_on(groups)
        if metrics["optim/skipped_updates"]:
            self._keep_skipped(groups)
        self.version += 1
        if self._reference is not None:
            self._reference.follow(self.model, self.version)
        if self._config.learner.slowdown_s:
            time.sleep(self._config.learner.slowdown_s)
        return metrics

    def _update_on(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Every update of the batch; other policies' log-probabilities are looked up once, before the first."""
        algorithm = self._config.algorithm
        sequences: Sequence[TrainSequence] = sequences_of(groups, algorithm.mask_truncated)
        sums: Sums = defaultdict(float)
        if self._reference is not None:
            with self._clock.stage("logprobs", "the reference's"):
                sequences = self._forward_backward.with_reference(self._reference.model, sequences)
        dealing_seed = f"{self._config.run.seed}/minibatches/{self.version}"
        size, num_epochs = algorithm.train_batch_size, algorithm.epochs_per_batch
        is_single = num_epochs == 1 and (size is None or size >= len(sequences))
        if not is_single and self._forward_backward.needs_proximal:
            with self._clock.stage("logprobs", "before the first update"):
                sequences, sums = self._forward_backward.with_proximal(self.model, sequences)
        updates: list[dict[str, float]] = []
        for minibatch in minibatches(sequences, size, num_epochs, dealing_seed):
            of_this = self.accumulate_gradient(minibatch)
            if updates:  # later ones would measure the policy's own steps, not the engines' difference
                of_this = {name: value for name, value in of_this.items() if name not in MISMATCH}
            with self._clock.stage("optimizer"):
                update = self._update(of_this["loss"])
            updates.append({**update, "loss/policy": of_this["loss"]})
            add(sums, of_this)
        num_skipped = sum(update["optim/skipped_updates"] for update in updates)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if num_skipped == len(updates) else 0
        return {
            **{name: float(np.mean([update[name] for update in updates])) for name in updates[0]},
            **mean_metrics(sums),
            "optim/num_updates": float(len(updates)),
            "optim/skipped_updates": num_skipped,
            "optim/skipped_in_a_row": float(self._skipped_in_a_row),
            "throughput/trained_tokens": sums["trained_tokens"],
        }

    def accumulate_gradient(self, sequences: Sequence[TrainSequence]) -> Sums:
        """Leave the gradient of one update in `.grad`; returns summed metrics."""
        self._optimizer.zero_grad()  # to none: where nothing can be learned, the optimizer takes no step
        return self._forward_backward.backward(self.model, sequences)

    def _update(self, loss: float) -> dict[str, float]:
        """Take the optimizer's step, unless loss or gradient is not finite."""
        learning_rate = self._set_learning_rate()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.learner.max_grad_norm)
        grad_norm = float(norm)
        is_skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not is_skipped:
            with record_function("optimizer"):
                self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # or it would be timed, and told of, before it is done
        return {
            "optim/grad_norm": grad_norm,
            "optim/lr": learning_rate,
            "optim/skipped_updates": float(is_skipped),
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

    def _check_lag(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """lag/mean and lag/max over the batch's tokens, replayed ones included, after the second guard."""
        versions = np.concatenate([c.versions for group in groups for c in group.rollout.completions])
        max_age = self._config.max_token_age
        if versions.min() < oldest_allowed(self.version, max_age):
            name = "buffer.replay.max_age" if self._config.replayed_per_step else "weight_sync.max_lag"
            raise StaleBatchError(
                f"a token of version {versions.min()} reached the Learner at version {self.version}; "
                f"{name} is {max_age}"
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
        with self._clock.stage("snapshot", f"version {self.version}"):
            return self._snapshot(), self.version

    def _snapshot(self) -> WeightSnapshot:
        parameters, sync = self.model.named_parameters(), self._config.weight_sync
        if sync.transport == "ipc":
            self._shared = None  # every Generator has the one before by now
            packed = pack_on_device(parameters, self.version, self._dtype, self._device)
            snapshot, self._shared = packed  # kept until the next: a Generator that is replaced loads it too
            return snapshot
        return pack_weights(parameters, self.version, self._dtype, sync.checksum)

    def make_room(self) -> None:
        """Colocated on a GPU: leave the device to the Generators until `take_room`."""
        if self._device.type == "cuda":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def take_room(self) -> None:
        """The Generators sleep: the device is the Learner's."""
        if self._device.type == "cuda":
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        with self._clock.stage("move", f"to {device}"):
            self._optimizer.zero_grad()  # or the last gradient would be carried along
            self.model.to(device)
            move_optimizer(self._optimizer, device)
            if self._reference is not None:
                self._reference.model.to(device)

    def capture(self) -> StepReport | None:
        """Copy the whole state to host memory, for `write_captured`; returns the last step's report."""
        counters = {"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}
        self._captured = None  # what nobody wrote makes room first
        with self._clock.stage("capture", f"version {self.version}"):
            reference = self._reference.weights() if self._reference is not None else {}
            self._captured = capture_state(self.model, self._optimizer, counters, reference)
        return self._last_report

    def write_captured(self, folder: Path) -> None:
        """Write what was captured to an existing folder, and forget it.

        Another thread may train meanwhile: no live weight is looked at.

        Raises:
            OSError: it could not be written.
        """
        captured, self._captured = self._captured, None
        assert captured is not None, "capture first"
        with self._clock.stage("write_checkpoint"):
            write_state(captured, self.model, self._tokenizer, folder)
