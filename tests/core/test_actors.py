"""Scorer and Generator as plain objects."""

import asyncio
import inspect
import math
import time
import zlib
from dataclasses import replace
from typing import Any, get_origin, get_type_hints

import numpy as np
import pytest
from builders import make_completion, make_item, make_scorer, make_settings

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.core import clients
from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.core.generator import Generator
from grpo_ray.core.learner import Learner
from grpo_ray.core.scorer import Scorer
from grpo_ray.core.sync import WeightSync
from grpo_ray.core.teacher import Teacher
from grpo_ray.episodes.environment_worker import EnvironmentWorker
from grpo_ray.objectives import advantages_of
from grpo_ray.transfer.messages import TensorSpec, WeightSnapshot
from grpo_ray.types import Completion, RolloutGroup, SamplingSettings, ScoredGroup


def score(
    config: AlgorithmConfig, answers: list[str], lengths: list[int] | None = None, max_tokens: int = 16
) -> ScoredGroup:
    """Score a group with these answers in the right format; an empty one is a response without the format."""
    texts = [f" ascending </think> <answer> {each} </answer>" if each else "no format" for each in answers]
    sizes = lengths or [1] * len(texts)
    completions = tuple(make_completion([5] * size, text=text) for text, size in zip(texts, sizes, strict=True))
    rollout = RolloutGroup(make_item(truth="01258"), completions, "generator-0")
    verdict = make_scorer(algorithm=vars(config), sampling={"max_tokens": max_tokens}).score(rollout)
    return ScoredGroup.of(rollout, verdict)


def test_scorer_reports_its_seconds_and_memory() -> None:
    rollout = RolloutGroup(make_item(truth="01258"), (make_completion([5], text="?"),), "generator-0")
    scorer = make_scorer()
    started = time.perf_counter()
    assert repr(scorer) == "Scorer(wait_for_groups)"
    scorer.score(rollout)
    stats = scorer.take_stats()
    assert 0 < stats.seconds["score"] <= time.perf_counter() - started
    assert "group 0" in [turn.label for turn in stats.turns]
    assert 2**20 < stats.resident_bytes < 2**40


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


@pytest.mark.parametrize(
    ("changes", "right", "wrong"),
    [
        ({"advantage": "leave_one_out"}, 1 - 2 / 4, 0 - 3 / 4),
        ({"std": "population"}, 0.4 / math.sqrt(0.24), -0.6 / math.sqrt(0.24)),
        ({"loss": "no_baseline"}, 1.0, 0.0),  # whatever `advantage` is
    ],
)
def test_other_advantages_by_hand(changes: dict, right: float, wrong: float) -> None:
    config = AlgorithmConfig(samples_per_prompt=5, **changes)
    advantages = score(config, ["01258", "01258", "", "01258", "85210"]).advantages
    assert advantages.tolist() == pytest.approx([right, right, wrong, right, wrong], rel=1e-4)


def test_raw_rewards_of_a_group_of_correct_answers_are_a_signal() -> None:
    config = AlgorithmConfig(samples_per_prompt=2, loss="no_baseline")
    assert score(config, ["01258", "01258"]).has_signal
    assert not score(config, ["1", "1"]).has_signal


def test_long_responses_lose_advantage_but_no_reward() -> None:
    """The last 4 of 16 tokens cost up to 0.5: 12 tokens cost nothing, 14 half of it, 16 or more all of it."""
    long = {"overlong_buffer_tokens": 4, "overlong_penalty": 0.5}
    config = AlgorithmConfig(samples_per_prompt=4, advantage="mean", **long)
    scored = score(config, ["01258"] * 4, lengths=[12, 14, 16, 3])
    assert scored.rewards.tolist() == [1, 1, 1, 1]
    worth = np.array([1, 0.75, 0.5, 1])
    assert scored.advantages.tolist() == pytest.approx((worth - worth.mean()).tolist())
    assert scored.has_signal
    assert not score(config, ["01258"] * 4, lengths=[12, 14, 16, 3], max_tokens=100).has_signal


