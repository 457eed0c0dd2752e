"""A verifiers taskset with a tool, which verifiers serves from a process of its own."""

from typing import Any

import verifiers.v1 as vf


class Map(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def look(self, place: str) -> str:
        """Look at a place."""
        return f"behind {place} is a chest"


class TreasureTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def is_found(self, trace: Any) -> float:
        return float("chest" in trace.last_reply)

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Map(vf.ToolsetConfig())]


class Treasure(vf.Taskset[TreasureTask]):
    def load(self) -> list[TreasureTask]:
        return [TreasureTask(vf.TaskData(prompt="Find it."), self.config.task) for _ in range(2)]


__all__ = ["Treasure"]

if __name__ == "__main__":
    Map.run()
