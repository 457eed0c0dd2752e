"""Groups of hand-made and of random episodes, built as a session builds them: through Segments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from builders import make_completion, make_item, make_scorer

from grpo_ray.episodes.outcome import Status, episode_of
from grpo_ray.episodes.segments import Segments
from grpo_ray.types import Episode, RolloutGroup, ScoredGroup

TRUNCATED = (Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS)


def play(
    segments: Segments, prompt: Sequence[int], reply: Sequence[int], versions: int | Sequence[int] = 0,
    logprobs: Sequence[float] | None = None,
) -> int:  # fmt: skip
    """Add a turn and return its segment; `prompt` is whole, as `Session.sample` takes it."""
    return segments.add_sample(segments.add_prompt(prompt), make_completion(reply, logprobs, versions))


def make_episode(
    segments: Segments, reward: float | None = 0.0, *, status: str = Status.FINISHED, text: str = "",
    seconds: float = 1.0, turn_rewards: Sequence[float] | None = None,
    metrics: Mapping[str, float] | None = None, error: str = "",
) -> Episode:  # fmt: skip
    """Make an episode of what was sampled, as a runner does."""
    episode = episode_of(segments, lambda token_ids: "", Status(status), None, seconds, error)
    rewards = None if turn_rewards is None else tuple(turn_rewards)
    return replace(episode, text=text, reward=reward, turn_rewards=rewards, metrics=dict(metrics or {}))


def make_episode_group(
    group_id: int, episodes: Sequence[Episode], *, discount: float = 1.0, **item: Any
) -> ScoredGroup:
    """Make the group of some episodes, compared by the Scorer; `item` is as for `make_item`.

    Args:
        discount: of rewards per turn, if an episode has them.
    """
    rollout = RolloutGroup(make_item(group_id, **item), tuple(episodes), "environment-0")
    return ScoredGroup.of(rollout, make_scorer(episodes={"turn_discount": discount}).score(rollout))


def random_episode(
    rng: np.random.Generator, *, max_turns: int = 5, branch: float = 0.3, version: int = 0, max_lag: int = 1,
    vocabulary: int = 40, with_turn_rewards: bool = False,
) -> Episode:  # fmt: skip
    """Make a random valid episode: turns, context between them, branches, versions that rise, and any end.

    Args:
        max_turns: an episode may also have none.
        branch: probability that a turn rewrites what came before.
        version: of the newest weights; the first turn is at most `max_lag` older.
    """
    segments, conversation = Segments(), tokens(rng, vocabulary)
    sampled_by = max(0, version - int(rng.integers(0, max_lag + 1)))
    for turn in range(int(rng.integers(0, max_turns + 1))):
        if turn and rng.random() < branch:
            conversation = [*conversation[: int(rng.integers(0, len(conversation)))], *tokens(rng, vocabulary)]
        reply = tokens(rng, vocabulary)
        later = min(version, sampled_by + int(rng.integers(0, 2)))
        switch = int(rng.integers(0, len(reply) + 1))
        versions = [sampled_by] * switch + [later] * (len(reply) - switch)
        sampled_by = versions[-1]
        play(segments, conversation, reply, versions, (-rng.exponential(1.0, len(reply))).tolist())
        conversation = [*conversation, *reply, *(tokens(rng, vocabulary) if rng.random() < 0.8 else [])]
    status = Status(rng.choice(list(Status)))
    has_reward = status is Status.FINISHED or status in TRUNCATED
    turn_rewards = rng.normal(size=segments.num_turns).tolist() if with_turn_rewards and has_reward else None
    return make_episode(
        segments,
        float(rng.normal()) if has_reward else None,
        status=status,
        text=f"an episode of {segments.num_turns} turns",
        seconds=float(rng.exponential(3.0)),
        turn_rewards=turn_rewards,
        metrics={"guesses": float(rng.integers(0, 9))} if rng.random() < 0.7 and has_reward else {},
        error="" if status is Status.FINISHED else f"the episode ended: {status}",
    )


def random_episode_group(
    rng: np.random.Generator, group_id: int = 0, size: int = 4, discount: float | None = None, **episode: Any
) -> ScoredGroup:
    """Make a group of random episodes; other arguments are as for `random_episode`.

    Args:
        discount: of rewards per turn; None: episodes without them.
    """
    episodes = [random_episode(rng, with_turn_rewards=discount is not None, **episode) for _ in range(size)]
    return make_episode_group(group_id, episodes, discount=1.0 if discount is None else discount)


def tokens(rng: np.random.Generator, vocabulary: int, most: int = 6) -> list[int]:
    return [int(token) for token in rng.integers(0, vocabulary, int(rng.integers(1, most + 1)))]


def branched_episode(versions: Sequence[int] = (0, 1, 1), **fields: Any) -> Episode:
    """Make an episode of three turns, the last of which branches off after the first one.

    prompt 1 2 | turn 0: 3 4 | context 9 9 | turn 1: 6 7
                             | context 8   | turn 2: 5
    """
    segments = Segments()
    play(segments, [1, 2], [3, 4], versions[0], [-0.5, -1.5])
    play(segments, [1, 2, 3, 4, 9, 9], [6, 7], versions[1], [-0.25, -0.75])
    play(segments, [1, 2, 3, 4, 8], [5], versions[2], [-2.0])
    return make_episode(segments, **fields)


def spoken_episode(
    rng: np.random.Generator, encode: Callable[[str], list[int]], version: int = 0, **fields: Any
) -> Episode:
    """Make an episode of text that calls a calculator, rewrites its history once, and answers.

    Args:
        encode: from text to tokens.
    """
    segments = Segments()

    def say(prompt: list[int], text: str, by: int) -> list[int]:
        reply = encode(text)
        play(segments, prompt, reply, by, (-rng.exponential(0.7, len(reply))).tolist())
        return [*prompt, *reply]

    a, b = (int(n) for n in rng.integers(11, 99, 2))
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a} * {b}"}}}}</tool_call>'
    question = encode(f"What is {a} * {b}? Call the calculator if you need it.\n>\n")
    first = say(question, f"I will ask.\n{call}", max(0, version - 1))
    second = say([*first, *encode(f"\n{a * b}\n>\n")], f"So it is {a * b}.", version)
    if rng.random() < 0.6:  # a second opinion on the tool's result, without the first answer
        say([*first, *encode(f"\n{a * b}, check it!\n>\n")], f"It is {a * b}; checked.", version)
    say([*second, *encode("\nOnly the number, please.\n>\n")], str(a * b + int(rng.integers(0, 2))), version)
    rewards = rng.normal(0.3, 0.5, segments.num_turns).round(2).tolist()
    own = {"turn_rewards": rewards, "metrics": {"num_calls": 1.0}, "seconds": float(rng.exponential(4))}
    text = f"What the sequences say about {a} * {b}"
    return make_episode(segments, float(sum(rewards)), **{"text": text, **own, **fields})
