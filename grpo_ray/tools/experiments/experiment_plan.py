"""The plan of an experiment: every run's configuration, checked together, and what must stay to resume it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.records.resumable_folder import Definition, changed_values
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.preparation import check_rewards
from grpo_ray.tasks.input_digests import file_digest, files_named, input_digests
from grpo_ray.tools.experiments.experiment import Experiment, check_overrides


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed."""

    variant: str
    seed: int
    config: Config
    overrides: tuple[str, ...]  # as the command line takes them
    directory: RunDirectory
    log: Path

    @property
    def name(self) -> str:
        return self.directory.path.name


@dataclass(frozen=True)
class ExperimentPlan:
    """An experiment with a base configuration, a number of seeds and a folder."""

    experiment: Experiment
    base: str
    overrides: tuple[str, ...]  # the user's
    num_seeds: int
    folder: Path
    runs: tuple[PlannedRun, ...]  # all variants with seed 0, then with seed 1, ...

    @property
    def kept_base(self) -> Path:
        """A copy of the base, which the runs read: somebody may edit theirs before the last one starts."""
        return self.folder / "base.yaml"


def plan_experiment(
    experiment: Experiment, base: str, overrides: Sequence[str], num_seeds: int, output: str
) -> ExperimentPlan:
    """Return the plan, with every run's configuration checked before anything starts.

    Raises:
        ConfigError: has the problems of all variants in one message.
    """
    load_config(base)  # otherwise its problems would be reported once per variant
    folder = Path(output) / experiment.name
    problems = check_overrides(experiment, overrides)
    if num_seeds < 1:
        problems.append(f"--seeds {num_seeds}: give at least 1")
    runs, found = [], {problem: [""] for problem in problems}
    for seed in range(num_seeds):
        for variant, own in experiment.variants.items():
            try:
                runs.append(_plan_run(folder, base, variant, seed, (*experiment.common, *overrides, *own)))
                check_rewards(runs[-1].config, None)
            except ValueError as error:
                found.setdefault(str(error), []).append(variant)
    if not found:
        found |= _same_variants(runs)
    if found:
        raise ConfigError(_message(experiment, found))
    return ExperimentPlan(experiment, base, tuple(overrides), num_seeds, folder, tuple(runs))


def _plan_run(folder: Path, base: str, variant: str, seed: int, overrides: Sequence[str]) -> PlannedRun:
    name = f"{variant}-seed{seed}"
    own = {"output_dir": str(folder / "runs"), "name": name, "seed": seed, "if_exists": "resume"}
    # JSON is YAML: quoted, a name such as `1e-3` stays text.
    everything = (*overrides, *(f"run.{key}={json.dumps(value)}" for key, value in own.items()))
    config = load_config(base, everything)
    directory = RunDirectory(folder / "runs" / name)
    return PlannedRun(variant, seed, config, everything, directory, folder / "logs" / f"{name}.log")


def _same_variants(runs: Sequence[PlannedRun]) -> dict[str, list[str]]:
    """Return problems with variants that are the same job under two labels."""
    seen: dict[str, str] = {}
    same = {}
    for run in runs:
        if run.seed == 0:
            content = json.dumps(run.config.model_dump(mode="json", exclude={"run": {"name"}}), sort_keys=True)
            if content in seen:
                same[f"the same configuration as variant {seen[content]}"] = [run.variant]
            seen[content] = run.variant
    return same


def _message(experiment: Experiment, found: Mapping[str, Sequence[str]]) -> str:
    lines = [f"{experiment.name}: nothing was started"]
    for problem, variants in found.items():
        names = ", ".join(dict.fromkeys(filter(None, variants)))
        lines.append((f"variant {names}: {problem}" if names else problem).replace("\n", "\n  "))
    return "\n  ".join(lines)


def definition_of(plan: ExperimentPlan) -> dict[str, Any]:
    """Return the contents of `experiment.json`."""
    base, digest = load_config(plan.base).model_dump(mode="json"), cache(file_digest)

    def inputs(config: Config) -> dict[str, str]:  # variants have most files in common
        files = {field: path for field, path in files_named(config).items() if Path(path).is_file()}
        return input_digests(config, {}, [], []) | {f"{k} ({path})": digest(path) for k, path in files.items()}

    return {
        "name": plan.experiment.name,
        "base": plan.base,
        "base_sha256": hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest(),
        "seeds": plan.num_seeds,
        "common": list(plan.experiment.common),
        "overrides": list(plan.overrides),
        "variants": {label: list(overrides) for label, overrides in plan.experiment.variants.items()},
        "base_config": base,
        "inputs": {run.variant: inputs(run.config) for run in plan.runs if run.seed == 0},
    }


def differences(before: Definition, now: Definition) -> list[str]:
    """Compare what the runs depend on; seeds may be added, and the name and path of the base may change."""
    lines = changed_values(before["base_config"], now["base_config"], "base configuration: ")
    for key in ("common", "overrides"):
        lines += changed_values({key: before[key]}, {key: now[key]})
    lines += changed_values(before["variants"], now["variants"], "variant ")
    known, inputs = before.get("inputs", {}), now["inputs"]  # of models, files, and modules with rewards
    for variant in sorted(known.keys() & inputs.keys()):
        now_there = {name: inputs[variant].get(name) for name in known[variant]}  # earlier releases had fewer
        lines += changed_values(known[variant], now_there, f"variant {variant}: ")
    if now["seeds"] < before["seeds"]:
        lines.append(f"seeds: was {before['seeds']}, is {now['seeds']}; seeds can be added, not removed")
    return lines
