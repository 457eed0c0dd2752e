"""The Learner's ranks in a run's records: their actors' names, and the metrics that only several ranks have."""

import re

RANK = re.compile(r"learner(?:-(?P<number>\d+))?")
"""Name of a rank's actor: `learner` if there is only one, else `learner-0` and so on."""
COLLECTIVES = re.compile(r"ranks/(?P<actor>learner-\d+)/collectives_s")
"""Metric of a rank's seconds in collectives, per step."""
SLOWEST = "ranks/slowest"
"""Metric of the number of the rank that the others waited for."""
IMBALANCE = "ranks/imbalance"


def collectives_of(actor: str) -> str:
    """Return the name of an actor's metric that `COLLECTIVES` matches."""
    return f"ranks/{actor}/collectives_s"


def rank_name(number: float) -> str:
    """Return the actor's name of one of several ranks; `number` is a value of the metric `ranks/slowest`."""
    return f"learner-{number:.0f}"


def by_number(actor: str) -> tuple[str, int]:
    """Return a key that sorts `learner-2` before `learner-10`."""
    kind, _, number = actor.rpartition("-")
    return (kind, int(number)) if number.isdecimal() else (actor, -1)
