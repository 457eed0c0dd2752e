"""The budget of restarts, and the suspects: groups that may end the process that samples them.

A group that is lost twice with its process is a suspect. It is then played alone: its next losses are its own.
"""

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from grpo_ray.errors import DataLost, RunError, TurnLost, TurnUnanswered
from grpo_ray.watch.clock import monotonic

HOUR_S = 3600.0
COMMON_CAUSE_S = 30.0  # actors that die within this time of the first share a cause: a node, a network, a sync
FORGIVEN_AFTER_S = 600.0  # a death this long after the previous one starts a new series
LONGEST_PAUSE_S = 60.0
OF_A_NODE = re.compile("its node has died|the actor's node was")  # in Ray's error of an actor
LOSSES = 2  # alongside other groups, until a group is a suspect
MAX_LONE = 8  # suspects lost one after another, while no group finishes, that cannot all be to blame


def pause_s(backoff_s: float, num_before: int) -> float:
    """Return the seconds to wait before a restart or a retry that follows `num_before` others."""
    return min(LONGEST_PAUSE_S, backoff_s * 2.0 ** min(num_before, 60))  # 2.0 ** 1024 overflows


class BudgetUsedUp(RunError):
    """More deaths within an hour than the configuration allows; the run ends."""


class RestartBudget:
    """A count of restarts in the last hour; the pause doubles with each restart that soon follows another.

    Different actors that die at about the same time count as one restart, however many they are. An actor that
    dies again counts again.
    """

    def __init__(
        self, setting: str, max_per_hour: int, backoff_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """Count nothing yet; `setting` is the field that sets the limit, such as `recovery.max_restarts`."""
        self._setting, self._max_per_hour = setting, max_per_hour
        self._backoff_s, self._clock = backoff_s, clock
        self._counted: deque[tuple[float, str]] = deque()  # time and error, of the last hour
        self._cause_at = self._last_at = -FORGIVEN_AFTER_S
        self._victims: set[str] = set()  # of the last cause
        self._in_series = 0

    def spend(self, name: str, error: str) -> float:
        """Count a restart of actor `name`, and return the seconds to wait before it.

        Raises:
            BudgetUsedUp: the hour's budget is used up. The message shows the first error: the likely cause.
        """
        now = self._clock()
        if now - self._cause_at >= COMMON_CAUSE_S or name in self._victims:
            self._count(now, error)
        self._victims.add(name)
        return pause_s(self._backoff_s, self._in_series)

    def _count(self, now: float, error: str) -> None:
        while self._counted and now - self._counted[0][0] >= HOUR_S:
            self._counted.popleft()
        if len(self._counted) >= self._max_per_hour:
            first_error = self._counted[0][1] if self._counted else error
            kind = self._setting.rpartition("max_")[2]
            raise BudgetUsedUp(
                f"{self._setting}: {self._max_per_hour} {kind} within an hour are used up. "
                f"The first error was: {first_error}"
            )
        self._counted.append((now, error))
        self._in_series = self._in_series + 1 if now - self._last_at < FORGIVEN_AFTER_S else 0
        self._cause_at = self._last_at = now
        self._victims.clear()


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
        num = LOSSES if of_turn and not isinstance(error, TurnUnanswered) else 1
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
        """Count a loss of the group, except with a whole node: no group's prompt is to blame for that.

        Raises:
            RunError: suspect after suspect is lost, and no group finishes: no prompt is the cause.
        """
        losses = self._losses.setdefault(group, Losses())
        if OF_A_NODE.search(str(error)):
            return losses
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
