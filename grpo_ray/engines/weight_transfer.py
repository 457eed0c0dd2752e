"""vLLM's side of a weight sync: its workers load the weights from memory that another process filled.

`object_store`: Ray brings the snapshot to the Generator's node, `SharedBuffer.write` copies it once there, and
the engine's workers map the same pages and load from them. It works on any device, and needs no network between
the workers and the Learner. `collective`: the Generator receives them in pages that the workers map as well.
`nccl`: each worker receives them on its GPU, chunk by chunk (transfer/wire.py). `ipc`: the bytes stay on the
GPU (device_buffer.py).
"""

import mmap
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from grpo_ray.engines.wires import join
from grpo_ray.transfer.device_buffer import gpu_of, open_shared
from grpo_ray.transfer.snapshot import room_on, unpack_weights
from grpo_ray.transfer.wire import Channel, Meeting, receive
from grpo_ray.types import DeviceHandle, TensorSpec, WeightSnapshot

BACKEND = "grpo_ray"


def register() -> None:
    """Register the transport; every vLLM process calls this through the entry point `vllm.general_plugins`."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SharedMemoryTransferEngine")


class SharedBuffer:
    """Anonymous shared memory that other processes of the same user can map through /proc.

    It has no name in /dev/shm, so it cannot outlive the process that made it, however that process dies.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("grpo_ray-weights")
        self._map: mmap.mmap | None = None

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, snapshot: WeightSnapshot) -> None:
        """Copy the snapshot's bytes into the memory, which is reused by the next snapshot."""
        size = snapshot.data.nbytes
        if self._map is None or len(self._map) != size:
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        self._map[:] = snapshot.data.data

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self._fd)


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """The message that sets up `nccl`: the fields of a `Meeting`. Other transports need none."""

    meeting: dict[str, Any]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Location and layout of the bytes; `specs` are the fields of each `TensorSpec`.

    The bytes are in the pages of `path`, or on the GPU: `on_device` has the fields of each `DeviceHandle`.
    """

    path: str
    num_bytes: int
    specs: list[dict[str, Any]]
    on_device: list[dict[str, Any]] | None = None
    version: int = 0
    by_wire: bool = False  # they are still with the Learner, which sends them now


class SharedMemoryTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """The receiving end in vLLM's worker, which loads all tensors of a model from shared memory."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    _channel: Channel | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        self.shutdown()
        self._meeting = Meeting(**init_info.meeting)
        self._channel = join(self._meeting, 1 + self.parallel_config.rank, self.device)

    def start_weight_update(self) -> None:
        # Layers transform their weights after loading (on a CPU linears are packed), so the loading and
        # transformation of each layer run again, as at start-up.
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        for layer in self.model.modules() if self.device.type == "cpu" else ():
            # Only experts that have no kernel yet are packed, which vLLM 0.32 forgets in a reload on a CPU.
            if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        specs = [TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in update_info.specs]
        if update_info.by_wire:
            loaded = self._receive(update_info, tuple(specs))
        else:
            loaded = self.model.load_weights(unpack_weights(specs, self._buffer(update_info)))
        # As vLLM's own loader checks at start-up: a layer that received nothing would keep its old weights.
        missing = {name for name, _ in self.model.named_parameters()} - (loaded or set())
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            # lm_head is another name of the embeddings; the two are separate only during a reload.
            missing = {name for name in missing if not name.endswith("lm_head.weight")}
        if self.model_config.quantization is not None:
            # Scales and zero points are made from the weights here; no checkpoint has them.
            missing = {name for name in missing if name.endswith(("weight", "bias"))}
        if loaded is not None and missing:
            raise ValueError(f"the snapshot does not fit the model: nothing for {sorted(missing)[:5]}")

    def _receive(self, update_info: SharedMemoryUpdateInfo, specs: tuple[TensorSpec, ...]) -> set[str] | None:
        """Load each chunk as it arrives; return the names of the parameters that were loaded."""
        assert self._channel is not None, "the Generator joins first"
        expected = WeightSnapshot(
            update_info.version, specs, np.empty(0, np.uint8), wire_bytes=update_info.num_bytes
        )
        new = room_on(self.device)  # per chunk: the reload keeps views of it until a layer is complete
        loaded: set[str] | None = set()
        for chunk, part in receive(
            self._channel, self._meeting, expected, lambda chunk: new(chunk.end - chunk.start)
        ):
            found = self.model.load_weights(unpack_weights(chunk.rebased(), part))
            loaded = None if loaded is None or found is None else loaded | found
        return loaded

    def _buffer(self, update_info: SharedMemoryUpdateInfo) -> torch.Tensor:
        if update_info.on_device:
            handles = {fields["gpu"]: DeviceHandle(**fields) for fields in update_info.on_device}
            return open_shared(handles[gpu_of(self.device)], self.device)
        with open(update_info.path, "rb") as file:
            pages = mmap.mmap(file.fileno(), update_info.num_bytes, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_lm_head()

    def _repack_lm_head(self) -> None:
        # With tied embeddings vLLM's reload leaves lm_head's packed copy (CPU only) at the old weights.
        lm_head: Any = getattr(self.model, "lm_head", None)
        if hasattr(lm_head, "cpu_linear"):
            lm_head.quant_method.process_weights_after_loading(lm_head)

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def update_info(buffer: SharedBuffer, snapshot: WeightSnapshot) -> dict[str, Any]:
    """Return the message for `AsyncLLM.update_weights`."""
    return {
        "path": snapshot.pages or buffer.path,
        "num_bytes": snapshot.num_bytes,
        "specs": [asdict(spec) for spec in snapshot.specs],
        "on_device": [asdict(handle) for handle in snapshot.on_device],
        "version": snapshot.version,
        "by_wire": snapshot.wire_bytes > 0,
    }
