"""Logprobs, versions and stops of vLLM itself, before and after its weights are replaced.

There is one engine for a Qwen2 with tied embeddings, one for a TransformerLM without, and one for a Qwen3-MoE,
which transformers holds under other names and in other shapes than its checkpoint; each runs through `_record`
once, and the tests check the record. Weights come whole, as a delta, and by wires: to the Generator, and
to vLLM's worker in chunks, as with `nccl`, here over gloo. One more engine keeps keys and values at a sync.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    ENDS,
    ROUNDING,
    TEST_ENGINE,
    TinyModel,
    logprob_error,
    logprobs_over_kept_cache,
    make_settings,
    perturb,
    plain_rows,
    update,
)

from grpo_ray.config import Config
from grpo_ray.config.model import Implementation
from grpo_ray.core.generator import Generator
from grpo_ray.engines import make_engine
from grpo_ray.engines.base import Engine
from grpo_ray.learning.adapters import served_weights
from grpo_ray.learning.hub_format import in_hub_format
from grpo_ray.learning.loading import cast_parameters, load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.policy_model import PolicyModel, with_head_dtype
from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.sender import Sender
from grpo_ray.transfer.snapshot import pack_weights
from grpo_ray.types import Completion, SamplingSettings

pytestmark = pytest.mark.vllm

# The last is longer than a block of vLLM's prefix cache (128 tokens on a CPU), so that it is cached.
PROMPTS = [(40, 41, 42), (50,), (60, 61, 62, 63, 64, 65, 66), tuple(range(40, 240))]
SETTINGS = make_settings(num_samples=8, temperature=0.7, min_tokens=3, max_tokens=24, end_token_ids=ENDS)
LONG = make_settings(num_samples=8, temperature=0.7, min_tokens=150, max_tokens=150, end_token_ids=ENDS)
STOPPING = make_settings(num_samples=100, min_tokens=2, max_tokens=40, stop=("an", "7"))
SEEDED = make_settings(num_samples=2, max_tokens=12, seed=7)
DETOKENIZED = make_settings(num_samples=2, max_tokens=12, seed=7, stop=("no response has this text",))
# For evaluation alone: their tokens cannot be trained on.
GREEDY = make_settings(temperature=0.0, max_tokens=12, end_token_ids=ENDS)
ONE_TOKEN = make_settings(num_samples=40, max_tokens=1)
NUCLEUS = make_settings(num_samples=200, top_p=0.2, max_tokens=1)

Groups = list[tuple[Completion, ...]]
LATER = [pytest.param(name, marks=pytest.mark.campaign) for name in ("TransformerLM, untied", "Qwen3-MoE")]


@dataclass
class Record:
    """Outputs of one engine; `models[v]` has the weights of version v."""

    models: list[PolicyModel]
    path: Path
    again: Groups  # SEEDED, twice
    detokenized: Groups  # the same, with texts that vLLM itself makes token by token
    stopping: Groups
    greedy: Groups
    nucleus: Groups  # of the first prompt
    pure: dict[int, Groups]  # by their only version: 2 came as a delta, 3 by the inbox's wire
    in_flight: Groups  # begun by version `old`; the worker received the next one during it
    old: int
    refusal: str  # the error for a snapshot that lacks a tensor


@pytest.fixture(scope="module", params=["Qwen2, tied", *LATER])
def record(request: pytest.FixtureRequest, tiny_model: TinyModel, tiny_moe: Path) -> Record:
    pytest.importorskip("vllm")
    own = request.param.startswith("TransformerLM")
    path = tiny_model(tied=not own, hidden_size=64, own=own)  # vLLM's CPU attention takes heads of 32 and more
    if request.param == "Qwen3-MoE":
        path = tiny_moe
    implementation: Implementation = "grpo_ray" if own else "transformers"
    models = [load_policy(str(path), implementation=implementation) for _ in range(7)]
    for version in range(1, 7):
        perturb(models[version], seed=version, scale=0.1)
    _change_little(models[2], models[1])
    return asyncio.run(_record(config_of_vllm(), path, models))


def config_of_vllm(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    given = {"model": {"tiny": {}, **(model or {"dtype": "float32"})}, "task": {"kind": "sorting"}}
    return Config.model_validate({**given, "generator": TEST_ENGINE, **sections})


@asynccontextmanager
async def started(config: Config, path: Path | str) -> AsyncIterator[Any]:
    engine = make_engine(config, str(path), max_model_len=384, seed=0)
    try:
        await engine.start(0)
        yield engine
    finally:
        await engine.shutdown()


async def _record(config: Config, path: Path, models: list[PolicyModel]) -> Record:
    async with started(config, path) as engine:
        pure = {0: await _generate(engine, SETTINGS)}
        again = [*await _generate(engine, SEEDED, 1), *await _generate(engine, SEEDED, 1)]
        detokenized = await _generate(engine, DETOKENIZED, 1)
        stopping = await _generate(engine, STOPPING, 1)
        greedy, nucleus = await _generate(engine, GREEDY), await _generate(engine, NUCLEUS, 1)
        await _sync_by_delta(engine, models)
        pure[2] = await _generate(engine, SETTINGS)
        inbox, worker = (Wire(config, engine, by_worker) for by_worker in (False, True))
        await inbox.join()
        await inbox.sync(models[3], 3)
        pure[3] = await _generate(engine, SETTINGS)
        await worker.join()
        for version, delay_s in ((4, 0.2), (5, 0.05), (6, 1.0)):  # whatever the machine's speed
            running = asyncio.create_task(_generate(engine, LONG))
            await asyncio.sleep(delay_s)
            await engine.ping()  # while it samples
            await worker.sync(models[version], version)
            in_flight = await running
            if all(len(np.unique(c.versions)) == 2 for group in in_flight for c in group):
                break
        refusal = await _refusal(engine, models[0])
        return Record(
            models, path, again, detokenized, stopping, greedy, nucleus, pure, in_flight, version - 1, refusal,
        )  # fmt: skip


async def _generate(engine: Engine, settings: SamplingSettings, num_prompts: int = len(PROMPTS)) -> Groups:
    return await asyncio.gather(*(engine.generate(prompt, settings) for prompt in PROMPTS[:num_prompts]))


class Wire:
    """A Learner's end, and one Generator's: the Generator itself, or the engine's worker."""

    def __init__(self, config: Config, engine: Any, by_worker: bool) -> None:
        self.by_worker, self.generator = by_worker, Generator("generator", engine)
        self.end = engine if by_worker else self.generator
        self.sender = Sender(config, "127.0.0.1", torch.device("cpu"), chunk_bytes=20_000)

    async def join(self) -> None:
        meeting = self.sender.open_wire("generator")
        await asyncio.gather(self.end.join(meeting), asyncio.to_thread(self.sender.join_wire, "generator"))

    async def sync(self, model: PolicyModel, version: int) -> None:
        """The Generator receives while the version is staged, and the worker while it is loaded."""
        served = in_hub_format(model, served_weights(model))
        snapshot = self.sender.pack(served, version, torch.float32, not self.by_worker)
        send = asyncio.to_thread(self.sender.send, "generator", version)
        stage = self.generator.stage_weights(snapshot)
        await (stage if self.by_worker else asyncio.gather(stage, send))
        switch = self.generator.switch(60.0)
        await (asyncio.gather(switch, send) if self.by_worker else switch)


