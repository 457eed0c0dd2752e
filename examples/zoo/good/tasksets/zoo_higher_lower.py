"""An environment of verifiers with several turns: a number from 1 to 7 in three guesses."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class NumberData(vf.TaskData):  # type: ignore[misc]
    number: int


class NumberTask(vf.Task[NumberData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def is_right(self, trace: Any) -> float:
        return float(trace.last_reply == str(self.data.number))


class Numbers(vf.Taskset[NumberTask]):  # type: ignore[misc]
    def load(self) -> Iterator[NumberTask]:
        for n in range(280):
            prompt = "Guess my number from 1 to 7."
            yield NumberTask(NumberData(prompt=prompt, number=n % 7 + 1), self.config.task)


class PlayerConfig(vf.EnvConfig):  # type: ignore[misc]
    player: vf.AgentConfig = vf.AgentConfig()


class HigherLower(vf.Env[PlayerConfig]):  # type: ignore[misc]
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as game:
            guess = await game.turn()
            for _ in range(2):
                if guess.terminated or guess.last_reply == str(task.data.number):
                    break
                is_low = guess.last_reply < str(task.data.number)
                guess = await game.turn("higher" if is_low else "lower")


__all__ = ["HigherLower", "Numbers"]
