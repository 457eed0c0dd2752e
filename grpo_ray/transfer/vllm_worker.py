"""vLLM's side of a weight sync: its workers load the weights from memory that another process filled.

`object_store`: Ray brings the snapshot to the Generator's node, and the engine's workers map the same pages
(shared_pages.py) and load from them. It works on any device, and needs no network between the workers and the
Learner. `collective`: the Generator receives them in pages that the workers map as well. `nccl`: each worker
receives them on its GPU, chunk by chunk (wire.py). `ipc`: the bytes stay on the GPU (snapshot.py).

The weights are loaded over the old ones while the engine is paused.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo_ray.learning.device import lock_pages
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
from grpo_ray.transfer.wire import Channel, join, receive


def register() -> None:
    """Prepare one of vLLM's processes; all call this, through the entry point `vllm.general_plugins`."""
    # vLLM 0.32 computes attention in bfloat16 with AMX where there is one, and does not ask Linux to allow it.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


class LoadingWorker:
    """Methods of vLLM's worker for `AsyncLLM.collective_rpc`, which load all tensors of a model."""

    device: torch.device
    rank: int
    model_config: Any
    vllm_config: Any
    model_runner: Any
    _channel: Channel | None = None
    _place: tuple[Pages, int] | None = None

    def join_wire(self, meeting: dict[str, Any]) -> None:
        """Join the wire of `nccl`, in place of an earlier one; `meeting` has the fields of a `Meeting`."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._meeting = Meeting(**meeting)
        self._channel = join(self._meeting, 1 + self.rank, self.device)

    def load_weights_from(self, message: dict[str, Any]) -> None:
        """Replace the model's weights by those of `message_of` while nothing is sampled.

        Raises:
            ValueError: they are another model's.
        """
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            # Layers transform their weights after loading, so both run again for each layer, as at start-up.
            initialize_layerwise_reload(model)
            self._receive_weights(model, message)
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu":
                _repack(model)
            torch.accelerator.synchronize()
        self.model_runner.reset_lora_state()

    def _receive_weights(self, model: Any, message: dict[str, Any]) -> None:
        """Load each chunk as it comes."""
        loaded: set[str] | None = set()
        for chunk, part in self._parts(**message):
            found = model.load_weights(unpack_weights(chunk.rebased(), part))
            loaded = None if loaded is None or found is None else loaded | found
        _check_complete(model, self.model_config, loaded)

    def _parts(
        self, pages: dict[str, Any], specs: list[dict[str, Any]], on_device: list[dict[str, Any]], version: int,
        by_wire: bool,
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:  # fmt: skip
        layout = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in specs)
        place = Pages(**pages)
        if by_wire:
            assert self._channel is not None, "the Generator joins first"
            expected = WeightSnapshot(version, layout, np.empty(0, np.uint8), wire_bytes=place.num_bytes)
            return receive(self._channel, self._meeting, expected, self._new_memory)
        if not on_device:
            return iter([(Chunk(layout, 0, place.num_bytes), self._mapped(place))])
        handles = [DeviceHandle(**fields) for fields in on_device]
        own = [handle for handle in handles if handle.gpu == gpu_of(self.device)]
        parts = (open_shared(handle, self.device) for handle in own)
        return zip(chunks(layout, place.num_bytes, CHUNK_BYTES), parts, strict=True)

    def _mapped(self, pages: Pages) -> torch.Tensor:
        """Map the pages; for a GPU they are the Generator's own, page-locked at the first load and kept."""
        if self.device.type == "cpu":
            return map_pages(pages)
        place = pages, Path(pages.path).stat().st_ino  # another file may have the path by now
        if place != self._place:
            self._place, self._locked = place, lock_pages(map_pages(pages, is_shared=True))
        return self._locked

    def _new_memory(self, chunk: Chunk) -> torch.Tensor:
        """Allocate each chunk anew: the reload keeps views of it until a layer is complete."""
        return torch.empty(chunk.end - chunk.start, dtype=torch.uint8, device=self.device)


def _repack(model: Any) -> None:
    """Pack again what vLLM 0.32 packs for a CPU at start-up, and not after a reload."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
    lm_head: Any = getattr(model, "lm_head", None)  # if it is tied, it would keep the old weights
    if hasattr(lm_head, "cpu_linear"):
        lm_head.quant_method.process_weights_after_loading(lm_head)


def _check_complete(model: Any, config: Any, loaded: set[str] | None) -> None:
    # As vLLM's own loader checks at start-up: a layer that received nothing would keep its old weights.
    missing = {name for name, _ in model.named_parameters()} - (loaded or set())
    if getattr(config.hf_text_config, "tie_word_embeddings", False):
        # lm_head is another name of the embeddings; the two are separate only during a reload.
        missing = {name for name in missing if not name.endswith("lm_head.weight")}
    if config.quantization is not None:
        # Scales and zero points are made from the weights here; no checkpoint has them.
        missing = {name for name in missing if name.endswith(("weight", "bias"))}
    if loaded is not None and missing:
        raise ValueError(f"the snapshot does not fit the model: nothing for {sorted(missing)[:5]}")


def message_of(snapshot: WeightSnapshot, pages: Pages) -> dict[str, Any]:
    """Return the message for `load_weights_from`, in plain values.

    The bytes are in the pages; or on the GPU, where `on_device` has for each GPU the handles of all `chunks`;
    or still with the Learner, which sends them now.
    """
    return {
        "pages": asdict(pages),
        "specs": [asdict(spec) for spec in snapshot.specs],
        "on_device": [asdict(handle) for handle in snapshot.on_device],
        "version": snapshot.version,
        "by_wire": snapshot.wire_bytes > 0,
    }


register()  # a checkout that is not installed has no entry points
