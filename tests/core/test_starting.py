"""The start of a run's actors: Generators in waves, with a report of how many are up."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from local_runs import FakeServing, make_config
from test_generator_pool import FakeActors, FakeClient, Pool

from grpo_ray.core import starting
from grpo_ray.core.starting import until_all_ready
from grpo_ray.errors import Stalled
from grpo_ray.watch.clock import VirtualClock, simulated_by


class Starts(FakeServing):
    """Actors that take their time to start, and the numbers of those that started at the same time."""

    def __init__(self, folder: Path, num_generators: int, *overrides: str) -> None:
        config = make_config(f"generator.num_generators={num_generators}", *overrides)
        actors = FakeActors(lambda what, _: self.start(what), num_generators, ["scorer"])
        super().__init__(folder, config, actors)
        self.texts: list[str] = []
        self.log.display.status = self.texts.append  # type: ignore[method-assign]
        self.seconds = dict.fromkeys(self.actors.by_name(), 0.1)
        self.now: set[str] = set()
        self.most = 0
        self.began: list[str] = []

    async def start(self, what: str) -> None:
        name = what.removesuffix(" ready")
        self.began.append(name)
        self.now.add(name)
        self.most = max(self.most, len(self.now - {"scorer"}))
        await asyncio.sleep(self.seconds[name])
        self.now.remove(name)

    def wait(self) -> None:
        async def ready(actor: Any) -> None:
            assert isinstance(actor, FakeClient)
            await actor.ready()

        with simulated_by(clock := VirtualClock()):
            clock.run(until_all_ready(self.context, ready))


def test_generators_start_in_waves_and_the_others_at_once(tmp_path: Path) -> None:
    starts = Starts(tmp_path, 7, "generator.max_starting=3", "recovery.start_timeout_s=0.25")  # of each wave
    starts.wait()
    assert starts.most == 3
    assert starts.began.index("scorer") <= 3  # it does not wait for a turn
    assert sorted(starts.began) == sorted(starts.actors.by_name())


def test_the_run_says_how_many_actors_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "REPORT_S", 0.15)
    monkeypatch.setattr(starting, "NOTICE_S", 0.4)
    starts = Starts(tmp_path, 4, "generator.max_starting=2")
    starts.seconds["generator-3"] = 1.5
    starts.wait()
    first, *reports = starts.texts
    assert first == "starting the actors"
    assert reports[0] == "starting the actors: 3 of 5 are up"  # the first wave, and the Scorer
    waiting = f"4 of 5 are up; still waiting for generator-3 (is the cluster busy? see {tmp_path / 'logs'})"
    assert reports[-1].endswith(waiting)


def test_only_actors_that_had_their_turn_are_late(tmp_path: Path) -> None:
    starts = Starts(tmp_path, 4, "generator.max_starting=2", "recovery.start_timeout_s=0.5")
    starts.seconds |= {"generator-0": 30.0, "generator-1": 30.0}
    with pytest.raises(Stalled, match=r"^generator-0, generator-1 did not start within 0.5 s"):
        starts.wait()


async def test_replacements_start_in_waves_too(tmp_path: Path) -> None:
    now: set[str] = set()
    most = 0

    async def start(name: str) -> int:
        nonlocal most
        now.add(name)
        most = max(most, len(now))
        await asyncio.sleep(0.02)
        now.remove(name)
        return 3

    pool = Pool(tmp_path, lambda what, _: start(what), "generator.num_generators=6", "generator.max_starting=2")
    async with pool.during():
        for name in list(pool.pool.serving):
            pool.pool.retire(name, "its node died")
        while len(pool.pool.serving) < 6:
            await asyncio.sleep(0.001)
    assert most == 2
