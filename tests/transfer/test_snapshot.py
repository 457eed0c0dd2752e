"""Weights as one buffer of bytes, and the refusal of incomplete or damaged ones."""

import inspect
import zlib
from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from grpo_ray.transfer import snapshot as snapshot_module
from grpo_ray.transfer.messages import DeviceHandle, TensorSpec, WeightSnapshot
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
    monkeypatch.setattr(
        snapshot_module, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, arguments)
    )
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
    with pytest.raises(ValueError, match="version 3 did not arrive complete: w is cut off"):
        check_snapshot(
            WeightSnapshot(3, (spec,), np.empty(0, np.uint8), on_device=(replace(handle, num_bytes=79),))
        )


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
