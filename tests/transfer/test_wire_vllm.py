"""vLLM's workers: what each rank loads, what a snapshot must have, and pages that are locked once."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import TinyModel, logprob_error, perturb, update
from test_engines_vllm import PROMPTS, SETTINGS, Groups, _generate, config_of_vllm, started
from test_snapshot import TENSORS

from grpo_ray.learning.loading import load_policy
from grpo_ray.transfer import snapshot as snapshot_module
from grpo_ray.transfer.messages import Chunk, DeviceHandle, WeightSnapshot
from grpo_ray.transfer.shared_pages import Pages, SharedBuffer
from grpo_ray.transfer.snapshot import check_snapshot, pack_on_device, pack_weights, unpack_weights

pytestmark = pytest.mark.vllm


@pytest.mark.campaign
def test_each_tensor_parallel_rank_loads_a_part(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a CPU, which the configuration does not offer: vLLM wants their cores by hand."""
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    make = arg_utils.AsyncEngineArgs
    in_parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", lambda **given: make(**given | in_parallel))
    path = tiny_model(tied=False, hidden_size=64)
    models = [load_policy(str(path)) for _ in range(2)]
    perturb(models[1], seed=1, scale=0.1)

    async def sampled() -> Groups:
        async with started(config_of_vllm(), path) as engine:
            await update(engine, pack_weights(models[1].named_parameters(), 1, torch.float32))
            return await _generate(engine, SETTINGS)

    for prompt, group in zip(PROMPTS, asyncio.run(sampled()), strict=True):
        for completion in group:
            assert (completion.versions == 1).all()
            assert logprob_error(models[1], prompt, completion, SETTINGS).max() < 1e-4
            assert logprob_error(models[0], prompt, completion, SETTINGS).max() > 1e-2


LOADED = {"q.weight", "q.bias", "experts.w13_weight", "norm.weight"}


def receive(quantization: str | None, parameters: set[str], loaded: set[str]) -> None:
    pytest.importorskip("vllm")
    from grpo_ray.transfer.vllm_worker import LoadingWorker

    worker: Any = LoadingWorker()
    named = {name: torch.empty(0) for name in parameters}
    model = SimpleNamespace(load_weights=lambda _: loaded, named_parameters=lambda: named.items())
    text_config = SimpleNamespace(tie_word_embeddings=False)
    worker.model_config = SimpleNamespace(quantization=quantization, hf_text_config=text_config)
    worker._parts = lambda: iter([(Chunk((), 0, 0), torch.empty(0, dtype=torch.uint8))])
    worker._receive_weights(model, {})


def test_every_parameter_is_needed_but_for_the_scales_of_a_quantized_model() -> None:
    made_here = {"q.weight_scale", "q.input_scale", "attn.k_scale", "experts.w13_weight_scale", "q.g_idx"}
    receive("fp8", LOADED | made_here, LOADED)
    for lost in sorted(LOADED):
        with pytest.raises(ValueError, match=f"nothing for .*{lost}"):
            receive("fp8", LOADED | made_here, LOADED - {lost})
    receive(None, LOADED, LOADED)
    with pytest.raises(ValueError, match=r"nothing for \['q.scale'\]"):
        receive(None, LOADED | {"q.scale"}, LOADED)


def test_a_gpus_worker_locks_its_pages_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm_worker = pytest.importorskip("grpo_ray.transfer.vllm_worker")
    locked: list[torch.Tensor] = []
    monkeypatch.setattr(vllm_worker, "lock_pages", lambda pages: locked.append(pages) or pages)
    worker = vllm_worker.LoadingWorker()
    worker.device, buffer = torch.device("cuda", 0), SharedBuffer()
    for value, (size, times) in enumerate(((5000, 1), (5000, 1), (9000, 2), (5000, 3))):
        snapshot = WeightSnapshot(1, (), np.full(size, value, np.uint8))
        mapped = worker._mapped(buffer.write(snapshot))
        assert (mapped.numpy().tobytes(), len(locked)) == (snapshot.data.tobytes(), times)
    buffer.close()
    for number in range(2):  # a file of the same name
        path = tmp_path / "pages"
        path.unlink(missing_ok=True)
        path.write_bytes(bytes([number] * 5000))
        assert worker._mapped(Pages(str(path), 0, 5000))[0] == number


def test_each_engine_loads_the_chunks_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a colocated Learner shares its buffers there; a handle here is a place in a list."""
    vllm_worker = pytest.importorskip("grpo_ray.transfer.vllm_worker")
    buffers: list[torch.Tensor] = []

    def share(buffer: torch.Tensor) -> DeviceHandle:
        buffers.append(buffer)
        return DeviceHandle(buffer.numel(), b"", 0, len(buffers) - 1, b"", 0, b"", False, f"GPU-{rank}")

    for module in (snapshot_module, vllm_worker):
        monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    monkeypatch.setattr(snapshot_module, "share", share)
    handles: list[DeviceHandle] = []
    for rank in (1, 2):
        weights = [(name, tensor + rank) for name, tensor in TENSORS]
        found, kept = pack_on_device(weights, 3, torch.float32, torch.device("cpu"))
        handles += found.on_device
        assert len(kept) == len(found.on_device) > 1
    snapshot = replace(found, on_device=tuple(handles))
    check_snapshot(snapshot)
    monkeypatch.setattr(vllm_worker, "gpu_of", lambda device: f"GPU-{device.index + 1}")
    monkeypatch.setattr(vllm_worker, "open_shared", lambda handle, _: buffers[handle.storage_offset_bytes])
    message = vllm_worker.message_of(snapshot, Pages("", 0, snapshot.num_bytes))
    for index in (0, 1):
        worker = vllm_worker.LoadingWorker()
        worker.device = torch.device("cuda", index)
        parts = worker._parts(**message)
        loaded = {n: t for chunk, part in parts for n, t in unpack_weights(chunk.rebased(), part)}
        assert loaded.keys() == {name for name, _ in TENSORS}
        for name, tensor in TENSORS:
            assert torch.equal(loaded[name], (tensor + index + 1).to(loaded[name].dtype)), name
