"""TrajectoryBuffer, WeightSync, Scorer and Generator as plain objects, and the staleness guards."""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable

import numpy as np
import pytest
from builders import make_completion, make_group, make_item, make_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.actors.generator import Generator
from grpo_ray.actors.scorer import Scorer
from grpo_ray.actors.staleness import admission_limit, oldest_allowed
from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer
from grpo_ray.actors.weight_sync import WeightSync, WeightSyncError
from grpo_ray.config import AlgorithmConfig, ScorerConfig
from grpo_ray.types import (
    Completion,
    PromptItem,
    RolloutGroup,
    SamplingSettings,
    ScoredGroup,
    WeightSnapshot,
)


def simple_group(group_id: int, versions: int | list[int] = 0) -> ScoredGroup:
    return make_group(make_item(group_id), [make_completion([5, 6, 7], versions=versions)] * 2, [1, 0], [1, -1])


# ---- WeightSync ----


class FakeGenerator:
    """Writes down what it is asked; hangs or fails in the phases it is told to."""

    def __init__(
        self, name: str, log: list[tuple[str, str]] | None = None, hangs: str = "", fails: str = ""
    ) -> None:
        self.name, self.log, self.hangs, self.fails = name, [] if log is None else log, hangs, fails
        self.loaded: list[object] = []

    async def _phase(self, phase: str) -> None:
        self.log.append((phase, self.name))
        if phase == self.fails:
            raise RuntimeError("out of memory")
        if phase == self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.001 if self.name == "a" else 0.003)
        self.log.append((f"{phase} done", self.name))

    def pause(self) -> Awaitable[None]:
        return self._phase("pause")

    def load_weights(self, snapshot: object) -> Awaitable[None]:
        self.loaded.append(snapshot)
        return self._phase("load")

    def resume(self) -> Awaitable[None]:
        return self._phase("resume")


def make_sync(
    generators: list[FakeGenerator] | None = None, max_lag: int = 1, timeout_s: float = 5.0
) -> WeightSync:
    return WeightSync(
        generators or [FakeGenerator("a")], max_lag, prompts_per_step=4, phase_timeout_s=timeout_s
    )


@pytest.mark.parametrize(("max_lag", "limits"), [(0, [4, 8, 12]), (1, [8, 12, 16]), (3, [16, 20, 24])])
def test_admission_limit_by_hand(max_lag: int, limits: list[int]) -> None:
    """max_lag 0: exactly the batch that version 0 trains; each lag allowed is one batch more."""

    async def run() -> list[int]:
        sync = make_sync(max_lag=max_lag)
        seen = [await sync.admission_limit(above=0)]
        for version in (1, 2):
            await sync.publish(version, [None])
            seen.append(await sync.admission_limit(above=seen[-1]))
        return seen

    assert asyncio.run(run()) == limits
    assert [admission_limit(version, max_lag, 4) for version in (0, 1, 2)] == limits


def test_admission_waits_until_every_generator_runs_the_version() -> None:
    async def run() -> None:
        slow = FakeGenerator("slow")
        release = asyncio.Event()

        async def resume_when_released() -> None:
            await release.wait()

        slow.resume = resume_when_released  # type: ignore[method-assign]
        sync = make_sync([FakeGenerator("a"), slow])
        assert await sync.admission_limit(above=7) == 8
        waiting = asyncio.create_task(sync.admission_limit(above=8))
        published = asyncio.create_task(sync.publish(1, [None]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        release.set()
        assert await asyncio.wait_for(waiting, 5) == 12
        await published

    asyncio.run(run())


def test_every_generator_finishes_a_phase_before_any_begins_the_next() -> None:
    log: list[tuple[str, str]] = []
    generators = [FakeGenerator("a", log), FakeGenerator("b", log)]
    sync = make_sync(generators)
    report = asyncio.run(sync.publish(1, ["the snapshot"]))
    assert [event for event, name in log if name == "a"] == [
        "pause", "pause done", "load", "load done", "resume", "resume done",
    ]  # fmt: skip
    phases = [event.removesuffix(" done") for event, _ in log]
    assert [phase for phase, _ in itertools.groupby(phases)] == ["pause", "load", "resume"]
    assert [generator.loaded for generator in generators] == [["the snapshot"]] * 2
    assert report.version == 1
    assert set(report.metrics) == {f"timing/weight_sync/{p}_s" for p in ("pause", "transfer", "resume")}
    assert all(0.002 <= seconds < 2 for seconds in report.metrics.values())  # the slower one's
    assert asyncio.run(sync.versions()) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("phase", "shown", "version"), [("pause", "pause", 0), ("load", "transfer", 0), ("resume", "resume", 1)]
)
def test_generator_that_hangs_is_named_and_stale(phase: str, shown: str, version: int) -> None:
    async def run() -> None:
        sync = make_sync([FakeGenerator("a"), FakeGenerator("b", hangs=phase)], timeout_s=0.05)
        with pytest.raises(WeightSyncError) as caught:
            await sync.publish(1, [None])
        message = str(caught.value)
        assert f"b did not finish phase `{shown}` within 0.05 s" in message
        assert await sync.stale() == {"b"}
        await nobody_is_admitted(sync, above=8)

    asyncio.run(run())


def test_generator_that_fails_is_named_and_stale() -> None:
    async def run() -> None:
        sync = make_sync([FakeGenerator("a", fails="load"), FakeGenerator("b")])
        with pytest.raises(WeightSyncError, match=r"a failed in phase `transfer`: out of memory"):
            await sync.publish(1, [None])
        assert await sync.stale() == {"a"}
        await nobody_is_admitted(sync, above=8)

    asyncio.run(run())


async def nobody_is_admitted(sync: WeightSync, above: int) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sync.admission_limit(above), 0.02)


