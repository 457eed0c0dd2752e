"""Weights from a Learner to Generators in other processes, by model size, transport and engine.

The actors are real, and a run's own WeightSync does the transaction (stage, then switch: pause, load, finish,
resume). This process has the Learner's part, with `collective` its `Sender`, in threads. The baseline is a
plain copy of the same bytes in memory for each Generator, one after the other.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, model_folder
from grpo_ray.cluster.kinds import GENERATOR, Deferred
from grpo_ray.cluster.remote_actor import Client, as_actor
from grpo_ray.cluster.session import connected
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.clients import GeneratorClient
from grpo_ray.core.sync import PHASES, WeightSync
from grpo_ray.engines import make_engine
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.transfer.messages import Snapshot, WeightSnapshot
from grpo_ray.transfer.sender import Sender
from grpo_ray.transfer.snapshot import ReusedMemory, pack_weights
from grpo_ray.transfer.wires import SendingLearner, Wires
from grpo_ray.types import Ref

TITLE = "weight sync by model size, transport and engine, against a copy in memory"
SIZES: dict[str, list[str]] = {
    "small": [],
    "medium": ["model.tiny.hidden_size=512", "model.tiny.num_layers=6", "model.tiny.intermediate_size=1408"],
    "large": ["model.tiny.hidden_size=1024", "model.tiny.num_layers=8", "model.tiny.intermediate_size=2816"],
}
CASES = (("object_store", 1), ("object_store", 2), ("collective", 2))  # transport, number of Generators
NUM_WARM_UP = 3  # until wires are joined and all memory that syncs use again and again has been touched
STEP_S = 0.5  # between syncs; Ray frees a replaced snapshot with a delay
NOT_HERE = {
    "nccl": "it needs a GPU for the Learner and one for a Generator",
    "ipc": "it needs a GPU that Learner and Generator share, in a run with generator.colocated; the "
    "phases are that run's timing/weight_sync/*",
}


class InThreads:
    """A Sender called like the Learner's actor."""

    name = "learner"

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: asyncio.to_thread(getattr(self._sender, method), *args)


def run(options: Options) -> list[Row]:
    sizes = ("small",) if options.quick else tuple(SIZES)
    rounds, rows = options.rounds or (1 if options.quick else 5), []
    with connected():
        for size in sizes:
            with model_folder(["model.tiny.warmup=null", *SIZES[size]]) as folder:
                for engine in ("torch",) if options.quick else ("torch", "vllm"):
                    for transport, number in CASES:
                        rows += _measure(size, folder, engine, transport, number, rounds)
    return [*rows, *(Row(transport, skipped=why) for transport, why in NOT_HERE.items())]


def _measure(size: str, folder: str, engine: str, transport: str, number: int, rounds: int) -> list[Row]:
    chosen = [f"generator.engine={engine}", f"weight_sync.transport={transport}"]
    config, model = load_config(QUICKSTART, [*chosen, *SIZES[size]]), load_policy(folder)
    mib = sum(4 * parameter.numel() for parameter in model.parameters()) / 2**20
    with _generators(config, folder, number) as clients:
        seconds, phases = asyncio.run(_publish_all(config, clients, model, rounds))
    facts = {f"{phase}, s": float(np.median(values)) for phase, values in phases.items()}
    facts["paused, copies"] = facts["paused, s"] / float(np.median(seconds["copies"]))
    case = f"{size}, {mib:.0f} MiB, {engine}: {transport} to {number}"
    base = f"{case}, copies in memory beside it"
    return [
        Row(base, tuple(seconds["copies"]), base, mib, "MiB"),
        Row(case, tuple(seconds["sync"]), base, mib, "MiB", facts),
    ]


@contextmanager
def _generators(config: Config, folder: str, number: int) -> Iterator[list[GeneratorClient]]:
    engine = Deferred(lambda: make_engine(config, folder, 64, seed=0))
    clients = []
    with tempfile.TemporaryDirectory() as logs:
        for name in (f"generator-{index}" for index in range(number)):
            actor = as_actor(GENERATOR, name, Path(logs)).options(num_cpus=0, max_concurrency=100)
            clients.append(Client(name, actor.remote(name, engine, 0.0, 0)))
        try:
            yield [cast(GeneratorClient, client) for client in clients]
        finally:
            ray.get([client.handle.shutdown.remote() for client in clients], timeout=60)
            for client in clients:
                ray.kill(client.handle)


async def _publish_all(
    config: Config, clients: list[GeneratorClient], model: PolicyModel, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of every sync and of its copies, and of the sync's phases.

    A sync lasts from the Learner's weights until all Generators sample again.
    """
    for client in clients:
        await client.ready()
    dtype, checksum = getattr(torch, config.model.dtype), config.weight_sync.checksum
    source = torch.from_numpy(pack_weights(model.named_parameters(), 0, dtype).data)
    targets = [torch.zeros_like(source).fill_(1) for _ in clients]  # touches their pages
    sender, memory = Sender(config, "127.0.0.1", torch.device("cpu")), ReusedMemory()
    has_wires = config.weight_sync.wire_backend is not None
    wires = Wires(cast(SendingLearner, InThreads(sender)), "stage") if has_wires else None
    sync = WeightSync(clients, config.weight_sync.phase_timeout_s, 0, wires)
    seconds: dict[str, list[float]] = {"copies": [], "sync": []}
    phases: dict[str, list[float]] = {phase: [] for phase in ("pack", "put", *PHASES, "paused")}
    for version in range(1, rounds + 1 + NUM_WARM_UP):
        started = time.perf_counter()
        weights = model.named_parameters()
        if has_wires:
            snapshot = sender.pack(weights, version, dtype, checksum)
        else:
            snapshot = pack_weights(weights, version, dtype, checksum, memory)
        packed = time.perf_counter()
        reference: Ref[WeightSnapshot] = ray.put(snapshot)
        put = time.perf_counter()
        del snapshot  # the next takes its memory
        report = await sync.publish(version, Snapshot(reference))
        ended = time.perf_counter()
        assert not report.failed, report.failed
        del reference
        await asyncio.sleep(STEP_S)
        copying = time.perf_counter()
        for target in targets:
            target.copy_(source)
        copied = time.perf_counter()
        if version <= NUM_WARM_UP:
            continue
        seconds["copies"].append(copied - copying)
        seconds["sync"].append(ended - started)
        phases["pack"].append(packed - started)
        phases["put"].append(put - packed)
        for phase in (*PHASES, "paused"):
            phases[phase].append(report.metrics[f"timing/weight_sync/{phase}_s"])
    return seconds, phases
