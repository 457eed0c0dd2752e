"""Host memory for what a colocated Learner moves off its GPU, and back, once per step."""

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from grpo_ray.learning.device import host_memory

PLAIN = (torch.Tensor, torch.nn.Parameter)  # sharded and 4-bit tensors move by themselves


class Offload:
    """Page-locked host memory for each tensor, kept from step to step: locking it takes longer than a copy."""

    def __init__(self) -> None:
        self._memory = WeakTensorKeyDictionary()  # moving replaces a tensor's data, not the tensor

    @torch.no_grad()
    def move(self, tensors: Iterable[torch.Tensor], device: torch.device, are_constant: bool = False) -> None:
        """Move the data of plain tensors in place, with all copies under way at the same time.

        Args:
            are_constant: the tensors never change, so that one copy on the host is enough.
        """
        for tensor in tensors:
            if type(tensor) not in PLAIN:
                continue
            if device.type == "cpu":
                tensor.data = self._on_host(tensor, are_constant)
            else:
                tensor.data = tensor.data.to(device, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def _on_host(self, tensor: torch.Tensor, is_constant: bool) -> torch.Tensor:
        memory: torch.Tensor | None = self._memory.get(tensor)
        if memory is None:
            memory = self._memory[tensor] = host_memory(tensor)
        elif is_constant:
            return memory
        return memory.copy_(tensor, non_blocking=True)