@torch.no_grad()
def _change_little(model: PolicyModel, base: PolicyModel) -> None:
    """Make the model the base but for a twentieth of each weight's rows."""
    rows = [parameter[::20].clone() for parameter in model.parameters()]
    model.load_state_dict(base.state_dict())
    for parameter, changed in zip(model.parameters(), rows, strict=True):
        parameter[::20] = changed


async def _sync_by_delta(engine: Engine, models: list[PolicyModel]) -> None:
    """Send version 1 whole, and version 2 as its difference from it."""
    learner = KeptWeights()
    for version in (1, 2):
        served = in_hub_format(models[version], served_weights(models[version]))
        whole = replace(pack_weights(served, version, torch.float32), is_kept=True)
        delta = learner.delta_to(whole)
        assert (delta is None) == (version == 1)
        await update(engine, delta or whole)


async def _refusal(engine: Engine, model: PolicyModel) -> str:
    served = in_hub_format(model, served_weights(model))
    tensors = [(name, weight) for name, weight in served if name != "model.norm.weight"]
    try:
        await engine.stage(pack_weights(tensors, 9, torch.float32))
        await engine.pause()
        await engine.load()
    except Exception as error:
        return str(error)
    pytest.fail("the snapshot was loaded")


@pytest.mark.parametrize("version", [0, 2, 3])
def test_without_a_sync_in_flight_every_token_is_of_its_version(record: Record, version: int) -> None:
    for prompt, group in zip(PROMPTS, record.pure[version], strict=True):
        assert len({tuple(c.token_ids.tolist()) for c in group}) == 8  # no duplicates in a group
        for completion in group:
            assert (completion.versions == version).all()
            assert logprob_error(record.models[version], prompt, completion, SETTINGS).max() < ROUNDING
            assert logprob_error(record.models[version - 1], prompt, completion, SETTINGS).max() > 0.1


