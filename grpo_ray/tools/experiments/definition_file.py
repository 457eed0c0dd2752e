"""The definition that an experiment's folder keeps: started again, it must be the same."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_ray.config.loading import load_config
from grpo_ray.config.schema import leaves
from grpo_ray.errors import RunError
from grpo_ray.telemetry.durable import replacing
from grpo_ray.tools.experiments.plan import Plan

COMPARED = ("base_sha256", "base_config", "seeds", "common", "overrides", "variants")


def keep_definition(plan: Plan) -> None:
    """Write `experiment.json`, or make sure that the one there is the same; further seeds are allowed.

    Raises:
        RunError: it is of another experiment, says in what; or the folder holds something else.
    """
    path, definition = plan.folder / "experiment.json", _definition(plan)
    if path.exists():
        before = _read_definition(path)
        differences = _differences(before, definition)
        if differences:
            raise RunError(
                f"{plan.folder} holds an experiment that was defined otherwise; give another --output or "
                "--name, or move the folder away:\n  " + "\n  ".join(differences)
            )
    elif plan.folder.exists() and any(entry.name != ".lock" for entry in plan.folder.iterdir()):
        raise RunError(f"{plan.folder} is not empty, and no experiment (it has no experiment.json)")
    plan.folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(definition, indent=1) + "\n", encoding="utf-8")


def _definition(plan: Plan) -> dict[str, Any]:
    base = load_config(plan.base).model_dump(mode="json")
    return {
        "name": plan.experiment.name,
        "base": plan.base,
        "base_sha256": hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest(),
        "seeds": plan.num_seeds,
        "common": list(plan.experiment.common),
        "overrides": list(plan.overrides),
        "variants": {label: list(overrides) for label, overrides in plan.experiment.variants.items()},
        "base_config": base,
    }


def _read_definition(path: Path) -> dict[str, Any]:
    try:
        definition = json.loads(path.read_text(encoding="utf-8"))
        return {key: definition[key] for key in COMPARED}
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path} is not readable ({error!r}); give another --output or --name") from error


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = []
    if before["base_sha256"] != now["base_sha256"]:
        old, new = leaves(before["base_config"]), leaves(now["base_config"])
        lines += _changes("base configuration: ", old, new)
    for key in ("common", "overrides"):
        if before[key] != now[key]:
            lines.append(f"{key}: was {_words(before[key])}, is {_words(now[key])}")
    lines += _changes("variant ", before["variants"], now["variants"])
    if now["seeds"] < before["seeds"]:
        lines.append(f"seeds: was {before['seeds']}, is {now['seeds']}; more can be added, none left out")
    return lines


def _changes(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each key whose value is another, or is on one side only."""
    keys = [key for key in {**before, **now} if before.get(key, KeyError) != now.get(key, KeyError)]
    return [
        f"{what}{key}: was {_words(before.get(key, 'not there'))}, is {_words(now.get(key, 'not there'))}"
        for key in keys
    ]


def _words(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
