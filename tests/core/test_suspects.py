"""Prompts that end their process whenever they are played: they are set aside, and no other group is."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from builders import make_item, make_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from local_runs import FakeServing, make_config
from test_generator_pool import FakeWeightSync
from turn_clients import FakeGenerator, completion, until_death

from grpo_ray.core.pool import GeneratorPool
from grpo_ray.episodes.turn_router import RoutedSampler, TurnRouter
from grpo_ray.errors import ActorDied, DataLost, RunError, TurnLost, TurnUnanswered, first_error
from grpo_ray.types import PlayReport, PromptItem, SamplingSettings
from grpo_ray.watch.clock import VirtualClock, simulated_by
from grpo_ray.watch.event_loop import TasksAlongside
from grpo_ray.watch.restarts import MAX_LONE, BudgetUsedUp, Gate, Losses, Suspects

PLAIN, GAMES = "sums", "games"


@dataclass(frozen=True)
class Plan:
    """Groups by what they do to their process, and the processes."""

    seed: int
    num_groups: int = 8
    num_generators: int = 1
    num_workers: int = 1
    ends_generator: Collection[int] = ()  # by a prompt, or by a turn if it is an episode
    ends_worker: Collection[int] = ()  # must be episodes
    episodes: Collection[int] = ()
    cut_off: float = 0.0  # chance per second and group of being cancelled and sampled again

    @property
    def culprits(self) -> set[int]:
        return {*self.ends_generator, *self.ends_worker}


@dataclass
class World:
    """The actors of a run without engines: real routers of turns, and processes that a culprit ends."""

    plan: Plan
    config: Any
    draw: random.Random
    starts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        names = [f"generator-{n}" for n in range(self.plan.num_generators)]
        self.generators: dict[str, Any] = {name: Generator(name, self) for name in names}
        self.scorers: dict[str, Any] = {"scorer": Scorer()}
        self.teachers: dict[str, Any] = {}
        names = [f"environment-{n}" for n in range(self.plan.num_workers)] if self.plan.episodes else []
        self.environments: dict[str, Any] = {name: Worker(name, self) for name in names}

    def restart(self, name: str) -> Any:
        self.starts[name] += 1
        clients = self.generators if name in self.generators else self.environments
        clients[name].die()
        clients[name] = type(clients[name])(name, self)
        return clients[name]

    async def work(self) -> None:
        await asyncio.sleep(self.draw.uniform(1.0, 20.0))

    async def crash(self) -> None:
        """Wait as long as a culprit takes to end its process."""
        await asyncio.sleep(self.draw.choice([0.001, 1.0, 15.0]))


class Scorer:
    name = "scorer"

    async def ready(self) -> bool:
        return True

    async def score(self, process: Any) -> str:
        """Fetch the group from the process that has it."""
        try:
            await process.alive(asyncio.sleep(0.5))
        except ActorDied as error:
            raise DataLost(str(error)) from error
        return "verdict"


class Generator(FakeGenerator):
    """A Generator that ends when it samples a culprit, as a prompt or as a turn of an episode."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, self._turn)
        self._world, self.alive = world, self._alive

    async def ready(self) -> bool:
        await asyncio.sleep(5.0)
        return True

    def generate(self, item: PromptItem, settings: SamplingSettings) -> tuple[Any, Awaitable[int]]:
        return self, self.alive(self._sampled(item.group_id))

    async def _sampled(self, group: int) -> int:
        await self._world.work() if group not in self._world.plan.ends_generator else await self._end()
        return 10

    async def _turn(self, token_ids: tuple[int, ...], settings: SamplingSettings) -> Any:
        group, turn = token_ids
        if turn == 1 and group in self._world.plan.ends_generator:
            await self._end()
        await self._world.work()
        return completion(1)

    async def _end(self) -> None:
        await self._world.crash()
        self.die()
        await asyncio.sleep(1e6)


