"""The reference engine: its draws, its logprobs, and weights replaced while requests run."""

import asyncio
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import TinyModel, changed, logprob_error, logprobs_over_kept_cache, make_settings, perturb, update
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from grpo_ray.cluster.hosts import ServingHost
from grpo_ray.config import Config
from grpo_ray.engines import engine_seed, sampling_batch
from grpo_ray.engines.torch_engine import TorchEngine
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.transformer_lm import TransformerLM
from grpo_ray.transfer.snapshot import pack_weights
from grpo_ray.types import Completion, SamplingSettings, StartingModel

ENDS = (0, 17)
MakeEngine = Callable[..., TorchEngine]
PROMPTS = [(40, 41, 42), (50,), (60, 61, 62, 63, 64, 65, 66)]


@pytest.fixture
def make_torch_engine(tiny_config: Config, tiny_model: TinyModel) -> MakeEngine:
    def make(
        tied: bool = True, index: int = 0, max_lag: int = 1, own: bool = False, recompute_kv: bool = True,
        **generator: object,
    ) -> TorchEngine:  # fmt: skip
        model = {"implementation": "grpo_ray" if own else "transformers"}
        sync = {"max_lag": max_lag, "recompute_kv": recompute_kv}
        config = changed(tiny_config, generator=generator, weight_sync=sync, model=model)
        engine = TorchEngine(config, str(tiny_model(tied, own=own)), 128, seed=index)
        assert isinstance(engine._model, TransformerLM) == own
        return engine

    return make


def generate(
    engine: TorchEngine, settings: SamplingSettings, prompts: Sequence[tuple[int, ...]] = PROMPTS
) -> list[tuple[Completion, ...]]:
    async def run() -> list[tuple[Completion, ...]]:
        await engine.start(0)
        return await asyncio.gather(*(engine.generate(prompt, settings) for prompt in prompts))

    return asyncio.run(run())


@pytest.mark.slow
def test_draws_follow_the_distribution(make_torch_engine: MakeEngine, tiny_model: TinyModel) -> None:
    """Pearson's chi-square of 2,000 first tokens; the seed is fixed, so the test is deterministic."""
    settings = make_settings(num_samples=500, temperature=0.7, min_tokens=1, max_tokens=1, end_token_ids=ENDS)
    groups = generate(make_torch_engine(), settings, [PROMPTS[0]] * 4)
    counts = np.bincount([int(c.token_ids[0]) for group in groups for c in group], minlength=300)
    assert counts.sum() == 2000

    model = load_policy(str(tiny_model()))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0, -1].double() / 0.7
    logits[list(ENDS)] = -torch.inf
    expected = 2000 * logits.softmax(0).numpy()
    rare = expected < 5  # by the rule of thumb, one cell for all tokens with expected counts below 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    chi_square, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom > 30
    assert chi_square < freedom + 3.1 * np.sqrt(2 * freedom)  # exceeded once in about a thousand times