def check_in_flight(record: Any, settings: SamplingSettings, rounding: float) -> None:
    """Check that each token's version is the one it carries, given all tokens before it, and no other."""
    completions = [(prompt, c) for prompt, group in zip(PROMPTS, record.in_flight, strict=True) for c in group]
    assert len(completions) == settings.num_samples * len(PROMPTS)
    old, new = record.old, record.old + 1
    for prompt, completion in completions:
        versions = completion.versions
        assert set(versions.tolist()) == {old, new}
        assert (np.diff(versions) >= 0).all()
        errors = {v: logprob_error(record.models[v], prompt, completion, settings) for v in (old, new)}
        assert errors[old][versions == old].max() < rounding
        assert errors[new][versions == new].max() < rounding
        assert errors[new][versions == old].max() > 0.1
        assert errors[old][versions == new].max() > 0.1


def test_weights_replaced_in_flight(record: Record) -> None:
    check_in_flight(record, LONG, ROUNDING)


def test_end_tokens_come_only_from_min_tokens_on_and_end_the_response(record: Record) -> None:
    for group in [*record.pure[0], *record.pure[2]]:
        for completion in group:
            is_end = np.isin(completion.token_ids, ENDS)
            assert not is_end[:-1].any()
            if completion.finish_reason == "stop":
                assert is_end[-1]
                assert len(is_end) > 3
            else:
                assert completion.is_truncated
                assert len(is_end) == 24


def test_stop_string_ends_a_response_and_is_kept(record: Record) -> None:
    tokenizer = load_tokenizer(str(record.path))
    ((*stopping,),) = record.stopping
    stopped = [c for c in stopping if c.finish_reason == "stop" and c.token_ids[-1] not in ENDS]
    assert len(stopping) == 100
    assert len(stopped) > 10
    for c in stopped:
        assert c.text.endswith(("an", "7"))
        assert tokenizer.decode(c.token_ids, skip_special_tokens=True).startswith(c.text)


def test_request_seed_repeats_the_draws_and_texts_are_vllms_own(record: Record) -> None:
    groups = (*record.again, *record.detokenized)
    first, second, detokenized = ([(c.token_ids.tolist(), c.text) for c in group] for group in groups)
    assert first == second == detokenized
    assert first[0] != first[1]
    assert all(text for _, text in first)


def test_temperature_0_takes_the_likeliest_token(record: Record) -> None:
    for prompt, (completion,) in zip(PROMPTS, record.greedy, strict=True):
        with torch.no_grad():
            rows = plain_rows(record.models[0], prompt, completion.token_ids.tolist())
        assert completion.token_ids.tolist() == [int(row.argmax()) for row in rows]


def test_top_p_draws_from_the_nucleus_alone(record: Record) -> None:
    """The nucleus is the smallest set of likeliest tokens that has the mass."""
    ((*completions,),) = record.nucleus
    with torch.no_grad():
        (row,) = plain_rows(record.models[0], PROMPTS[0], completions[0].token_ids.tolist())
    mass, tokens = row.exp().sort(descending=True)
    kept = tokens[: int((mass.cumsum(0) < 0.2).sum()) + 1].tolist()
    drawn = {int(completion.token_ids[0]) for completion in completions}
    assert len(drawn) > 1
    assert drawn <= set(kept)
    assert len(kept) < 100


def test_snapshot_without_a_tensor_is_refused(record: Record) -> None:
    assert "nothing for ['model.norm.weight']" in record.refusal


