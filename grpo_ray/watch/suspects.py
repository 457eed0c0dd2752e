"""Suspects: groups that may end the process that samples them.

A group that is lost twice with its process is a suspect, since one of the groups there may be the cause. A
suspect is played alone, so that its next losses are its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from grpo_ray.errors import DataLost, RunError, TurnLost

LOSSES = 2  # alongside other groups, until a group is a suspect
MAX_LONE = 8  # suspects lost one after another, while no group finishes, that cannot all be to blame


@dataclass
class Losses:
    """Times that one group was lost with the process that had it."""

    num: int = 0  # alongside other groups
    num_alone: int = 0
    is_in_turn: bool = False  # a Generator died of an episode's turn, not the EnvironmentWorker

    @property
    def is_suspect(self) -> bool:
        return self.num >= LOSSES

    def add(self, error: DataLost) -> None:
        """Count a loss. A lost turn has cost two Generators, to itself only if a turn was lost before."""
        of_turn = isinstance(error, TurnLost)
        num = LOSSES if of_turn else 1
        if self.is_suspect and (self.is_in_turn or not of_turn):
            self.num_alone += num
        else:
            self.num += num
        self.is_in_turn |= of_turn


class Suspects:
    """The losses of each group that is not finished, kept while it is cut off and sampled again."""

    def __init__(self) -> None:
        self._losses: dict[str, Losses] = {}
        self._lone: set[str] = set()  # suspects lost since a group finished

    def losses(self, group: str) -> Losses:
        return self._losses.get(group) or Losses()

    def lost(self, group: str, error: DataLost) -> Losses:
        """Count a loss of the group.

        Raises:
            RunError: suspect after suspect is lost, and no group finishes: no prompt is the cause.
        """
        losses = self._losses.setdefault(group, Losses())
        if losses.is_suspect:
            self._lone.add(group)
        losses.add(error)
        if len(self._lone) >= MAX_LONE:
            raise RunError(
                f"{MAX_LONE} groups, played one by one, were each lost with their process, and none finished: "
                f"the environment or the engine itself ends it. The last error was: {error}"
            )
        return losses

    def ended(self, group: str, is_finished: bool) -> None:
        """Forget the losses of a group that is finished or set aside."""
        self._losses.pop(group, None)
        if is_finished:
            self._lone.clear()


class Gate:
    """A gate to something that groups share, or that one of them has alone; first come, first served."""

    def __init__(self) -> None:
        self._entrance = asyncio.Lock()  # held by a lone group, also while it waits for the others to leave
        self._num_inside = 0
        self._left = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._entrance.locked()

    @contextlib.asynccontextmanager
    async def enter(self, is_alone: bool) -> AsyncIterator[None]:
        """Wait for those before, and stay inside while the block lasts."""
        async with self._entrance:
            if is_alone:
                while self._num_inside:
                    self._left.clear()
                    await self._left.wait()
                yield
                return
            self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            self._left.set()
