"""Training for a few steps with the environments of docs/environments.md; each needs only its own package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_runs import train

from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

pytestmark = pytest.mark.usefixtures("model_cache")
SMALL = (
    "model.tiny={hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_position_embeddings: 256, "
    "warmup: {num_steps: 2, batch_size: 4}}",
    "algorithm={num_steps: 3, prompts_per_step: 4, samples_per_prompt: 4, entropy_bonus: 0.01}",
    "generator.engine=torch",
    "episodes.max_seconds=60",
    "evaluation.every_num_steps=3",
    "task.num_validation_prompts=4",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "overrides"),
    [
        ("frozen_lake", "gymnasium", ()),
        ("colors", "openai", ("sampling.max_tokens=40", "episodes.tool_parser=transformers")),
        ("play_numbers", "verifiers.v1", ("episodes.max_turns=3",)),
    ],
)
@pytest.mark.kept("frozen_lake-gymnasium-overrides0")
def test_the_pages_environments_are_trained(
    environments_page: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, package: str, overrides: tuple[str, ...],
) -> None:  # fmt: skip
    pytest.importorskip(package)
    monkeypatch.setattr("grpo_ray.tasks.kinds.TOKENIZER_PAIRS", 100)
    environments_page(name)
    functions = [f"task.{key}={name}:{key}" for key in ("episode", "examples", "warmup")]
    run = RunDirectory(tmp_path / "run")
    train(load_config("frozen_lake.yaml", [*SMALL, *functions, *overrides]), run.path)
    rows = read_metrics(run.metrics_path)
    assert len(rows) == 3
    assert all(row["throughput/trained_tokens"] > 0 for row in rows)
    assert all(row["optim/grad_norm"] > 0 for row in rows)  # the entropy bonus needs no episode that succeeds
    assert all(row["reward/errors"] == 0 for row in rows)
    assert audit(run, run_reward_code=True).problems == []
