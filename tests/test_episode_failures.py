"""Runs with episodes that fail, in this process."""

from pathlib import Path

import pytest
from local_runs import train
from tiny_games import game_config

from grpo_ray.config import Config
from grpo_ray.episodes.session import Session
from grpo_ray.errors import RunError
from grpo_ray.tasks.examples import Example
from grpo_ray.telemetry.run_files import RunDirectory, read_metrics

pytestmark = pytest.mark.usefixtures("model_cache")


async def failing(session: Session, example: Example) -> float:
    await session.chat([{"role": "user", "content": example.question}])
    raise OSError("the environment is gone")


async def failing_often(session: Session, example: Example) -> float:
    reply = await session.chat([{"role": "user", "content": example.question}])
    if len(reply.text) % 3 == 0:
        raise OSError("the environment is gone")
    return float(len(reply.text) % 2)


def make_config(episode: str) -> Config:
    few = ["task.num_validation_prompts=2", "algorithm.num_steps=2", "algorithm.samples_per_prompt=2"]
    return game_config(f"{__name__}:{episode}", *few)


def test_a_run_ends_if_every_episode_fails(tmp_path: Path) -> None:
    message = r"every episode in the validation at step 0 failed: (.|\n)*OSError: the environment is gone"
    with pytest.raises(RunError, match=message):
        train(make_config("failing"), tmp_path / "run")


def test_single_failures_are_counted_and_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    train(make_config("failing_often"), run.path)
    rows = read_metrics(run.metrics_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert sum(row["reward/errors"] for row in rows) == sum(
        8 * row["episodes/status/environment_error"] for row in rows
    )
