"""An adapter that vLLM's own LoRA layers apply: replaced in place, also under running requests."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import ENDS, TEST_ENGINE, TinyModel, logprob_error, make_settings, perturb, update

from grpo_ray.config import Config
from grpo_ray.config.model import AdapterConfig, ModelConfig
from grpo_ray.engines import make_engine
from grpo_ray.engines.base import Engine
from grpo_ray.learning.adapters import load_trained, served_adapter
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.transfer.snapshot import pack_weights
from grpo_ray.types import Completion

# The last is longer than a block of vLLM's prefix cache (128 tokens on a CPU), so that it is cached.
PROMPTS = [(40, 41, 42), (50,), tuple(range(40, 240))]
SETTINGS = make_settings(num_samples=4, min_tokens=2, max_tokens=16, end_token_ids=ENDS)
LONG = make_settings(num_samples=4, min_tokens=150, max_tokens=150, end_token_ids=ENDS)

Groups = list[tuple[Completion, ...]]


CONFIG = {
    "model": {"tiny": {}, "dtype": "float32", "adapter": {"rank": 4}},
    "task": {"kind": "sorting"},
    "generator": TEST_ENGINE,
    "weight_sync": {"send": "adapter"},
}


@dataclass
class Record:
    """Outputs of one engine; `models[v]` has the adapter of version v."""

    models: list[PolicyModel]
    initial: Groups  # version 0, a new adapter
    synced: Groups  # version 1
    in_flight: Groups  # begun by version `old`; the next arrived during it
    old: int
    num_bytes: int  # of a snapshot


@pytest.fixture(scope="module")
def record(tiny_model: TinyModel) -> Record:
    pytest.importorskip("vllm")
    path = tiny_model(hidden_size=64)  # vLLM's CPU attention takes heads of 32 and more
    model = ModelConfig(path=str(path), dtype="float32", adapter=AdapterConfig(rank=4))
    models = [load_trained(str(path), model, torch.device("cpu")) for _ in range(5)]
    for version, each in enumerate(models[1:], 1):  # by nats; at 0.1, float32 itself is off by up to 1e-4
        perturb(torch.nn.ParameterList(p for p in each.parameters() if p.requires_grad), version, 0.03)
    return asyncio.run(_record(Config.model_validate(CONFIG), path, models))


async def _record(config: Config, path: Path, models: list[PolicyModel]) -> Record:
    engine = make_engine(config, str(path), max_model_len=384, seed=0)
    try:
        await engine.start(0)
        num_bytes = await _sync(engine, models[0], 0)
        initial = await _generate(engine)
        await _sync(engine, models[1], 1)
        synced = await _generate(engine)
        for version, delay_s in ((2, 0.2), (3, 0.05), (4, 1.0)):  # whatever the machine's speed
            running = asyncio.gather(*(engine.generate(prompt, LONG) for prompt in PROMPTS))
            await asyncio.sleep(delay_s)
            await _sync(engine, models[version], version)
            in_flight = await running
            if all(len(np.unique(c.versions)) == 2 for group in in_flight for c in group):
                break
        return Record(models, initial, synced, in_flight, version - 1, num_bytes)
    finally:
        await engine.shutdown()


async def _generate(engine: Engine) -> Groups:
    return await asyncio.gather(*(engine.generate(prompt, SETTINGS) for prompt in PROMPTS))


async def _sync(engine: Engine, model: PolicyModel, version: int) -> int:
    snapshot = pack_weights(served_adapter(model), version, torch.float32)
    await update(engine, snapshot)
    return snapshot.num_bytes


@pytest.mark.vllm
def test_only_the_adapter_travels_and_each_version_is_served_as_peft_computes_it(record: Record) -> None:
    for version, groups in enumerate((record.initial, record.synced)):
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                assert set(completion.versions.tolist()) == {version}
                assert logprob_error(record.models[version], prompt, completion, SETTINGS).max() < 1e-4
    prompt, completion = PROMPTS[0], record.synced[0][0]
    assert logprob_error(record.models[0], prompt, completion, SETTINGS).max() > 1e-3  # the versions do differ
    trained = sum(p.numel() for p in record.models[0].parameters() if p.requires_grad)
    assert trained * 4 <= record.num_bytes < trained * 4 + 64 * 28  # aligned; only the adapter travels


@pytest.mark.vllm
def test_an_adapter_is_replaced_under_running_requests(record: Record) -> None:
    old, new = record.models[record.old], record.models[record.old + 1]
    for prompt, group in zip(PROMPTS, record.in_flight, strict=True):
        for completion in group:
            assert np.unique(completion.versions).tolist() == [record.old, record.old + 1]
            is_old = completion.versions == record.old
            assert (np.diff(completion.versions) >= 0).all()
            assert logprob_error(old, prompt, completion, LONG)[is_old].max() < 1e-4
            assert logprob_error(new, prompt, completion, LONG)[~is_old].max() < 1e-4
