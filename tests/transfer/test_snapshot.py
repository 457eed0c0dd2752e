"""Weights as one buffer of bytes, the refusal of incomplete or damaged ones, and pages that processes share."""

import asyncio
import inspect
import mmap
import multiprocessing
import sys
import tempfile
import zlib
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from grpo_ray.transfer import snapshot as snapshot_module
from grpo_ray.transfer.messages import DeviceHandle, Snapshot, TensorSpec, WeightSnapshot
from grpo_ray.transfer.shared_pages import Pages, SharedBuffer, map_pages, pages_of
from grpo_ray.transfer.snapshot import ReusedMemory, as_tensor, check_snapshot, pack_weights, unpack_weights

TENSORS = [
    ("first", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("steps", torch.tensor([7, 8], dtype=torch.int64)),
    ("empty", torch.zeros(0, 4)),
    ("last", torch.tensor(2.5)),
]


def packed(dtype: torch.dtype = torch.float32, with_checksum: bool = False) -> WeightSnapshot:
    return pack_weights(TENSORS, 3, dtype, with_checksum)


def test_layout_by_hand() -> None:
    """Every tensor begins at a multiple of 64 bytes; only floating-point tensors are cast."""
    snapshot = packed(torch.bfloat16)
    assert snapshot.specs == (
        TensorSpec("first", "bfloat16", (2, 3), 0, 12),
        TensorSpec("steps", "int64", (2,), 64, 16),
        TensorSpec("empty", "bfloat16", (0, 4), 128, 0),
        TensorSpec("last", "bfloat16", (), 128, 2),
    )
    assert (snapshot.version, snapshot.data.nbytes, snapshot.checksum) == (3, 192, None)


@pytest.mark.parametrize("with_checksum", [True, False])
def test_packed_tensors_are_unpacked_unchanged(with_checksum: bool) -> None:
    snapshot = packed(with_checksum=with_checksum)
    snapshot.data.flags.writeable = False  # as Ray's object store returns it
    check_snapshot(snapshot)
    unpacked = dict(unpack_weights(snapshot.specs, as_tensor(snapshot.data)))
    assert list(unpacked) == [name for name, _ in TENSORS]
    for name, tensor in TENSORS:
        assert torch.equal(unpacked[name], tensor)
        assert unpacked[name].dtype == tensor.dtype


def test_checksum_is_the_crc_32_of_all_bytes() -> None:
    snapshot = packed(with_checksum=True)
    assert snapshot.checksum == zlib.crc32(snapshot.data.tobytes())
    known = np.frombuffer(b"123456789", np.uint8)
    check_snapshot(WeightSnapshot(1, (), known, 0xCBF43926))  # the check value of CRC-32


@pytest.mark.parametrize("num_bytes", [0, 11, 64, 79, 129])
def test_data_that_is_cut_off_is_refused(num_bytes: int) -> None:
    snapshot = packed()
    with pytest.raises(ValueError, match=r"version 3 did not arrive complete: (first|steps|last) is cut off"):
        check_snapshot(replace(snapshot, data=snapshot.data[:num_bytes]))
    check_snapshot(replace(snapshot, data=snapshot.data[: 128 + 4]))  # what follows the last is padding


@pytest.mark.parametrize("num_bytes", [0, 20, 23, 25, 28])
def test_tensor_with_bytes_that_do_not_match_its_shape_is_refused(num_bytes: int) -> None:
    snapshot = packed()
    specs = (replace(snapshot.specs[0], num_bytes=num_bytes), *snapshot.specs[1:])
    with pytest.raises(ValueError, match="version 3 did not arrive complete: first is cut off"):
        check_snapshot(replace(snapshot, specs=specs))


@pytest.mark.parametrize("place", [0, 23, 130, 191])
def test_flipped_bit_is_refused_by_the_checksum_alone(place: int) -> None:
    data = packed().data.copy()
    data[place] ^= 1
    check_snapshot(replace(packed(), data=data))  # unnoticed without a checksum
    with pytest.raises(ValueError, match="version 3 did not arrive complete: its CRC-32 differs"):
        check_snapshot(replace(packed(with_checksum=True), data=data))


# ---- on a GPU that two processes share: torch's own functions stand in for the device ----


def test_handle_carries_torch_s_own_arguments_to_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rebuild_cuda_tensor` gets what `reduce_tensor` returned, in torch's order, but for its own device."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    given = {
        "tensor_cls": torch.Tensor, "tensor_size": torch.Size([96]), "tensor_stride": (1,), "tensor_offset": 0,
        "storage_cls": torch.UntypedStorage, "dtype": torch.uint8, "storage_device": 0, "storage_handle": b"h",
        "storage_size_bytes": 128, "storage_offset_bytes": 32, "requires_grad": False,
        "ref_counter_handle": b"r", "ref_counter_offset": 7, "event_handle": b"e", "event_sync_required": True,
    }  # fmt: skip
    arguments = tuple(given[name] for name in names)
    monkeypatch.setattr(snapshot_module, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, arguments))
    monkeypatch.setattr(snapshot_module, "gpu_of", lambda device: "GPU-1")
    rebuilt: list[tuple[object, ...]] = []
    monkeypatch.setattr(snapshot_module, "rebuild_cuda_tensor", lambda *args: rebuilt.append(args))

    handle = snapshot_module.share(torch.zeros(96, dtype=torch.uint8))
    assert handle.num_bytes == 96
    sent = DeviceHandle(**msgspec.msgpack.decode(msgspec.msgpack.encode(asdict(handle))))
    snapshot_module.open_shared(sent, torch.device("cuda", 2))
    assert dict(zip(names, rebuilt[0], strict=True)) == {**given, "storage_device": 2}


def test_snapshot_on_a_device_is_checked_by_its_own_size() -> None:
    spec = TensorSpec("w", "float32", (4,), 64, 16)
    handle = DeviceHandle(80, b"h", 80, 0, b"r", 0, b"e", False, "GPU-1")
    check_snapshot(WeightSnapshot(3, (spec,), np.empty(0, np.uint8), on_device=(handle,)))
    cut_off = replace(handle, num_bytes=79)
    with pytest.raises(ValueError, match="version 3 did not arrive complete: w is cut off"):
        check_snapshot(WeightSnapshot(3, (spec,), np.empty(0, np.uint8), on_device=(cut_off,)))


def test_memory_is_used_again_only_when_it_is_free() -> None:
    memory = ReusedMemory()
    first = pack_weights(TENSORS, 1, torch.float32, memory=memory).data
    address, start = first.ctypes.data, first[:24]
    del first
    second = pack_weights([("ones", torch.ones(48))], 2, torch.float32, memory=memory).data
    assert second.ctypes.data != address
    assert start.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]  # of the first, which is still read
    address, kept = second.ctypes.data, as_tensor(second)
    del second
    assert memory.take(192).ctypes.data != address
    assert kept.view(torch.float32).tolist() == [1.0] * 48
    address = memory.take(192).ctypes.data
    assert memory.take(192).ctypes.data == address
    assert memory.take(64).nbytes == 64


# ---- pages that processes share ----


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


def test_buffer_follows_the_size_and_the_bytes_and_what_a_reader_writes_stays_with_it() -> None:
    buffer = SharedBuffer()
    for data in (BYTES[:100], BYTES[:0], BYTES, BYTES[8:108]):
        pages = buffer.write(WeightSnapshot(1, (), data))
        assert pages == Pages(buffer.path, 0, data.nbytes)
        first, second = map_pages(pages), map_pages(pages)
        first.fill_(7)
        assert second.numpy().tobytes() == data.tobytes()
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
        self.are_right.append(pages is not None and bytes(map_pages(pages).numpy()) == snapshot.data.tobytes())

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

    from grpo_ray.cluster.kinds import GENERATOR, Deferred
    from grpo_ray.cluster.remote_actor import Client, as_actor
    from grpo_ray.cluster.session import connected
    from grpo_ray.core.sync import WeightSync

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import it
    with connected():
        clients = []
        for number, name in enumerate(("generator-0", "generator-1")):
            actor = as_actor(GENERATOR, name, tmp_path).options(num_cpus=0, max_concurrency=10)
            handle = actor.remote(name, Deferred(PlaceEngine), 0.0, 0)
            clients.append(Client(name, handle, number))
        sync = WeightSync(clients, phase_timeout_s=30)
        for version in range(1, 8):
            weights = [("w", torch.full((4_000_000,), float(version)))]
            reference = ray.put(pack_weights(weights, version, torch.float32))
            report = await sync.publish(version, Snapshot(reference))
            assert not report.failed
            del reference
            await asyncio.sleep(1.0)  # Ray frees an object soon after its last reference has gone
        seen = lambda it: (it.actor._engine.places, it.actor._engine.are_right)  # noqa: E731
        (places, are_right), (others, _) = [ray.get(each.handle.__ray_call__.remote(seen)) for each in clients]
    assert all(are_right)
    assert places == others  # one copy on the node
    assert len(set(places)) == 2
