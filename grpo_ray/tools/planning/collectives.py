"""The communication of the Learner's ranks: bytes of ring collectives over the bandwidth of the slowest link.

A ring of n ranks passes (n - 1) / n of the bytes through every rank in an all-gather or a reduce-scatter, and
twice that in an all-reduce (Patarasu and Yuan 2009). Across nodes the rings share the nodes' adapters, so all
ranks of a node together pass those bytes once.
"""

from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.gpu_memory import FLOAT32, served_width
from grpo_ray.tools.planning.hardware import LINK_UTILIZATION, Machine
from grpo_ray.tools.planning.learner_memory import adapter_parameters
from grpo_ray.tools.planning.model_shape import ModelShape
from grpo_ray.tools.planning.sharding import block_parameters, num_shards, root_parameters, sharded_parameters


@dataclass(frozen=True)
class Collectives:
    """Seconds of communication in the passes of one micro-batch; zeros for a single rank."""

    gather_s: float = 0.0
    """An all-gather of all weights in `model.dtype`: one in the forward and one in the backward pass."""
    reduce_s: float = 0.0
    """The reduce-scatter of all gradients in float32, and their all-reduce over replicas."""
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
    gathered, reduced = sharded_parameters(shape, config, adapter_parameters(shape, config.model.adapter))
    gather_s = gather_seconds(served_width(config) * gathered, config, machine)
    reduce_s = gather_seconds(FLOAT32 * reduced, config, machine) + _replicas_s(
        FLOAT32 * reduced, config, machine
    )
    root = root_parameters(shape)
    first = min(1.0, (root + block_parameters(shape)) / gathered)
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
