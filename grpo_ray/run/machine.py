"""The machine as it is: a configuration that names no GPU runs on the CPU of a machine without one."""

import os
from glob import glob

from grpo_ray.cluster.placement import Node, bundles_of, shortfalls, total
from grpo_ray.config import Config

FEW_CPUS = 0.5
"""CPUs that each actor reserves, so that several fit on two cores."""


GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of Windows below Linux, of AMD


def on_this_machine(config: Config, is_local: bool = False) -> tuple[Config, str | None]:
    """Return the configuration with the values of a CPU where nothing else was asked for, and a notice of them.

    A configuration that asks for GPUs, or for none, stays as it is, and so does every value that it gives. The
    run's `config.yaml` has the values, so a resumed run keeps them on any machine. A cluster at RAY_ADDRESS may
    have its GPUs on other nodes, so there nothing is changed: without the GPUs that are the default, the run is
    refused.

    Args:
        is_local: all actors are in this process, on its CPU.
    """
    if _names_gpus(config) or (not is_local and (_joins_cluster() or _num_gpus())):
        return config, None
    few: dict[str, object] = {"num_gpus": 0, "num_cpus": FEW_CPUS}
    values: dict[str, dict[str, object]] = {"model": {"dtype": "float32"}, "generator": few, "learner": few}
    if config.distillation.teacher is not None:
        values["distillation"] = few
    data, changes = config.model_dump(exclude_unset=True), []
    for section, defaults in values.items():
        given = data.get(section, {})
        changes += [f"{section}.{name}={value}" for name, value in defaults.items() if name not in given]
        data[section] = {**defaults, **given}
    where = "on the CPU of this process" if is_local else "no GPU here"
    return Config.model_validate(data), f"{where}: {' '.join(changes)}"


def shortfalls_here(config: Config) -> list[str]:
    """Return a line per resource that this machine lacks for the run; none if the run joins a cluster."""
    num_gpus = _num_gpus() if total(bundles_of(config), "GPU") else 0
    there = {"GPU": num_gpus, "CPU": os.cpu_count() or 1}
    return [] if _joins_cluster() else shortfalls(config, [Node("this machine", there)])


def _num_gpus() -> int:
    if not any(glob(pattern) for pattern in GPU_DEVICES):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count()


def _joins_cluster() -> bool:
    return os.environ.get("RAY_ADDRESS") not in (None, "", "local")


def _names_gpus(config: Config) -> bool:
    sections, sync = (config.generator, config.learner, config.distillation), config.weight_sync
    only_on_gpus = "nccl" in (sync.transport, sync.wire_backend) or sync.transport == "ipc"
    is_named = any("num_gpus" in section.model_fields_set for section in sections)
    return is_named or only_on_gpus or config.model.attention not in ("auto", "sdpa")
