"""A wire: the communicator of the Learner and one Generator, and how a version's bytes go through it.

Each Generator has its own, so that one that fails holds up no other, and a replacement joins like the first.
The bytes are one flat buffer, cut at the borders of tensors, so that a receiver can load a chunk while the next
one arrives. A header goes ahead of them: both ends must mean the same version in the same layout.

Gloo goes between host memories, where an `Inbox` is a Generator's end, and NCCL through vLLM's bindings between
GPUs. The channel with NCCL has not been run on any GPU.
"""

import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Lock
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed import ProcessGroupGloo

from grpo_ray.learning.rendezvous import NUM_BYTES, prove
from grpo_ray.transfer.messages import Chunk, Meeting, WeightSnapshot, WireError, chunks
from grpo_ray.transfer.shared_pages import shared_memory

SENDER = 0  # the Learner's rank in every wire; the receivers follow
POLL_S = 0.0005


class Channel(Protocol):
    """One end of a wire. Every transfer ends, at the latest when its time is up."""

    @property
    def device(self) -> torch.device:
        """The device that the bytes are on."""

    def send(self, part: torch.Tensor, timeout_s: float) -> None:
        """Send bytes (uint8) to every receiver; raises WireError if it is broken: use it no more."""

    def receive(self, part: torch.Tensor, timeout_s: float) -> None:
        """Fill `part` (uint8) with the bytes sent; raises like `send`."""

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send each end its part, before all else; return the part that came from each."""

    def close(self) -> None:
        """Let the other end know, whatever it waits for."""


class GlooChannel:
    """A channel between the memories of two processes, over TCP."""

    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, rank: int) -> None:
        """Wait for the other end; raises WireError if it did not come in time."""
        self._timeout_s = meeting.timeout_s
        gloo: Any = ProcessGroupGloo  # its type lacks much
        options = gloo._Options()
        options._timeout = timedelta(seconds=meeting.timeout_s)
        options._devices = [gloo.create_device(hostname=_address_towards(meeting))]
        self._store, self._other = meeting.store(), 1 - rank
        try:
            self._group: Any = gloo(self._store, rank, 2, options)
        except RuntimeError as error:
            raise WireError(f"the other end did not come: {error}") from error

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        part = torch.frombuffer(bytearray(parts[self._other]), dtype=torch.uint8)
        sending = self._group.send([part], self._other, 0)
        found = torch.empty(NUM_BYTES, dtype=torch.uint8)
        self.receive(found, self._timeout_s)
        sending.wait(timedelta(seconds=self._timeout_s))
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


class NcclChannel:
    """A channel that broadcasts from the Learner to every worker of a Generator.

    NCCL itself waits without a limit; here a transfer that takes too long is aborted.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        """Wait for all ranks; raises WireError if they did not come in time."""
        self._rank, self._timeout_s = rank, meeting.timeout_s
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        size, store = 1 + meeting.num_receivers, meeting.store()
        store.set(f"here/{rank}", "")
        try:
            store.wait([f"here/{rank}" for rank in range(size)], timedelta(seconds=meeting.timeout_s))
        except RuntimeError as error:
            raise WireError(f"the other end did not come: {error}") from error
        self._lock, self._is_closed = Lock(), False
        try:
            self._nccl = _communicator(store, rank, size, self.device)
        except (OSError, RuntimeError) as error:
            raise WireError(f"no communicator of NCCL: {error}") from error
        if self._nccl.disabled:
            raise WireError("vLLM's use of NCCL is turned off here")
        self._stream = torch.cuda.Stream(self.device)  # beside training

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        found = []
        for root in range(len(parts)):  # each sends all of its parts to all
            data = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which copies the bytes there
            self._broadcast(data, self._timeout_s, root)
            found.append(bytes(data.view(-1, NUM_BYTES)[self._rank].tolist()))
        return found

    def send(self, part: torch.Tensor, timeout_s: float) -> None:
        self._broadcast(part, timeout_s)

    def receive(self, part: torch.Tensor, timeout_s: float) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # may still use part's memory
        self._broadcast(part, timeout_s)

    def _broadcast(self, part: torch.Tensor, timeout_s: float, root: int = SENDER) -> None:
        deadline = monotonic() + timeout_s
        with self._lock, torch.cuda.device(self.device):
            self._check_open()
            try:
                self._nccl.broadcast(part, root, self._stream)
            except RuntimeError as error:
                raise WireError(f"NCCL: {error}") from error
            done = self._stream.record_event()
        while not done.query():
            if monotonic() > deadline:
                self.close()
                raise WireError("the other end is gone or silent")
            sleep(POLL_S)
        self._check_open()  # an abort ends the transfer, too

    def _check_open(self) -> None:
        if self._is_closed:
            raise WireError("the wire was closed")

    def close(self) -> None:
        self._is_closed = True
        with self._lock:  # no thread begins a transfer on what is being freed
            if not self._nccl.disabled:
                self._nccl.destroy()  # aborts what waits


def _communicator(store: Any, rank: int, size: int, device: torch.device) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        if rank == SENDER:
            store.set("id", bytes(NCCLLibrary().ncclGetUniqueId().internal))
        return PyNcclCommunicator.from_unique_id_bytes(store.get("id"), rank, size, device)


def join(meeting: Meeting, rank: int, device: torch.device) -> Channel:
    """Return the channel to the meeting's other ranks.

    Raises:
        WireError: they did not come in time, or one of them is another process.
    """
    is_gloo = meeting.backend == "gloo"
    channel: Channel = GlooChannel(meeting, rank) if is_gloo else NcclChannel(meeting, rank, device)
    try:
        prove(meeting.secret, meeting.key, rank, 1 + meeting.num_receivers, channel.exchange)
    except RuntimeError as error:
        channel.close()
        raise WireError(f"the other end did not come: {error}") from error
    return channel


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
        self._channel: Channel | None = None

    def join(self, meeting: Meeting) -> None:
        """Join the wire, in place of an earlier one; raises WireError if the Learner did not come."""
        self._meeting, self._channel = meeting, None
        self._channel = join(meeting, 1, GlooChannel.device)

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