# ---- the output layer in float32 ----


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.kept("True")
def test_a_float32_head_over_bfloat16_before_and_after_a_sync(tiny_model: TinyModel, tied: bool) -> None:
    pytest.importorskip("vllm")
    path = tiny_model(tied=tied, hidden_size=64)
    models = [with_head_dtype(load_policy(str(path)), "float32") for _ in range(2)]
    perturb(models[1], seed=1, scale=0.1)
    for model in models:
        cast_parameters(model.parameters(), torch.bfloat16)
    config = config_of_vllm(model={"dtype": "bfloat16", "head_dtype": "float32"})

    async def record() -> list[Groups]:
        async with started(config, path) as engine:
            first = await _generate(engine, ONE_TOKEN)
            served = in_hub_format(models[1], served_weights(models[1]))
            await update(engine, pack_weights(served, 1, torch.bfloat16))
            return [first, await _generate(engine, ONE_TOKEN)]

    for version, groups in enumerate(asyncio.run(record())):
        for prompt, group in zip(PROMPTS, groups, strict=True):
            logprobs = {int(c.token_ids[0]): float(c.logprobs[0]) for c in group}
            assert len(logprobs) > 10
            apart = np.diff(np.array(list(logprobs.values()))) * 2**10
            # Logits of 1/8 and more are multiples of this in bfloat16, and so are their differences.
            assert np.mean(np.abs(apart - apart.round()) < 0.02) < 0.3
            errors = {
                v: np.mean([logprob_error(models[v], prompt, c, ONE_TOKEN).max() for c in group])
                for v in (0, 1)
            }
            assert errors[version] < 0.05
            assert errors[1 - version] > 2 * errors[version]


# ---- `weight_sync.recompute_kv: false`: keys and values are kept, and no version shares another's ----

# The longer one fills a block of vLLM's prefix cache (128 tokens on a CPU).
TWO_PROMPTS = [tuple(range(40, 240)), (60, 61, 62)]
SHORT = make_settings(num_samples=2, temperature=0.7, max_tokens=12, end_token_ids=ENDS)
KeptRecord = tuple[list[Any], dict[int, Groups], Groups]


@pytest.fixture(scope="module")
def kept_record(tiny_model: TinyModel) -> KeptRecord:
    """The models by version, groups by their only version, and those that a sync interrupted.

    The groups of the last version were requested while the sync began that brought it.
    """
    pytest.importorskip("vllm")
    path = str(tiny_model(tied=False, hidden_size=64, own=True))
    models = [load_policy(path) for _ in range(5)]
    for version in range(1, 5):
        perturb(models[version], seed=version, scale=0.1)
    config = config_of_vllm(weight_sync={"recompute_kv": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")  # as in a checkout that is not installed, which has no entry points
        return models, *asyncio.run(_record_kept(config, path, models))


async def _record_kept(config: Config, path: str, models: list[Any]) -> tuple[dict[int, Groups], Groups]:
    def ask(settings: Any) -> "asyncio.Future[list[tuple[Completion, ...]]]":
        return asyncio.gather(*(engine.generate(prompt, settings) for prompt in TWO_PROMPTS))

    during: list[asyncio.Future[Groups]] = []
    async with started(config, path) as engine:
        pure = {0: await ask(SHORT)}
        await _sync_kept(engine, models[1], 1)
        pure[1] = await ask(SHORT)
        for version, delay_s in ((2, 0.2), (3, 0.05), (4, 1.0)):  # whatever the machine's speed
            running = ask(LONG)
            await asyncio.sleep(delay_s)
            await _sync_kept(engine, models[version], version, lambda: during.append(ask(SHORT)))
            interrupted, of_new = await running, await during[-1]
            if all(len(np.unique(c.versions)) == 2 for group in interrupted for c in group):
                break
        return {**pure, version: of_new}, interrupted


async def _sync_kept(engine: Engine, model: Any, version: int, ask: Callable[[], Any] = lambda: None) -> None:
    await engine.stage(pack_weights(model.named_parameters(), version, torch.float32))
    pausing = asyncio.create_task(engine.pause())
    await asyncio.sleep(0)  # it has begun to pause
    ask()
    await pausing
    await engine.load()
    await engine.finish(version)
    await engine.resume()


def test_requests_use_no_prefix_of_another_version(kept_record: KeptRecord) -> None:
    """The same prompts, one longer than a block of the cache, before a sync, after it, and during another."""
    models, pure, _ = kept_record
    assert len(pure) == 3
    for version, groups in pure.items():
        for prompt, group in zip(TWO_PROMPTS, groups, strict=True):
            for completion in group:
                assert (completion.versions == version).all()
                assert logprob_error(models[version], prompt, completion, SHORT).max() < ROUNDING


def test_running_requests_continue_on_the_keys_and_values_that_they_have(kept_record: KeptRecord) -> None:
    models, _, interrupted = kept_record
    for prompt, group in zip(TWO_PROMPTS, interrupted, strict=True):
        for completion in group:
            old, new = np.unique(completion.versions)
            assert new == old + 1
            expected = logprobs_over_kept_cache(models, prompt, completion, LONG)
            assert np.abs(expected - completion.logprobs).max() < ROUNDING
            anew = logprob_error(models[new], prompt, completion, LONG)
            assert anew[completion.versions == new].max() > max(1e-3, 2 * ROUNDING)
