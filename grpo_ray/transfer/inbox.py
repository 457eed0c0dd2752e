"""A Generator's end of its wire, in host memory."""

import os
from dataclasses import replace

import numpy as np
import torch

from grpo_ray.transfer.meeting import Meeting, WireError
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.shared_pages import shared_memory
from grpo_ray.transfer.wire import GlooChannel, receive


class Inbox:
    """Receives each version into the same pages, which the engine's own processes can map.

    They have no name in /dev/shm, so they cannot outlive this process, however it dies.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("grpo_ray-inbox")
        self._data = np.empty(0, np.uint8)
        self._meeting: Meeting | None = None
        self._channel: GlooChannel | None = None

    def join(self, meeting: Meeting) -> None:
        """Join the wire, in place of an earlier one.

        Raises:
            WireError: the Learner did not come.
        """
        self._meeting, self._channel = meeting, None
        self._channel = GlooChannel(meeting, rank=1)

    def received(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """Return the snapshot with its bytes, which come over the wire now; the previous ones are overwritten.

        Raises:
            WireError: they did not come.
        """
        if self._channel is None or self._meeting is None:
            raise WireError("join a wire first")
        if self._data.nbytes != snapshot.wire_bytes:
            self._data = shared_memory(self._fd, snapshot.wire_bytes)
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

    def close(self) -> None:
        self._channel = None
        os.close(self._fd)
