"""Cases that take turns, so that a drift of the machine's speed meets all alike."""

import time
from collections.abc import Callable, Mapping


def take_turns(
    cases: Mapping[str, Callable[[], object]], rounds: int, num_warmups: int = 1
) -> dict[str, tuple[float, ...]]:
    """Seconds of each case in each round; the warm-up rounds are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(num_warmups + rounds):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            if number >= num_warmups:
                seconds[name].append(time.perf_counter() - started)
    return {name: tuple(values) for name, values in seconds.items()}
