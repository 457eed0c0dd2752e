"""The time of a step, at rates that a run measured or that the data sheet of a GPU suggests."""

from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.collectives import collectives, gather_seconds
from grpo_ray.tools.planning.gpu_memory import served_width
from grpo_ray.tools.planning.hardware import COPY_TO_HOST, COPY_TO_STORE, IMBALANCE, LOAD_FROM_HOST, Machine
from grpo_ray.tools.planning.learner_memory import adapter_parameters
from grpo_ray.tools.planning.measured_run import MeasuredRun
from grpo_ray.tools.planning.model_shape import ModelShape
from grpo_ray.tools.planning.modelled_work import (
    Passes,
    Workload,
    num_lookups,
    num_micro_batches,
    optimizer_s,
    passes_on,
    sampling_s,
)
from grpo_ray.tools.planning.sharding import sharded_parameters


@dataclass(frozen=True)
class StepTime:
    """Seconds of work per step; validation, checkpoints, grading and stragglers are not counted."""

    sample_s: float
    train_s: float
    """The slowest rank's, with the communication that its computation does not hide."""
    sync_s: float
    """The pause of the Generators."""
    overlaps: bool
    snapshot_s: float = 0.0
    """Seconds in which the Learner gathers a snapshot and does not train."""
    exposed_s: float = 0.0
    """The part of `train_s` in which a rank waits for communication."""

    @property
    def step_s(self) -> float:
        """The sum in a synchronous run; with `max_lag` above 0, the slower side alone."""
        sampling, training = self.generators_s, self.learner_s
        return max(sampling, training) if self.overlaps else sampling + training

    @property
    def generators_s(self) -> float:
        return self.sample_s + self.sync_s

    @property
    def learner_s(self) -> float:
        return self.train_s + self.snapshot_s


def step_time(config: Config, work: Workload, machine: Machine, run: MeasuredRun | None) -> StepTime:
    """Return the time of a step; replayed groups cost no sampling.

    Args:
        run: measured the rates of a Generator and of the Learner; without one the GPU's data sheet has them.
    """
    overlaps = config.weight_sync.max_lag > 0
    if run is None:
        train_s, exposed_s = training_s(config, work, machine, passes_on(machine.gpu, config, work))
        return StepTime(
            sampling_s(machine.gpu, config, work),
            train_s + config.num_updates * optimizer_s(machine.gpu, config, work.shape),
            sent_bytes(work.shape, config) / max(1, config.generator.num_gpus) / LOAD_FROM_HOST,
            overlaps,
            snapshot_s(work.shape, config, machine),
            exposed_s,
        )
    algorithm = config.algorithm
    sampled = config.fresh_per_step * algorithm.samples_per_prompt * work.response_tokens
    trained = algorithm.epochs_per_batch * config.rollouts_per_step * work.response_tokens * run.trained_frac
    measured, planned = run.config.learner.num_ranks, config.learner.num_ranks
    compute_s = trained / run.trained_tokens_per_s
    exposed_s = gathered_s = 0.0
    if planned != measured:  # the run's rate includes the communication of its own ranks
        alone_s = compute_s * measured / (IMBALANCE if measured > 1 else 1.0)
        compute_s, exposed_s = training_s(config, work, machine, Passes(alone_s / 4, alone_s * 3 / 4))
        gathered_s = gathering_s(work.shape, config, machine)
    return StepTime(
        sampled / (run.sampled_tokens_per_s * config.generator.num_generators),
        compute_s,
        run.sync_s,
        overlaps,
        gathered_s,
        exposed_s,
    )


def training_s(config: Config, work: Workload, machine: Machine, passes: Passes) -> tuple[float, float]:
    """Return the seconds of a step's passes on the slowest rank, and those in which it waits for communication.

    Args:
        passes: those of the whole step on one GPU, which the ranks divide.
    """
    of_ranks = IMBALANCE / config.learner.num_ranks if config.learner.num_ranks > 1 else 1.0
    communication = collectives(work.shape, config, machine)
    num_micro = num_micro_batches(config, work)
    times = config.num_updates * num_micro
    forward_s, backward_s = passes.forward_s * of_ranks / times, passes.backward_s * of_ranks / times
    in_passes = communication.forward_s(forward_s) + communication.backward_s(backward_s)
    total_s = times * in_passes
    if lookups := num_lookups(config) if passes.lookup_s else 0:
        of_batch = lookups * num_micro * -(-config.num_updates // config.algorithm.epochs_per_batch)
        total_s += of_batch * communication.forward_s(passes.lookup_s * of_ranks / of_batch)
    computing_s = (passes.forward_s + passes.backward_s + passes.lookup_s) * of_ranks
    return total_s, total_s - computing_s


def sent_bytes(shape: ModelShape, config: Config) -> float:
    """Return the bytes of a snapshot."""
    if config.model.adapter is not None and config.weight_sync.send == "adapter":
        return served_width(config) * adapter_parameters(shape, config.model.adapter)
    return served_width(config) * shape.num_parameters


def snapshot_s(shape: ModelShape, config: Config, machine: Machine) -> float:
    """Return the seconds of a snapshot: gathered by all ranks, copied to rank 0's host and the object store.

    With `ipc` and `nccl` it stays on the GPU, and with `collective` on the host.
    """
    sync, num_bytes = config.weight_sync, sent_bytes(shape, config)
    to_host = 0.0 if sync.transport == "ipc" or sync.wire_backend == "nccl" else num_bytes / COPY_TO_HOST
    to_store = num_bytes / COPY_TO_STORE if sync.transport == "object_store" else 0.0
    return gathering_s(shape, config, machine) + to_host + to_store


def gathering_s(shape: ModelShape, config: Config, machine: Machine) -> float:
    """Return the seconds in which the ranks gather a snapshot's sharded tensors, in `model.dtype`."""
    sharded, _ = sharded_parameters(shape, config, adapter_parameters(shape, config.model.adapter))
    return gather_seconds(min(sent_bytes(shape, config), served_width(config) * sharded), config, machine)
