"""The collectives of sharded weights, with their time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveTime:
    """The time that a rank's collectives took: the transfer, and the wait for ranks that come later.

    On a GPU a part of it passes while blocks compute.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self, on_gpu: bool = False) -> Iterator[None]:
        """Add the block's time, on a GPU that of the work that it puts into the current stream."""
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Return the seconds since the last call; the device has done its work."""
        on_gpu = sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3
        seconds, self._seconds = self._seconds + on_gpu, 0.0
        self._events.clear()
        return seconds


class Timed:
    """A collective that FSDP2 lets be replaced (`FSDPModule.set_custom_all_gather`), with its time.

    FSDP2 names its tensors; those of `torch.distributed` may have other names, but stand in the same order.
    """

    def __init__(self, collective: Callable[..., dist.Work | None], clock: CollectiveTime) -> None:
        self._collective, self._clock = collective, clock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> dist.Work | None:
        with self._clock.measured(input_tensor.is_cuda):
            return self._collective(output_tensor, input_tensor, **options)
