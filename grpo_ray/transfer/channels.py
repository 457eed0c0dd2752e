"""Ends of wires: gloo between host memories, or between GPUs NCCL through vLLM's bindings.

The channel with NCCL has not been run on any GPU.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch

from grpo_ray.learning.rendezvous import NUM_BYTES, prove
from grpo_ray.transfer.messages import Meeting, WireError
from grpo_ray.transfer.wire import SENDER, Channel, GlooChannel

POLL_S = 0.0005


def join(meeting: Meeting, rank: int, device: torch.device) -> Channel:
    """Return the channel to the meeting's other ranks; raises WireError if they did not come in time."""
    return GlooChannel(meeting, rank) if meeting.backend == "gloo" else NcclChannel(meeting, rank, device)


class NcclChannel:
    """A channel that broadcasts from the Learner to every worker of a Generator.

    NCCL itself waits without a limit; here a transfer that takes too long is aborted.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        """Wait for all ranks; raises WireError if they did not come in time, or one is another process."""
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
        try:
            prove(meeting.secret, meeting.key, rank, size, lambda parts: self._exchange(parts, rank, meeting))
        except RuntimeError as error:
            self.close()
            raise WireError(f"the other end did not come: {error}") from error

    def _exchange(self, parts: Sequence[bytes], rank: int, meeting: Meeting) -> list[bytes]:
        """Send each rank's parts to all in turn; return the part of each that is for this one."""
        found = []
        for root in range(len(parts)):
            data = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which copies the bytes there
            self._broadcast(data, meeting.timeout_s, root)
            found.append(bytes(data.view(-1, NUM_BYTES)[rank].tolist()))
        return found

    def send(self, part: torch.Tensor, timeout_s: float) -> None:
        self._broadcast(part, timeout_s)

    def receive(self, part: torch.Tensor, timeout_s: float) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # may still use part's memory
        self._broadcast(part, timeout_s)

    def _broadcast(self, part: torch.Tensor, timeout_s: float, root: int = SENDER) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock, torch.cuda.device(self.device):
            self._check_open()
            try:
                self._nccl.broadcast(part, root, self._stream)
            except RuntimeError as error:
                raise WireError(f"NCCL: {error}") from error
            done = self._stream.record_event()
        while not done.query():
            if time.monotonic() > deadline:
                self.close()
                raise WireError("the other end is gone or silent")
            time.sleep(POLL_S)
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
