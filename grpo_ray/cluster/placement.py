"""The placement of a run's actors: bundles of resources, each on one node, and what a cluster lacks."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_ray.config import Config

Resources = Mapping[str, float]  # "GPU" and "CPU"; zero amounts are left out

LEARNER, SCORER = "learner", "scorer"


@dataclass(frozen=True)
class Bundle:
    """Resources that one node must have, and the actors that share them."""

    actors: tuple[str, ...]
    resources: Resources


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, and its amount of each resource."""

    name: str
    resources: Resources

    def room_for(self, size: Resources) -> int:
        """Return how many bundles of this size would fit, if nothing else were here."""
        return min(int(_exact([self.resources.get(name, 0) / amount])) for name, amount in size.items())


def joins_cluster() -> bool:
    """Return whether RAY_ADDRESS names a cluster; otherwise a run starts a Ray of its own on this machine."""
    return os.environ.get("RAY_ADDRESS") not in (None, "", "local")


def names_of(config: Config) -> dict[str, list[str]]:
    """Return the names of a run's actors by their kind: `generator-0` and so on, and of the Learner its ranks.

    One Learner or Scorer alone has no number. Teachers need distillation, and EnvironmentWorkers episodes.
    """
    numbers = {
        "generator": config.generator.num_generators,
        LEARNER: config.learner.num_ranks,
        SCORER: config.scorer.num_scorers,
        "teacher": config.distillation.num_teachers if config.distillation.teacher else 0,
        "environment": config.episodes.num_workers if config.episode_tasks else 0,
    }  # Generators first, so that `spread` places these first
    return {
        kind: [kind] if number == 1 and kind in (LEARNER, SCORER) else [f"{kind}-{i}" for i in range(number)]
        for kind, number in numbers.items()
    }


def reservations(config: Config) -> dict[str, dict[str, float]]:
    """Return the resources that each actor reserves in Ray, by its name; actors left out reserve nothing."""
    amounts = {
        "generator": {"GPU": config.gpus_per_generator, "CPU": config.generator.num_cpus},
        LEARNER: {"GPU": config.gpus_of_learner, "CPU": config.learner.num_cpus},
        SCORER: {"GPU": 0.0, "CPU": config.scorer.num_cpus},
        "teacher": {"GPU": config.distillation.num_gpus, "CPU": config.distillation.num_cpus},
        "environment": {"GPU": 0.0, "CPU": config.episodes.num_cpus},
    }
    return {name: amounts[kind] for kind, names in names_of(config).items() for name in names}


def bundles_of(config: Config) -> tuple[Bundle, ...]:
    """Return the bundles of a run; actors that reserve nothing are in no bundle.

    An actor has a bundle of its own, but the Learner's ranks of one node have one together. All share one under
    `placement.strategy: colocate`. Under `generator.colocated` a Generator and a rank share a GPU's bundle, or
    on CPUs all Generators and ranks.
    """
    wanted = {name: amounts for name, amounts in reservations(config).items() if any(amounts.values())}
    generators, ranks, *others = names_of(config).values()
    helpers, per_node = [[name] for names in others for name in names], config.learner.num_ranks_per_node
    nodes = [ranks[first : first + per_node] for first in range(0, len(ranks), per_node)]
    if config.placement.strategy == "colocate":
        groups = [list(wanted)]
    elif config.generator.colocated and config.learner.num_gpus:
        groups = [[*pair] for pair in zip(generators, ranks, strict=True)] + helpers
    elif config.generator.colocated:
        groups = [generators + ranks, *helpers]
    else:
        groups = [*([name] for name in generators), *nodes, *helpers]
    present = (tuple(name for name in group if name in wanted) for group in groups)
    return tuple(Bundle(names, _sum(wanted[name] for name in names)) for names in present if names)


def total(bundles: Sequence[Bundle], resource: str) -> float:
    return _exact(bundle.resources.get(resource, 0) for bundle in bundles)


