"""Learner: GRPO updates of the policy, one batch after another, on its own device."""

import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function

from grpo_ray.config import Config
from grpo_ray.core.staleness import UpdateCounts, lag_metrics
from grpo_ray.errors import RunError
from grpo_ray.learning.adapters import load_adapter, load_trained, trained_parameters
from grpo_ray.learning.batch_advantages import needs_batch, with_batch_advantages
from grpo_ray.learning.device import Offload, hold_to_cores
from grpo_ray.learning.forward_backward import MISMATCH, ForwardBackward
from grpo_ray.learning.loading import cast_parameters
from grpo_ray.learning.master_weights import MasterWeights
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.optimizer import learning_rate, make_optimizer, move_optimizer
from grpo_ray.learning.out_of_memory import SmallerMicroBatches
from grpo_ray.learning.policy_model import PolicyModel, compile_blocks, recompute_in_backward
from grpo_ray.learning.ranks import Ranks, Seat
from grpo_ray.learning.reference import AdapterReference, Reference
from grpo_ray.learning.sequences import TrainSequence, minibatches, samples_of, sequences_of
from grpo_ray.learning.sharded import whole
from grpo_ray.learning.sharded_loading import load_in_shards
from grpo_ray.learning.training_state import TrainingState, capture_state, restore_state, write_state
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import step_name
from grpo_ray.transfer.messages import Meeting, WeightSnapshot
from grpo_ray.transfer.sender import Packer
from grpo_ray.types import NO_VERSION, ScoredGroup, StepReport, TrainBatch
from grpo_ray.watch.flops import DEVICE_PEAK, Performance
from grpo_ray.watch.learner_metrics import StepProfiler, Sums, add, mean_metrics
from grpo_ray.watch.memory import resident_bytes
from grpo_ray.watch.metrics_catalog import IMBALANCE, SLOWEST, collectives_of, rank_name
from grpo_ray.watch.stage_clock import StageClock, StageTimes

STAGES = ("optimizer", "logprobs", "train", "snapshot", "capture", "move", "write_checkpoint", "write_profile")


