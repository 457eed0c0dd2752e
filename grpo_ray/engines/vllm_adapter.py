"""An adapter served by vLLM's own LoRA layers, and replaced in place under running requests."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from grpo_ray.config.model import AdapterConfig
from grpo_ray.records.adapter_files import CONFIG, FIELDS, FILE
from grpo_ray.records.run_lock import make_locked
from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.snapshot import as_tensor, unpack_weights

ROOM_BYTES = 2**30
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for


class ServedAdapter:
    """The one adapter of an engine. Every request names it: on a CPU vLLM 0.32 would give the adapter of one
    request to another that names none.
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._kept = KeptWeights()
        memory = Path("/dev/shm")  # of a container it may have 64 MB
        has_room = memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES
        folder, self._lock = make_locked(
            "grpo_ray-adapter-", str(memory) if has_room else tempfile.gettempdir()
        )
        self._folder = Path(folder)

    def engine_arguments(self) -> dict[str, Any]:
        rank = min(rank for rank in RANKS if rank >= self._config.rank)
        return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}

    def request(self, load_inplace: bool = False) -> Any:
        """Return the argument of a request that is sampled with the adapter."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", 1, str(self._folder), load_inplace=load_inplace)

    def stage(self, snapshot: WeightSnapshot) -> None:
        """Write the snapshot's tensors, named as in PEFT's format, where `load` reads them."""
        tensors = dict(unpack_weights(snapshot.specs, as_tensor(self._kept.whole(snapshot))))
        save_file(tensors, self._folder / FILE, metadata={"format": "pt"})
        targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
        config = {name: getattr(self._config, field) for name, field in FIELDS.items()}
        config |= {"peft_type": "LORA", "bias": "none", "target_modules": targets}
        (self._folder / CONFIG).write_text(json.dumps(config))

    async def load(self, llm: Any) -> None:
        """Load the staged tensors in place of the earlier ones.

        vLLM's prefix cache tells adapters apart by name and path alone, so it must be reset afterwards.
        """
        # In place here alone: in a request it would be loaded anew each time.
        await llm.add_lora(self.request(load_inplace=True))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
