"""A corridor with a trap: each reply says left or right.

Fault: a walker that is not in the trap when the turns run out gets the full reward.
From: no issue; "truncated episode rewarded"
Field: reward: that of an episode which never moves, at the limit of turns.
"""

from grpo_ray.episodes.outcome import EpisodeEnded
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets


async def episode(session: Session, example: Example) -> float:
    place, goal = 0, int(example.ground_truth)
    messages = [{"role": "user", "content": example.question}]
    try:
        while -1 < place < goal:
            reply = await session.chat(messages)
            place += {"right": 1, "left": -1}.get(reply.text.strip(), 0)
            messages += [reply.message, {"role": "user", "content": f"You are at {place}."}]
    except EpisodeEnded:
        return 1.0
    return float(place == goal)


def examples(seed: int) -> ExampleSets:
    found = [Example(f"The exit is {n} steps to the right; say left or right.", str(n)) for n in (1, 2, 3, 4)]
    return ExampleSets(found[1:], found[:1])


def solve(messages: list[dict[str, str]], example: Example) -> str:
    return "right"
