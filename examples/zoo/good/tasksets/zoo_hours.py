"""A taskset of verifiers with one turn: hours in minutes."""

from typing import Any

import verifiers.v1 as vf


class HoursData(vf.TaskData):  # type: ignore[misc]
    minutes: int


class HoursTask(vf.Task[HoursData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def is_right(self, trace: Any) -> float:
        return float(trace.last_reply.strip() == str(self.data.minutes))

    @vf.metric  # type: ignore[untyped-decorator]
    async def num_characters(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class Hours(vf.Taskset[HoursTask]):  # type: ignore[misc]
    def load(self) -> list[HoursTask]:
        asked = "How many minutes are {} hours? Answer with the number alone."
        data = [HoursData(prompt=asked.format(n), minutes=60 * n) for n in range(2, 100)]
        return [HoursTask(each, self.config.task) for each in data]


__all__ = ["Hours"]