def shortfalls(config: Config, nodes: Sequence[Node], there: str = "available") -> list[str]:
    """Return one line per resource that the nodes certainly lack.

    An empty list is no guarantee: only Ray places the bundles, and it may still find no room for one.

    Args:
        there: the word for the nodes' resources in the lines: "available" for all, "free" for the unreserved.
    """
    bundles = bundles_of(config)
    lines = []
    for resource in ("GPU", "CPU"):
        wanted, in_all = total(bundles, resource), sum(node.resources.get(resource, 0) for node in nodes)
        largest = max((node.resources.get(resource, 0) for node in nodes), default=0.0)
        bundle = max(bundles, key=lambda bundle: bundle.resources.get(resource, 0), default=Bundle((), {}))
        at_once = bundle.resources.get(resource, 0)
        if wanted > in_all:
            lines.append(f"{resource}: {wanted:g} needed ({_shares(config, resource)}), {in_all:g} {there}")
        elif at_once > largest:
            is_ranks = len(bundle.actors) > 1 and all(name.startswith(LEARNER) for name in bundle.actors)
            divide = "; a lower learner.ranks_per_node divides them over nodes" if is_ranks else ""
            place = f"must be on one node, where {largest:g} are {there}{divide}"
            lines.append(f"{resource}: {at_once:g} for {listed(bundle.actors)} {place}")
    if not lines:
        sizes = {tuple(bundle.resources.items()): bundle.resources for bundle in bundles}
        lines = [line for size in sizes.values() for line in _no_room(size, bundles, nodes, there)]
    if config.placement.strategy == "strict_spread" and len(bundles) > len(nodes):
        lines.append(f"nodes: {len(bundles)} needed (placement.strategy: strict_spread), {len(nodes)} {there}")
    return lines


def listed(names: Iterable[str]) -> str:
    """Return the names as text, with three or more numbered in a row as `learner-0 to learner-7`."""
    rows: list[list[str]] = []
    for name in names:
        kind, _, number = name.rpartition("-")
        if kind and rows and rows[-1][-1] == f"{kind}-{int(number) - 1}":
            rows[-1].append(name)
        else:
            rows.append([name])
    parts = [part for row in rows for part in ([f"{row[0]} to {row[-1]}"] if len(row) > 2 else row)]
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _no_room(size: Resources, bundles: Sequence[Bundle], nodes: Sequence[Node], there: str) -> list[str]:
    """Return a line if the nodes have room for fewer bundles of this size, or larger, than there are."""
    room = sum(node.room_for(size) for node in nodes)
    alike = [bundle for bundle in bundles if Node("", bundle.resources).room_for(size)]
    if room >= len(alike):
        return []
    names = [f"for {listed(bundle.actors)}" for bundle in alike]
    if len(alike) == 1:
        return [f"{amounts_of(size)} {names[0]} are not {there} on one node"]
    found = f"room for {room} of these {len(alike)} is {there}"
    return [f"{amounts_of(size)} must be on one node each {' and '.join(names)}; {found}"]


def _shares(config: Config, resource: str) -> str:
    """Return the amounts per actor, such as `2 x 1 for Generators, 1 for the Learner`."""
    amounts = {name: amounts[resource] for name, amounts in reservations(config).items()}
    kinds = {
        "generator": ("Generators", "Generators"),
        LEARNER: ("the Learner", "the Learner's ranks"),
        SCORER: ("the Scorer", "Scorers"),
        "teacher": ("the Teacher", "Teachers"),
        "environment": ("the EnvironmentWorker", "EnvironmentWorkers"),
    }
    present = [(kind, names) for kind, names in names_of(config).items() if names]
    shares = [(len(names), amounts[names[0]], *kinds[kind]) for kind, names in present]
    return ", ".join(
        f"{amount:g} for {one}" if number == 1 and one != several else f"{number} x {amount:g} for {several}"
        for number, amount, one, several in shares
        if amount
    )


def amounts_of(resources: Resources) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if resources.get(name))


def _sum(amounts: Iterable[Resources]) -> dict[str, float]:
    """Return the sum of each resource, leaving out zeros."""
    rows = list(amounts)
    summed = {name: _exact(row[name] for row in rows) for name in ("GPU", "CPU")}
    return {name: amount for name, amount in summed.items() if amount}


def _exact(amounts: Iterable[float]) -> float:
    """Return the sum at Ray's precision: 3 x 0.8 and 0.6 are 3, not more than 3."""
    return round(sum(amounts), 4)
