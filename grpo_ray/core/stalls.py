"""Detection of stalls: when no call is answered for long, report the open calls and replace stuck actors."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

from grpo_ray.core.pool import GeneratorPool
from grpo_ray.errors import Stalled
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.run_log import RunLog

LOOK_S = 5.0


class StallWatch:
    """A check of the open calls, and of the Learner's progress within a long step."""

    def __init__(
        self, calls: OpenCalls, pool: GeneratorPool, log: RunLog, limit_s: float,
        work_done: Callable[[], Awaitable[int]] | None = None,
    ) -> None:  # fmt: skip
        """`work_done`: asks the Learner for a number that changes while it works."""
        self._calls, self._pool, self._log = calls, pool, log
        self.limit_s, self._look_s = limit_s, min(LOOK_S, limit_s / 4)
        self._ask_work_done = work_done
        self._work_done: int | None = None  # at the previous look, while nothing else moves

    async def run(self) -> None:
        """Check for a stall until cancelled.

        Raises:
            Stalled: no call was answered for `limit_s`, and no actor that can be replaced is the cause.
        """
        while True:
            await asyncio.sleep(self._look_s)
            if self._calls.quiet_s >= self.limit_s / 2:
                await self._look_at_learner()
            else:
                self._work_done = None
            if self._calls.quiet_s >= self.limit_s:
                self._report()
                self._replace_stuck(set(self._calls.stuck(0.7 * self.limit_s)))
                self._calls.progress()

    async def _look_at_learner(self) -> None:
        """Count the micro-batches of a long step as progress; a Learner that cannot answer makes none."""
        if self._ask_work_done is None:
            return
        try:
            async with asyncio.timeout(self._look_s):
                work_done = await self._ask_work_done()
        except Exception:  # the call of the step itself reports the death of the Learner
            return
        if self._work_done not in (None, work_done):
            self._calls.progress()
        self._work_done = work_done

    def _report(self) -> None:
        log, calls = self._log, self._calls
        log.event("stalled", None, f"nothing has moved for {calls.quiet_s:.0f} s; the actors:")
        for line in calls.lines():
            log.event("waits", None, f"  {line}")
        log.display.warning(f"the Python stacks of the actors' processes are in {log.run.logs}/")
        # In a thread that is not waited for: it reads files, and the file system may be the cause.
        threading.Thread(target=self._pool.actors.dump_stacks, daemon=True).start()

    def _replace_stuck(self, stuck: set[str]) -> None:
        """Replace stuck Generators, Scorers and Teachers; a replacement under way has its own time limit."""
        # A stuck EnvironmentWorker is replaced by environment_pool.py, which asks each one all the time.
        pool, limit = self._pool, f"{self.limit_s:g} s"
        for name in stuck & (pool.serving.keys() | pool.actors.scorers.keys() | pool.actors.teachers.keys()):
            pool.retire(name, f"it has not answered for {limit} (recovery.stall_timeout_s)")
        is_starting = bool(pool.being_replaced)  # which has a limit of its own
        is_replaced_now = bool(stuck & pool.being_replaced)
        if not (is_replaced_now if stuck else is_starting):
            causes = ", ".join(sorted(stuck)) or "everything waits for the buffer"
            raise Stalled(f"stuck for {limit}: {causes}")
