"""Whole runs with episodes in this process: interrupted and resumed, too old, replayed, evaluated."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import check_names
from local_runs import kill_after, train, train_twice
from run_process import untimed
from safetensors.torch import load_file
from test_distillation_runs import with_teacher

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.episodes.session import Session
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tasks.examples import Example
from grpo_ray.tools.audit.audit import audit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_cache")]


def chance(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return hashlib.sha256(text.encode()).digest()[0] / 256


async def wandering(session: Session, example: Example) -> float:
    """Chat for one to three turns, which the replies decide."""
    messages: list[Any] = [{"role": "user", "content": f"{example.question} {(example.seed or 0) % 10}"}]
    for _ in range(3):
        reply = await session.chat(messages)
        if chance(reply.text) < 0.3:
            break
        messages += [reply.message, {"role": "user", "content": "go on"}]
    return chance(reply.text + "!")


async def slow_at_times(session: Session, example: Example) -> float:
    """Let every other game wait between its turns until the weights have changed a few times."""
    messages: list[Any] = [{"role": "user", "content": example.question}]
    for _ in range(3):
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": "go on"}]
        if int(example.ground_truth) % 2:
            await asyncio.sleep(0.3)
    return chance(reply.text)


def make_config(episode: str, *overrides: str) -> Config:
    tiny = "model.tiny={hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, warmup: null}"
    return load_config("configs/guess-number.yaml", [
        tiny, f"task.episode={__name__}:{episode}", "generator.engine=torch", "algorithm.prompts_per_step=4",
        "task.num_validation_prompts=3", "sampling.max_tokens=4", "algorithm.num_steps=6",
        "algorithm.samples_per_prompt=3", "learner.learning_rate=1e-2", "evaluation.every_num_steps=2",
        "checkpoint.every_num_steps=2", "recovery.restart_backoff_s=0.01", *overrides,
    ])  # fmt: skip


def kept(row: Any) -> Any:
    """Return the metrics of a step or an evaluation that do not depend on the machine's speed."""
    if not isinstance(row, dict):
        return row
    return {name: kept(value) for name, value in untimed(row).items() if "seconds" not in name}


def test_a_synchronous_run_that_is_killed_and_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    """Two teachers judge its episodes."""
    teachers = with_teacher("weight_sync.max_lag=0", number=2, student=make_config("wandering"))
    config = make_config("wandering", *teachers, "algorithm.num_steps=4")
    whole, run = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "run")
    train(config, whole.path)
    train_twice(config, run.path, kill_after(3, 0.01))
    rows = [[kept(row) for row in read_metrics(each.metrics_path)] for each in (whole, run)]
    assert len(rows[0]) == 4
    assert any(row["optim/grad_norm"] > 0 for row in rows[0])
    assert rows[0] == rows[1]
    evaluations = [read_metrics(each.evaluations_summary_path) for each in (whole, run)]
    assert [kept(row) for row in evaluations[0]] == [kept(row) for row in evaluations[1]]
    for file in ("model.safetensors", "training/optimizer.safetensors"):
        tensors, resumed = (load_file(each.checkpoint_path(4) / file) for each in (whole, run))
        torch.testing.assert_close(tensors, resumed, rtol=0, atol=0)
    assert audit(run).problems == []
    samples = read_rollouts(run.rollouts_path(4))
    assert any(row["num_context_tokens"] for row in samples)
    assert all(len(row["teacher_logprobs"]) == len(row["token_ids"]) for row in samples)


def test_no_token_beyond_the_lag_is_trained(run: RunDirectory) -> None:
    """With oversampling the slow games come after several weight syncs."""
    config = make_config(
        "slow_at_times", "episodes.over_age=mask", "algorithm.oversample_frac=0.5",
        "algorithm.num_steps=8", "evaluation.every_num_steps=8", "learner.slowdown_s=0.15",
    )  # fmt: skip
    train(config, run.path)
    rows = read_metrics(run.metrics_path)
    assert len(rows) == 8
    assert all(row["lag/max"] <= 1 for row in rows)
    assert sum(row["lag/masked_tokens"] for row in rows) > 0
    assert check_names(set().union(*rows) - {"step", "time"}) == []
    assert min(row["rollout/response_tokens/mean"] for row in rows) >= 1
    assert audit(run).problems == []


SMALL = (
    "model.tiny={hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_position_embeddings: 256, "
    "warmup: {num_steps: 2, batch_size: 4}}",
    "algorithm={num_steps: 3, prompts_per_step: 4, samples_per_prompt: 4, entropy_bonus: 0.01}",
    "generator.engine=torch", "episodes.max_seconds=60", "evaluation.every_num_steps=3",
    "task.num_validation_prompts=4",
)  # fmt: skip


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
    environments_page: Callable[[str], Any], run: RunDirectory, monkeypatch: pytest.MonkeyPatch,
    name: str, package: str, overrides: tuple[str, ...],
) -> None:  # fmt: skip
    pytest.importorskip(package)
    monkeypatch.setattr("grpo_ray.tasks.kinds.TOKENIZER_PAIRS", 100)
    environments_page(name)
    functions = [f"task.{key}={name}:{key}" for key in ("episode", "examples", "warmup")]
    train(load_config("frozen_lake.yaml", [*SMALL, *functions, *overrides]), run.path)
    rows = read_metrics(run.metrics_path)
    assert len(rows) == 3
    assert all(row["throughput/trained_tokens"] > 0 for row in rows)
    assert all(row["optim/grad_norm"] > 0 for row in rows)  # the entropy bonus needs no episode that succeeds
    assert all(row["reward/errors"] == 0 for row in rows)
    assert audit(run, run_reward_code=True).problems == []
