"""What each actor spent its time on, step by step: the web page's stacked bars."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from grpo_ray.telemetry.metrics_catalog import STAGE, SYNC

Column = Sequence[float | None]
Stages = dict[str, list[float]]


def stage_times(columns: Mapping[str, Column]) -> dict[str, Stages]:
    """Seconds a step, by actor and stage; those of an actor add up to its time, 0 where none is known.

    Runs from before actors kept stages of their own have the Learner and the busiest Generator only, from
    `timing/*`: what those did not name of a step is its rest.
    """
    actors: dict[str, Stages] = defaultdict(dict)
    for name, column in columns.items():
        if match := STAGE.fullmatch(name):
            actors[match["actor"]][match["stage"]] = _filled(column)
    return dict(sorted(actors.items())) or _from_timing(columns)


def _from_timing(columns: Mapping[str, Column]) -> dict[str, Stages]:
    if "timing/step_s" not in columns:
        return {}
    step = _filled(columns["timing/step_s"])
    nothing: Column = [None] * len(step)

    def seconds(*names: str) -> list[float]:
        return [sum(values) for values in zip(*(_filled(columns.get(n, nothing)) for n in names), strict=True)]

    return {
        "Learner": _with_rest(
            {"train": seconds("timing/train_s"), "wait for a batch": seconds("timing/wait_for_batch_s")},
            "synchronisation and other", step,
        ),
        "busiest Generator": _with_rest(
            {"generate": seconds("timing/generate_s"), "synchronisation": seconds(*SYNC)}, "idle", step
        ),
    }  # fmt: skip


def _with_rest(stages: Stages, name: str, step: Sequence[float]) -> Stages:
    """The stages, and as `name` what they leave of the step."""
    spent = [sum(values) for values in zip(*stages.values(), strict=True)]
    return {**stages, name: [max(0.0, whole - part) for whole, part in zip(step, spent, strict=True)]}


def _filled(column: Column) -> list[float]:
    return [value or 0.0 for value in column]
