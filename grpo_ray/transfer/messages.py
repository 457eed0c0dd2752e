"""The messages that carry weights from the Learner to the Generators, and the meetings where wires begin."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import numpy as np

from grpo_ray.types import Ref

CHUNK_BYTES = 2**30


@dataclass(frozen=True)
class DeviceHandle:
    """A buffer on a GPU that another process on the same GPU can open, in plain values."""

    num_bytes: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    gpu: str  # its UUID, by which another process finds it


@dataclass(frozen=True)
class TensorSpec:
    """Position of one tensor in a snapshot's buffer."""

    name: str
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Delta:
    """The version that a snapshot's bytes must be applied to, and the result (transfer/delta.py)."""

    base_version: int
    num_bytes: int
    fingerprint: int  # 64 bits


@dataclass(frozen=True)
class WeightSnapshot:
    """All weights of one version under their Hugging Face names, end to end in one buffer of bytes.

    The bytes are in `data`, or in the buffers of `on_device`, for each GPU that a Generator shares with the
    Learner; or the Learner keeps them, and sends `wire_bytes` to each Generator (transfer/wire.py). With
    `delta`, `data` is the difference from an earlier version.
    """

    version: int
    specs: tuple[TensorSpec, ...]
    data: np.ndarray  # uint8 [total_bytes]
    checksum: int | None = None  # CRC-32 of `data`, if `weight_sync.checksum` is on or it is a delta
    on_device: tuple[DeviceHandle, ...] = ()
    wire_bytes: int = 0
    delta: Delta | None = None
    is_kept: bool = False  # the receiver keeps the bytes, because a delta from them may follow

    @property
    def num_bytes(self) -> int:
        if self.delta is not None:
            return self.delta.num_bytes
        if self.on_device:
            return sum(each.num_bytes for each in self.on_device if each.gpu == self.on_device[0].gpu)
        return self.wire_bytes or self.data.nbytes


@dataclass(frozen=True)
class Snapshot:
    """References to one version's weights; no bytes are fetched where it passes through."""

    whole: Ref[WeightSnapshot]
    changes: Ref[WeightSnapshot | None] | None = None
    """The difference from the version before, for the Generators that have that one."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tensors, `specs`, with the bytes from `start` to `end` of the buffer."""

    specs: Sequence[TensorSpec]
    start: int
    end: int

    def rebased(self) -> list[TensorSpec]:
        """Return the specs with offsets in the chunk instead of the whole buffer."""
        return [replace(spec, offset_bytes=spec.offset_bytes - self.start) for spec in self.specs]


def chunks(specs: Sequence[TensorSpec], num_bytes: int, limit: int) -> Iterator[Chunk]:
    """Cut a buffer of `num_bytes` at tensor borders, into chunks of at most `limit` bytes or one tensor."""
    ends = [spec.offset_bytes for spec in specs[1:]] + [num_bytes]
    first = 0
    for place in range(len(specs)):
        start = specs[first].offset_bytes
        if place + 1 == len(specs) or ends[place + 1] - start > limit:
            yield Chunk(specs[first : place + 1], start, ends[place])
            first = place + 1


if TYPE_CHECKING:
    from grpo_ray.learning.rendezvous import SignedStore

Backend = Literal["gloo", "nccl"]


class WireError(RuntimeError):
    """A failure of a wire: its other end is gone or silent, or sent something else than was expected."""


@dataclass(frozen=True)
class Meeting:
    """The place where both ends of a wire find each other: a key in the Learner's store, and their secret."""

    host: str
    port: int
    key: str
    backend: Backend
    num_receivers: int
    timeout_s: float  # for joining, and for each transfer
    secret: bytes = field(repr=False)  # of this wire alone; it proves that a process is one of its ends
    chunk_bytes: int = CHUNK_BYTES

    def store(self) -> "SignedStore":
        """Return this wire's part of the Learner's store; raises WireError without an answer in `timeout_s`."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        from grpo_ray.learning.rendezvous import SignedStore

        limit = timedelta(seconds=self.timeout_s)
        try:
            store = PrefixStore(self.key, TCPStore(self.host, self.port, timeout=limit))
        except RuntimeError as error:
            raise WireError(f"no store at {self.host}:{self.port}: {error}") from error
        return SignedStore(store, self.secret)
