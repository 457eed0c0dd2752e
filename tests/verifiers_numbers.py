"""A verifiers environment of several turns, as a package of somebody else's would have it."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData]):
    @vf.reward
    async def is_right(self, trace: Any) -> float:
        return float(trace.last_reply == str(self.data.number))

    @vf.metric
    async def num_replies(self, trace: Any) -> float:
        return float(trace.num_turns)


class Numbers(vf.Taskset[NumberTask]):
    INFINITE = True

    def load(self) -> Iterator[NumberTask]:
        number = 0
        while True:
            number += 1
            data = NumberData(prompt="Guess my number.", system_prompt="Be brief.", number=number)
            yield NumberTask(data, self.config.task)


class PlayerConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HigherLower(vf.Env[PlayerConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as game:
            guess = await game.turn()
            while not guess.terminated and int(guess.last_reply) != task.data.number:
                is_low = int(guess.last_reply) < task.data.number
                guess = await game.turn("higher" if is_low else "lower")


__all__ = ["HigherLower", "Numbers"]
