"""An EnvironmentWorker on its own: groups in threads, ends by the clock, cancellations, threads left behind."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import psutil
import pytest
from turn_clients import Answer, FakeGenerator, completion, never, until

from grpo_ray.config.loading import load_config
from grpo_ray.episodes import runner, threads, turn_router
from grpo_ray.episodes.environment_worker import EnvironmentWorker
from grpo_ray.episodes.session import Session
from grpo_ray.errors import DataLost
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.plain_chat import give_plain_chat
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer
from grpo_ray.tasks.examples import Example
from grpo_ray.types import Completion, Episode, PromptItem, RolloutGroup, SamplingSettings, StartingModel

END = threading.Event()  # ends the calls that hang, at the end of each test
SEEDS: list[int | None] = []


async def ask(session: Session, question: str = "hello") -> str:
    return (await session.chat([{"role": "user", "content": question}])).text


async def plain(session: Session, example: Example) -> float:
    return float(len(await ask(session, example.question)))


async def blocking(session: Session, example: Example) -> float:
    """Hang in a call, as a badly written environment would, if the example says so."""
    await ask(session)
    if example.ground_truth == "hang":
        END.wait(30)
    return 1.0


async def seeded(session: Session, example: Example) -> float:
    SEEDS.append(example.seed)
    assert example.seed is not None
    await ask(session)
    return random.Random(example.seed).random()


async def leaving_a_task(session: Session, example: Example) -> float:
    async def go_on() -> None:
        while True:
            await ask(session)

    session.left = asyncio.ensure_future(go_on())  # type: ignore[attr-defined]
    await ask(session)
    return 1.0


async def long(session: Session, example: Example) -> float:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    for _ in range(6):
        messages += [(await session.chat(messages)).message, {"role": "user", "content": "more"}]
    return 1.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    monkeypatch.setattr(threads, "WIND_DOWN_S", 0.1)
    END.clear()
    SEEDS.clear()
    yield
    END.set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StartingModel:
    folder = str(tmp_path_factory.mktemp("model"))
    tokenizer = tiny_tokenizer(load_config("configs/quickstart.yaml", []))
    give_plain_chat(tokenizer)
    tokenizer.save_pretrained(folder)
    return StartingModel(folder, (load_tokenizer(folder).eos_token_id,), 512)


@asynccontextmanager
async def working(
    model: StartingModel, episode: str, *overrides: str, answer: Answer | None = None
) -> AsyncIterator[tuple[EnvironmentWorker, FakeGenerator]]:
    """Start a worker of an episode function, served by one Generator."""
    task = f"{{kind: episodes, episode: '{__name__}:{episode}', examples: '{__name__}:examples'}}"
    config = load_config("configs/quickstart.yaml", [f"task={task}", *overrides])
    worker = EnvironmentWorker("environment-0", config, model)
    generator = FakeGenerator("generator-0", answer or spoken())
    await worker.ready()
    await worker.serve({0: generator})
    async with asyncio.timeout(120):
        yield worker, generator
    await worker._server.aclose()


def play(
    worker: EnvironmentWorker, group_id: int = 0, ground_truth: str = "", num_samples: int = 4, seed: int = 5
) -> Coroutine[Any, Any, tuple[RolloutGroup, Any]]:
    item = PromptItem(group_id, "hello", (1, 2), ground_truth)
    return worker.play(item, SamplingSettings(num_samples, 1.0, 1.0, 0, 16), seed)


def spoken(version: int = 0) -> Answer:
    """Return an answer of some tokens, which differ from turn to turn."""
    count = iter(range(10**9))

    async def answer(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        await asyncio.sleep(0.001)
        return completion(20 + next(count) % 50, 30, 0, text="a reply", version=version)

    return answer


def episodes_of(*groups: RolloutGroup) -> list[Episode]:
    return [episode for group in groups for episode in group.completions if isinstance(episode, Episode)]


def statuses(group: RolloutGroup) -> list[str]:
    return [episode.status for episode in episodes_of(group)]


@pytest.mark.slow
async def test_an_episode_that_blocks_its_thread_stops_no_other_group(model: StartingModel) -> None:
    async with working(model, "blocking", "episodes.max_seconds=1") as (worker, _):
        hanging = asyncio.ensure_future(play(worker, 0, "hang"))
        await asyncio.sleep(0.3)
        for number in range(1, 6):
            group, report = await play(worker, number)
            assert statuses(group) == ["finished"] * 4  # a thread that waited would not finish within its limit
        group, report = await hanging
        assert statuses(group) == ["truncated_time"] * 4
        assert [episode.reward for episode in episodes_of(group)] == [None] * 4
        assert all("not finished after 1.0 s" in episode.error for episode in episodes_of(group))
        assert report.num_stuck == 0  # it has only just been stopped
        await asyncio.sleep(0.2)
        assert (await play(worker, 7))[1].num_stuck == 1
        END.set()
        await until(lambda: not any(each.is_stuck for each in worker._stopped))
        assert (await play(worker, 8))[1].num_stuck == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "answer"), [("plain", never), ("blocking", None)])
async def test_cancelling_a_play_cancels_its_episodes(model: StartingModel, name: str, answer: Any) -> None:
    async with working(model, name, answer=answer) as (worker, generator):
        num_threads = threading.active_count()
        playing = asyncio.ensure_future(play(worker, ground_truth="hang"))
        await until(lambda: generator.num_started >= 4)
        await asyncio.sleep(0.1)
        playing.cancel()
        await asyncio.wait({playing}, timeout=5)
        assert playing.cancelled()
        await until(lambda: generator.num_running == 0)
        END.set()
        await until(lambda: threading.active_count() <= num_threads)
        assert not worker._server._sessions


async def test_a_group_is_its_episodes_and_its_environments_have_its_seed(model: StartingModel) -> None:
    async with working(model, "seeded") as (worker, _):
        first, report = await play(worker, 3, seed=7)
        again, _ = await play(worker, 3, seed=7)
    assert statuses(first) == statuses(again) == ["finished"] * 4
    assert (first.item.group_id, first.generator) == (3, "environment-0")
    assert (report.num_tokens, report.num_stuck) == (12, 0)
    assert SEEDS == [7] * 8
    assert {episode.reward for episode in episodes_of(first, again)} == {random.Random(7).random()}


async def test_a_task_that_an_episode_leaves_behind_samples_no_more(model: StartingModel) -> None:
    async with working(model, "leaving_a_task") as (worker, generator):
        group, _ = await play(worker)
        assert statuses(group) == ["finished"] * 4
        await asyncio.sleep(0.05)
        num_started = generator.num_started
        await asyncio.sleep(0.1)
        assert generator.num_started == num_started


async def test_each_token_has_the_version_that_sampled_it(model: StartingModel) -> None:
    """Weights change between turns and within one: the third turn's tokens are of two versions."""
    turns = iter([(0, 0, 0), (1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 2), (3, 3, 3)])

    async def answer(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        return replace(completion(20, 30, 0, text="a reply"), versions=np.array(next(turns), np.int32))

    async with working(model, "long", answer=answer) as (worker, _):
        group, _ = await play(worker, num_samples=1)
    (episode,) = episodes_of(group)
    assert episode.versions[episode.mask].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, *[2] * 6, 3, 3, 3]
    assert group.oldest_version == 0
    masked = group.masked_before(2)
    assert masked.oldest_version == 2
    (cut,) = episodes_of(masked)
    assert np.count_nonzero(cut.mask) == 2 + 6 + 3
    assert cut.num_tokens == episode.num_tokens == 18  # masked ones were sampled, too
    assert cut.turns.tolist() == episode.turns.tolist()


