"""The placement of a run's actors: bundles of resources, each on one node, and what a cluster lacks."""

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

    def fits(self, bundle: Bundle) -> bool:
        return all(self.resources.get(name, 0) >= amount for name, amount in bundle.resources.items())


def generator_names(config: Config) -> list[str]:
    return [f"generator-{index}" for index in range(config.generator.num_generators)]


def scorer_names(config: Config) -> list[str]:
    """Return the Scorers' names: `scorer`, or `scorer-0` and so on if there are several."""
    number = config.scorer.num_scorers
    return [SCORER] if number == 1 else [f"{SCORER}-{index}" for index in range(number)]


def reservations(config: Config) -> dict[str, dict[str, float]]:
    """Return the resources that each actor reserves in Ray, by its name; actors left out reserve nothing."""
    learner, generator = config.learner, config.generator
    one = {"GPU": config.gpus_per_generator, "CPU": generator.num_cpus}
    of_scorer = {"GPU": 0.0, "CPU": config.scorer.num_cpus}
    return {
        **dict.fromkeys(generator_names(config), one),  # first, so that `spread` places these first
        LEARNER: {"GPU": config.gpus_of_learner, "CPU": learner.num_cpus},
        **dict.fromkeys(scorer_names(config), of_scorer),
    }


def bundles_of(config: Config) -> tuple[Bundle, ...]:
    """Return the bundles of a run; actors that reserve nothing are in no bundle.

    An actor has a bundle of its own, unless it shares devices (`generator.colocated`: Generators and Learner)
    or a node (`placement.strategy: colocate`: all).
    """
    wanted = {name: amounts for name, amounts in reservations(config).items() if any(amounts.values())}
    if config.placement.strategy == "colocate":
        together = set(wanted)
    elif config.generator.colocated:
        together = set(wanted) - set(scorer_names(config))
    else:
        together = set()
    shared = tuple(name for name in wanted if name in together)
    groups = [*([shared] if shared else []), *((name,) for name in wanted if name not in together)]
    return tuple(Bundle(names, _sum(wanted[name] for name in names)) for names in groups)


def total(bundles: Sequence[Bundle], resource: str) -> float:
    return _exact(bundle.resources.get(resource, 0) for bundle in bundles)


def shortfalls(config: Config, nodes: Sequence[Node], there: str = "there") -> list[str]:
    """Return one line per resource that the nodes certainly lack.

    An empty list is no guarantee: only Ray places the bundles, and it may still find no room for one.

    Args:
        there: the word for the nodes' resources in the lines: "there" for all, "free" for the unreserved.
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
            sharers = " and ".join(bundle.actors)
            lines.append(
                f"{resource}: {at_once:g} for {sharers} must be on one node, where {largest:g} are {there}"
            )
    if not lines:
        lines = [_no_node_for(bundle, there) for bundle in bundles if not any(n.fits(bundle) for n in nodes)]
    if config.placement.strategy == "strict_spread" and len(bundles) > len(nodes):
        lines.append(f"nodes: {len(bundles)} needed (placement.strategy: strict_spread), {len(nodes)} {there}")
    return lines


def describe(nodes: Sequence[Node]) -> str:
    return "; ".join(f"{node.name}: {_amounts(node.resources) or 'nothing'}" for node in nodes)


def _no_node_for(bundle: Bundle, there: str) -> str:
    return f"{_amounts(bundle.resources)} for {' and '.join(bundle.actors)} are not {there} on one node"


def _shares(config: Config, resource: str) -> str:
    """Return the amounts per actor, such as `2 x 1 for Generators, 1 for the Learner`."""
    amounts = {name: amounts[resource] for name, amounts in reservations(config).items()}
    names = scorer_names(config)
    several = len(names) > 1
    scorers = f"{len(names)} x " if several else "", amounts[names[0]], "Scorers" if several else "the Scorer"
    shares = [
        (f"{config.generator.num_generators} x ", amounts[generator_names(config)[0]], "Generators"),
        ("", amounts[LEARNER], "the Learner"),
        scorers,
    ]
    return ", ".join(f"{times}{amount:g} for {actors}" for times, amount, actors in shares if amount)


def _amounts(resources: Resources) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if resources.get(name))


def _sum(amounts: Iterable[Resources]) -> dict[str, float]:
    """Return the sum of each resource, leaving out zeros."""
    rows = list(amounts)
    summed = {name: _exact(row[name] for row in rows) for name in ("GPU", "CPU")}
    return {name: amount for name, amount in summed.items() if amount}


def _exact(amounts: Iterable[float]) -> float:
    """Return the sum at Ray's precision: 3 x 0.8 and 0.6 are 3, not more than 3."""
    return round(sum(amounts), 4)
