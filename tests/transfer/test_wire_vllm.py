"""Logprobs of vLLM after weights came by a wire, received by its Generator, or by its own worker in chunks.

The second is the path of `nccl`, here over gloo, and with chunks far below a GPU's.
"""

import asyncio
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import TinyModel, logprob_error, perturb
from test_engines_vllm import LONG, PROMPTS, SETTINGS, Groups, _generate, config_of_vllm

from grpo_ray.config import Config
from grpo_ray.config.model import Implementation
from grpo_ray.core.generator import Generator
from grpo_ray.engines import make_engine
from grpo_ray.learning.adapters import served_weights
from grpo_ray.learning.hub_format import in_hub_format
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.transfer.messages import Chunk, WeightSnapshot
from grpo_ray.transfer.sender import Sender
from grpo_ray.transfer.shared_pages import Pages, SharedBuffer
from grpo_ray.transfer.wire import GlooChannel

pytestmark = pytest.mark.vllm


@dataclass
class Record:
    models: list[PolicyModel]
    by_inbox: Groups  # version 1
    by_worker: Groups  # version 3
    in_flight: dict[int, Groups]  # by the later version: one by the Generator's inbox, one by the worker
    refusal: str  # of a version that the Learner did not send


class Wired:
    """A Sender, and one Generator's end, which is the engine's worker or the Generator itself."""

    def __init__(self, engine: Any, models: list[PolicyModel], by_worker: bool) -> None:
        self.models, self.engine, self.by_worker = models, engine, by_worker
        self.generator = Generator("generator", engine)
        self.sender = Sender("gloo", "127.0.0.1", 1, 20.0, GlooChannel, torch.device("cpu"), chunk_bytes=20_000)

    async def join(self) -> None:
        end = self.engine.join if self.by_worker else self.generator.join
        meeting = self.sender.open_wire("generator")
        await asyncio.gather(end(meeting), asyncio.to_thread(self.sender.join_wire, "generator"))

    def pack(self, version: int) -> WeightSnapshot:
        model = self.models[version]
        self.sender.release(version)
        return self.sender.pack(
            in_hub_format(model, served_weights(model)), version, torch.float32, not self.by_worker
        )

    async def sync(self, version: int) -> None:
        await self.stage(version)
        await self.switch(version)

    async def stage(self, version: int) -> None:
        stage = self.generator.stage_weights(self.pack(version))
        await (stage if self.by_worker else self.with_send(stage, version))

    async def switch(self, version: int) -> None:
        switch = self.generator.switch(60.0)
        await (self.with_send(switch, version) if self.by_worker else switch)

    async def with_send(self, receiving: Awaitable[Any], version: int) -> None:
        await asyncio.gather(receiving, asyncio.to_thread(self.sender.send, "generator", version))


@pytest.fixture(
    scope="module", params=[pytest.param("Qwen2, tied", marks=pytest.mark.campaign), "TransformerLM, untied"]
)
def record(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Any:
    pytest.importorskip("vllm")
    own = request.param.startswith("TransformerLM")
    path = tiny_model(tied=not own, hidden_size=64, own=own)
    implementation: Implementation = "grpo_ray" if own else "transformers"
    models = [load_policy(str(path), implementation=implementation) for _ in range(7)]
    for version in range(1, 7):
        perturb(models[version], seed=version, scale=0.1)
    return asyncio.run(_record(config_of_vllm(), path, models))


async def _record(config: Config, path: Path, models: list[PolicyModel]) -> Record:
    engine = make_engine(config, str(path), max_model_len=384, seed=0)
    try:
        await engine.start(0)
        inbox, worker = Wired(engine, models, by_worker=False), Wired(engine, models, by_worker=True)
        await inbox.join()
        await inbox.sync(1)
        by_inbox = await _generate(engine, SETTINGS)
        in_flight = {2: await _in_flight(inbox, 2)}
        await worker.join()
        await worker.sync(3)
        by_worker = await _generate(engine, SETTINGS)
        in_flight[4] = await _in_flight(worker, 4)
        refusal = await _refusal(worker)
        return Record(models, by_inbox, by_worker, in_flight, refusal)
    finally:
        await engine.shutdown()


async def _in_flight(wired: Wired, version: int) -> Groups:
    """Switch versions at about a third of the requests' time, which depends on the machine and its load."""
    await wired.stage(version)
    started = time.perf_counter()
    await _generate(wired.engine, LONG)
    running = asyncio.create_task(_generate(wired.engine, LONG))
    await asyncio.sleep((time.perf_counter() - started) / 3)
    await wired.switch(version)
    return await running


async def _refusal(wired: Wired) -> str:
    expected, _ = wired.pack(6), wired.pack(5)
    wired.sender._kept[6] = wired.sender._kept[5]  # with a header that says 5
    await wired.generator.stage_weights(expected)
    try:
        await wired.with_send(wired.generator.switch(60.0), 6)
    except Exception as error:
        return str(error)
    pytest.fail("the wrong version was loaded")


@pytest.mark.parametrize("version", [1, 3])
def test_every_token_is_the_new_weights(record: Record, version: int) -> None:
    groups = record.by_inbox if version == 1 else record.by_worker
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert (completion.versions == version).all()
            assert logprob_error(record.models[version], prompt, completion, SETTINGS).max() < 1e-4
            assert logprob_error(record.models[version - 1], prompt, completion, SETTINGS).max() > 1e-2


@pytest.mark.parametrize("version", [2, 4])
def test_each_token_in_flight_is_of_the_version_that_it_carries(record: Record, version: int) -> None:
    num_switched = 0
    for prompt, group in zip(PROMPTS, record.in_flight[version], strict=True):
        for completion in group:
            versions = completion.versions
            assert (np.diff(versions) >= 0).all()
            assert set(versions.tolist()) <= {version - 1, version}
            num_switched += len(np.unique(versions)) == 2
            for each in np.unique(versions):
                error = logprob_error(record.models[each], prompt, completion, LONG)
                assert error[versions == each].max() < 1e-4
    assert num_switched > 4 * len(PROMPTS)


def test_another_version_than_the_one_that_was_staged_is_refused(record: Record) -> None:
    assert "expected the weights of version 6, and version 5 came" in record.refusal


@pytest.mark.campaign
def test_each_tensor_parallel_rank_loads_its_part(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    models = [load_policy(str(path)) for _ in range(3)]
    for version in (1, 2):
        perturb(models[version], seed=version, scale=0.1)

    async def sampled() -> Groups:
        engine = make_engine(config_of_vllm(), str(path), max_model_len=384, seed=0)
        try:
            await engine.start(0)
            wired = Wired(engine, models, by_worker=False)
            await wired.join()
            for version in (1, 2):
                await wired.sync(version)
            return await _generate(engine, SETTINGS)
        finally:
            await engine.shutdown()

    for prompt, group in zip(PROMPTS, asyncio.run(sampled()), strict=True):
        for completion in group:
            assert (completion.versions == 2).all()
            assert logprob_error(models[2], prompt, completion, SETTINGS).max() < 1e-4
            assert logprob_error(models[1], prompt, completion, SETTINGS).max() > 1e-2


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