def test_a_float32_head_over_bfloat16(tiny_config: Config, tiny_model: TinyModel) -> None:
    config = changed(tiny_config, model={"dtype": "bfloat16", "head_dtype": "float32"})
    engine = TorchEngine(config, str(tiny_model()), 128, seed=0)
    tokens = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        hidden = engine._model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, -1]
        logits = hidden.double() @ engine._model.get_output_embeddings().weight.double().T
    assert hidden.dtype == torch.bfloat16
    ((*group,),) = generate(engine, make_settings(num_samples=20, max_tokens=1), PROMPTS[2:])
    for completion in group:
        expected = logits.log_softmax(-1)[completion.token_ids[0]].item()
        assert completion.logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_request_seed_gives_the_same_tokens_whatever_the_neighbours(make_torch_engine: MakeEngine) -> None:
    settings = make_settings(num_samples=3, max_tokens=12, seed=7)
    engine = make_torch_engine()
    alone = generate(engine, settings, PROMPTS[:1])[0]
    together = generate(engine, settings, PROMPTS)[0]
    other = generate(engine, replace(settings, seed=8), PROMPTS[:1])[0]
    tokens = [[c.token_ids.tolist() for c in group] for group in (alone, together, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len({tuple(row) for row in tokens[0]}) == 3  # samples of a group are not copies


async def test_a_request_that_ends_at_the_models_last_position_has_a_longer_neighbour(
    tiny_config: Config, tiny_model: TinyModel, tmp_path: Path
) -> None:
    learned_positions = GPT2Config(vocab_size=300, n_positions=64, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(learned_positions).save_pretrained(tmp_path)
    load_tokenizer(str(tiny_model())).save_pretrained(tmp_path)
    engine = TorchEngine(tiny_config, str(tmp_path), 64, seed=0)
    await engine.start(0)
    settings = [make_settings(num_samples=1, max_tokens=number, end_token_ids=()) for number in (4, 9)]
    groups = await asyncio.gather(*map(engine.generate, [(40,) * 60, (50,)], settings))
    assert [len(completion.token_ids) for (completion,) in groups] == [4, 9]


Drawn = list[tuple[list[int], list[float]]]


@pytest.mark.slow
async def test_engine_that_joins_no_requests_draws_the_same_to_the_bit(make_torch_engine: MakeEngine) -> None:
    engine = make_torch_engine(max_lag=0, num_threads=2)
    settings = make_settings(num_samples=3, temperature=0.7, min_tokens=2, max_tokens=24, end_token_ids=ENDS)

    async def ask(numbers: Sequence[int]) -> dict[int, Drawn]:
        """Request these prompts, each with its own seed, all at once in this order."""
        drawn = await asyncio.gather(*(engine.generate(PROMPTS[n], replace(settings, seed=n)) for n in numbers))
        return {
            n: [(c.token_ids.tolist(), c.logprobs.tolist()) for c in group]
            for n, group in zip(numbers, drawn, strict=True)
        }

    alone = {n: (await ask([n]))[n] for n in range(len(PROMPTS))}
    for numbers in itertools.permutations(range(len(PROMPTS))):
        assert await ask(numbers) == alone
    assert await ask([1, 0]) == {n: alone[n] for n in (0, 1)}


@pytest.mark.parametrize(("max_lag", "widths"), [(0, [2, 2, 2]), (1, [6])])
def test_only_a_synchronous_run_samples_each_request_by_itself(
    make_torch_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, max_lag: int, widths: list[int],
) -> None:  # fmt: skip
    engine, seen = make_torch_engine(max_lag=max_lag), []
    original = engine._sample

    async def sample(sequences: list[sampling_batch.Sequence]) -> None:
        seen.append(len(sequences))
        await original(sequences)

    monkeypatch.setattr(engine, "_sample", sample)
    assert [len(group) for group in generate(engine, make_settings(num_samples=2, max_tokens=3))] == [2, 2, 2]
    assert seen == widths


@pytest.mark.slow
def test_engines_and_requests_have_their_own_seeds(make_torch_engine: MakeEngine) -> None:
    settings = make_settings(num_samples=1, max_tokens=16)

    def tokens(index: int) -> list[list[int]]:
        groups = generate(make_torch_engine(index=index), settings, PROMPTS[:1] * 2)
        return [c.token_ids.tolist() for (c,) in groups]

    assert tokens(0) == tokens(0)
    first, second = tokens(0), tokens(1)
    assert first[0] != first[1]  # two requests to one engine
    assert first[0] != second[0]  # the first requests to two engines
    assert first[1] != second[1]


def test_end_token_ends_a_response_from_min_tokens_on(make_torch_engine: MakeEngine) -> None:
    ends = tuple(range(150))
    settings = make_settings(num_samples=64, min_tokens=3, max_tokens=40, end_token_ids=ends, seed=0)
    (group,) = generate(make_torch_engine(), settings, PROMPTS[:1])
    for completion in group:
        assert completion.finish_reason == "stop"
        is_end = completion.token_ids < 150
        assert is_end.tolist() == [False] * (len(is_end) - 1) + [True]
        assert len(is_end) > 3  # the first three are held back
    assert min(len(c.token_ids) for c in group) == 4


@pytest.mark.slow
def test_stop_string_ends_a_response_and_is_kept(make_torch_engine: MakeEngine, tiny_model: TinyModel) -> None:
    tokenizer = load_tokenizer(str(tiny_model()))
    settings = make_settings(num_samples=200, max_tokens=40, stop=("an", "7"), seed=0)
    (group,) = generate(make_torch_engine(), settings, PROMPTS[:1])
    assert sum(c.finish_reason == "stop" for c in group) > 20
    for c in group:
        is_stopped = c.finish_reason == "stop"
        assert c.text.count("an") + c.text.count("7") == is_stopped
        assert c.text.endswith(("an", "7")) == is_stopped
        assert is_stopped or len(c.token_ids) == 40
        before = tokenizer.decode(c.token_ids[:-1])
        assert "an" not in before
        assert "7" not in before
        assert tokenizer.decode(c.token_ids, skip_special_tokens=True).startswith(c.text)


def test_requests_beyond_max_num_seqs_wait_and_are_served(make_torch_engine: MakeEngine) -> None:
    settings = make_settings(num_samples=3, max_tokens=6)
    groups = generate(make_torch_engine(max_num_seqs=4), settings, PROMPTS * 3)
    assert [len(group) for group in groups] == [3] * 9


async def test_error_reaches_its_request_and_the_engine_keeps_serving(make_torch_engine: MakeEngine) -> None:
    engine = make_torch_engine()
    cancelled = asyncio.create_task(engine.generate((299_999,), make_settings()))
    refused = asyncio.create_task(engine.generate((299_999,), make_settings()))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(IndexError):
        await asyncio.wait_for(refused, 120)
    assert len(await asyncio.wait_for(engine.generate(PROMPTS[0], make_settings()), 120)) == 1


async def sync(engine: TorchEngine, model: PreTrainedModel, version: int) -> None:
    await update(engine, pack_weights(model.named_parameters(), version, torch.float32))


async def length_reached(engine: TorchEngine, num_tokens: int) -> None:
    """Wait until the running sequences have `num_tokens` tokens."""
    async with asyncio.timeout(120):
        while engine._batch is None or len(engine._batch.sequences[0].token_ids) < num_tokens:
            await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "own", "recompute_kv"), [(True, True, True), (False, False, True), (True, False, False)]
)
async def test_weights_replaced_in_flight(
    make_torch_engine: MakeEngine, tiny_model: TinyModel, tied: bool, own: bool, recompute_kv: bool
) -> None:
    engine = make_torch_engine(tied, own=own, recompute_kv=recompute_kv)
    settings = make_settings(num_samples=2, temperature=0.7, min_tokens=30, max_tokens=30, end_token_ids=ENDS)
    models = [load_policy(str(tiny_model(tied, own=own))) for _ in range(3)]
    for version in (1, 2):
        perturb(models[version], seed=version, scale=0.1)
    requests = [asyncio.create_task(engine.generate(prompt, settings)) for prompt in PROMPTS]
    for version in (1, 2):
        await length_reached(engine, 10 * version)
        await sync(engine, models[version], version)
    for prompt, group in zip(PROMPTS, await asyncio.gather(*requests), strict=True):
        for completion in group:
            versions = completion.versions
            assert set(versions.tolist()) == {0, 1, 2}
            assert (np.diff(versions) >= 0).all()
            errors = [logprob_error(model, prompt, completion, settings) for model in models]
            if not recompute_kv:  # each version reads the keys and values of those before it
                expected = logprobs_over_kept_cache(models, prompt, completion, settings)
                assert np.abs(expected - completion.logprobs).max() < 1e-4
                assert errors[2][versions == 2].max() > 1e-3
                continue
            for version in (0, 1, 2):
                assert errors[version][versions == version].max() < 1e-4
                # a wrong label would be noticed
                assert errors[version][versions != version].max() > 1e-2


async def test_nothing_is_sampled_while_paused_or_of_another_version(make_torch_engine: MakeEngine) -> None:
    engine = make_torch_engine()
    await engine.start(7)
    request = asyncio.create_task(engine.generate(PROMPTS[0], make_settings(max_tokens=40)))
    await length_reached(engine, 3)
    await engine.pause()
    assert engine._batch is not None
    (sequence,) = engine._batch.sequences
    length = len(sequence.token_ids)
    assert 3 <= length < 40
    await asyncio.sleep(0.05)
    assert len(sequence.token_ids) == length
    await engine.resume()
    (completion,) = await request
    assert completion.versions.tolist() == [7] * 40


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tied", "left_out", "problem"),
    [
        (True, "model.embed_tokens.weight", "missing {}, unexpected [], of another shape []"),
        (True, UP, "missing {}, unexpected [], of another shape []"),
        (False, "lm_head.weight", "missing {}, unexpected [], of another shape []"),
        (True, "stranger", "missing [], unexpected {}, of another shape []"),
        (True, f"{UP}.T", f"missing [], unexpected [], of another shape {[UP]}"),
    ],
)
def test_snapshot_that_does_not_fit_is_refused_whole(
    make_torch_engine: MakeEngine, tiny_model: TinyModel, tied: bool, left_out: str, problem: str
) -> None:
    """A tensor is missing, or is one too many (`stranger`), or has another shape (`.T`)."""
    engine, model = make_torch_engine(tied), load_policy(str(tiny_model(tied)))
    before = {name: weight.detach().clone() for name, weight in engine._model.named_parameters()}
    perturb(model, seed=1, scale=0.1)
    tensors = {name: weight for name, weight in model.named_parameters() if name != left_out}
    tensors |= {"stranger": torch.zeros(1)} if left_out == "stranger" else {}
    tensors |= {UP: tensors[UP].T} if left_out == f"{UP}.T" else {}
    with pytest.raises(ValueError, match=re.escape(f"does not fit the model: {problem.format([left_out])}")):
        asyncio.run(engine.stage(pack_weights(tensors.items(), 1, torch.float32)))
    assert all(torch.equal(weight, before[name]) for name, weight in engine._model.named_parameters())


