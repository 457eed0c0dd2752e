"""Episodes that last over several versions, at any speed: what each `episodes.over_age` lets a batch train."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from builders import make_buffer, parts, schedule_config
from episode_groups import branched_episode, make_episode, make_episode_group, play
from hypothesis import given, settings
from hypothesis import strategies as st
from test_staleness import Pace, PacedPool, Schedule, Trained, paces, turns, within_turns

from grpo_ray.config import Config
from grpo_ray.episodes.segments import Segments
from grpo_ray.types import Episode, PromptItem, RolloutGroup, TrainBatch, Verdict

Plan = tuple[bool, int]  # of a turn: it rewrites the history; new tokens before it, and tokens of the reply


@dataclass
class Games:
    """The plans of a run's episodes, which repeat, and the tokens and batches that come of them."""

    plans: list[list[Plan]]  # of each episode: its turns
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))  # of tokens
    sampled: dict[int, int] = field(default_factory=dict)  # by token: its version
    batches: list[TrainBatch] = field(default_factory=list)
    num_masked: list[float] = field(default_factory=list)  # by batch, as the buffer says


class EpisodePool(PacedPool):
    """A GeneratorPool with groups of episodes; each token takes the given turns of the event loop."""

    def __init__(self, generators: Any, pace: Pace, games: Games) -> None:
        super().__init__(generators, pace)
        self._games, self._episodes = games, itertools.cycle(games.plans)

    async def sample(
        self, item: PromptItem, num_samples: int, purpose: str, on_dispatch: Callable[[], None]
    ) -> tuple[RolloutGroup, Verdict, None]:
        await turns(next(self._pace.of("room")))
        on_dispatch()
        slow = self._pace.slow.get(item.group_id, 0)
        plays = (self._play(next(self._episodes), item.group_id + n, slow) for n in range(num_samples))
        group = make_episode_group(item.group_id, await asyncio.gather(*plays), num_cuts=item.num_cuts)
        return *parts(group), None

    async def _play(self, plan: list[Plan], number: int, slow: int) -> Episode:
        segments, conversation = Segments(), [-1]
        for turn, (is_rewritten, length) in enumerate(plan):
            await turns(slow * (turn == len(plan) - 1))  # the environment
            generator = self._generators[(number + turn) % 2]
            kept = len(conversation) // 2 if is_rewritten else len(conversation)
            conversation = [*conversation[:kept], -2 - turn]
            reply, versions = [], []
            for _ in range(length):
                await turns(next(self._pace.of("token")))
                reply.append(next(self._games.numbers))
                versions.append(generator.version)
            self._games.sampled |= dict(zip(reply, versions, strict=True))
            play(segments, conversation, reply, versions)
            conversation += reply
        return make_episode(segments, reward=float(number % 2))


class EpisodeSchedule(Schedule):
    """The schedule with episodes, which remembers every batch."""

    def __init__(self, config: Config, pace: Pace, games: Games) -> None:
        super().__init__(config, pace, Trained())
        producer: Any = self.producer
        producer._pool = EpisodePool(producer._pool._generators, pace, games)
        take = self.buffer.take

        async def remembered(*arguments: Any) -> Any:
            batch, facts = await take(*arguments)
            games.batches.append(batch)
            games.num_masked.append(facts.metrics.get("lag/masked_tokens", 0.0))
            return batch, facts

        self.buffer.take = remembered  # type: ignore[method-assign]


def make_config(over_age: str, max_lag: int, prompts: int, oversample: float, lookahead: int) -> Config:
    return schedule_config(
        task={"kind": "episodes", "episode": "games:play", "examples": "games:examples"},
        sampling={"max_tokens": 8},
        episodes={"over_age": over_age},
        algorithm={"num_steps": 6, "prompts_per_step": prompts, "oversample_frac": oversample},
        buffer={"lookahead": lookahead},
        weight_sync={"max_lag": max_lag},
    )


