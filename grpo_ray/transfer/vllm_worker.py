"""vLLM's side of a weight sync: its workers load the weights from memory that another process filled.

`object_store`: Ray brings the snapshot to the Generator's node, and the engine's workers map the same pages
(shared_pages.py) and load from them. It works on any device, and needs no network between the workers and the
Learner. `collective`: the Generator receives them in pages that the workers map as well. `nccl`: each worker
receives them on its GPU, chunk by chunk (wire.py). `ipc`: the bytes stay on the GPU (snapshot.py).

The weights are loaded over the old ones while the engine is paused.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo_ray.learning.device import lock_pages
from grpo_ray.transfer.channels import join
from grpo_ray.transfer.messages import (
    CHUNK_BYTES,
    Chunk,
    DeviceHandle,
    Meeting,
    TensorSpec,
    WeightSnapshot,
    chunks,
)
from grpo_ray.transfer.shared_pages import Pages, map_pages
from grpo_ray.transfer.snapshot import gpu_of, open_shared, unpack_weights
from grpo_ray.transfer.wire import Channel, receive

BACKEND = "grpo_ray"
WORKER = f"{__name__}.LoadingWorker"


def register() -> None:
    """Register the transport; every vLLM process calls this, through the entry point `vllm.general_plugins`."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SharedMemoryTransferEngine")
    # vLLM 0.32 computes attention in bfloat16 with AMX where there is one, and does not ask Linux to allow it.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """The message that sets up `nccl`: the fields of a `Meeting`. Other transports need none."""

    meeting: dict[str, Any]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Location and layout of the bytes; `specs` are the fields of each `TensorSpec`.

    The bytes are in the pages of `path`, or on the GPU: `on_device` has the fields of each `DeviceHandle`, for
    each GPU those of all `chunks`.
    """

    path: str
    offset_bytes: int
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
    _place: tuple[Pages, int] | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        self.shutdown()  # leaves an earlier wire
        self._meeting = Meeting(**init_info.meeting)
        self._channel = join(self._meeting, 1 + self.parallel_config.rank, self.device)

    def load(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Replace the model's weights while nothing is sampled; raises ValueError for another model's."""
        self.start_weight_update()
        self.receive_weights(update_info)
        self.finish_weight_update()
        torch.accelerator.synchronize()

    def start_weight_update(self) -> None:
        # Layers transform their weights after loading, so both run again for each layer, as at start-up.
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load each chunk as it comes."""
        loaded: set[str] | None = set()
        for chunk, part in self._parts(update_info):
            found = self.model.load_weights(unpack_weights(chunk.rebased(), part))
            loaded = None if loaded is None or found is None else loaded | found
        self._check_complete(self.model, loaded)

    def _parts(self, update_info: SharedMemoryUpdateInfo) -> Iterator[tuple[Chunk, torch.Tensor]]:
        specs = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in update_info.specs)
        num_bytes = update_info.num_bytes
        if update_info.by_wire:
            assert self._channel is not None, "the Generator joins first"
            expected = WeightSnapshot(update_info.version, specs, np.empty(0, np.uint8), wire_bytes=num_bytes)
            return receive(self._channel, self._meeting, expected, self._new_memory)
        if not update_info.on_device:
            return iter([(Chunk(specs, 0, num_bytes), self._mapped(update_info))])
        handles = [DeviceHandle(**fields) for fields in update_info.on_device]
        own = [handle for handle in handles if handle.gpu == gpu_of(self.device)]
        parts = (open_shared(handle, self.device) for handle in own)
        return zip(chunks(specs, num_bytes, CHUNK_BYTES), parts, strict=True)

    def _mapped(self, update_info: SharedMemoryUpdateInfo) -> torch.Tensor:
        """Map the pages; for a GPU they are the Generator's own, page-locked at the first load and kept."""
        pages = Pages(update_info.path, update_info.offset_bytes, update_info.num_bytes)
        if self.device.type == "cpu":
            return map_pages(pages)
        place = pages, Path(pages.path).stat().st_ino  # another file may have the path by now
        if place != self._place:
            self._place, self._locked = place, lock_pages(map_pages(pages, is_shared=True))
        return self._locked

    def _new_memory(self, chunk: Chunk) -> torch.Tensor:
        """Allocate each chunk anew: the reload keeps views of it until a layer is complete."""
        return torch.empty(chunk.end - chunk.start, dtype=torch.uint8, device=self.device)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack()

    def _repack(self) -> None:
        """Pack again what vLLM 0.32 packs for a CPU at start-up, and not after a reload."""
        for layer in self.model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)
        lm_head: Any = getattr(self.model, "lm_head", None)  # if it is tied, it would keep the old weights
        if hasattr(lm_head, "cpu_linear"):
            lm_head.quant_method.process_weights_after_loading(lm_head)

    def _check_complete(self, model: Any, loaded: set[str] | None) -> None:
        # As vLLM's own loader checks at start-up: a layer that received nothing would keep its old weights.
        missing = {name for name, _ in model.named_parameters()} - (loaded or set())
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            # lm_head is another name of the embeddings; the two are separate only during a reload.
            missing = {name for name in missing if not name.endswith("lm_head.weight")}
        if self.model_config.quantization is not None:
            # Scales and zero points are made from the weights here; no checkpoint has them.
            missing = {name for name in missing if name.endswith(("weight", "bias"))}
        if loaded is not None and missing:
            raise ValueError(f"the snapshot does not fit the model: nothing for {sorted(missing)[:5]}")

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class LoadingWorker:
    """Methods of vLLM's worker for `AsyncLLM.collective_rpc`."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any

    def load_weights_from(self, update_info: dict[str, Any]) -> None:
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            engine.load(engine.parse_update_info(update_info))
        self.model_runner.reset_lora_state()


def update_info(pages: Pages, snapshot: WeightSnapshot) -> dict[str, Any]:
    """Return the message for `load_weights_from`."""
    return {
        **asdict(pages),
        "specs": [asdict(spec) for spec in snapshot.specs],
        "on_device": [asdict(handle) for handle in snapshot.on_device],
        "version": snapshot.version,
        "by_wire": snapshot.wire_bytes > 0,
    }


register()  # a checkout that is not installed has no entry points, and vLLM imports `WORKER` before it asks
