"""The time of a step, at rates that a run measured or that the data sheet of a GPU suggests.

Operations are counted as in watch/flops.py, which imports torch, and with recomputation. Communication is the
bytes of ring collectives over the bandwidth of the slowest link: a ring of n ranks passes (n - 1) / n of the
bytes through every rank in an all-gather or a reduce-scatter, and twice that in an all-reduce (Patarasu and
Yuan 2009). Across nodes the rings share the nodes' adapters, so all ranks of a node together pass those bytes
once. No assumed share of a peak or bandwidth was measured with this project; docs/plan.md lists them.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.records.json_lines import StepLines
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.planning.gpu_memory import (
    FLOAT32,
    GIB,
    concurrent_sequences,
    generator_budget,
    kv_bytes_per_token,
    served_width,
)
from grpo_ray.tools.planning.learner_memory import (
    MOMENT_BYTES,
    gathered_parameters,
    num_shards,
    responses_per_prompt,
    sent_bytes,
    trained_parameters,
)
from grpo_ray.tools.planning.model_shape import GB, GpuType, Machine, ModelShape
from grpo_ray.watch.metrics_catalog import PAUSED

TRAINING_UTILIZATION = 0.3
"""Share of the peak that passes of the Learner reach, recomputation included. Published for FSDP2 at this size:
0.15 with micro-batches of 16k tokens, 0.36 with 64k (prime-rl's benchmarks of Qwen3-4B on 8 H200)."""
SAMPLING_UTILIZATION = 0.5  # share of the peak in prefill and in large decoding batches
MEMORY_UTILIZATION = 0.7  # share of the memory's bandwidth that decoding and the optimizer reach
LINK_UTILIZATION = 0.7  # share of a link's bandwidth that a collective reaches
IMBALANCE = 1.1
"""Time of the slowest rank over the mean: micro-batches of unequal sequences are dealt out, and ranks wait."""
ENGINE_STEP_S = 0.005
"""An engine's step beyond its traffic and arithmetic: scheduling, launches, sampling from the logits."""
ALL_REDUCE_S = 15e-6  # latency of an all-reduce between the GPUs of one engine, two per layer
COPY_TO_HOST = 20 * GB  # bytes per second from a GPU to pinned host memory
COPY_TO_STORE = 4 * GB  # bytes per second from host memory into Ray's object store
LOAD_FROM_HOST = 16 * GB
"""Bytes per second from page-locked host memory into an engine, while it is paused; 16 to 19 on an H100."""
FIRST_STEPS = 2  # engine and allocator are slower in these
NEEDED = (  # a step counts where all of them are above 0
    "throughput/sampled_tokens_per_s", "throughput/trained_tokens_per_s",
    "utilization/generators", "utilization/learner",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the steps of a run."""

    config: Config
    num_steps: int
    step_s: float
    response_tokens: float  # mean length of a response
    sampled_tokens_per_s: float  # rate of one Generator while it samples
    trained_tokens_per_s: float  # rate of the Learner, with all its ranks, while it trains, in response tokens
    trained_frac: float  # share of the response tokens that get a gradient; those without an advantage get none
    sync_s: float  # seconds of a weight sync, in which Generators are paused


def measure(path: str | Path) -> MeasuredRun:
    """Read a run's config.yaml and metrics.jsonl.

    Raises:
        ValueError: there is no run, or it has no step in which both sides worked.
        ConfigError: its config.yaml is of another version.
    """
    run = RunDirectory(path)
    if not run.config_path.exists():
        raise ValueError(f"--from {path}: no run there (it has no config.yaml)")
    config = load_config(run.config_path)
    rows = list(StepLines(run.metrics_path))
    steady = rows[FIRST_STEPS if len(rows) > 2 * FIRST_STEPS else 0 :]
    steady = [row for row in steady if all(row.get(name, 0) > 0 for name in NEEDED)]
    if not steady:
        raise ValueError(f"--from {path}: no step in which the Generators sampled and the Learner trained")
    response_tokens = median(row["rollout/response_tokens/mean"] for row in steady)
    all_tokens = config.algorithm.epochs_per_batch * config.rollouts_per_step * response_tokens
    # `throughput` is per second of a step, and `utilization` the share of the step that was work.
    sampled = [row["throughput/sampled_tokens_per_s"] / row["utilization/generators"] for row in steady]
    trained = [row["throughput/trained_tokens_per_s"] / row["utilization/learner"] for row in steady]
    return MeasuredRun(
        config=config,
        num_steps=len(steady),
        step_s=median(row["timing/step_s"] for row in steady),
        response_tokens=response_tokens,
        sampled_tokens_per_s=median(sampled) / config.generator.num_generators,
        trained_tokens_per_s=median(trained),
        trained_frac=min(1.0, median(row["throughput/trained_tokens"] for row in steady) / all_tokens),
        sync_s=median(row[PAUSED] for row in steady),
    )


UPDATE_VALUES = 5
"""Float32 values per parameter that an update reads and writes besides the moments: the gradient for its norm,
again for the update, and when it is cleared; the weight twice."""


@dataclass(frozen=True)
class Workload:
    """The model, and the lengths of its sequences."""

    shape: ModelShape
    prompt_tokens: int  # length of the longest prompt, which the estimate takes for all
    response_tokens: float  # mean length of a response


@dataclass(frozen=True)
class Passes:
    """Seconds of a step's passes on one GPU, without communication."""

    forward_s: float
    backward_s: float  # with the recomputed activations
    lookup_s: float = 0.0  # forward passes alone: of a reference, or of the policy before several updates


@dataclass(frozen=True)
class StepTime:
    """Seconds of work per step; validation, checkpoints, grading and stragglers are not counted."""

    sample_s: float
    train_s: float  # the slowest rank's, with the communication that its computation does not hide
    sync_s: float  # the pause of the Generators
    overlaps: bool
    snapshot_s: float = 0.0  # seconds in which the Learner gathers a snapshot and does not train
    exposed_s: float = 0.0  # the part of `train_s` in which a rank waits for communication

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
        train_s += config.num_updates * optimizer_s(machine.gpu, config, work.shape)
        sync_s = sent_bytes(work.shape, config) / max(1, config.generator.num_gpus) / LOAD_FROM_HOST
        sample_s, copy_s = sampling_s(machine.gpu, config, work), snapshot_s(work.shape, config, machine)
        return StepTime(sample_s, train_s, sync_s, overlaps, copy_s, exposed_s)
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
    sample_s = sampled / (run.sampled_tokens_per_s * config.generator.num_generators)
    return StepTime(sample_s, compute_s, run.sync_s, overlaps, gathered_s, exposed_s)


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
    sharded_bytes = served_width(config) * gathered_parameters(shape, config)
    return gather_seconds(min(sent_bytes(shape, config), sharded_bytes), config, machine)


def passes_on(gpu: GpuType, config: Config, work: Workload) -> Passes:
    """Return the seconds of a step's passes on one GPU; every response is taken to have a gradient."""
    blocks, output = forward_flops(config, work)
    epochs, rate = config.algorithm.epochs_per_batch, TRAINING_UTILIZATION * gpu.flops(config.model.dtype)
    times = 1 if config.model.adapter is not None else 2  # frozen weights pass a gradient on and have none
    again_s = blocks / rate if config.learner.gradient_checkpointing == "full" else 0.0
    pass_s = (blocks + output) / rate
    backward_s = epochs * (times * pass_s + again_s)
    return Passes(epochs * pass_s, backward_s, lookup_s=num_lookups(config) * pass_s)


def num_lookups(config: Config) -> int:
    """Return how often a step passes its batch forward only, to look log-probabilities up."""
    algorithm = config.algorithm
    is_proximal = algorithm.old_log_probs == "proximal" or bool(algorithm.corrections)
    looks_up = algorithm.token_selection != "none" or (is_proximal and config.num_updates > 1)
    return looks_up + (algorithm.kl.reference != "none")


def forward_flops(config: Config, work: Workload) -> tuple[float, float]:
    """Return the operations of a forward pass over a step's batch: in the blocks, and in the output layer."""
    shape, prompt, response = work.shape, work.prompt_tokens, work.response_tokens
    rollouts, prompts = config.rollouts_per_step, 1 / responses_per_prompt(config)
    pairs = prompts * prompt**2 / 2 + prompt * response + response**2 / 2
    tokens = rollouts * (prompts * prompt + response)
    matrices = shape.num_layers * shape.layer_matrices
    attention = 4 * shape.num_layers * shape.query_width * pairs * rollouts
    return 2 * matrices * tokens + attention, 2 * shape.embedding * rollouts * response


def num_micro_batches(config: Config, work: Workload) -> int:
    """Return the number of micro-batches per update that one rank computes: as many as every other rank."""
    num_sequences = config.algorithm.train_batch_size or config.rollouts_per_step
    of_sequence = work.prompt_tokens / responses_per_prompt(config) + work.response_tokens
    in_micro_batch = max(1.0, config.learner.micro_batch_tokens / of_sequence)  # lengths differ, and fill it
    return ceil(num_sequences / (in_micro_batch * config.learner.num_ranks))


def optimizer_s(gpu: GpuType, config: Config, shape: ModelShape) -> float:
    """Return the seconds of one update of AdamW, which the memory's bandwidth limits."""
    trained = trained_parameters(shape, config) / num_shards(config)
    num_bytes = FLOAT32 * UPDATE_VALUES + 4 * MOMENT_BYTES[config.learner.moments]  # two moments, twice each
    return trained * num_bytes / (MEMORY_UTILIZATION * gpu.bandwidth)


def sampling_s(gpu: GpuType, config: Config, work: Workload) -> float:
    """Return the seconds in which all Generators together sample a step's fresh responses.

    An engine's step reads its weights and the cached keys and values of its sequences, and computes one token
    of each; a prompt is computed once per group. Sequences are on average half done.
    """
    generator, samples = config.generator, config.algorithm.samples_per_prompt
    groups = config.fresh_per_step / generator.num_generators
    prefill_s = groups * 2 * work.shape.num_parameters * work.prompt_tokens / _engine_flops(gpu, config)
    running, step_s = decoding(gpu, config, work)
    return prefill_s + groups * samples * work.response_tokens * step_s / running


def decoding(gpu: GpuType, config: Config, work: Workload) -> tuple[int, float]:
    """Return the number of sequences that an engine decodes at a time, and the seconds of one of its steps."""
    shape, num_gpus = work.shape, max(1, config.generator.num_gpus)
    context = work.prompt_tokens + work.response_tokens / 2
    cached = context * kv_bytes_per_token(shape, config)
    weights = served_width(config) * shape.num_parameters / num_gpus
    budget = generator_budget(shape, config, work.prompt_tokens, gpu.memory_gib * GIB)
    room = max(0.0, (budget.capacity_bytes or 0.0) - weights)
    running = int(max(1, min(concurrent_sequences(config), room // cached)))
    read_s = (weights + running * cached) / (MEMORY_UTILIZATION * gpu.bandwidth)
    compute_s = running * 2 * shape.num_parameters / _engine_flops(gpu, config)
    latency_s = 2 * shape.num_layers * ALL_REDUCE_S if num_gpus > 1 else 0.0
    return running, max(read_s, compute_s) + latency_s + ENGINE_STEP_S


def _engine_flops(gpu: GpuType, config: Config) -> float:
    return SAMPLING_UTILIZATION * gpu.flops(config.model.dtype) * max(1, config.generator.num_gpus)


@dataclass(frozen=True)
class Collectives:
    """Seconds of communication in the passes of one micro-batch; zeros for a single rank."""

    gather_s: float = 0.0
    """An all-gather of all weights in `model.dtype`: one in the forward and one in the backward pass."""
    reduce_s: float = 0.0  # the reduce-scatter of all gradients in float32, and their all-reduce over replicas
    exposed_s: float = 0.0
    """The part that nothing can hide: the root and the first block are gathered before the first product, and
    the root's gradient is reduced after the last."""

    def forward_s(self, compute_s: float) -> float:
        """Return the time of a forward pass that computes for `compute_s`; blocks are gathered meanwhile."""
        return max(compute_s, self.gather_s)

    def backward_s(self, compute_s: float) -> float:
        """Return the time of a backward pass that computes for `compute_s`."""
        return max(compute_s, self.gather_s + self.reduce_s) + self.exposed_s


def collectives(shape: ModelShape, config: Config, machine: Machine) -> Collectives:
    """Return the communication of one micro-batch, from GPU to GPU."""
    learner = config.learner
    if learner.num_ranks == 1 or not learner.num_gpus:
        return Collectives()
    gathered, reduced = gathered_parameters(shape, config), trained_parameters(shape, config)
    gather_s = gather_seconds(served_width(config) * gathered, config, machine)
    reduced_bytes = FLOAT32 * reduced
    reduce_s = gather_seconds(reduced_bytes, config, machine) + _replicas_s(reduced_bytes, config, machine)
    root = shape.root_parameters
    first = min(1.0, (root + shape.block_parameters) / gathered)
    last = min(1.0, root / reduced) if config.model.adapter is None else 0.0
    return Collectives(gather_s, reduce_s, first * gather_s + last * reduce_s)


def gather_seconds(num_bytes: float, config: Config, machine: Machine) -> float:
    """Return the time of an all-gather or reduce-scatter of `num_bytes` among the ranks of a replica."""
    shards = num_shards(config)
    bandwidth = machine.gpu.link
    if shards > config.learner.num_ranks_per_node:
        bandwidth = min(bandwidth, machine.network)
    return num_bytes * (shards - 1) / shards / (LINK_UTILIZATION * bandwidth)


def _replicas_s(num_bytes: float, config: Config, machine: Machine) -> float:
    """Return the time of an all-reduce over replicas on different nodes; each rank reduces its shard."""
    replicas, shards = config.learner.replicas, num_shards(config)
    of_node = num_bytes * min(shards, config.learner.num_ranks_per_node) / shards
    by_rank = num_bytes / shards / machine.gpu.link
    return 2 * (replicas - 1) / replicas * max(by_rank, of_node / machine.network) / LINK_UTILIZATION
