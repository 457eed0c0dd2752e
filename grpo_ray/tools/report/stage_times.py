"""The seconds of each actor's stages, step by step, for the stacked bars of the web page."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from grpo_ray.watch.metrics_catalog import STAGE
from grpo_ray.watch.ranks import by_number

Stages = dict[str, list[float]]


def stage_times(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Stages]:
    """Return seconds per step, by actor and stage; an actor's stages add up to its time, 0 where unknown."""
    actors: dict[str, Stages] = defaultdict(dict)
    for name, column in columns.items():
        if match := STAGE.fullmatch(name):
            actors[match["actor"]][match["stage"]] = [value or 0.0 for value in column]
    return dict(sorted(actors.items(), key=lambda item: by_number(item[0])))
