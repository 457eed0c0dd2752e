"""A wire: the communicator of the Learner and one Generator, and how a version's bytes go through it.

Each Generator has its own, so that one that fails holds up no other, and a replacement joins like the first.
The bytes are one flat buffer, cut at the borders of tensors, so that a receiver can load a chunk while the next
one arrives. A header goes ahead of them: both ends must mean the same version in the same layout. An `Inbox`
is a Generator's end in host memory.
"""

import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed import ProcessGroupGloo

from grpo_ray.learning.rendezvous import NUM_BYTES, prove
from grpo_ray.transfer.messages import Chunk, Meeting, WeightSnapshot, WireError, chunks
from grpo_ray.transfer.shared_pages import shared_memory

SENDER = 0  # the Learner's rank in every wire; the receivers follow


class Channel(Protocol):
    """One end of a wire. Every transfer ends, at the latest when its time is up."""

    @property
    def device(self) -> torch.device:
        """The device that the bytes are on."""

    def send(self, part: torch.Tensor, timeout_s: float) -> None:
        """Send bytes (uint8) to every receiver; raises WireError if it is broken: use it no more."""

    def receive(self, part: torch.Tensor, timeout_s: float) -> None:
        """Fill `part` (uint8) with the bytes sent; raises like `send`."""

    def close(self) -> None:
        """Let the other end know, whatever it waits for."""


class GlooChannel:
    """A channel between the memories of two processes, over TCP."""

    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, rank: int) -> None:
        """Wait for the other end; raises WireError if it did not come in time, or is another process."""
        gloo: Any = ProcessGroupGloo  # its type lacks much
        options = gloo._Options()
        options._timeout = timedelta(seconds=meeting.timeout_s)
        options._devices = [gloo.create_device(hostname=_address_towards(meeting))]
        self._store, self._other = meeting.store(), 1 - rank
        try:
            self._group: Any = gloo(self._store, rank, 2, options)
            prove(meeting.secret, meeting.key, rank, 2, lambda parts: self._exchange(parts, meeting.timeout_s))
        except RuntimeError as error:
            self.close()
            raise WireError(f"the other end did not come: {error}") from error

    def _exchange(self, parts: Sequence[bytes], timeout_s: float) -> list[bytes]:
        part = torch.frombuffer(bytearray(parts[self._other]), dtype=torch.uint8)
        sending = self._group.send([part], self._other, 0)
        found = torch.empty(NUM_BYTES, dtype=torch.uint8)
        self.receive(found, timeout_s)
        sending.wait(timedelta(seconds=timeout_s))
        return [bytes(found.tolist())] * 2

    def send(self, part: torch.Tensor, timeout_s: float) -> None:
        self._wait(lambda group: group.send([part], self._other, 0), timeout_s)

    def receive(self, part: torch.Tensor, timeout_s: float) -> None:
        self._wait(lambda group: group.recv([part], self._other, 0), timeout_s)

    def _wait(self, begin: Callable[[Any], Any], timeout_s: float) -> None:
        group = self._group
        if group is None:
            raise WireError("the wire was closed")
        try:
            begin(group).wait(timedelta(seconds=max(timeout_s, 0.001)))  # 0 would be no limit
        except RuntimeError as error:
            raise WireError(f"the other end is gone or silent: {str(error).strip()[:300]}") from error

    def close(self) -> None:
        self._group = None  # closes its connection, once no thread waits in it


def _address_towards(meeting: Meeting) -> str:
    """Return the address of this machine that the Learner's can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.host, meeting.port))  # sends nothing
        return str(probe.getsockname()[0])


def send(channel: Channel, meeting: Meeting, snapshot: WeightSnapshot, buffer: torch.Tensor) -> None:
    """Send the snapshot's bytes, which are in `buffer` (uint8) on the channel's device.

    Raises:
        WireError: the receiver is gone, or did not take them within the meeting's time limit.
    """
    deadline = monotonic() + meeting.timeout_s
    channel.send(_header(snapshot).to(channel.device), meeting.timeout_s)
    for chunk in chunks(snapshot.specs, snapshot.num_bytes, meeting.chunk_bytes):
        channel.send(buffer[chunk.start : chunk.end], deadline - monotonic())


def receive(
    channel: Channel, meeting: Meeting, snapshot: WeightSnapshot, room: Callable[[Chunk], torch.Tensor]
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield each chunk of the snapshot as it arrives, and its bytes.

    Args:
        snapshot: what must come: the version, the specs and the number of bytes.
        room: returns the memory (uint8, on the channel's device) for a chunk.

    Raises:
        WireError: the sender is gone or silent, or sent something else.
    """
    deadline = monotonic() + meeting.timeout_s
    expected = _header(snapshot)
    header = torch.empty_like(expected, device=channel.device)
    channel.receive(header, meeting.timeout_s)
    if not torch.equal(header.cpu(), expected):
        version = int(header.cpu().view(torch.int64)[0])
        raise WireError(f"expected the weights of version {snapshot.version}, and version {version} came, or "
                        "the same in another layout")  # fmt: skip
    for chunk in chunks(snapshot.specs, snapshot.num_bytes, meeting.chunk_bytes):
        part = room(chunk)
        channel.receive(part, deadline - monotonic())
        yield chunk, part


def _header(snapshot: WeightSnapshot) -> torch.Tensor:
    """Return version, size and layout of the weights as bytes, uint8 [24]."""
    layout = zlib.crc32(repr(snapshot.specs).encode())
    return torch.tensor([snapshot.version, snapshot.num_bytes, layout]).view(torch.uint8)


class Inbox:
    """Receives each version into the same pages, which the engine's own processes can map.

    They have no name in /dev/shm, so they cannot outlive this process, however it dies.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("grpo_ray-inbox"))  # which is closed with this object
        self._data = np.empty(0, np.uint8)
        self._meeting: Meeting | None = None
        self._channel: GlooChannel | None = None

    def join(self, meeting: Meeting) -> None:
        """Join the wire, in place of an earlier one; raises WireError if the Learner did not come."""
        self._meeting, self._channel = meeting, None
        self._channel = GlooChannel(meeting, rank=1)

    def received(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """Receive the snapshot's bytes, over the previous ones; raises WireError if they did not come."""
        if self._channel is None or self._meeting is None:
            raise WireError("join a wire first")
        if self._data.nbytes != snapshot.wire_bytes:
            self._data = shared_memory(self._file.fileno(), snapshot.wire_bytes)
        buffer = torch.from_numpy(self._data)
        try:
            for _ in receive(
                self._channel, self._meeting, snapshot, lambda chunk: buffer[chunk.start : chunk.end]
            ):
                pass
        except WireError:
            self._channel = None
            raise
        return replace(snapshot, data=self._data, wire_bytes=0)
