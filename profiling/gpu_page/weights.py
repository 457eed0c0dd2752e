"""The parts of a weight sync on one GPU: the snapshot, its way to host memory, ipc and NCCL in a loop-back."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from gpu_page.shapes import build_model
from gpu_page.throughput import seconds_of
from grpo_ray.learning.device import host_memory
from grpo_ray.transfer.messages import CHUNK_BYTES, WeightSnapshot, chunks
from grpo_ray.transfer.snapshot import open_shared, pack_on_device, pack_weights, unpack_weights

ROUNDS = 5
COPY = "copy of the bytes on the device"


def measure_weights(name: str, device: torch.device) -> dict[str, Any]:
    """Measure each part for a model's weights in bfloat16: seconds per part, the median of some rounds.

    Returns:
        `seconds` per part, and `errors` of the parts that failed.
    """
    model = build_model(name, device, is_plain=True)
    named = [(key, weight.detach()) for key, weight in model.named_parameters()]
    found: dict[str, Any] = {"model": name}
    seconds = found["seconds"] = {}
    seconds["snapshot: cast into a buffer"] = _median(lambda: _pack(named, device), device)
    snapshot, buffers = _pack(named, device)  # kept while another process reads them
    buffer = buffers[0] if len(buffers) == 1 else torch.cat(buffers)
    found["num_bytes"] = buffer.numel()
    target = torch.empty_like(buffer)
    seconds[COPY] = _median(lambda: target.copy_(buffer), device)
    if device.type == "cpu":
        return found | {"skipped": "the rest needs a GPU"}
    parts: dict[str, Callable[[], float]] = {
        **_host(buffer, target, device),
        "ipc: another process loads every tensor in place": lambda: _ipc(snapshot, device),
        "NCCL, from this rank to itself": lambda: _nccl(buffer, target, device),
    }
    errors = found["errors"] = {}
    for part, measure in parts.items():
        try:
            seconds[part] = measure()
        except Exception as error:  # the other parts go on
            errors[part] = f"{type(error).__name__}: {error}"
    return found


def _pack(
    named: list[tuple[str, torch.Tensor]], device: torch.device
) -> tuple[WeightSnapshot, list[torch.Tensor]]:
    if device.type == "cuda":
        return pack_on_device(named, 0, torch.bfloat16, device)
    snapshot = pack_weights(named, 0, torch.bfloat16)
    return snapshot, [torch.from_numpy(snapshot.data)]


def _host(buffer: torch.Tensor, target: torch.Tensor, device: torch.device) -> dict[str, Callable[[], float]]:
    locked, pageable = host_memory(buffer), torch.empty(buffer.shape, dtype=buffer.dtype)
    pageable.fill_(0)  # touches its pages
    return {
        "to page-locked memory": lambda: _median(lambda: locked.copy_(buffer, non_blocking=True), device),
        "to pageable memory": lambda: _median(lambda: pageable.copy_(buffer), device),
        "from page-locked memory": lambda: _median(lambda: target.copy_(locked, non_blocking=True), device),
        "from pageable memory": lambda: _median(lambda: target.copy_(pageable), device),
    }


def _nccl(buffer: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    """Gather the buffer in a group of one: NCCL refuses two ranks on a GPU, so no link is measured."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)  # type: ignore[attr-defined]
    try:
        return _median(lambda: dist.all_gather_into_tensor(target, buffer), device)
    finally:
        dist.destroy_process_group()


def _ipc(snapshot: WeightSnapshot, device: torch.device) -> float:
    """Let another process, with weights of its own in bfloat16, load them from the shared buffers."""
    from torch import multiprocessing

    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    reader = context.Process(target=_read, args=(snapshot, answers, str(device)))
    reader.start()
    reader.join()
    if reader.exitcode:
        raise RuntimeError(f"the reading process ended with status {reader.exitcode}")
    return float(answers.get())


def _read(snapshot: WeightSnapshot, answers: Any, device_name: str) -> None:
    device = torch.device(device_name)
    parts = [open_shared(handle, torch.device("cuda", 0)) for handle in snapshot.on_device]
    own = {spec.name: torch.empty(spec.shape, dtype=torch.bfloat16, device=device) for spec in snapshot.specs}

    def load() -> None:
        for chunk, part in zip(chunks(snapshot.specs, snapshot.num_bytes, CHUNK_BYTES), parts, strict=True):
            for name, tensor in unpack_weights(chunk.rebased(), part):
                own[name].copy_(tensor)

    answers.put(_median(load, device))


def _median(work: Callable[[], object], device: torch.device) -> float:
    return statistics.median([seconds_of(work, device) for _ in range(ROUNDS + 1)][1:])