def test_a_replaced_engine_draws_other_noise() -> None:
    """With its predecessor's seed it would repeat that one's stream; so would the engines of a resumed run."""
    first = engine_seed(7, "generator-0", version=0, num_starts=0)
    assert first == engine_seed(7, "generator-0", version=0, num_starts=0)
    others = [
        engine_seed(8, "generator-0", 0, 0),
        engine_seed(7, "generator-1", 0, 0),
        engine_seed(7, "generator-0", 20, 0),
        engine_seed(7, "generator-0", 0, 1),
    ]
    assert len({first, *others}) == 5
    assert all(0 <= seed < 2**32 for seed in [first, *others])


def test_a_host_counts_the_engines_of_each_name(tiny_config: Config, tmp_path: Path) -> None:
    class Recorded(ServingHost):
        def _start(self, kind: Any, name: str, given: Any, *_: Any, **__: Any) -> Any:
            return given

        def _kill(self, name: str) -> None: ...

        def stop(self) -> None: ...

    config = changed(tiny_config, generator={"num_generators": 2})
    host = Recorded(config, StartingModel("m", (1,), 64), tmp_path)
    started = [host.generators["generator-0"], host.generators["generator-1"], host.restart("generator-0")]
    _, _, _, seeds = zip(*(engine.args for _, engine, *_ in started), strict=True)
    seed = config.run.seed
    assert [*seeds] == [
        engine_seed(seed, f"generator-{name}", 0, num) for name, num in ((0, 0), (1, 0), (0, 1))
    ]
