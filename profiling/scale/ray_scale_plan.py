"""The plan of one run on real Ray with simulated engines, and its result; it does without Ray."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """One run, in plain values."""

    config: str
    overrides: list[str]
    speeds: dict[str, float]
    length_mean: float  # tokens
    num_nodes: int
    per_process: int
    training_s: float
    """Seconds of training, after which the run stops as after Ctrl-C."""
    profile: str | None = None
    """File for the profile of the event loop's thread."""


@dataclass
class Measured:
    """The result of one run."""

    num_steps: int = 0
    num_groups: int = 0  # trained
    nodes_s: float = 0.0  # until all nodes had joined
    start_s: float = 0.0  # from the first actor's start until all were ready
    training_s: float = 0.0
    loop_lag_s: float = 0.0
    """99th percentile of the delays of the driver's event loop, over the whole training."""
    step_lags_s: list[float] = field(default_factory=list)
    """The metric `perf/loop_lag_s` of each step."""
    driver_cpu_s: float = 0.0  # of the training, all threads
    driver_bytes: int = 0
    process_bytes: list[int] = field(default_factory=list)  # of each process of engines
    num_stale: int = -1
    num_lost: int = -1
    num_repeated: int = -1
    num_restarts: int = 0
    num_restores: int = 0
    num_retried: int = 0
    lag_shares: dict[int, float] = field(default_factory=dict)