def test_generator_synced_again_is_not_stale() -> None:
    async def run() -> None:
        generator = FakeGenerator("a", fails="load")
        sync = make_sync([generator])
        with pytest.raises(WeightSyncError):
            await sync.publish(1, [None])
        generator.fails = ""
        await sync.publish(1, [None])
        assert await sync.stale() == frozenset()
        assert await sync.versions() == {"a": 1}
        assert await sync.admission_limit(above=8) == 12

    asyncio.run(run())


@pytest.mark.parametrize("version", [0, 2])
def test_versions_are_consecutive(version: int) -> None:
    generator = FakeGenerator("a")
    with pytest.raises(ValueError, match=f"version {version} cannot follow 0"):
        asyncio.run(make_sync([generator]).publish(version, [None]))
    assert generator.log == []


# ---- staleness ----


class VersionedGenerator(FakeGenerator):
    """Serves the version last loaded, after as many turns of the event loop as told."""

    version = 0

    def __init__(self, name: str, load_turns: list[int]) -> None:
        super().__init__(name)
        self._load_turns = iter(load_turns)

    async def _phase(self, phase: str) -> None:
        await turns(next(self._load_turns, 1) if phase == "load" else 1)
        if phase == "load":
            self.version += 1


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def largest_lags(
    max_lag: int, prompts_per_step: int, num_steps: int, token_turns: list[int], train_turns: list[int],
    load_turns: list[int],
) -> list[int]:  # fmt: skip
    """Runs the controller's schedule with tokens and steps that take so many turns; a lag a step."""
    generators = [VersionedGenerator(name, load_turns) for name in ("a", "b")]
    sync = WeightSync(generators, max_lag, prompts_per_step, phase_timeout_s=60)
    buffer = TrajectoryBuffer(prompts_per_step)
    speeds = itertools.cycle(token_turns)
    total = num_steps * prompts_per_step

    async def rollout(group_id: int) -> None:
        generator, versions = generators[group_id % 2], []
        for _ in range(3):
            await turns(next(speeds))
            versions.append(generator.version)
        await buffer.put(make_group(make_item(group_id), [make_completion([5, 6, 7], versions=versions)]))

    async def produce(tasks: asyncio.TaskGroup) -> None:
        dispatched = 0
        while dispatched < total:
            limit = min(await sync.admission_limit(above=dispatched), total)
            for group_id in range(dispatched, limit):
                tasks.create_task(rollout(group_id))
            dispatched = limit

    lags = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce(tasks))
        publishing = None
        for step in range(num_steps):
            batch, facts = await buffer.take(step, oldest_allowed(step, max_lag))
            assert facts.rejected_items == ()
            lags.append(step - min(group.rollout.oldest_version for group in batch.groups))
            await turns(train_turns[step % len(train_turns)])
            if publishing is not None:
                await publishing
            publishing = tasks.create_task(sync.publish(step + 1, [None]))
    return lags


