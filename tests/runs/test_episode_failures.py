"""Runs with episodes that fail, in this process."""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_episodes
from local_runs import make_config as plain_config
from local_runs import train

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.generator import Generator
from grpo_ray.episodes.session import Session
from grpo_ray.errors import RunError
from grpo_ray.records.rollout_log import read_groups
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tasks.examples import Example
from grpo_ray.tools.audit.audit import audit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_cache")]


async def failing(session: Session, example: Example) -> float:
    await session.chat([{"role": "user", "content": example.question}])
    raise OSError("the environment is gone")


def test_a_run_ends_if_every_episode_fails(tmp_path: Path) -> None:
    message = r"every episode in the validation at step 0 failed: (.|\n)*OSError: the environment is gone"
    with pytest.raises(RunError, match=message):
        train(episodes_config("failing"), tmp_path / "run")


# ---- one prompt that ends its process ----

CULPRIT, BAD_TURN = "5", (7, 8, 9, 7, 8, 9)
END: list[Callable[[str, Any], None]] = []  # of the running test: ends a worker or a Generator


async def ends_its_worker(session: Session, example: Example) -> Any:
    if example.ground_truth == CULPRIT:
        await session.chat([{"role": "user", "content": example.question}])
        END[-1]("worker", session._template)
        await asyncio.sleep(60)
    return await small_episodes.talk(session, example)


async def ends_a_generator(session: Session, example: Example) -> Any:
    if example.ground_truth == CULPRIT:
        await session.sample(BAD_TURN)
    return await small_episodes.talk(session, example)


async def enders(actors: LocalActors, _: Any) -> None:
    """Let episodes, which run in threads of their own, end actors of this run."""
    loop = asyncio.get_running_loop()

    def end(kind: str, who: Any) -> None:
        if kind == "worker":
            (worker,) = (each for each in actors.environments.values() if each.actor._template is who)
            loop.call_soon_threadsafe(worker.die)
        else:  # a little later, while it samples
            (client,) = (each for each in actors.generators.values() if each.actor is who)
            loop.call_later(0.02, client.die)

    END.append(end)
    await asyncio.sleep(1e6)


def episodes_config(episode: str, *overrides: str) -> Config:
    own = [f"task.episode={__name__}:{episode}", "algorithm.num_steps=5", "evaluation.every_num_steps=9"]
    return load_config("tests/small_episodes.yaml", [*own, *overrides])


def test_an_example_that_ends_its_worker_is_set_aside_and_costs_no_other_group(tmp_path: Path) -> None:
    several = ["weight_sync.max_lag=1", "episodes.num_workers=3", "generator.num_generators=2"]
    check_run(episodes_config("ends_its_worker", *several), tmp_path, "environment")


def test_a_prompt_that_ends_its_generator_is_set_aside_and_costs_no_other_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain_config("weight_sync.max_lag=1", "evaluation.every_num_steps=9")
    generate = Generator.generate
    prompts: list[str] = []

    @functools.wraps(generate)
    async def generate_or_end(self: Any, item: Any, settings: Any) -> Any:
        if item.group_id == 6:
            prompts.append(item.prompt)
            END[-1]("generator", self)
            await asyncio.sleep(60)
        return await generate(self, item, settings)

    monkeypatch.setattr(Generator, "generate", generate_or_end)
    check_run(config, tmp_path, "generator")
    assert len(prompts) == 5


def test_a_turn_that_ends_its_generator_is_set_aside_and_costs_no_other_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_turns = Generator.begin_turns

    async def begin_or_end(self: Any, worker: Any, turns: Any, cancelled: Any) -> None:
        bad = {number for number, (token_ids, _) in turns.items() if token_ids == BAD_TURN}
        if bad:
            END[-1]("generator", self)
        others = {number: turn for number, turn in turns.items() if number not in bad}
        await begin_turns(self, worker, others, cancelled)

    monkeypatch.setattr(Generator, "begin_turns", begin_or_end)
    check_run(episodes_config("ends_a_generator", "generator.num_generators=2"), tmp_path, "generator", 6)


def check_run(config: Config, folder: Path, actor: str, num_deaths: int = 5) -> None:
    run = RunDirectory(folder / "run")
    train(config, run.path, enders)
    events = list(read_metrics(run.events_path))
    set_aside = [event["group_id"] for event in events if event["kind"] == "set_aside"]
    num_failed = sum(event["kind"] == f"{actor}_failed" for event in events)
    assert len(set_aside) in (1, 2)
    at_least = num_deaths * len(set_aside)
    assert at_least <= num_failed < at_least + num_deaths  # one may come at the end
    rows = read_metrics(run.metrics_path)
    assert [row["step"] for row in rows] == list(range(1, config.algorithm.num_steps + 1))
    groups = [group for path in run.rollouts.glob("*.parquet") for group in read_groups(path)]
    assert not {group.rollout.item.group_id for group in groups} & set(set_aside)
    assert audit(run).problems == []
