"""The actors' clocks in a step's metrics: every second is counted once, and no metric is wrong."""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from builders import Time, check_names

from grpo_ray.errors import ActorDied
from grpo_ray.watch.activity import Activity, Window
from grpo_ray.watch.stage_clock import StageClock, StageTimes


class Actor:
    """An actor that answers with the seconds since its last answer, once `answers` is set."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.clock = StageClock(("work",), "wait", now)
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_asked = 0

    async def take_stats(self) -> StageTimes:
        self.num_asked += 1
        await self.answers.wait()
        return self.clock.take(1000)


async def test_all_have_the_same_window_and_a_dead_or_replaced_actor_none() -> None:
    time = Time()
    activity = Activity(StageClock((), "idle", time))
    clients: dict[str, Any] = {"learner": Actor(time), "scorer": Actor(time)}
    dead, windows = AsyncMock(), []
    dead.take_stats.side_effect = ActorDied("learner", "the test ended it")
    for changed in ({}, {"learner": dead}, {"learner": Actor(time)}, {}):
        clients |= changed
        time.seconds += 7
        windows.append(await activity.read(clients))
    assert [(sorted(window.stats), window.is_complete) for window in windows] == [
        (["driver"], False),  # the first actors' windows began at arbitrary times
        (["driver", "scorer"], False),
        (["driver", "scorer"], False),  # the new actor's window began in the middle of this one
        (["driver", "learner", "scorer"], True),
    ]
    assert windows[-1].seconds == 7
    assert all(times.wall_s == 7 for times in windows[-1].stats.values())


async def test_a_silent_actor_is_waited_for_once_and_its_late_answer_is_not_used() -> None:
    time, slow_s = Time(), 0.05
    activity = Activity(StageClock((), "idle", time), answer_s=slow_s)
    silent, other = Actor(time), Actor(time)
    clients = {"learner": silent, "scorer": other}
    await activity.read(clients)
    silent.answers.clear()
    loop = asyncio.get_running_loop()
    waited = []
    for _ in range(3):
        time.seconds += 1
        started = loop.time()
        assert (await activity.read(clients)).stats.keys() == {"driver", "scorer"}
        waited.append(loop.time() - started)
    assert waited[0] >= slow_s > max(waited[1:])
    assert silent.num_asked == 2  # not asked again while it owes an answer
    silent.answers.set()
    await asyncio.sleep(0)
    windows = []
    for _ in range(2):
        time.seconds += 1
        windows.append(await activity.read(clients))
    assert [window.is_complete for window in windows] == [False, True]
    assert windows[1].stats["learner"].wall_s == 1


def window(**seconds: dict[str, float]) -> Window:
    stats = {
        name.replace("_", "-"): StageTimes(sum(stages.values()), stages, resident_bytes=7)
        for name, stages in seconds.items()
    }
    return Window(4.0, stats, is_complete=True)


LEARNER = {"train": 1.0, "optimizer": 0.5, "logprobs": 0.5, "snapshot": 1.0, "wait_for_batch": 1.0}


def test_metrics_by_hand() -> None:
    metrics = window(
        generator_0={"generate": 3.0, "wait_for_prompts": 1.0},
        generator_1={"generate": 1.0, "wait_for_prompts": 3.0},
        learner=LEARNER,
        scorer={"score": 0.25, "wait_for_groups": 3.75},
    ).metrics(num_generators=4)  # two of them are being replaced
    assert metrics["time/generator-0/generate_s"] == metrics["timing/generate_s"] == 3
    assert metrics["utilization/generators"] == (3 + 1) / 4 / 4
    assert metrics["utilization/learner"] == 0.5
    assert metrics["timing/score_s"] == metrics["time/scorer/score_s"] == 0.25
    assert metrics["memory/learner_bytes"] == 7
    assert check_names(metrics) == []
    for seconds, share in ((5.0, 1.0), (1.0, 0.25)):  # of one that answers late, and of a replacement
        assert window(generator_0={"generate": seconds}).metrics(1)["utilization/generators"] == share


def test_the_learners_utilization_is_the_mean_of_its_ranks() -> None:
    stages = {"optimizer": 0.0, "logprobs": 0.0, "wait_for_batch": 1.0}
    ranks = {f"learner_{n}": {"train": seconds, **stages} for n, seconds in ((0, 3.0), (1, 1.0), (10, 0.0))}
    metrics = window(**ranks).metrics(num_generators=1)
    assert metrics["utilization/learner"] == pytest.approx((0.75 + 0.5 + 0.0) / 3)
    assert metrics["time/learner-10/wait_for_batch_s"] == 1
    assert metrics["memory/learner-1_bytes"] == 7
    assert check_names(metrics) == []
    other = window(learners={"train": 1.0, "wait_for_batch": 1.0}).metrics(num_generators=1)
    assert "utilization/learner" not in other  # no rank has this name


def test_unknown_metrics_are_left_out() -> None:
    """A silent Generator may have been idle or busy; a dead one was not busy."""
    known = window(generator_0={"generate": 3.0, "wait_for_prompts": 1.0})
    unknown = Window(4.0, known.stats, is_complete=False).metrics(num_generators=2)
    assert unknown.keys() == {
        "time/generator-0/generate_s", "time/generator-0/wait_for_prompts_s", "memory/generator-0_bytes",
    }  # fmt: skip


def test_many_generators_share_their_mean_and_the_slowest() -> None:
    """With 20 Generators, of which number 7 samples for 3 s and the others for 1 s of 4 s."""
    stages = {f"generator_{n}": {"generate": 1.0, "wait_for_prompts": 3.0} for n in range(20)}
    stages["generator_7"] = {"generate": 3.0, "wait_for_prompts": 1.0}
    whole = window(**stages, learner=LEARNER)
    metrics = whole.metrics(num_generators=20)
    assert metrics["time/generators/generate_s"] == pytest.approx((3 + 19) / 20)
    assert metrics["time/generators/wait_for_prompts_s"] == pytest.approx((1 + 19 * 3) / 20)
    assert metrics["time/slowest-generator/generate_s"] == metrics["timing/generate_s"] == 3
    assert metrics["generators/slowest"] == 7
    assert metrics["utilization/generators"] == pytest.approx((3 + 19) / 20 / 4)
    assert metrics["memory/generators_bytes"] == metrics["memory/learner_bytes"] == 7
    assert check_names(metrics) == []
    more = {f"generator_{n}": {"generate": 1.0, "wait_for_prompts": 3.0} for n in range(200)}
    assert len(window(**more, learner=LEARNER).metrics(num_generators=200)) == len(metrics)
    assert list(whole.drawn) == [*(f"generator-{n}" for n in range(16)), "learner"]
