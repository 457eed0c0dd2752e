"""Cases that take turns, so that a drift in the machine's speed affects all of them equally.

Every second round has the opposite order, so that no case always follows the same one.
"""

import time
from collections.abc import Callable, Mapping


def take_turns(
    cases: Mapping[str, Callable[[], object]], rounds: int, num_warmups: int = 1
) -> dict[str, tuple[float, ...]]:
    """Return each case's seconds in each round; warm-up rounds are left out."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(num_warmups + rounds):
        order = list(cases.items())
        for name, run in order if number % 2 else reversed(order):
            started = time.perf_counter()
            run()
            if number >= num_warmups:
                seconds[name].append(time.perf_counter() - started)
    return {name: tuple(values) for name, values in seconds.items()}
