"""Ends of wires: gloo between host memories, or between GPUs NCCL through vLLM's bindings."""

from typing import Any

import torch

from grpo_ray.transfer.meeting import Meeting
from grpo_ray.transfer.nccl_channel import NcclChannel
from grpo_ray.transfer.wire import SENDER, Channel, GlooChannel


def join(meeting: Meeting, rank: int, device: torch.device) -> Channel:
    """Return the channel to the meeting's other ranks, once they have come.

    Raises:
        WireError: they did not, within the meeting's time limit.
    """
    if meeting.backend == "gloo":
        return GlooChannel(meeting, rank)
    return NcclChannel(meeting, rank, device, _communicator)


def _communicator(store: Any, rank: int, size: int, device: torch.device) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        if rank == SENDER:
            store.set("id", bytes(NCCLLibrary().ncclGetUniqueId().internal))
        return PyNcclCommunicator.from_unique_id_bytes(store.get("id"), rank, size, device)
