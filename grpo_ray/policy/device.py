"""The cores that a process runs on, and the device that holds an optimizer's state."""

import contextlib
import os
from collections.abc import Sequence

import torch


def hold_to_cores(cores: Sequence[int] | None) -> None:
    """Pin all threads of this process (and those that they start) to the cores; None leaves them free."""
    if cores is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), cores)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state to the weights' new device; counters that it keeps on the host stay there."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[name] = value.to(device)
