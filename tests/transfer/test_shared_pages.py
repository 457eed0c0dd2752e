"""Bytes that several processes of a node read in place, and Ray's snapshots, of which few exist at a time."""

import asyncio
import mmap
import multiprocessing
import sys
import tempfile
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ray.transfer.messages import Snapshot, WeightSnapshot
from grpo_ray.transfer.shared_pages import Pages, SharedBuffer, map_pages, pages_of
from grpo_ray.transfer.snapshot import pack_weights

BYTES = np.arange(3 * mmap.PAGESIZE, dtype=np.uint64).view(np.uint8)


def read(pipe: Connection) -> None:
    pipe.send([zlib.crc32(map_pages(place).numpy().data) for place in pipe.recv()])


@pytest.mark.slow
def test_arrays_in_shared_memory_are_found_and_read_by_another_process() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(BYTES.tobytes())
        file.flush()
        pages = np.frombuffer(mmap.mmap(file.fileno(), BYTES.nbytes), np.uint8)
        arrays = [pages[n : n + 5000] for n in (0, 64, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 64)]
        found = [pages_of(data) for data in arrays]
        assert None not in found
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe()
        process = fork.Process(target=read, args=(there,), daemon=True)
        process.start()
        here.send(found)
        assert here.recv() == [zlib.crc32(data.tobytes()) for data in arrays]
        process.join()


def test_private_memory_is_not_found() -> None:
    assert pages_of(np.zeros(10_000_000, np.uint8)) is None


def test_what_a_reader_writes_stays_with_it() -> None:
    buffer = SharedBuffer()
    pages = buffer.write(WeightSnapshot(1, (), BYTES))
    first, second = map_pages(pages), map_pages(pages)
    first.fill_(7)
    assert torch.equal(second, torch.from_numpy(BYTES.copy()))
    buffer.close()


def test_buffer_follows_the_size_and_the_bytes() -> None:
    buffer = SharedBuffer()
    for data in (BYTES[:100], BYTES[:0], BYTES, BYTES[8:108]):
        pages = buffer.write(WeightSnapshot(1, (), data))
        assert pages == Pages(buffer.path, 0, data.nbytes)
        assert map_pages(pages).numpy().tobytes() == data.tobytes()
    path = Path(buffer.path)
    buffer.close()
    assert not path.exists()


class PlaceEngine:
    """Notes where in the object store each snapshot lies."""

    def __init__(self) -> None:
        self.places: list[Pages | None] = []
        self.are_right: list[bool] = []

    async def stage(self, snapshot: WeightSnapshot) -> None:
        pages = pages_of(snapshot.data)
        self.places.append(pages)
        self.are_right.append(
            pages is not None and map_pages(pages).numpy().tobytes() == snapshot.data.tobytes()
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # as pickle asks for

        async def nothing(*_: object) -> None: ...

        return nothing


@pytest.mark.ray
@pytest.mark.campaign
async def test_two_snapshots_are_stored_at_a_time_and_read_where_they_lie(tmp_path: Path) -> None:
    """The published one, and the one in transit; so the memory of the one before is used again."""
    import ray

    from grpo_ray.cluster.remote_actor import Client, Deferred, as_actor
    from grpo_ray.cluster.session import connected
    from grpo_ray.core.generator import Generator
    from grpo_ray.core.sync import WeightSync
    from grpo_ray.types import methods_with_bulk

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it
    with connected():
        clients = []
        for number, name in enumerate(("generator-0", "generator-1")):
            actor = as_actor(Generator, name, tmp_path).options(num_cpus=0, max_concurrency=10)
            handle = actor.remote(name, Deferred(PlaceEngine), 0.0, 0)
            clients.append(Client(name, handle, methods_with_bulk(Generator), number))
        sync = WeightSync(clients, phase_timeout_s=30)
        for version in range(1, 8):
            weights = [("w", torch.full((4_000_000,), float(version)))]
            reference = ray.put(pack_weights(weights, version, torch.float32))
            report = await sync.publish(version, Snapshot(reference))
            assert not report.failed
            del reference
            await asyncio.sleep(1.0)  # Ray frees an object soon after its last reference has gone
        seen = lambda actor: (actor._engine.places, actor._engine.are_right)  # noqa: E731
        (places, are_right), (others, _) = [
            ray.get(client.handle.__ray_call__.remote(seen)) for client in clients
        ]
    assert all(are_right)
    assert places == others  # one copy on the node
    assert len(set(places)) == 2
