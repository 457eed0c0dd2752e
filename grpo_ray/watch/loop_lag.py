"""The delay of the driver's event loop: the time for which a callback that is due has to wait for others."""

import asyncio
import math
from collections import deque

EVERY_S = 0.25
MAX_DELAYS = 10_000  # kept between two readings


class LoopLag:
    """Delays of a timer that rings at equal intervals; it ends with its event loop."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._delays: deque[float] = deque(maxlen=MAX_DELAYS)

    def start(self) -> None:
        """Begin to measure, on the running event loop."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._every_s

        def ring() -> None:
            self._delays.append(max(0.0, loop.time() - due))
            self.start()

        loop.call_at(due, ring)

    def take(self) -> dict[str, float]:
        """Return the 99th percentile of the delays since the last reading, which then begins anew.

        It is the longest delay of a hundred or fewer. There is none if the timer has not rung.
        """
        delays = sorted(self._delays)
        self._delays.clear()
        return {"perf/loop_lag_s": delays[math.ceil(0.99 * len(delays)) - 1]} if delays else {}
