"""The check that a weight sync brought every parameter of vLLM's model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ray.transfer.messages import Chunk, WeightSnapshot
from grpo_ray.transfer.shared_pages import Pages, SharedBuffer

pytestmark = pytest.mark.vllm

LOADED = {"q.weight", "q.bias", "experts.w13_weight", "norm.weight"}


def receive(quantization: str | None, parameters: set[str], loaded: set[str]) -> None:
    pytest.importorskip("vllm")
    from grpo_ray.transfer.vllm_worker import SharedMemoryTransferEngine

    engine: Any = object.__new__(SharedMemoryTransferEngine)
    named = {name: torch.empty(0) for name in parameters}
    engine.model = SimpleNamespace(load_weights=lambda _: loaded, named_parameters=lambda: named.items())
    text_config = SimpleNamespace(tie_word_embeddings=False)
    engine.model_config = SimpleNamespace(quantization=quantization, hf_text_config=text_config)
    engine._parts = lambda info: iter([(Chunk((), 0, 0), torch.empty(0, dtype=torch.uint8))])
    engine.receive_weights(None)


def test_scales_of_a_quantized_model_are_in_no_snapshot_and_its_weights_are() -> None:
    made_here = {"q.weight_scale", "q.input_scale", "attn.k_scale", "experts.w13_weight_scale", "q.g_idx"}
    receive("fp8", LOADED | made_here, LOADED)
    for lost in sorted(LOADED):
        with pytest.raises(ValueError, match=f"nothing for .*{lost}"):
            receive("fp8", LOADED | made_here, LOADED - {lost})


def test_a_model_as_it_is_needs_every_parameter() -> None:
    receive(None, LOADED, LOADED)
    with pytest.raises(ValueError, match=r"nothing for \['q.scale'\]"):
        receive(None, LOADED | {"q.scale"}, LOADED)


def test_a_gpus_worker_locks_its_pages_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm_worker = pytest.importorskip("grpo_ray.transfer.vllm_worker")
    locked: list[torch.Tensor] = []
    monkeypatch.setattr(vllm_worker, "lock_pages", lambda pages: locked.append(pages) or pages)
    worker = object.__new__(vllm_worker.SharedMemoryTransferEngine)
    worker.device, buffer = torch.device("cuda", 0), SharedBuffer()
    for value, (size, times) in enumerate(((5000, 1), (5000, 1), (9000, 2), (5000, 3))):
        snapshot = WeightSnapshot(1, (), np.full(size, value, np.uint8))
        mapped = worker._mapped(buffer.write(snapshot))  # which has the fields that are read
        assert (mapped.numpy().tobytes(), len(locked)) == (snapshot.data.tobytes(), times)
    buffer.close()
    for number in range(2):  # a file of the same name
        path = tmp_path / "pages"
        path.unlink(missing_ok=True)
        path.write_bytes(bytes([number] * 5000))
        assert worker._mapped(Pages(str(path), 0, 5000))[0] == number
