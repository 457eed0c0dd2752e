"""A term that may use the network, such as an LLM judge: many calls at once, each with a limit and retries.

It is called in a grading process of its own, with the secrets of this term alone. A failure is the grader's
error, as no response can help an outage.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any

from grpo_ray.config.reward import RewardTerm
from grpo_ray.rewards.configured import TermReward

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # between a failed call and the next


class NetworkReward(TermReward):
    """The reward of a networked term for the responses of a group."""

    needs_group = True  # so that its calls are under way at the same time

    def __init__(self, term: RewardTerm, num_slots: int) -> None:
        """
        Args:
            num_slots: calls at the same time.

        Raises:
            ValueError: there is no such module or function.
        """
        super().__init__(term)
        self._num_slots = num_slots
        self._runner: asyncio.Runner | None = None  # one loop for all groups: clients keep their connections

    def _results(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        if self._runner is None:
            self._runner = asyncio.Runner()
            self._take_new_threads(self._runner.get_loop())
        return self._runner.run(self._gathered(calls))

    def _take_new_threads(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_default_executor(ThreadPoolExecutor(self._num_slots))

    async def _gathered(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        slots = asyncio.Semaphore(self._num_slots)
        return await asyncio.gather(*(self._until_it_succeeds(slots, call) for call in calls))

    async def _until_it_succeeds(self, slots: asyncio.Semaphore, call: Callable[[], Any]) -> Any:
        """Return what the call does, or, after all retries, the last exception."""
        pause_s = FIRST_PAUSE_S
        for left in reversed(range(self._term.retries + 1)):
            limit = asyncio.timeout(None)
            try:
                async with slots, limit:
                    limit.reschedule(asyncio.get_running_loop().time() + self._term.timeout_s)
                    result = await asyncio.to_thread(call)  # of an `async def` what is to be awaited
                    return await result if inspect.isawaitable(result) else result
            except (Exception, SystemExit, asyncio.CancelledError) as failure:  # of the judge, or the network
                error = failure if isinstance(failure, Exception) else RuntimeError(repr(failure))
                if limit.expired():
                    error = TimeoutError(f"longer than {self._term.timeout_s:g} s (timeout_s of its term)")
                    self._take_new_threads(asyncio.get_running_loop())  # the call still has its own
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return error


def longest_s(term: RewardTerm, num_slots: int, num_responses: int) -> float:
    """Return the most seconds that the grading of a group takes."""
    waves = ceil(num_responses / num_slots)
    return waves * (term.retries + 1) * (term.timeout_s + LONGEST_PAUSE_S) + LONGEST_PAUSE_S