SPEEDS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    max_lag=st.integers(0, 3), prompts_per_step=st.integers(1, 3), token_turns=SPEEDS, train_turns=SPEEDS,
    load_turns=SPEEDS,
)  # fmt: skip
def test_no_token_is_older_than_max_lag_at_any_speed(
    max_lag: int, prompts_per_step: int, token_turns: list[int], train_turns: list[int], load_turns: list[int]
) -> None:
    run = largest_lags(max_lag, prompts_per_step, 6, token_turns, train_turns, load_turns)
    lags = asyncio.run(asyncio.wait_for(run, 60))
    assert len(lags) == 6
    assert max(lags) <= max_lag


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_fast_generators_run_ahead_as_far_as_max_lag_allows(max_lag: int) -> None:
    """Admission that is tighter than need be would waste the Generators' time."""
    lags = asyncio.run(largest_lags(max_lag, 2, 6, token_turns=[0], train_turns=[200], load_turns=[1]))
    assert lags == [min(step, max_lag) for step in range(6)]


@given(version=st.integers(0, 100), max_lag=st.integers(0, 10), prompts_per_step=st.integers(1, 50))
def test_the_two_guards_agree(version: int, max_lag: int, prompts_per_step: int) -> None:
    """The last group admitted at a version is trained while that version is just allowed."""
    last_group = admission_limit(version, max_lag, prompts_per_step) - 1
    trained_at = last_group // prompts_per_step
    assert oldest_allowed(trained_at, max_lag) == version
    assert oldest_allowed(trained_at + 1, max_lag) > version  # one group more would be too old


# ---- Scorer ----


def score(config: AlgorithmConfig, answers: list[str]) -> ScoredGroup:
    """Each answer in the right format; an empty one is a response without any."""
    texts = [
        f" ascending </think> <answer> {answer} </answer>" if answer else "no format" for answer in answers
    ]
    completions = tuple(make_completion([5], text=text) for text in texts)
    rollout = RolloutGroup(make_item(truth="01258"), completions, "generator-0")
    return Scorer("exact_match", config, ScorerConfig()).score(rollout)


def test_scores_and_advantages_by_hand() -> None:
    scored = score(AlgorithmConfig(samples_per_prompt=5), ["01258", "01258", "", "01258", "85210"])
    assert scored.rewards.tolist() == [1, 1, 0, 1, 0]
    assert scored.format_rewards.tolist() == [1, 1, 0, 1, 1]
    assert scored.answer_rewards.tolist() == [1, 1, 0, 1, 0]
    # mean 3/5; sample variance (3 * 0.4**2 + 2 * 0.6**2) / 4 = 0.3
    high, low = 0.4 / math.sqrt(0.3), -0.6 / math.sqrt(0.3)
    assert scored.advantages.tolist() == pytest.approx([high, high, low, high, low], rel=1e-4)
    assert scored.advantages.dtype == np.float32
    assert scored.has_signal
    assert scored.group_id == 0


def test_advantages_without_the_standard_deviation() -> None:
    config = AlgorithmConfig(samples_per_prompt=5, normalize_by_std=False)
    advantages = score(config, ["01258", "01258", "", "01258", "85210"]).advantages
    assert advantages.tolist() == pytest.approx([0.4, 0.4, -0.6, 0.4, -0.6])


@pytest.mark.parametrize("answer", ["01258", "1", ""])
def test_equal_rewards_have_no_signal(answer: str) -> None:
    scored = score(AlgorithmConfig(samples_per_prompt=3), [answer] * 3)
    assert scored.advantages.tolist() == [0.0, 0.0, 0.0]
    assert not scored.has_signal


# ---- Generator ----


