"""The budget of restarts: a limit on how often dead actors are restarted, and the pause before each time."""

import time
from collections.abc import Callable

from grpo_ray.errors import RunError

FORGIVEN_AFTER_S = 600.0  # a death this long after the previous one starts a new series
LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """A count of restarts; the pause doubles with each restart that soon follows another."""

    def __init__(
        self, max_restarts: int, backoff_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._backoff_s, self._clock = max_restarts, backoff_s, clock
        self._first_error: str | None = None
        self._last_at = -FORGIVEN_AFTER_S
        self._in_series = 0
        self.num_restarts = 0

    def spend(self, error: str) -> float:
        """Count a restart, and return the seconds to wait before it.

        Raises:
            RunError: the budget is used up. The message shows the first error, because the others may be its
                consequences.
        """
        self._first_error = self._first_error or error
        if self.num_restarts == self._max_restarts:
            raise RunError(
                f"recovery.max_restarts: {self._max_restarts} restarts are used up. "
                f"The first error was: {self._first_error}"
            )
        now = self._clock()
        self._in_series = self._in_series + 1 if now - self._last_at < FORGIVEN_AFTER_S else 0
        self._last_at = now
        self.num_restarts += 1
        return min(LONGEST_PAUSE_S, self._backoff_s * 2.0**self._in_series)