@st.composite
def configs(draw: st.DrawFn, over_age: str) -> Config:
    max_lag, prompts = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    is_waiting = over_age == "wait"
    lookahead = draw(st.integers(1, max_lag * prompts + 1)) if is_waiting else 1
    oversample = 0.0 if is_waiting else draw(st.sampled_from([0.3, 1.0, 2.0]))
    return make_config(over_age, max_lag, prompts, oversample, lookahead)


PLAN = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=4)
PLANS = st.lists(PLAN, min_size=1, max_size=5)


def train(config: Config, pace: Pace, games: Games) -> None:
    schedule = EpisodeSchedule(config, pace, games)
    asyncio.run(within_turns(schedule.run(config.algorithm.num_steps)))


def num_sampled(group: RolloutGroup) -> int:
    """Count the tokens that the group's turns sampled, with a loss or without."""
    return sum(int((e.turns >= 0).sum()) for e in group.completions if isinstance(e, Episode))


def trained_tokens(group: RolloutGroup) -> list[tuple[int, int]]:
    """Return the tokens with a loss, and the version that each is said to have, sequence by sequence."""
    found = []
    for episode in group.completions:
        assert isinstance(episode, Episode)
        for part in episode.sequences:
            mask = episode.mask[part.start : part.end]
            own = (values[part.start : part.end][mask] for values in (episode.token_ids, episode.versions))
            found += zip(*(values.tolist() for values in own), strict=True)
    return found


@pytest.mark.parametrize("over_age", ["wait", "mask", "drop"])
@settings(max_examples=20)
@given(data=st.data(), pace=paces(), plans=PLANS)
@pytest.mark.slow
def test_no_token_is_trained_beyond_the_lag_or_twice(
    over_age: str, data: st.DataObject, pace: Pace, plans: list[list[Plan]]
) -> None:
    config, games = data.draw(configs(over_age)), Games(plans)
    train(config, pace, games)
    assert len(games.batches) == 6
    seen: set[int] = set()
    for version, batch in enumerate(games.batches):
        oldest = version - config.weight_sync.max_lag
        for group in batch.groups:
            tokens = trained_tokens(group.rollout)
            assert all(games.sampled[token] == said >= oldest for token, said in tokens)
            numbers = [token for token, _ in tokens]
            assert len({*numbers} - seen) == len(numbers)
            seen.update(numbers)
            assert len(numbers) == num_sampled(group.rollout) or over_age == "mask"


async def test_masked_tokens_by_hand() -> None:
    """The first turn of one episode, two tokens of ten, is too old."""
    group = make_episode_group(0, [branched_episode((0, 1, 1)), branched_episode((1, 1, 1))])
    buffer = make_buffer(size=1, masks_old=True)
    await buffer.put(*parts(group))
    batch, facts = await buffer.take(2, [0], (), 1)
    assert len(trained_tokens(batch.groups[0].rollout)) == num_sampled(group.rollout) - 2 == 8
    assert facts.metrics["lag/masked_tokens"] == 2.0


@pytest.mark.parametrize("over_age", ["mask", "drop"])
def test_an_episode_beyond_the_lag_is_masked_or_dropped(over_age: str) -> None:
    """With a lag of 0, group 1 begins under version 0 and ends under a later one, in every try."""
    config = make_config(over_age, max_lag=0, prompts=1, oversample=1.0, lookahead=1)
    games = Games([[(False, 1), (False, 1)]])
    train(config, Pace(slow={1: 60}, train=[10]), games)
    groups = [group.rollout for batch in games.batches for group in batch.groups]
    slow = [group for group in groups if group.item.group_id == 1]
    if over_age == "drop":
        assert slow == []
    else:
        (group,) = slow
        assert len(trained_tokens(group)) < 4 == num_sampled(group)
    for batch, num_masked in zip(games.batches, games.num_masked, strict=True):
        rollouts = [group.rollout for group in batch.groups]
        assert num_masked == sum(num_sampled(r) - len(trained_tokens(r)) for r in rollouts)