class FakeEngine:
    """An engine that holds its requests back until they are released."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.released = asyncio.Event()
        self.fails = fails

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError("the device was lost")

    async def generate(self, prompt: tuple[int, ...], settings: SamplingSettings) -> tuple[Completion, ...]:
        self._call("generate")
        await self.released.wait()
        return tuple(make_completion([5, 6, 7]) for _ in range(settings.num_samples))

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> None:
            self._call(" ".join([name, *(str(getattr(each, "version", each)) for each in args)]))

        return call


def snapshot(version: int) -> WeightSnapshot:
    return WeightSnapshot(version, (), np.zeros(0, np.uint8))


async def update(generator: Generator, weights: WeightSnapshot) -> dict[str, float]:
    """Make both calls of a sync; return the seconds of each phase."""
    await generator.stage_weights(weights)
    return await generator.switch(60.0)


async def test_weight_update_calls_the_engine_in_order() -> None:
    engine = FakeEngine()
    generator = Generator("generator-0", engine, version=6)
    assert await generator.ready()
    assert "version=6" in repr(generator)
    seconds = await update(generator, snapshot(7))
    assert list(seconds) == ["pause", "load", "finish", "resume", "paused"]
    assert 0 < sum(seconds.values()) - seconds["paused"] <= seconds["paused"]
    await generator.shutdown()
    assert engine.calls == ["start 6", "stage 7", "pause", "load", "finish 7", "resume", "shutdown"]
    assert repr(generator) == "Generator(generator-0, version=7, wait_for_prompts, 0 groups running)"


def test_failed_update_keeps_the_version_and_is_never_committed() -> None:
    engine = FakeEngine(fails="load")
    generator = Generator("generator-0", engine)
    with pytest.raises(RuntimeError, match=r"^phase `load`: .*device was lost"):
        asyncio.run(update(generator, snapshot(1)))
    assert engine.calls == ["stage 1", "pause", "load"]
    assert "version=0" in repr(generator)


@pytest.mark.parametrize("phase", ["pause", "load", "finish", "resume"])
async def test_phase_that_takes_too_long_is_named(phase: str) -> None:
    engine = FakeEngine()
    setattr(engine, phase, lambda *_: asyncio.sleep(60))
    generator = Generator("generator-0", engine)
    await generator.stage_weights(snapshot(1))
    with pytest.raises(RuntimeError, match=rf"^phase `{phase}`: not done within 0.01 s"):
        await generator.switch(0.01)
    assert ("version=1" in repr(generator)) == (phase == "resume")


WHOLE = WeightSnapshot(
    8, (TensorSpec("w", "float32", (3,), 0, 12),), np.arange(12, dtype=np.uint8), zlib.crc32(bytes(range(12)))
)


def test_incomplete_snapshot_is_refused_before_it_reaches_the_engine() -> None:
    """It has other bytes here; test_snapshot.py has the others."""
    engine = FakeEngine()
    generator = Generator("generator-0", engine, version=7)
    with pytest.raises(ValueError, match="version 8 did not arrive complete"):
        asyncio.run(update(generator, replace(WHOLE, data=WHOLE.data + np.uint8(1))))
    assert engine.calls == []
    assert "version=7" in repr(generator)
    asyncio.run(update(generator, WHOLE))
    assert engine.calls == ["stage 8", "pause", "load", "finish 8", "resume"]
    assert "version=8" in repr(generator)


async def generate_s(generator: Generator) -> float:
    return (await generator.take_stats()).seconds["generate"]


@pytest.mark.slow
async def test_groups_tokens_and_seconds() -> None:
    engine = FakeEngine()
    generator = Generator("generator-3", engine)
    await asyncio.sleep(0.05)
    assert await generate_s(generator) == 0.0  # idle so far

    started = time.perf_counter()
    settings = make_settings(num_samples=4)
    two = [asyncio.create_task(generator.generate(make_item(i), settings)) for i in range(2)]
    await asyncio.sleep(0.1)
    assert "2 groups running" in repr(generator)
    asked = time.perf_counter()
    # overlapping groups count once
    assert 0.09 <= await generate_s(generator) <= time.perf_counter() - started

    engine.released.set()
    answers = await asyncio.gather(*two)
    assert [group.item.group_id for group, _ in answers] == [0, 1]
    assert {group.generator for group, _ in answers} == {"generator-3"}
    assert [num_tokens for _, num_tokens in answers] == [4 * 3, 4 * 3]
    finished = await generator.take_stats()
    # reported once
    assert 0 < finished.seconds["generate"] <= time.perf_counter() - asked
    assert sorted(span.label.partition(",")[0] for span in finished.spans) == ["group 0", "group 1"]

    await asyncio.sleep(0.05)
    idle = await generator.take_stats()
    assert idle.seconds["generate"] == 0
    assert idle.seconds["wait_for_prompts"] >= 0.05


async def test_generator_sleeps_when_its_last_group_has_ended() -> None:
    """Even a group that was cut off takes a moment to end."""
    engine = FakeEngine()
    generator = Generator("generator-0", engine)
    groups = [asyncio.create_task(generator.generate(make_item(), make_settings())) for _ in range(2)]
    await asyncio.sleep(0)
    sleeping = asyncio.create_task(generator.sleep())
    groups[0].cancel()
    await asyncio.sleep(0.01)
    assert not sleeping.done()
    engine.released.set()
    await asyncio.wait_for(sleeping, 120)
    assert groups[1].done()
    await generator.wake()
    await asyncio.wait_for(generator.sleep(), 120)
    assert engine.calls == ["generate", "generate", "sleep", "wake", "sleep"]


async def test_failed_group_does_not_keep_its_generator_busy() -> None:
    generator = Generator("generator-0", FakeEngine(fails="generate"))
    with pytest.raises(RuntimeError, match="device was lost"):
        await generator.generate(make_item(), make_settings())
    assert "0 groups running" in repr(generator)
    await generator.take_stats()
    await asyncio.sleep(0.02)
    assert await generate_s(generator) == 0.0


async def test_slowdown_delays_a_group() -> None:
    engine = FakeEngine()
    engine.released.set()
    generator = Generator("generator-0", engine, slowdown_s=0.05)
    await generator.generate(make_item(), make_settings())
    assert await generate_s(generator) >= 0.05


@pytest.mark.parametrize("kind", ["mean_std", "mean", "leave_one_out", "max_only", "raw", "gdpo"])
def test_advantages_compare_only_graded_responses(kind: str) -> None:
    config = AlgorithmConfig(advantage=kind, overlong_buffer_tokens=4)
    rewards, lengths = np.array([1, 9, -0.5, -1], np.float32), np.array([3, 8, 9, 10])
    is_graded = np.array([True, False, True, True])
    worth = advantages_of(rewards, lengths, is_graded, config, max_tokens=10)
    alone = advantages_of(rewards[is_graded], lengths[is_graded], np.ones(3, bool), config, max_tokens=10)
    assert worth[1] == 0
    assert worth[is_graded].tolist() == alone.tolist()
    for few in ([False] * 4, [True] + [False] * 3):
        worth = advantages_of(rewards, lengths, np.array(few), config, max_tokens=10)
        assert worth.tolist() == [float(kind in ("max_only", "raw") and few[0]), 0, 0, 0]


@pytest.mark.slow
def test_ungraded_responses_have_no_advantage_and_ungradable_ones_are_no_better_off_than_wrong_ones() -> None:
    """A fault of the grader excludes a response; one that makes its own grading impossible takes part."""
    rewards = {"maths": "r1_zero", "own": "hostile_rewards:obey"}
    parts = {name: {"task": {"kind": "sorting", "reward": reward}} for name, reward in rewards.items()}
    limits = {"num_workers": 1, "timeout_s": 1.0, "ungradable_reward": -1.0}
    mixture = {"kind": "mixture", "parts": parts}
    scorer = make_scorer(task=mixture, algorithm={"std": "population"}, scorer=limits)

    def scored_by(task: str, *texts: str) -> ScoredGroup:
        completions = tuple(make_completion([5, 6], text=text) for text in texts)
        rollout = RolloutGroup(replace(make_item(truth="72"), task=task), completions, "generator-0")
        return ScoredGroup.of(rollout, scorer.score(rollout))

    failed = scored_by("own", "exit 72", "72", "missing", "71", "71")
    assert len(failed.errors) == 2
    assert failed.errors[0] == "exit status 0"
    assert failed.errors[2].startswith("KeyError: 'no such key'")
    assert failed.rewards.tolist() == [0, 1, 0, 0, 0]
    assert failed.format_rewards.tolist() == [0, 1, 0, 1, 1]
    # among 1, 0, 0: mean 1/3, population variance 2/9
    high, low = 2 / 3 / math.sqrt(2 / 9), -1 / 3 / math.sqrt(2 / 9)
    assert failed.advantages.tolist() == pytest.approx([0, high, 0, low, low], abs=1e-4)

    long = "</think> <answer> " + "1+" * 600 + "1 </answer>"
    overlong = scored_by("maths", "</think> <answer> 72 </answer>", "</think> <answer> 71 </answer>", long)
    assert not overlong.errors
    assert dict(overlong.ungradable) == {2: "longer than 1000 characters, and not the truth itself"}
    assert overlong.format_rewards.tolist() == [1, 1, 1]
    assert overlong.advantages[2] == overlong.advantages[1] < 0

    late = scored_by("own", "72", "71", "loop 72")
    scorer.close()
    assert dict(late.ungradable) == {2: "longer than 1 s (scorer.timeout_s)"}
    assert late.rewards.tolist() == [1, 0, -1]
    assert late.advantages[2] < late.advantages[1]


PAIRS: list[tuple[Any, type]] = [
    (clients.GeneratorClient, Generator),
    (clients.EnvironmentClient, EnvironmentWorker),
    (clients.ScorerClient, Scorer),
    (clients.TeacherClient, Teacher),
    (clients.BufferClient, TrajectoryBuffer),
    (clients.LearnerClient, Learner),
    (clients.WeightSyncClient, WeightSync),
]


@pytest.mark.parametrize(("protocol", "actor"), PAIRS, ids=[actor.__name__ for _, actor in PAIRS])
def test_every_call_exists_with_its_parameters_and_the_mark_of_a_reference(protocol: Any, actor: type) -> None:
    calls = dict(inspect.getmembers(protocol, lambda one: inspect.isfunction(one) and one.__name__[0] != "_"))
    assert len(calls) > 2
    for name, call in calls.items():
        method = getattr(actor, name)
        assert list(inspect.signature(call).parameters) == list(inspect.signature(method).parameters), name
        returned = [get_origin(get_type_hints(each)["return"]) for each in (call, method)]
        assert [each is tuple for each in returned] == [name in clients.WITH_BULK] * 2, name