class Learner:
    """The policy, its float32 weights and their optimizer; `version` is the number of completed steps.

    With `learner.num_ranks` it is one of several: each holds a part of all weights, every call goes to all of
    them, and they meet in collectives.
    """

    def __init__(
        self, model_path: str, config: Config, end_token_ids: tuple[int, ...], checkpoint: Path | None = None,
        skipped_folder: Path | None = None, initial_path: str | None = None, profile_folder: Path | None = None,
        seat: Seat | None = None, host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        """
        Args:
            model_path: the policy's folder or hub name, or the base's if an adapter is trained.
            checkpoint: the `training` folder to restore from, in `model_path` or in the adapter's folder.
            skipped_folder: receives the batches of skipped updates.
            initial_path: the model that the run began with, if it is not `model_path`.
            profile_folder: receives the traces of `learner.profile_steps`.
            seat: this rank's place, if there are several.
            host: the address of this node, which Generators reach.
        """
        self._config = config
        self._device = torch.device("cuda" if config.learner.num_gpus else "cpu")
        self._ranks = Ranks(seat, self._device)
        if self._device.type == "cpu":
            torch.set_num_threads(config.learner.num_threads)
            hold_to_cores(config.learner.cores_of(self._ranks.rank))
        self._dtype = getattr(torch, config.model.dtype)
        self._forward_backward = ForwardBackward(config, end_token_ids, self._device, self._ranks)
        self._performance = Performance(config, self._device)
        self._memory = SmallerMicroBatches(self._forward_backward, self._ranks.size)
        self._tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
        # When colocated, the Generators have the device first.
        self._home = torch.device("cpu") if config.generator.colocated else self._device
        self.model = self._load(model_path)
        adapter = checkpoint.parent if checkpoint is not None and config.model.adapter is not None else None
        is_average = config.algorithm.kl.reference == "ema"  # one that begins now begins at the policy
        if adapter is not None and is_average:
            load_adapter(self.model, adapter)
        self._reference = self._make_reference(initial_path or model_path, model_path)
        if adapter is not None and not is_average:
            load_adapter(self.model, adapter)
        recompute_in_backward(self.model, config.learner.gradient_checkpointing)
        for model in {self.model, *([self._reference.model] if self._reference else [])}:
            if config.learner.compile:
                compile_blocks(model)
        trained = None if config.model.adapter is None else trained_parameters(self.model)
        self.masters = MasterWeights(self.model, self._dtype, trained)
        self._optimizer = make_optimizer(self.masters.parameters, config.learner)
        self._clock = StageClock(STAGES, rest="wait_for_batch")
        torch.manual_seed(config.run.seed)  # otherwise every process starts with a different state
        self.version = 0
        self._skipped_in_a_row = 0
        self._updates = UpdateCounts(config.max_token_age)
        self._offload = Offload()
        self._skipped_folder = skipped_folder if self._ranks.is_first else None
        profiled = config.learner.profile_steps if self._ranks.is_first else None
        self._profiler = StepProfiler(profiled, profile_folder)
        self._last_report: StepReport | None = None
        self._is_between = False  # updates of a batch: the weights are of no version
        self._captured: TrainingState | None = None
        self._spare: TrainingState | None = None  # a written state; the next takes its memory
        self._packer = Packer(config, host, self._device, self._ranks)
        if checkpoint is not None:
            counters = restore_state(checkpoint, self.masters, self._optimizer, self._reference)
            self.version, self._skipped_in_a_row = (int(counters[n]) for n in ("version", "skipped_in_a_row"))
            self._updates.restore(counters, self.version)
            self._forward_backward.entropy_bonus.restore(counters)

    def _load(self, path: str, kept_dtype: torch.dtype | None = None) -> PolicyModel:
        model, seed = self._config.model, self._config.run.seed
        if self._ranks.size > 1:
            return load_in_shards(path, model, self._home, self._ranks, seed, kept_dtype)
        return load_trained(path, model, self._home, seed)

    def _make_reference(self, initial_path: str, model_path: str) -> Reference | None:
        """Return the reference policy with the weights that the run began with, or None without a KL term."""
        kl = self._config.algorithm.kl
        if kl.reference == "none":
            return None
        if self._config.model.adapter is not None:
            return AdapterReference(self.model, kl, self._dtype)
        kept_dtype = self._dtype if kl.reference == "initial" else None
        path = initial_path if kl.reference == "initial" else model_path
        if path != model_path or self._ranks.size > 1:
            first = self._load(path, kept_dtype)
        else:
            first = copy.deepcopy(self.model)
        if kept_dtype is not None and self._ranks.size == 1:
            cast_parameters(first.parameters(), kept_dtype)
        return Reference(first, kl, self._dtype)

    @property
    def _step(self) -> int:
        """The step that the next batch is trained in."""
        return self.version + 1

    def ready(self) -> bool:
        return True

    def take_stats(self) -> StageTimes:
        """Return the stage times since the last call, and the memory; another thread may be training."""
        return self._clock.take(resident_bytes())

    def work_done(self) -> int:
        """Return the number of micro-batches computed so far; another thread may be training."""
        return self._forward_backward.num_micro_batches

    def train_step(self, batch: TrainBatch) -> StepReport:
        """Update on one batch: once, unless `epochs_per_batch` or `train_batch_size` asks for more updates.

        An update with a non-finite loss or gradient leaves weights and optimizer unchanged, and its batch is
        kept for inspection; the version still advances, because the batch is used up.

        Raises:
            StaleBatchError: a token is older than the schedule allows; nothing was changed.
            ValueError: the batch has no groups; nothing was changed.
        """
        if not batch.groups:
            raise ValueError(f"the batch of version {self.version} has no groups to train on")
        ids = [group.rollout.item.group_id for group in batch.groups]
        self._ranks.agree("the batch", (self.version, ids))
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # not those of transfers
        self._ranks.time.take()  # of the last snapshot, and of waiting for the batch
        with self._clock.stage("train", f"step {self._step}, {len(batch.groups)} groups") as duration:
            metrics = self._train_on(batch.groups)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # or the step is reported before it is done
        metrics["timing/train_s"] = duration.seconds
        metrics |= self._performance.take(self._forward_backward.work, duration.seconds)
        if self._device.type == "cuda":
            metrics["perf/flash_attention"] = float(self._forward_backward.attention_kernel != "sdpa")
        metrics |= self._metrics_of_ranks(metrics)
        profile_failed = None
        if self._profiler.has_trace:
            with self._clock.stage("write_profile"):
                profile_failed = self._profiler.write()
        found = {"profile_failed": profile_failed, "learner_out_of_memory": self._memory.take_report()}
        events = {kind: text for kind, text in found.items() if text is not None}
        events |= self._forward_backward.take_layout_notes()
        self._last_report = StepReport(self.version, metrics, events)
        self._is_between = False
        return self._last_report

    def _metrics_of_ranks(self, own: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of each rank, if there are several; `own` are this one's."""
        if self._ranks.size == 1:
            return {}
        found = self._ranks.gathered((self._ranks.time.take(), own.get(DEVICE_PEAK)))
        waits = [seconds for seconds, _ in found]
        peaks = {rank: peak for rank, (_, peak) in enumerate(found) if peak is not None}
        return {
            **{collectives_of(rank_name(rank)): seconds for rank, seconds in enumerate(waits)},
            SLOWEST: float(np.argmin(waits)),  # the others waited for it
            IMBALANCE: self._forward_backward.imbalance,
            **{f"memory/{rank_name(rank)}_device_peak_bytes": peak for rank, peak in peaks.items()},
            **({DEVICE_PEAK: max(peaks.values())} if peaks else {}),
        }

    def _train_on(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        metrics = lag_metrics(groups, self.version, self._config)
        with self._profiler.step(self._step):
            metrics |= self._update_on(groups)
        if metrics["optim/skipped_updates"]:
            self._keep_skipped(groups)
        self.version += 1
        self._updates.complete(self.version)
        if self._reference is not None:
            self._reference.follow(self.masters, self.version)
        if self._config.learner.slowdown_s:
            time.sleep(self._config.learner.slowdown_s)
        return metrics

    def _update_on(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Run every update of the batch; compute other policies' logprobs once, before the first update."""
        algorithm = self._config.algorithm
        sequences: Sequence[TrainSequence] = sequences_of(groups, algorithm.mask_truncated)
        sums: Sums = defaultdict(float)
        if self._reference is not None:
            with self._clock.stage("logprobs", "reference"), self._reference.in_use() as reference:
                look_up = partial(self._forward_backward.with_reference, reference)
                sequences = self._memory.retry(look_up, sequences)
        dealing_seed = f"{self._config.run.seed}/minibatches/{self.version}"
        size, num_epochs = algorithm.train_batch_size, algorithm.epochs_per_batch
        is_single = num_epochs == 1 and (size is None or size >= len(samples_of(sequences)))
        passes = self._forward_backward
        # Of tokens of an older policy the sampler's logprobs would make the KL in the reward that policy's.
        is_kl_of_old = algorithm.kl.placement != "loss" and any(
            group.rollout.oldest_version < self.version for group in groups
        )
        if passes.selects_tokens or is_kl_of_old or (not is_single and passes.needs_proximal):
            with self._clock.stage("logprobs", "before the first update"):
                look_up = partial(passes.with_proximal, self.model)
                sequences = self._memory.retry(look_up, sequences)
        of_batch: dict[str, float] = {}
        if needs_batch(algorithm):
            sequences, of_batch = with_batch_advantages(groups, sequences, self._config)
        sequences = passes.with_selection(sequences)
        updates: list[dict[str, float]] = []
        ages: list[int | None] = []
        for minibatch in minibatches(sequences, size, num_epochs, dealing_seed):
            if not updates:
                minibatch = [sequence.before_any_update(self.version) for sequence in minibatch]
            of_this = self._memory.retry(self.accumulate_gradient, minibatch)
            ages.append(self._updates.age(min((s.oldest_version for s in minibatch), default=NO_VERSION)))
            if updates:  # from then on it would measure the policy's change, not the engines' difference
                of_this = {name: value for name, value in of_this.items() if name not in MISMATCH}
            self._is_between = True
            with self._clock.stage("optimizer"):
                update = self._update(of_this["loss"])
            updates.append({**update, "loss/policy": of_this["loss"]})
            add(sums, of_this)
        measured, bonus = mean_metrics(sums), passes.entropy_bonus
        if algorithm.entropy_target is not None:
            measured["loss/entropy_bonus"] = bonus.weight
        bonus.observe(measured.get("policy/entropy/exact"))
        num_skipped = sum(update["optim/skipped_updates"] for update in updates)
        sampled = np.concatenate([c.logprobs[c.mask] for g in groups for c in g.rollout.completions])
        # Weights that give no numbers are not finite either, although no token is left for the loss.
        is_dead = passes.omits_without_behaviour and sampled.size > 0 and not np.isfinite(sampled).any()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_dead or num_skipped == len(updates) else 0
        known = [age for age in ages if age is not None]
        return {
            **({"lag/updates/max": float(max(known))} if len(known) == len(ages) else {}),
            **{name: float(np.mean([update[name] for update in updates])) for name in updates[0]},
            **measured,
            **of_batch,
            "optim/num_updates": float(len(updates)),
            "optim/skipped_updates": num_skipped,
            "optim/skipped_in_a_row": float(self._skipped_in_a_row),
            "throughput/trained_tokens": sums["trained_tokens"],
        }

    def accumulate_gradient(self, sequences: Sequence[TrainSequence]) -> Sums:
        """Accumulate the gradient of one update in `.grad`; return summed metrics."""
        self._optimizer.zero_grad()  # sets to None: a parameter without a gradient is not updated
        return self._forward_backward.backward(self.model, sequences)

    def _update(self, loss: float) -> dict[str, float]:
        """Take an optimizer step, unless loss or gradient is not finite; a gradient of 0 changes nothing."""
        rate = learning_rate(self._config.learner, self._step, self._config.algorithm.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.masters.parameters, self._config.learner.max_grad_norm)
        grad_norm = whole(norm).item()  # the only wait for the device per update
        is_skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not is_skipped and grad_norm:  # at 0 the moments of earlier steps would move the weights
            with record_function("optimizer"):
                self._optimizer.step()
                self.masters.refresh()
        self._updates.now += not is_skipped
        return {"optim/grad_norm": grad_norm, "optim/lr": rate, "optim/skipped_updates": float(is_skipped)}

    def _keep_skipped(self, groups: Sequence[ScoredGroup]) -> None:
        step = self._step
        if self._skipped_folder is None:
            return
        try:
            self._skipped_folder.mkdir(parents=True, exist_ok=True)
            write_rollouts(self._skipped_folder / f"{step_name(step)}.parquet", step, groups)
        except OSError as error:
            logging.warning("step %d: the batch could not be kept: %s", step, error)

    def snapshot(self) -> tuple[WeightSnapshot, int]:
        """Return a copy of the weights in the served dtype, unaffected by later steps, and its version."""
        with self._clock.stage("snapshot", f"version {self.version}"):
            return self._packer.snapshot(self.model, self.version), self.version

    def delta(self) -> tuple[WeightSnapshot | None, float]:
        """Return the last snapshot as its difference from the one before it: see `Packer.delta`."""
        with self._clock.stage("snapshot", f"changes of version {self.version}"):
            return self._packer.delta()

    # The first rank's end of the wires, in threads beside the training: see `Sender`.

    def open_wire(self, name: str) -> Meeting:
        return self._packer.sender.open_wire(name)

    def join_wire(self, name: str) -> None:
        self._packer.sender.join_wire(name)

    def send(self, name: str, version: int) -> None:
        with self._clock.span("send", f"version {version} to {name}"):
            self._packer.sender.send(name, version)

    def drop_wire(self, name: str) -> None:
        self._packer.sender.drop_wire(name)

    def release(self, version: int) -> None:
        self._packer.sender.release(version)

    def make_room(self) -> None:
        """Leave the colocated device to the Generators until `take_room`; move unless their share is free."""
        if self._device.type != "cuda":
            return
        self._optimizer.zero_grad()  # otherwise the last gradient would stay, or move as well
        torch.cuda.empty_cache()
        generator = self._config.generator
        share = generator.gpu_memory_utilization if generator.engine == "vllm" else 1.0
        free, total = torch.cuda.mem_get_info(self._device)
        if free < share * total:
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def take_room(self) -> None:
        """Move onto the colocated device while the Generators sleep."""
        if self._device.type == "cuda":
            self._packer.forget_shared()
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        with self._clock.stage("move", f"to {device}"):
            self.masters.to(device, self._offload)
            move_optimizer(self._optimizer, device, self._offload)
            if self._reference is not None:
                self._reference.masters.to(device, self._offload, are_constant=not self._reference.moves)

    def capture(self) -> StepReport | None:
        """Copy the whole state to host memory, for `write_captured`; return the last step's report.

        Raises:
            RunError: an error ended the last step between its updates.
        """
        if self._is_between:
            raise RunError(f"step {self._step} ended between its updates: the weights are of no version")
        counters: dict[str, float] = {"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}
        counters |= self._forward_backward.entropy_bonus.state() | self._updates.state()
        spare, self._spare, self._captured = self._captured or self._spare, None, None
        with self._clock.stage("capture", f"version {self.version}"):
            reference = self._reference.weights() if self._reference is not None else {}
            self._captured = capture_state(self.masters, self._optimizer, counters, reference, spare)
        return self._last_report

    def write_captured(self, folder: Path) -> dict[str, int]:
        """Write the captured state to an existing folder, and forget it; return the size of each file.

        Reads no live weight, so another thread may train at the same time.

        Raises:
            OSError: the state could not be written.
        """
        captured, self._captured = self._captured, None
        assert captured is not None, "capture first"
        with self._clock.stage("write_checkpoint"):
            try:
                return write_state(captured, self.model, self._tokenizer, self._dtype, folder, self._ranks)
            finally:
                if self._device.type == "cuda":  # page-locked, see host_memory
                    self._spare = captured
