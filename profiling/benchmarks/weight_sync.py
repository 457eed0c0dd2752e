"""Weights from a Learner to a Generator in another process, by model size, transport and engine.

The actors are real, and a run's own WeightSync does the transaction (stage, then switch: pause, load, finish,
resume); the baseline is a plain copy of the same bytes in memory.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
import torch

from benchmarks import two_generators
from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, model_folder
from grpo_ray.cluster.remote_actor import Client, Deferred, as_actor
from grpo_ray.cluster.session import connected
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.generator import Generator
from grpo_ray.core.sync import PHASES, WeightSync
from grpo_ray.engines import make_engine
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.transfer.messages import Snapshot
from grpo_ray.transfer.snapshot import ReusedMemory, pack_weights
from grpo_ray.types import methods_with_bulk

TITLE = "weight sync by model size, transport and engine, against a copy in memory"
SIZES: dict[str, list[str]] = {
    "small": [],
    "medium": [
        "model.tiny.hidden_size=512",
        "model.tiny.num_layers=6",
        "model.tiny.intermediate_size=1408",
    ],
    "large": [
        "model.tiny.hidden_size=1024",
        "model.tiny.num_layers=8",
        "model.tiny.intermediate_size=2816",
    ],
}
NUM_WARM_UP = 3  # until all memory that syncs use again and again has been touched
STEP_S = 0.5  # between syncs; Ray frees a replaced snapshot with a delay
NOT_HERE = {
    "nccl": "it needs a GPU for the Learner and one for a Generator",
    "ipc": "it needs a GPU that Learner and Generator share, in a run with generator.colocated; the "
    "phases are that run's timing/weight_sync/*",
}


def run(options: Options) -> list[Row]:
    sizes = ("small",) if options.quick else tuple(SIZES)
    rounds, rows = options.rounds or (1 if options.quick else 5), []
    with connected():
        for size in sizes:
            with model_folder(["model.tiny.warmup=null", *SIZES[size]]) as folder:
                for engine in ("torch",) if options.quick else ("torch", "vllm"):
                    rows += asyncio.run(_measure(size, folder, engine, rounds))
                    rows += _to_two(size, folder, engine, rounds)
    return [*rows, *(Row(transport, skipped=why) for transport, why in NOT_HERE.items())]


def _to_two(size: str, folder: str, engine: str, rounds: int) -> list[Row]:
    model = load_policy(folder)
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())

    def config_of(transport: str) -> Config:
        chosen = [f"generator.engine={engine}", f"weight_sync.transport={transport}"]
        return load_config(QUICKSTART, [*chosen, *SIZES[size]])

    label = f"{size}, {num_bytes / 2**20:.0f} MiB, {engine}"
    return two_generators.measure(config_of, folder, label, model, rounds)


async def _measure(size: str, folder: str, engine: str, rounds: int) -> list[Row]:
    config = load_config(QUICKSTART, [f"generator.engine={engine}", *SIZES[size]])
    model = load_policy(folder)
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    case, copy = f"object_store, {engine}", "copy in memory"
    label = f"{size}, {num_bytes / 2**20:.0f} MiB"
    with tempfile.TemporaryDirectory() as logs:
        client = _start_generator(config, folder, Path(logs))
        try:
            await client.ready()
            seconds, phases = await _publish_all(config, client, model, num_bytes, rounds)
            await client.shutdown()
        finally:
            ray.kill(client.handle)
    facts = {f"{phase}, s": float(np.median(values)) for phase, values in phases.items()}
    facts["paused, copies"] = facts["paused, s"] / float(np.median(seconds["copy"]))
    base = f"{label}: {copy} beside {engine}"
    mib = num_bytes / 2**20
    return [
        Row(base, tuple(seconds["copy"]), base, mib, "MiB"),
        Row(f"{label}: {case}", tuple(seconds["sync"]), base, mib, "MiB", facts),
    ]


def _start_generator(config: Config, folder: str, logs: Path) -> Client:
    engine = Deferred(lambda: make_engine(config, folder, 64, seed=0))
    actor = as_actor(Generator, "generator-0", logs).options(num_cpus=0, max_concurrency=100)
    return Client("generator-0", actor.remote("generator-0", engine, 0.0, 0), methods_with_bulk(Generator))


async def _publish_all(
    config: Config, client: Client, model: PolicyModel, num_bytes: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each sync, from the Learner's weights to a Generator that samples again, and of its phases."""
    sync = WeightSync([client], config.weight_sync.phase_timeout_s)
    seconds: dict[str, list[float]] = {"copy": [], "sync": []}
    phases: dict[str, list[float]] = {phase: [] for phase in ("pack", "put", *PHASES, "paused")}
    source, target = (torch.full((num_bytes,), value, dtype=torch.uint8) for value in (1, 0))
    memory = ReusedMemory()
    for version in range(1, rounds + 1 + NUM_WARM_UP):
        started = time.perf_counter()
        weights = model.named_parameters()
        snapshot = pack_weights(
            weights, version, getattr(torch, config.model.dtype), config.weight_sync.checksum, memory
        )
        packed = time.perf_counter()
        reference = ray.put(snapshot)
        put = time.perf_counter()
        del snapshot  # the next takes its memory
        report = await sync.publish(version, Snapshot(reference))
        ended = time.perf_counter()
        assert not report.failed, report.failed
        del reference
        await asyncio.sleep(STEP_S)
        copying = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter()
        if version <= NUM_WARM_UP:
            continue
        seconds["copy"].append(copied - copying)
        seconds["sync"].append(ended - started)
        phases["pack"].append(packed - started)
        phases["put"].append(put - packed)
        for phase in (*PHASES, "paused"):
            phases[phase].append(report.metrics[f"timing/weight_sync/{phase}_s"])
    return seconds, phases
