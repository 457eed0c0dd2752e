"""Greedy and nucleus sampling of the torch engine match a slow loop over the distribution."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from builders import TinyModel, make_settings, plain_rows
from torch import Tensor

from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.learning.loading import load_policy
from grpo_ray.types import Completion, SamplingSettings

PROMPT = (40, 41, 42)


async def sample(config: Config, model_path: Path, settings: SamplingSettings) -> tuple[Completion, ...]:
    engine = make_engine(config, str(model_path), 64, 0)
    await engine.start(0)
    try:
        return await engine.generate(PROMPT, settings)
    finally:
        await engine.shutdown()


def rows_of(model_path: Path, completion: Completion, min_tokens: int = 0) -> list[Tensor]:
    model = load_policy(str(model_path))
    with torch.inference_mode():
        return plain_rows(model, PROMPT, completion.token_ids.tolist(), 1.0, min_tokens, (0, 17))


async def test_temperature_0_samples_the_most_likely_token(tiny_config: Config, tiny_model: TinyModel) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 12, "min_tokens": 3, "end_token_ids": (0, 17)}
    (completion,) = await sample(tiny_config, tiny_model(), make_settings(**greedy, seed=1))
    rows = rows_of(tiny_model(), completion, min_tokens=3)
    assert completion.token_ids.tolist() == [int(row.argmax()) for row in rows]
    assert completion.logprobs.tolist() == [0.0] * len(rows)
    (again,) = await sample(tiny_config, tiny_model(), make_settings(**greedy, seed=2))
    assert again.token_ids.tolist() == completion.token_ids.tolist()


def nucleus(row: Tensor, top_p: float) -> list[int]:
    """Return the smallest set of most likely tokens with `top_p` of the mass, by a loop."""
    kept, mass = [], 0.0
    for token in row.argsort(descending=True).tolist():
        kept.append(token)
        mass += float(row[token].exp())
        if mass >= top_p:
            break
    return kept


@pytest.mark.slow
async def test_top_p_samples_only_from_the_nucleus(tiny_config: Config, tiny_model: TinyModel) -> None:
    settings = make_settings(num_samples=2000, top_p=0.2, max_tokens=1, seed=3)
    completions = await sample(tiny_config, tiny_model(), settings)
    (row,) = rows_of(tiny_model(), completions[0])
    kept = nucleus(row, 0.2)
    assert 1 < len(kept) < 100
    drawn = Counter(int(completion.token_ids[0]) for completion in completions)
    assert set(drawn) <= set(kept)
    mass = float(row[kept].exp().sum())
    likeliest = kept[0]
    assert drawn[likeliest] / 2000 == pytest.approx(float(row[likeliest].exp()) / mass, abs=0.04)
    first = completions[0]
    expected = float(row[int(first.token_ids[0])]) - float(torch.tensor(mass).log())
    assert first.logprobs[0] == pytest.approx(expected, abs=1e-4)