@pytest.mark.slow
async def test_time_without_generators_is_not_the_episodes_own(
    model: StartingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only Generator dies, and its replacement takes longer than an episode may last."""
    monkeypatch.setattr(turn_router, "LOOK_S", 0.02)
    async with working(model, "long", "episodes.max_seconds=1") as (worker, generator):
        playing = asyncio.ensure_future(play(worker))
        await until(lambda: generator.num_started > 8)
        generator.die()
        await worker.failures(0)
        await asyncio.sleep(1.2)
        assert not playing.done()
        await worker.serve({1: FakeGenerator("generator-0", spoken(version=1))})
        assert statuses((await playing)[0]) == ["finished"] * 4


async def test_only_a_generator_that_answers_costs_an_episode_its_time(
    model: StartingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of another one is lost, so that it is played again, and the Generator has failed."""
    async with working(model, "plain", "episodes.max_seconds=0.1", answer=never) as (worker, generator):
        assert statuses((await play(worker))[0]) == ["truncated_time"] * 4
        assert not worker._router._failures
        monkeypatch.setattr(turn_router, "ANSWER_S", 0.05)
        generator.ping_s = 60.0
        with pytest.raises(DataLost, match="a Generator failed with a turn, in which the time of an episode"):
            await play(worker)
        (failure,) = await worker.failures(0)
        assert failure[1].startswith("does not answer (2 x 0.05 s), and the time of an episode ended")


async def test_a_generator_that_refuses_a_turn_fails_the_group(model: StartingModel) -> None:
    refusing = AsyncMock(side_effect=ValueError("the prompt is too long"))
    async with working(model, "plain", answer=refusing) as (worker, _):
        with pytest.raises(RuntimeError, match=r"sample 0 of group 9: ValueError: the prompt is too long"):
            await play(worker, 9)
        assert not worker._router._failures  # the turn's own error, and no death


@pytest.mark.slow
async def test_max_concurrent_bounds_the_turns_the_threads_and_the_open_files(model: StartingModel) -> None:
    """Groups that wait have no thread and no open file."""
    process, running, threads, files = psutil.Process(), [0], [0], [0]

    async def answer(token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        running.append(generator.num_running)
        threads.append(threading.active_count())
        files.append(process.num_fds())
        await asyncio.sleep(0.01)
        return completion(20, 0, text="a reply")

    async with working(model, "plain", "episodes.max_concurrent=8", answer=answer) as (worker, generator):
        await play(worker)
        num_threads, num_files = threading.active_count(), process.num_fds()
        groups = await asyncio.gather(*(play(worker, number) for number in range(200)))
    assert all(statuses(group) == ["finished"] * 4 for group, _ in groups)
    assert max(running) == 8
    assert max(threads) <= num_threads + 12  # two or three groups, and those that are just ending
    assert max(files) <= num_files + 3 * 12
