"""The data sheets of GPUs, and the shares of them that the model of a step's time assumes.

The shares are assumptions, none of which was measured with this project; docs/plan.md lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GB = 1e9

TRAINING_UTILIZATION = 0.3
"""Share of the peak that passes of the Learner reach, recomputation included. Published for FSDP2 at this size:
0.15 with micro-batches of 16k tokens, 0.36 with 64k (prime-rl's benchmarks of Qwen3-4B on 8 H200)."""
SAMPLING_UTILIZATION = 0.5
"""Share of the peak in prefill and in large decoding batches."""
MEMORY_UTILIZATION = 0.7
"""Share of the memory's bandwidth that decoding and the optimizer reach."""
LINK_UTILIZATION = 0.7
"""Share of a link's bandwidth that a collective reaches."""
IMBALANCE = 1.1
"""Time of the slowest rank over the mean: micro-batches of unequal sequences are dealt out, and ranks wait."""
ENGINE_STEP_S = 0.005
"""An engine's step beyond its traffic and arithmetic: scheduling, launches, sampling from the logits."""
ALL_REDUCE_S = 15e-6
"""Latency of an all-reduce between the GPUs of one engine, two per layer."""
COPY_TO_HOST = 20 * GB
"""Bytes per second from a GPU to pinned host memory."""
COPY_TO_STORE = 4 * GB
"""Bytes per second from host memory into Ray's object store."""
LOAD_FROM_HOST = 16 * GB
"""Bytes per second from page-locked host memory into an engine, while it is paused; 16 to 19 on an H100."""


@dataclass(frozen=True)
class GpuType:
    """Dense peaks and bandwidths from a data sheet."""

    memory_gib: float
    bfloat16_flops: float
    """FLOP/s in bfloat16 and float16."""
    float32_flops: float
    bandwidth: float
    """Bytes per second of the memory."""
    link: float
    """Bytes per second and direction to the other GPUs of a node: NVLink, or PCIe where there is none."""

    def flops(self, dtype: str) -> float:
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops


GPU_TYPES: Mapping[str, GpuType] = {  # the FLOP/s are those of watch/flops.py, which imports torch
    "A100": GpuType(80, 312e12, 19.5e12, 2039 * GB, 300 * GB),
    "H100": GpuType(80, 989e12, 67e12, 3350 * GB, 450 * GB),
    "H200": GpuType(140, 989e12, 67e12, 4800 * GB, 450 * GB),
    "B200": GpuType(179, 2250e12, 75e12, 8000 * GB, 900 * GB),
    "L40S": GpuType(45, 362e12, 91.6e12, 864 * GB, 32 * GB),
}


@dataclass(frozen=True)
class Machine:
    """The nodes that a run is planned for."""

    gpu: GpuType
    gpus_per_node: int = 8
    network: float = 50 * GB
    """Bytes per second and direction between two nodes, of all adapters of a node together."""