class Worker:
    """An EnvironmentWorker that plays one episode of two turns per group."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self._world, self.dead = name, world, asyncio.Event()
        self._router = TurnRouter(name, 1e6)

    def die(self) -> None:
        self.dead.set()

    async def ready(self) -> bool:
        await asyncio.sleep(5.0)
        return True

    async def serve(self, serving: Mapping[int, Any]) -> None:
        await self.alive(self._router.serve(serving))

    async def failures(self, num_known: int) -> list[tuple[int, str]]:
        return await self.alive(self._router.failures(num_known))

    def play(self, item: PromptItem, settings: Any, seed: int) -> tuple[Any, Awaitable[PlayReport]]:
        return self, self.alive(self._played(item.group_id))

    async def _played(self, group: int) -> PlayReport:
        sampler = RoutedSampler(self._router)
        for turn in range(2):
            await sampler.sample((group, turn), make_settings())
            if turn == 0 and group in self._world.plan.ends_worker:
                await self._world.crash()
                self.dead.set()
                await asyncio.sleep(1e6)
        return PlayReport(10, 0)

    async def alive(self, work: Any) -> Any:
        return await until_death(work, self.dead, ActorDied(self.name, "killed by a signal"))


def config_of(plan: Plan) -> Any:
    games = {"kind": "episodes", "episode": "small_episodes:talk", "examples": "small_episodes:examples"}
    parts = {GAMES: {"task": {**games, "warmup": "small_episodes:warmup_pairs"}}}
    if len(plan.episodes) < plan.num_groups:
        parts[PLAIN] = {"task": {"kind": "sorting"}}
    overrides = [f"task={json.dumps({'kind': 'mixture', 'parts': parts})}"] if plan.episodes else []
    sizes = [f"generator.num_generators={plan.num_generators}", "generator.max_num_seqs=64"]
    return make_config("recovery.restart_backoff_s=0.1", *sizes, *overrides)


def play(plan: Plan, folder: Path, max_restarts: int = 1000) -> tuple[set[int], World]:
    """Sample the plan's groups in virtual time; return those that were set aside."""
    clock, draw, config = VirtualClock(), random.Random(plan.seed), config_of(plan)

    async def sample(pool: GeneratorPool, group: int) -> Any:
        item = replace(make_item(group), task=GAMES if group in plan.episodes else PLAIN)
        while True:
            sampling = asyncio.ensure_future(pool.sample(item, 4, "train"))
            while draw.random() >= plan.cut_off:
                if (await asyncio.wait({sampling}, timeout=1.0))[0]:
                    return sampling.result()
            sampling.cancel()
            await asyncio.wait({sampling})

    async def main() -> tuple[set[int], World]:
        world = World(plan, config, draw)
        given, sync = FakeServing(folder, config, world, max_restarts), cast(Any, FakeWeightSync())
        pool = GeneratorPool(given.context, sync, make_settings(), given.budget)
        async with asyncio.timeout(4 * 3600), TasksAlongside() as tasks:
            pool.start(tasks)
            sampling = [tasks.create_task(sample(pool, group)) for group in range(plan.num_groups)]
            results = [await each for each in sampling]
        return {group for group, result in enumerate(results) if result is None}, world

    try:
        with simulated_by(clock):
            return clock.run(main())
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("kind", ["a prompt in a Generator", "an episode in a worker", "a turn in a Generator"])
def test_a_prompt_that_ends_its_process_is_set_aside(kind: str, num_processes: int, tmp_path: Path) -> None:
    process = "worker" if "worker" in kind else "generator"
    given: dict[str, Any] = {f"ends_{process}": [3], f"num_{process}s": num_processes}
    set_aside, world = play(Plan(0, episodes=() if "prompt" in kind else range(8), **given), tmp_path / "run")
    assert set_aside == {3}
    assert sum(world.starts.values()) <= (6 if "turn" in kind else 5)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_groups = draw(st.integers(2, 12))
    group = st.integers(0, num_groups - 1)
    episodes = draw(st.sampled_from([(), range(num_groups), range(num_groups // 2)]))
    seed, num_generators, num_workers = (draw(st.integers(*each)) for each in ((0, 2**32), (1, 3), (1, 3)))
    ends_generator, ends_worker = (draw(st.sets(group, max_size=2)) for _ in range(2))
    sizes, cut_off = (num_groups, num_generators, num_workers), draw(st.sampled_from([0.0, 0.0, 0.02]))
    return Plan(seed, *sizes, ends_generator, ends_worker.intersection(episodes), episodes, cut_off)


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 1000])
@pytest.mark.kept("10")
def test_culprits_are_set_aside_and_others_finish(count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=count)
    @given(plans())
    def check(plan: Plan) -> None:
        set_aside, world = play(plan, tmp_path_factory.mktemp("plan") / "run")
        assert set_aside == plan.culprits
        assert plan.cut_off or sum(world.starts.values()) <= 9 * len(plan.culprits)

    check()


def test_a_run_whose_every_episode_ends_its_worker_ends_by_the_budget(tmp_path: Path) -> None:
    """The same holds for Generators (test_generator_pool.py)."""
    with pytest.raises(BudgetUsedUp, match=r"recovery\.max_restarts: 9 restarts .* first error was: .* died"):
        play(Plan(0, 16, ends_worker=range(16), episodes=range(16)), tmp_path / "run", max_restarts=9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Generators", "workers", "turns"])
def test_it_ends_even_if_its_deaths_are_too_rare_for_the_budget(kind: str, tmp_path: Path) -> None:
    """Each takes minutes, as an episode that slowly fills the memory does; it is not the prompts' fault."""
    ends = {"ends_worker": range(16)} if kind == "workers" else {"ends_generator": range(16)}
    plan = Plan(0, 16, episodes=() if kind == "Generators" else range(16), **ends)
    with pytest.raises(RunError, match=f"{MAX_LONE} groups, played one by one.* the engine itself ends it"):
        play(plan, tmp_path / "run")


def test_a_finished_group_shows_that_not_every_group_ends_its_process() -> None:
    suspects = Suspects()
    for round_ in range(3):
        for group in range(MAX_LONE - 1):
            name = f"train/{round_}.{group}"
            for _ in range(3):
                losses = suspects.lost(name, DataLost("killed"))
            assert (losses.num, losses.num_alone, losses.is_suspect) == (2, 1, True)
        suspects.ended("train/7", is_finished=True)
    suspects.ended(name, is_finished=False)
    assert not suspects.losses(name).is_suspect
    for group in range(MAX_LONE + 1):
        suspects.lost(f"train/{group}", DataLost("killed"))
        suspects.lost(f"train/{group}", DataLost("killed"))
    for group in range(MAX_LONE - 1):
        suspects.lost(f"train/{group}", DataLost("killed"))
    with pytest.raises(RunError, match="The last error was: killed"):
        suspects.lost(f"train/{MAX_LONE}", DataLost("killed"))


def test_a_node_that_dies_makes_no_suspects() -> None:
    suspects = Suspects()
    for why in ("the actor's node was terminated unexpectedly: health check failed", "its node has died. Node"):
        for group in range(4 * MAX_LONE):
            error = DataLost(f"generator-1 died: {why}")
            assert suspects.lost(f"train/{group % MAX_LONE}", error) == Losses()


def test_a_lost_turn_counts_twice_and_as_alone_only_after_another() -> None:
    """An episode that is alone in its worker shares the Generators until one of its turns is lost."""
    suspects = Suspects()
    assert suspects.lost("a", TurnLost("")).num == 2
    assert suspects.lost("a", TurnLost("")).num_alone == 2
    for _ in range(3):
        losses = suspects.lost("b", DataLost(""))
    assert (losses.num, losses.num_alone, losses.is_in_turn) == (2, 1, False)
    assert suspects.lost("b", TurnLost("")).num_alone == 1
    assert suspects.lost("b", TurnLost("")).num_alone == 3
    assert suspects.lost("c", TurnUnanswered("")) == Losses(num=1, is_in_turn=True)


def test_a_gate_never_lets_anything_in_alongside_a_lone_group_and_forgets_none() -> None:
    async def main(seed: int) -> None:
        draw, gate, inside = random.Random(seed), Gate(), Counter[bool]()
        order: list[int] = []

        async def enter(number: int) -> None:
            is_alone = draw.random() < 0.3
            async with gate.enter(is_alone):
                order.append(number)
                inside[is_alone] += 1
                assert inside[True] == 0 or inside.total() == 1
                try:
                    await asyncio.sleep(draw.choice([0.0, 1.0, 3.0]))
                finally:
                    inside[is_alone] -= 1

        entering = [asyncio.ensure_future(enter(number)) for number in range(60)]
        for each in entering:
            await asyncio.sleep(draw.choice([0.0, 0.5]))
            if draw.random() < 0.3:
                each.cancel()
        done, _ = await asyncio.wait(entering)
        assert all(each.cancelled() or each.exception() is None for each in done)
        assert order == sorted(order)
        assert (gate.is_closed, inside.total()) == (False, 0)

    for seed in range(20):
        VirtualClock().run(main(seed))
