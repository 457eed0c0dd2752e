"""The folder of an experiment; its definition has to be the same on every start."""

import hashlib
import json
from typing import Any

from grpo_ray.config.loading import load_config
from grpo_ray.records.resumable_folder import Definition, ResumableFolder, changed_values
from grpo_ray.tools.experiments.experiment_plan import ExperimentPlan


def experiment_folder(plan: ExperimentPlan) -> ResumableFolder:
    """Return the plan's folder, for the experiment to claim."""
    remedy = "give another --output or --name"
    return ResumableFolder(plan.folder, "experiment.json", "experiment", remedy, _differences)


def definition_of(plan: ExperimentPlan) -> dict[str, Any]:
    """Return the contents of `experiment.json`."""
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


def _differences(before: Definition, now: Definition) -> list[str]:
    """Compare what the runs depend on; seeds may be added, and the name and path of the base may change."""
    lines = changed_values(before["base_config"], now["base_config"], "base configuration: ")
    for key in ("common", "overrides"):
        lines += changed_values({key: before[key]}, {key: now[key]})
    lines += changed_values(before["variants"], now["variants"], "variant ")
    if now["seeds"] < before["seeds"]:
        lines.append(f"seeds: was {before['seeds']}, is {now['seeds']}; seeds can be added, not removed")
    return lines
