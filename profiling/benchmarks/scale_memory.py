"""Memory of a simulated run at four moments: live objects by owner, their bytes, and the whole process.

The simulated actors share the process with the driver. Of the live objects those of a class (or a coroutine) in
`run/`, `tasks/`, `records/`, `watch/` or `core/` are the driver's; those of `tools/simulation/` and of the
actors in `core/` stand for other processes. Bytes by file come from tracemalloc, which makes the run several
times slower: `trace=true`.
"""

import ctypes
import ctypes.util
import gc
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CoroutineType

import grpo_ray
from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART
from grpo_ray.config.loading import load_config
from grpo_ray.core.groups import State
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.simulation.simulate import Watch, simulate
from grpo_ray.tools.simulation.speeds import LognormalLengths, Speeds
from grpo_ray.watch.memory import ProcessFamily

TITLE = "memory of a simulated run at four moments: the driver's objects, the simulated actors', the process"
TAKES_OVERRIDES = True
CHANGES = [
    "generator.num_generators=64",
    "algorithm.num_steps=200",
    "algorithm.prompts_per_step=64",
    "algorithm.samples_per_prompt=8",
    "sampling.max_tokens=2048",
    "weight_sync.max_lag=12",
    "weight_sync.in_flight=true",
    "run.save_rollouts=false",
    "evaluation.every_num_steps=1000000",
    "checkpoint.every_num_steps=1000000",
]
QUICK = ["generator.num_generators=4", "algorithm.num_steps=8", "algorithm.prompts_per_step=4"]
TRACE = "trace=true"
SLOW = Speeds(decode_s=0.2, train_token_s=1e-6)  # sampling is the bottleneck, so requests are queued
MOMENTS = 4
PACKAGE = Path(grpo_ray.__file__).parent
OWNERS = {"driver": ("run", "tasks", "records", "watch", "core"), "actors": ("actors", "tools")}
ACTORS = ("generator", "scorer", "teacher", "buffer", "replay", "learner", "sync")  # in core/


def run(options: Options) -> list[Row]:
    changes = [change for change in options.overrides if change != TRACE]
    config = load_config(QUICKSTART, [*CHANGES, *(QUICK if options.quick else ()), *changes])
    every = config.algorithm.num_steps // MOMENTS
    family, rows = ProcessFamily(), []
    is_traced = TRACE in options.overrides

    def note(step: int) -> None:
        if step % every:
            return
        gc.collect()
        _trim()
        facts = {"process MiB": family.resident_bytes(with_children=False) / 2**20, **_objects()}
        if is_traced:
            facts |= _traced_kib()
        rows.append(Row(f"step {step}", (watch.cpu_s[step],), facts=facts))

    watch = Watch(on_step=note)
    if is_traced:
        tracemalloc.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_dir, lengths = RunDirectory(Path(folder) / "run"), LognormalLengths(512.0, 1.0)
            simulate(config, run_dir, SLOW, lengths, watch=watch)
    finally:
        tracemalloc.stop()
    return rows


def _trim() -> None:
    """Return free memory to the system, or the process's size shows what was once needed."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(libc, "malloc_trim"):  # glibc only
        libc.malloc_trim(0)


def _owner(part: str) -> str:
    """Return the owner of a folder of the package."""
    return next((owner for owner, parts in OWNERS.items() if part in parts), "other")


def _folder(file: str) -> str:
    """Return the package's folder in which a file is; empty for a file of another package."""
    path = Path(file).with_suffix("")
    return _room(path.relative_to(PACKAGE).parts) if path.is_relative_to(PACKAGE) else ""


def _room(parts: Sequence[str]) -> str:
    """Return the folder of a module of the package; `actors` for an actor."""
    return "actors" if parts[0] == "core" and parts[1] in ACTORS else parts[0]


def _objects() -> dict[str, float]:
    """Count the live objects of the package's classes and coroutines by owner, and the groups in flight."""
    counts: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if kind is CoroutineType:
            folder = _folder(each.cr_code.co_filename)
        else:
            parts = f"{kind.__module__}..".split(".")  # of some classes it is no text
            folder = _room(parts[1:]) if parts[0] == PACKAGE.name else ""
        counts[f"{_owner(folder)} objects"] += 1
        counts["groups in flight"] += kind.__name__ == "_Group" and each.state is State.IN_FLIGHT
    return {name: float(number) for name, number in counts.items()}


def _traced_kib() -> dict[str, float]:
    """Return the KiB allocated by Python, by the owner of the line that allocates."""
    sizes: Counter[str] = Counter()
    for trace in tracemalloc.take_snapshot().traces:
        sizes[f"{_owner(_folder(trace.traceback[0].filename))} KiB"] += trace.size
    return {name: size / 1024 for name, size in sizes.items()}
