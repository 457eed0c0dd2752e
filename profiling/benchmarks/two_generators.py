"""Weights to two Generators at once, by transport: part of `weight_sync`.

This process has the Learner's part: its `Sender`, in threads. The baseline is a copy of the bytes in memory for
each Generator, one after the other.
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

from benchmarks.results import Row
from grpo_ray.cluster.remote_actor import Client, Deferred, as_actor
from grpo_ray.config import Config
from grpo_ray.core.clients import (
    GeneratorClient,
)
from grpo_ray.core.generator import Generator
from grpo_ray.core.sync import PHASES, WeightSync
from grpo_ray.engines import make_engine
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.transfer.channels import join
from grpo_ray.transfer.messages import Snapshot, WeightSnapshot
from grpo_ray.transfer.sender import Sender, make_sender
from grpo_ray.transfer.snapshot import ReusedMemory, pack_weights
from grpo_ray.transfer.wires import SendingLearner, Wires
from grpo_ray.types import Ref, methods_with_bulk

NAMES = ("generator-0", "generator-1")
TRANSPORTS = ("object_store", "collective")


class InThreads:
    """A Sender called like the Learner's actor."""

    name = "learner"

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: asyncio.to_thread(getattr(self._sender, method), *args)


def measure(
    config_of: Callable[[str], Config], folder: str, label: str, model: PolicyModel, rounds: int
) -> list[Row]:
    """Return a row per transport, and their baseline's.

    Args:
        config_of: returns the configuration with a transport.
        folder: the model's, for the engines.
    """
    dtype = getattr(torch, config_of(TRANSPORTS[0]).model.dtype)
    buffer = torch.from_numpy(pack_weights(model.named_parameters(), 0, dtype).data)
    mib = buffer.numel() / 2**20
    rows: list[Row] = []
    for transport in TRANSPORTS:
        config = config_of(transport)
        with _generators(config, folder) as clients:
            seconds, facts = asyncio.run(_rounds(config, clients, model, rounds, buffer))
        base = f"{label}: a copy in memory for each of 2, beside {transport}"
        rows.append(Row(base, tuple(seconds["copies"]), base, mib, "MiB"))
        rows.append(Row(f"{label}: {transport}, 2 x", tuple(seconds["sync"]), base, mib, "MiB", facts))
    return rows


@contextmanager
def _generators(config: Config, folder: str) -> Iterator[list[GeneratorClient]]:
    with tempfile.TemporaryDirectory() as logs:
        clients = [_start(name, config, folder, Path(logs)) for name in NAMES]
        try:
            yield [cast(GeneratorClient, client) for client in clients]
        finally:
            ray.get([client.handle.shutdown.remote() for client in clients], timeout=60)
            for client in clients:
                ray.kill(client.handle)


def _start(name: str, config: Config, folder: str, logs: Path) -> Client:
    engine = Deferred(lambda: make_engine(config, folder, 64, seed=0))
    actor = as_actor(Generator, name, logs).options(num_cpus=0, max_concurrency=100)
    return Client(name, actor.remote(name, engine, 0.0, 0), methods_with_bulk(Generator))


async def _rounds(
    config: Config, clients: list[GeneratorClient], model: PolicyModel, rounds: int, buffer: torch.Tensor
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of every sync and its copies, and the median of each phase.

    A sync lasts from the Learner's weights until both Generators sample again.
    """
    targets = [torch.zeros_like(buffer).fill_(1) for _ in NAMES]  # touches their pages
    for client in clients:
        await client.ready()
    sender = make_sender(config, "127.0.0.1", torch.device("cpu"), join)
    backend = config.weight_sync.wire_backend
    wires = Wires(cast(SendingLearner, InThreads(sender)), "stage") if backend else None
    sync = WeightSync(clients, config.weight_sync.phase_timeout_s, 0, wires)
    dtype = getattr(torch, config.model.dtype)
    seconds: dict[str, list[float]] = {"sync": [], "copies": []}
    phases: dict[str, list[float]] = {phase: [] for phase in ("pack", *PHASES, "paused")}
    memory = ReusedMemory()
    for version in range(1, rounds + 3):
        await asyncio.sleep(0.5)  # as between two steps: Ray frees the version before
        started = time.perf_counter()
        snapshot = (
            sender.pack(model.named_parameters(), version, dtype, False)
            if backend
            else pack_weights(model.named_parameters(), version, dtype, memory=memory)
        )
        packed = time.perf_counter()
        reference: Ref[WeightSnapshot] = ray.put(snapshot)
        del snapshot  # its memory is packed into again
        report = await sync.publish(version, Snapshot(reference))
        ended = time.perf_counter()
        assert not report.failed, report.failed
        copying = time.perf_counter()
        for target in targets:
            target.copy_(buffer)
        copied = time.perf_counter()
        if version <= 2:  # the first two make wires, buffers and pages
            continue
        seconds["copies"].append(copied - copying)
        seconds["sync"].append(ended - started)
        phases["pack"].append(packed - started)
        for phase in (*PHASES, "paused"):
            phases[phase].append(report.metrics[f"timing/weight_sync/{phase}_s"])
    return seconds, {f"{phase}, s": float(np.median(values)) for phase, values in phases.items()}
