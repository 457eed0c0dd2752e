"""An adapter that vLLM's own LoRA layers apply: replaced in place, also under running requests."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import ENDS, TinyModel, logprob_error, make_settings, perturb, update
from test_engines_vllm import PROMPTS, Groups, _generate, check_in_flight, config_of_vllm, started

from grpo_ray.config import Config
from grpo_ray.config.model import AdapterConfig, ModelConfig
from grpo_ray.engines.base import Engine
from grpo_ray.learning.adapters import load_trained, served_adapter
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.transfer.snapshot import pack_weights

SETTINGS = make_settings(num_samples=4, min_tokens=2, max_tokens=16, end_token_ids=ENDS)
LONG = make_settings(num_samples=4, min_tokens=150, max_tokens=150, end_token_ids=ENDS)


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
    config = config_of_vllm({"dtype": "float32", "adapter": {"rank": 4}}, weight_sync={"send": "adapter"})
    return asyncio.run(_record(config, path, models))


async def _record(config: Config, path: Path, models: list[PolicyModel]) -> Record:
    async with started(config, path) as engine:
        num_bytes = await _sync(engine, models[0], 0)
        initial = await _generate(engine, SETTINGS)
        await _sync(engine, models[1], 1)
        synced = await _generate(engine, SETTINGS)
        for version, delay_s in ((2, 0.2), (3, 0.05), (4, 1.0)):  # whatever the machine's speed
            running = asyncio.create_task(_generate(engine, LONG))
            await asyncio.sleep(delay_s)
            await _sync(engine, models[version], version)
            in_flight = await running
            if all(len(np.unique(c.versions)) == 2 for group in in_flight for c in group):
                break
        return Record(models, initial, synced, in_flight, version - 1, num_bytes)


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
    check_in_flight(record, LONG, 1e-4)