class FakeEngine:
    """An engine whose requests wait until they are released."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.released = asyncio.Event()
        self.fails = fails

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError("the device was lost")

    async def start(self) -> None:
        self._call("start")

    async def generate(self, prompt: tuple[int, ...], settings: SamplingSettings) -> tuple[Completion, ...]:
        self._call("generate")
        await self.released.wait()
        return tuple(make_completion([5, 6, 7]) for _ in range(settings.num_samples))

    async def pause(self) -> None:
        self._call("pause")

    async def start_weight_update(self) -> None:
        self._call("start_weight_update")

    async def update_weights(self, snapshot: WeightSnapshot) -> None:
        self._call(f"update_weights {snapshot.version}")

    async def finish_weight_update(self, version: int) -> None:
        self._call(f"finish_weight_update {version}")

    async def reset_prefix_cache(self) -> None:
        self._call("reset_prefix_cache")

    async def resume(self) -> None:
        self._call("resume")

    async def shutdown(self) -> None:
        self._call("shutdown")


def snapshot(version: int) -> WeightSnapshot:
    return WeightSnapshot(version, (), np.zeros(0, np.uint8))


def test_weight_update_calls_the_engine_in_order() -> None:
    engine = FakeEngine()
    generator = Generator("generator-0", engine)

    async def run() -> None:
        assert await generator.ready()
        assert "version=0" in repr(generator)
        await generator.pause()
        await generator.load_weights(snapshot(7))
        await generator.resume()
        await generator.shutdown()

    asyncio.run(run())
    assert engine.calls == [
        "start",
        "pause",
        "start_weight_update",
        "update_weights 7",
        "finish_weight_update 7",
        "reset_prefix_cache",
        "resume",
        "shutdown",
    ]
    assert repr(generator) == "Generator(generator-0, version=7, 0 groups running)"


def test_failed_update_keeps_the_version_and_is_never_committed() -> None:
    engine = FakeEngine(fails="update_weights 1")
    generator = Generator("generator-0", engine)
    with pytest.raises(RuntimeError, match="device was lost"):
        asyncio.run(generator.load_weights(snapshot(1)))
    assert engine.calls == ["start_weight_update", "update_weights 1"]
    assert "version=0" in repr(generator)


def test_groups_tokens_and_busy_seconds() -> None:
    async def run() -> None:
        engine = FakeEngine()
        generator = Generator("generator-3", engine)
        await asyncio.sleep(0.05)
        assert (await generator.take_stats()).busy_s == 0.0  # idle so far

        started = time.perf_counter()
        two = [
            asyncio.create_task(generator.generate(make_item(i), make_settings(num_samples=4)))
            for i in range(2)
        ]
        await asyncio.sleep(0.1)
        assert "2 groups running" in repr(generator)
        running = await generator.take_stats()
        asked = time.perf_counter()
        assert 0.09 <= running.busy_s <= asked - started  # two groups at a time are busy once, not twice
        assert running.sampled_tokens == 0

        engine.released.set()
        groups = await asyncio.gather(*two)
        assert [group.item.group_id for group in groups] == [0, 1]
        assert {group.generator for group in groups} == {"generator-3"}
        finished = await generator.take_stats()
        assert 0 < finished.busy_s <= time.perf_counter() - asked + 1e-3  # what was told is not told again
        assert finished.sampled_tokens == 2 * 4 * 3

        await asyncio.sleep(0.05)
        idle = await generator.take_stats()
        assert (idle.busy_s, idle.sampled_tokens) == (0.0, 0)

    asyncio.run(run())


def test_overlapping_groups_are_busy_once() -> None:
    class SleepyEngine(FakeEngine):
        async def generate(self, prompt: tuple[int, ...], settings: SamplingSettings) -> tuple[Completion, ...]:
            await asyncio.sleep(0.01 * settings.max_tokens)
            return (make_completion([5]),)

    async def run() -> None:
        generator = Generator("generator-0", SleepyEngine())
        started = time.perf_counter()
        lengths = (4, 10, 7)  # all begin together and end apart
        await asyncio.gather(*(generator.generate(make_item(), make_settings(max_tokens=n)) for n in lengths))
        busy_s = (await generator.take_stats()).busy_s
        assert 0.09 <= busy_s <= time.perf_counter() - started

    asyncio.run(run())


def test_failed_group_does_not_keep_its_generator_busy() -> None:
    async def run() -> None:
        generator = Generator("generator-0", FakeEngine(fails="generate"))
        with pytest.raises(RuntimeError, match="device was lost"):
            await generator.generate(make_item(), make_settings())
        assert "0 groups running" in repr(generator)
        await generator.take_stats()
        await asyncio.sleep(0.02)
        assert (await generator.take_stats()).busy_s == 0.0

    asyncio.run(run())


def test_slowdown_holds_a_group_back() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.released.set()
        generator = Generator("generator-0", engine, slowdown_s=0.05)
        await generator.generate(make_item(), make_settings())
        assert (await generator.take_stats()).busy_s >= 0.05

    asyncio.run(run())


def test_scorer_counts_what_it_could_not_grade() -> None:
    scorer = Scorer("r1_zero", AlgorithmConfig(), ScorerConfig(timeout_s=1.5))
    texts = [r"\binom{1000000000}{500000000}", "72"]
    completions = tuple(
        Completion(f" </think> <answer> {text} </answer>", *(np.zeros(2, dtype) for dtype in "ifi"), "stop")
        for text in texts
    )
    scored = scorer.score(RolloutGroup(PromptItem(0, "?", (1,), "72"), completions, "generator-0"))
    assert scored.num_errors == 1
    assert scored.rewards.tolist() == [0, 1]
